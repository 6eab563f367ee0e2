"""From a configuration to a finished drafter: target, data, cache, vocabulary, drafter, trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints import DrafterConfig, load_checkpoint
from dspark.checkpoints.borrow import parts_of
from dspark.checkpoints.chat import write_chat
from dspark.drafters.fit import fit
from dspark.errors import CapacityError, ConfigError, DataError
from dspark.plugins.catalog import Catalog
from dspark.plugins.kinds import Kind
from dspark.plugins.manager import load_plugins
from dspark.training.cache import CacheReader, CacheSpec, CacheWriter
from dspark.training.chat_record import chat_record
from dspark.training.checkpoint import changes, read_state, read_tensors
from dspark.training.config import TrainConfig
from dspark.training.eagle3 import EagleObjective, TrainableEagle3
from dspark.training.export import write_drafter
from dspark.training.features import TargetReader, softcap_of
from dspark.training.init import first_tensors
from dspark.training.memory import in_words, peak_bytes, predict, resident_bytes
from dspark.training.model import TrainableDrafter
from dspark.training.objective import BlockObjective, Objective, trained
from dspark.training.parallel import processes
from dspark.training.samples import Sample, SampleReader, Skipped
from dspark.training.setup import build_drafter, mask_token, new_config, tap_layers, to_checkpoint
from dspark.training.sources import CachedSource, CacheFiller, OnlineSource, Source
from dspark.training.teacher import Teacher
from dspark.training.tensorboard import tensorboard_writer
from dspark.training.trainer import Trainer
from dspark.training.vocabulary import choose_vocabulary, count_tokens, coverage, draft_ids

DRAFTER = "drafter"
"""Folder of the drafter under the run's output."""


class Run:
    """One training run, put together.

    Args:
        config: its settings.
        say: gets lines of text, in the main process.
        catalog: registered components; None loads plugins.
        target: a finished target; None builds the one that the settings name.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        say: Callable[[str], None] = print,
        catalog: Catalog | None = None,
        target: Any = None,
    ) -> None:
        self.config, self.processes = config, processes()
        self.say = say if self.processes.main else lambda _: None
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        self.catalog = catalog if catalog is not None else load_plugins().catalog
        self.target: Any = target if target is not None else self._target()
        layers = self.target.num_layers
        begin = config.drafter.start
        self.start = None if begin is None else load_checkpoint(begin, target_layers=layers)
        self.taps = tap_layers(config.drafter, layers) if self.start is None else self.start.config.target_layer_ids
        self.files = [Path(f).expanduser().resolve() for f in config.data.files]
        if not self.files:
            raise ConfigError("data.files: name at least one file of conversations")
        self.output = Path(config.run.output)
        self.samples = SampleReader(
            config.data.max_length, getattr(self.target, "tokenizer", None), config.data.chat_args
        )
        self._reader: TargetReader | None = None
        self._cache: CacheReader | None = None
        self._events = tensorboard_writer(self.output) if config.run.tensorboard and self.processes.main else None

    def _target(self) -> Any:
        t = self.config.target
        device = self.processes.device if t.device == "auto" and self.processes.device else t.device
        values: dict[str, Any] = {"model": t.model, "dtype": t.dtype, "device": device, **t.settings}
        return self.catalog.build(Kind.TARGET, t.kind, values)

    # -- data ---------------------------------------------------------------------------------------------------

    @property
    def reader(self) -> TargetReader:
        """The target, ready to read samples."""
        if self._reader is None:
            self._reader = TargetReader(self.target, self.taps, max_length=self.config.data.max_length)
        return self._reader

    def filler(self) -> CacheFiller:
        """What is still to go into the cache."""
        if self.config.data.cache is None:
            raise ConfigError("data.cache: name a folder")
        spec = CacheSpec(
            target=self.target.name,
            taps=self.taps,
            hidden_size=self.target.hidden_size,
            vocab_size=self.target.vocab_size,
            max_length=self.config.data.max_length,
        )
        return CacheFiller(CacheWriter(Path(self.config.data.cache), spec), self.files, self.samples)

    def fill(self) -> None:
        """Append to the cache what the files hold beyond it; the main process does, the others wait.

        Raises:
            CapacityError: beyond the budget, before the target has run.
        """
        if self.processes.main:
            filler = self.filler()
            if filler.skipped.counts:
                self.say(f"left out: {filler.skipped}")
            if filler.tokens:
                self.say(filler.estimate())
            filler.check_budget(self.config.data.cache_budget_gib)
            filler.fill(self.reader, lambda done, total: self.say(f"target cache: {done:,} of {total:,} tokens"))
        self.processes.wait()

    def source(self) -> Source:
        """Conversations, and the target's view of them."""
        if self.config.data.cache is not None:
            self.fill()
            self._cache = CacheReader(Path(self.config.data.cache))
            return CachedSource(self._cache)
        skipped, found = Skipped(), list[Sample]()
        for file in self.files:
            found += [s for s, _ in self.samples.read(file, skipped) if s is not None]
        if skipped.counts:
            self.say(f"left out: {skipped}")
        return OnlineSource(found, self.reader)

    def refresh(self) -> None:
        """Take in what was appended to the files. A run does not end because a new line is malformed, or because
        another process is filling the cache: it goes on with what is there."""
        if self._cache is None:
            return
        try:
            self.fill()
        except (DataError, CapacityError) as err:
            self.say(f"no new conversations: {err}")
            self.processes.wait()
        self._cache.refresh()

    # -- the drafter --------------------------------------------------------------------------------------------

    def prepare(self, resume: Path | None = None) -> Trainer:
        """Everything up to the first step.

        Args:
            resume: a checkpoint to go on from.
        """
        if resume is not None:
            state = read_state(resume)
            changed = changes(state["config"], self.config.plain())
            more = f" with other settings: {'; '.join(sorted(changed))}" if changed else ""
            self.say(f"going on from step {state['step']}{more}")
        source = self.source()
        drafter, tokens = self.drafter(source, resume)
        loss, head = self.config.loss, drafter.core.head.detach()
        teacher = Teacher(head, softcap_of(self.target))
        objective: Objective
        if isinstance(drafter, TrainableEagle3):
            objective = EagleObjective(drafter, teacher, tokens, loss)
        else:
            objective = BlockObjective(drafter, teacher, tokens, loss, self.config.optim.anchors)
        constants = {} if tokens is None else {"token_map": tokens}
        trainer = Trainer(
            self.config,
            objective,
            source,
            output=self.output,
            constants=constants | {"mask_token_id": torch.tensor(drafter.config.mask_token_id)},
            processes=self.processes,
            say=self.say,
            refresh=self.refresh if self.config.data.follow else None,
            on_log=self.log,
            on_save=lambda: self.export(drafter, tokens),
        )
        trainer.start(resume)
        self.say(
            f"data: {len(trainer.order):,} conversations to train on, {len(trainer.held)} held out, "
            f"left out: {trainer.skipped}; {trainer.steps:,} steps"
        )
        self.say(f"memory: at most about {in_words(self.memory(trainer))}")
        return trainer

    def drafter(self, source: Source, resume: Path | None) -> tuple[TrainableDrafter | TrainableEagle3, Tensor | None]:
        """The module to be trained and its vocabulary: new, from a checkpoint, or as the run that goes on had it."""
        embedding, head = self.target.input_embeddings.weight.detach(), self.target.lm_head.weight.detach()
        scale = float(getattr(self.target.input_embeddings, "embed_scale", 1.0))
        if self.start is not None:
            fitted = fit(self.start, self.target, embedding.device, torch.float32)
            config, tensors, tokens, scale = self.start.config, fitted.tensors, fitted.token_map, fitted.embed_scale
        else:
            config, tokens = self.new_drafter(source, {} if resume is None else read_tensors(resume))
            tensors = self.first_tensors(config, source, tokens)
        rows = (head if tokens is None else head[tokens.to(head.device)]).to(self.precision)
        drafter = build_drafter(
            config, tensors, embedding=embedding, head=rows, catalog=self.catalog, embed_scale=scale
        )
        size = f"{sum(p.numel() for p in trained(drafter).values()) / 1e6:.1f} M trained parameters"
        mask = f", mask token {config.mask_token_id}" if config.eagle is None else ""
        self.say(f"drafter: {config.algorithm}, {size}, taps {list(self.taps)}{mask}")
        return drafter, tokens

    def new_drafter(self, source: Source, known: Mapping[str, Tensor]) -> tuple[DrafterConfig, Tensor | None]:
        """Description and vocabulary (draft id -> target id, None for all) of a new drafter.

        Args:
            known: vocabulary and mask token of a run that goes on; empty for a new one.
        """
        settings, whole = self.config.drafter, len(self.target.input_embeddings.weight)
        said, seen = count_tokens((source.sample(i) for i in range(len(source))), whole)
        tokens = known.get("token_map")
        if not known and settings.vocab_size is not None and settings.vocab_size < whole:
            tokens = choose_vocabulary(said, seen, settings.vocab_size, self.target.eos_token_ids)
        if tokens is not None:
            share = 100 * coverage(said, tokens)
            self.say(f"draft vocabulary: {len(tokens):,} tokens, {share:.2f} % of the responses")
        mask = -1
        if "mask_token_id" in known:
            mask = int(known["mask_token_id"])
        elif settings.algorithm != "eagle3":
            mask = mask_token(settings, getattr(self.target, "tokenizer", None), seen)
        size = None if tokens is None else len(tokens)
        return new_config(settings, self.target, size, mask, self.catalog), tokens

    @property
    def precision(self) -> torch.dtype:
        """What products are computed in."""
        return torch.bfloat16 if self.config.optim.precision == "bf16" else torch.float32

    def first_tensors(self, config: DrafterConfig, source: Source, tokens: Tensor | None) -> dict[str, Tensor]:
        """First weights, as the settings ask."""
        return first_tensors(
            config,
            self.config.drafter,
            self.config.optim.seed,
            target=self.target,
            samples=(source.sample(i) for i in range(len(source))),
            draft_ids=draft_ids(tokens, config.vocab_size),
        )

    def memory(self, trainer: Trainer) -> dict[str, int]:
        """Bytes at the peak, by part."""
        o, drafter = self.config.optim, trainer.objective.drafter
        lengths = [len(trainer.source.sample(n)) for n in trainer.order.tolist()]
        sizes = [lengths[i : i + o.sequences] for i in range(0, len(lengths), o.sequences)]
        largest = max(sizes, key=sum)
        tokens = sum(largest)
        blocks, labels = trainer.objective.sizes(len(largest), tokens)
        return predict(
            drafter.config,
            parameters=sum(p.numel() for p in trainer.parameters.values()),
            tokens=tokens,
            blocks=blocks,
            labels=labels,
            length=tokens // len(largest),
            half=o.precision == "bf16",
            resident=resident_bytes(trainer.device),
        )

    # -- what it writes -----------------------------------------------------------------------------------------

    def log(self, record: dict[str, Any]) -> None:
        """Append a record to the run's log, and to TensorBoard's events where they are asked for."""
        self.output.mkdir(parents=True, exist_ok=True)
        with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._events is not None:
            self._events(record)

    def export(self, drafter: TrainableDrafter | TrainableEagle3, tokens: Tensor | None) -> None:
        """Write the drafter as it is now, ready to decode with."""
        checkpoint = to_checkpoint(drafter, tokens, torch.bfloat16)
        write_drafter(self.output / DRAFTER, checkpoint, parts_of(self.target))
        write_chat(self.output / DRAFTER, chat_record(self.samples.tokenizer, self.samples.chat_args, self.files))

    def train(self, resume: Path | None = None, on_start: Callable[[Trainer], None] | None = None) -> Trainer:
        """Prepare, train to the end, and say what it took."""
        trainer = self.prepare(resume)
        if on_start is not None:
            on_start(trainer)
        trainer.run()
        self.say(f"memory: {peak_bytes(trainer.device) / 2**30:.2f} GiB at most")
        return trainer
