"""A data run as a whole: header, plan, prompts, responses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark.api import SpeculativeDecoder
from dspark.errors import ConfigError, DataError
from dspark.training.chat_format import ChatFormat
from dspark.training.data_header import check_header, describe_prompts, make_header, read_header, write_header
from dspark.training.data_output import DataFiles, Output, Report
from dspark.training.data_plan import FRAME_BYTES, Budget, DataConfig, Estimate, estimate, prompt_ids
from dspark.training.data_resume import read_done
from dspark.training.line_file import LineFile, file_size
from dspark.training.prompts_in import Dialogue, PromptFile, Skipped, read_dialogue
from dspark.training.regenerate import Regeneration
from dspark.training.selfprompt import SelfPromptConfig, SelfPrompts

_TEXT_BYTES = 6
"""Of a token that the target writes; for estimates before there is any."""
_SLOTFULS = 8
"""Prompts that the target writes before they are answered, in slots; later, so many parts make one part more."""


class DataRun:
    """Makes a data set, or goes on with one that an earlier run began.

    Nothing is written before :meth:`run`.

    Args:
        decoder: the target, with an engine whose slots hold ``config.max_len`` tokens.
        config: how prompts are answered.
        output: the file of responses; others stand beside it, see ``DataFiles``.
        prompts: a file of them, or how the target writes them.
        adopt: take a file of responses without a header as this run's, after checking every line against the prompts.

    Raises:
        DataError: the data set was begun with other settings or prompts, or its files are damaged.
        ConfigError: target and settings do not fit.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        config: DataConfig,
        output: Path,
        prompts: Path | SelfPromptConfig,
        *,
        adopt: bool = False,
    ) -> None:
        self.decoder, self.config, self.files = decoder, config, DataFiles(output)
        self._written = prompts if isinstance(prompts, SelfPromptConfig) else None
        self._chat = ChatFormat(decoder.tokenizer, config.template_args)
        self._check_fit()
        self._input = None if isinstance(prompts, SelfPromptConfig) else PromptFile(prompts)
        self._header = make_header(decoder.engine, config, self._chat, self._input, self._written)
        kept = read_header(self.files.header)
        if kept is not None:
            check_header(self.files.header, kept, self._header)
            self._check_input(kept.get("input"))
        elif file_size(output) and not adopt:
            raise DataError(
                f"{str(output)!r} is there, without the header {str(self.files.header)!r} that says how it was made: "
                "choose another output, or adopt it"
            )
        self._sizes = {path: file_size(path) for path in self._paths}
        check = self._check_adopted if kept is None and adopt else None
        self._done = read_done(output, self.files.skipped, config, check=check)
        self.report = Report(
            responses=self._done.responses, total_tokens=self._done.tokens, skipped=self._done.skipped.copy()
        )
        self._writer = self._make_writer()

    def plan(self) -> Estimate:
        """How large the finished data set will be, what is there included."""
        found = self._plan_written(self._writer) if self._writer is not None else self._plan_file()
        found.there = self._done.responses
        found.tokens += self.report.total_tokens
        found.bytes += sum(self._sizes.values())
        return found

    def _plan_file(self) -> Estimate:
        prompts = self._input
        if prompts is None:
            return Estimate()
        variants = len(self.config.variants)
        return estimate(
            (self._dialogue(i, line) for i, line in enumerate(prompts)),
            len(prompts),
            self.config,
            self._chat,
            self.decoder.tokenizer,
            lambda dialogue: self._done.remaining(dialogue, variants),
        )

    def _plan_written(self, writer: SelfPrompts) -> Estimate:
        """Every prompt and answer at its longest; candidates that will not be kept come on top."""
        prompts = writer.kept + writer.missing
        responses = max(0, prompts * len(self.config.variants) - len(self._done.finished))
        per_token = len(str(self.decoder.engine.parts.target.vocab_size)) + 1 + _TEXT_BYTES
        prompt, answer = writer.config.max_tokens, self.config.max_tokens
        record = FRAME_BYTES + per_token * (prompt + answer)
        return Estimate(
            prompts=prompts,
            responses=responses,
            tokens=writer.missing * prompt + responses * answer,
            bytes=writer.missing * (FRAME_BYTES + _TEXT_BYTES * prompt) + responses * record,
            prompt_tokens=responses * prompt,
        )

    def run(
        self,
        budget: Budget | None = None,
        *,
        on_step: Callable[[Report], None] = lambda report: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Report:
        """Write what is missing.

        Args:
            budget: where to stop; nothing is written beyond it.
            on_step: called after every step of the engine.
            stopped: asked before every step; True ends the run, with everything that is finished on disk.

        Raises:
            DataError: a file can't be written, another process writes it, or request after request failed.
        """
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(LineFile(path, self._sizes[path])) for path in self._paths]
            prompts_file = files[2] if len(files) > 2 else None
            output = Output(files[0], files[1], prompts_file, budget or Budget(), self.report)
            self._claim()
            if self._writer is None or prompts_file is None:
                self._answer(output, on_step, stopped)
            else:
                self._write_and_answer(self._writer, prompts_file, output, on_step, stopped)
        return self.report

    def _write_and_answer(
        self,
        writer: SelfPrompts,
        file: LineFile,
        output: Output,
        on_step: Callable[[Report], None],
        stopped: Callable[[], bool],
    ) -> None:
        """Some prompts, their answers, the next prompts: what an early end leaves has its answers, too."""
        first = 0
        while not self.report.stopped:
            if writer.missing:
                self.report.phase = "prompts"
                most = max(_SLOTFULS * self.decoder.engine.config.max_slots, writer.kept // _SLOTFULS)
                writer.run(most, file, output, on_step, stopped)
                self.report.phase = "responses"
            if self.report.stopped or writer.kept == first:
                return
            self._input = PromptFile(self.files.prompts)
            self._answer(output, on_step, stopped, first)
            first = writer.kept

    def _answer(
        self, output: Output, on_step: Callable[[Report], None], stopped: Callable[[], bool], first: int = 0
    ) -> None:
        if self._input is None:
            return
        self._note_input(self._input)
        Regeneration(self.decoder, self._input, self.config, self._chat, self._done, output, self.report, first).run(
            on_step, stopped
        )

    # -- before the run --------------------------------------------------------------------------------------------

    @property
    def _paths(self) -> list[Path]:
        both = [self.files.responses, self.files.skipped]
        return both if self._written is None else [*both, self.files.prompts]

    def _check_fit(self) -> None:
        room = self.decoder.engine.max_len
        if room < self.config.max_len:
            raise ConfigError(
                f"the engine's slots hold {room} tokens, max_prompt + max_tokens are {self.config.max_len}: "
                f"build it with max_len={self.config.max_len}, or lower one of them"
            )
        if self.config.chat and self._chat.template is None:
            raise ConfigError("the target has no chat template: prompts can only be continued as they are (chat=False)")
        if self._written is not None and not self.config.chat:
            raise ConfigError("prompts that the target writes need its chat template (chat=True)")

    def _check_input(self, kept: Any) -> None:
        """A file of prompts may have grown at its end since; nothing else."""
        if not isinstance(kept, dict):
            return
        prompts = self._input if self._input is not None else PromptFile(self.files.prompts)
        if prompts.size < int(kept["bytes"]) or prompts.digest(int(kept["bytes"])) != kept["sha256"]:
            raise DataError(
                f"prompts {str(prompts.path)!r} are not those that the data was begun with ({kept['file']!r}, "
                f"{kept['bytes']} bytes): lines may only be added at the end"
            )

    def _claim(self) -> None:
        """Write the header, now that nobody else can; one that is there has to be ours."""
        kept = read_header(self.files.header)
        if kept is None:
            write_header(self.files.header, self._header)
        else:
            check_header(self.files.header, kept, self._header)

    def _note_input(self, prompts: PromptFile) -> None:
        """Keep what the prompts are now, if they are new or have grown."""
        header = read_header(self.files.header) or self._header
        now = describe_prompts(prompts)
        if header.get("input") != now:
            write_header(self.files.header, {**header, "input": now})

    def _check_adopted(self, record: dict[str, Any]) -> None:
        """Refuse a line that this run would not have written.

        Raises:
            ValueError: saying why.
        """
        if self._input is None:
            raise ValueError("there is no file of prompts to check it against")
        index = int(record["index"])
        if not 0 <= index < len(self._input):
            raise ValueError(f"there is no prompt {index}")
        dialogue = self._dialogue(index, self._input[index])
        if not isinstance(dialogue, Dialogue) or dialogue.turns > 1:
            raise ValueError(f"prompt {index} has not one turn")
        asked = list(dialogue.questions[0]) if dialogue.questions else []
        if prompt_ids(dialogue, asked, self._chat, self.decoder.tokenizer) != record["prompt_ids"]:
            raise ValueError(f"'prompt_ids' are not those of prompt {index} under this chat template")
        if not 1 <= len(record["response_ids"]) <= self.config.max_tokens:
            raise ValueError(
                f"{len(record['response_ids'])} tokens of response, max_tokens is {self.config.max_tokens}"
            )

    def _dialogue(self, index: int, line: bytes) -> Dialogue | Skipped | None:
        return read_dialogue(index, line, chat=self.config.chat, system=self.config.system)

    def _make_writer(self) -> SelfPrompts | None:
        if self._written is None:
            return None
        turn = self._chat.user_turn(self.config.system)
        if len(turn.opening) + self._written.max_tokens + 1 > self.decoder.engine.max_len:
            raise ConfigError(
                f"prompts of up to {self._written.max_tokens} tokens do not fit a slot of {self.decoder.engine.max_len}"
            )
        writer = SelfPrompts(
            self.decoder, self._written, turn, self.config.seed, self.files.prompts, self._done.last_candidate,
            self.report,
        )  # fmt: skip
        self.report.prompts = writer.kept
        self.report.total_tokens += writer.tokens
        return writer
