"""What a request asks for: token ids of its prompts, and sampling parameters of its choices."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.api import expand
from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.errors import DSparkWarning, RequestError
from dspark.prompts import encode, encode_chat
from dspark.server.chat import ChatDefaults, departs
from dspark.server.config import ServerConfig
from dspark.server.errors import ApiError, invalid
from dspark.server.grammar import Grammars
from dspark.server.schemas import ChatRequest, CompletionRequest, Message, Sampling

_SAME = (
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "do_sample",
    "stop_token_ids",
    "ignore_eos",
    "logprobs_mode",
    "request_key",
)
"""Fields that ``SamplingParams`` has by the same name."""
COMPLETION_TOKENS = 16
"""Most tokens of a completion that does not say, as in OpenAI's interface; a chat may fill its slot."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request, read.

    Attributes:
        choices: prompt ids and parameters of every choice, the choices of a prompt in a row.
        prompt_tokens: of all prompts, each counted once.
        echoes: text that goes before the output of each choice.
        samples: choices of each prompt.
    """

    choices: list[tuple[list[int], SamplingParams]]
    prompt_tokens: int
    echoes: list[str]
    samples: int = 1


class RequestReader:
    """Turns requests into work. Runs in a worker thread: templates and tokenizers take their time.

    Args:
        engine: whose limits hold.
        config: the server's limits.
        chat: variables of the chat template.
    """

    def __init__(self, engine: Engine, config: ServerConfig, chat: ChatDefaults) -> None:
        self._engine, self._config = engine, config
        self._tokenizer = engine.tokenizer
        self._chat = chat
        self._said: set[str] = set()
        target = engine.parts.target
        self._grammars = Grammars(
            self._tokenizer, target.vocab_size, tuple(target.eos_token_ids), config.max_schema_bytes
        )
        self._grammars.prepare()
        self.template: str = str(getattr(self._tokenizer, "chat_template", None) or "")

    def chat(self, body: ChatRequest) -> Work:
        """Read a chat.

        Raises:
            ApiError, DSparkError: naming the field.
        """
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise invalid("max_tokens: leave it out where max_completion_tokens is given", "max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs: needs logprobs = true", "top_logprobs")
        if not self.template:
            raise invalid("messages: the model's tokenizer has no chat template; use /v1/completions", "messages")
        ids = self._chat_ids(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        return self._work(body, [ids], ["messages"], logprobs, "top_logprobs", limit, name, [""])

    def completion(self, body: CompletionRequest) -> Work:
        """Read a completion.

        Raises:
            ApiError, DSparkError: naming the field.
        """
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise invalid("best_of: only as many as n are decoded; leave it out", "best_of")
        if body.echo and body.logprobs is not None:
            raise invalid("echo: log-probabilities of a prompt are not computed; leave echo or logprobs out", "echo")
        prompts: list[Any] = [body.prompt]
        if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
            prompts = list(body.prompt)
        names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
        self._check_choices(len(prompts), body.n or 1)
        ids = [self._ids(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        echoes = [self._text(prompt) if body.echo else "" for prompt in prompts]
        limit = body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS
        return self._work(body, ids, names, body.logprobs, "logprobs", limit, "max_tokens", echoes)

    # parts ----------------------------------------------------------------------------------------------------------

    def _chat_ids(self, body: ChatRequest) -> list[int]:
        given = body.chat_template_kwargs or {}
        for name in given:
            if name in _RESERVED or name not in self.template:
                where = f"chat_template_kwargs.{name}"
                raise invalid(f"{where}: the model's chat template has no such variable", where, "unknown_field")
        self._compare(given)
        try:
            ids = encode_chat([_plain(m) for m in body.messages], self._tokenizer, {**self._chat.args, **given})
        except RequestError:
            raise
        except Exception as err:  # a template raises whatever its author chose
            raise invalid(f"messages: the chat template refuses them: {err}", "messages", "template_error") from err
        self._check_prompt(ids, "messages")
        return ids

    def _compare(self, given: Mapping[str, Any]) -> None:
        """Say once of every variable that requests set it otherwise than the drafter's training did."""
        if self._chat.trained is None:
            return
        for name, value in given.items():
            if name in self._said:
                continue
            other = departs(self._tokenizer, self._chat.trained, name, value)
            if other is not None:
                self._said.add(name)
                warnings.warn(
                    f"a request sets {name} = {value!r}, and the drafter was trained with {other}: fewer drafts of "
                    "such requests will be accepted",
                    DSparkWarning,
                    stacklevel=2,
                )

    def _ids(self, prompt: Any, name: str) -> list[int]:
        if isinstance(prompt, list):
            self._check_tokens(name, prompt)
        ids = encode(prompt, self._tokenizer)
        self._check_prompt(ids, name)
        return ids

    def _check_tokens(self, name: str, ids: Iterable[int | str]) -> None:
        vocab = self._engine.parts.target.vocab_size
        wrong = next((i for i in ids if not 0 <= int(i) < vocab), None)
        if wrong is not None:
            raise invalid(f"{name}: token id {wrong} is outside the vocabulary of {vocab}", name)

    def _text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise invalid("echo: this server has no tokenizer", "echo")
        return str(self._tokenizer.decode(prompt))

    def _check_prompt(self, ids: Sequence[int], name: str) -> None:
        most = min(self._engine.max_len - 1, self._config.max_prompt_tokens or self._engine.max_len)
        if not ids:
            raise invalid(f"{name}: no tokens; give at least one", name)
        if len(ids) > most:
            raise invalid(f"{name}: {len(ids)} tokens, at most {most} are taken", name, "context_length_exceeded")

    def _check_choices(self, prompts: int, n: int) -> None:
        room = self._engine.config.max_slots + self._config.max_queue
        most = min(room, self._config.max_choices or room)
        if prompts * n > most:
            name = "prompt" if n == 1 else "n"
            raise invalid(f"{name}: {prompts * n} choices in all, at most {most} are taken", name)

    def _work(
        self,
        body: Sampling,
        prompts: list[list[int]],
        names: list[str],
        logprobs: int | None,
        logprobs_name: str,
        limit: int | None,
        limit_name: str,
        echoes: list[str],
    ) -> Work:
        n = body.n or 1
        self._check_choices(len(prompts), n)
        if logprobs is not None and logprobs > self._config.max_logprobs:
            raise invalid(f"{logprobs_name}: at most {self._config.max_logprobs}", logprobs_name)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options: needs stream = true", "stream_options")
        values = self._values(body)
        choices = []
        for ids, name in zip(prompts, names, strict=True):
            most = min(self._engine.max_len - len(ids), self._config.max_output_tokens or self._engine.max_len)
            if limit is not None and limit > most:
                raise ApiError(
                    400,
                    f"{limit_name}: {limit} tokens after a prompt of {len(ids)} ({name}), at most {most} fit",
                    param=limit_name,
                    code="context_length_exceeded",
                )
            tokens = most if limit is None else limit
            if values.get("min_tokens", 0) > tokens:
                raise invalid(f"min_tokens: {values['min_tokens']} exceeds {limit_name} of {tokens}", "min_tokens")
            params = SamplingParams(max_tokens=tokens, logprobs=logprobs, n=n, **values)
            choices += [(ids, choice) for choice in expand(params)]
        return Work(choices, sum(map(len, prompts)), [echo for echo in echoes for _ in range(n)], n)

    def _values(self, body: Sampling) -> dict[str, Any]:
        values = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        values["temperature"] = 1.0 if body.temperature is None else body.temperature
        if body.logit_bias:
            values["logit_bias"] = body.logit_bias
        self._check_tokens("logit_bias", body.logit_bias or ())
        self._check_tokens("stop_token_ids", body.stop_token_ids or ())
        stops = [] if body.stop is None else [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stops) > self._config.max_stops:
            raise invalid(f"stop: at most {self._config.max_stops} strings", "stop")
        if stops:
            values["stop"] = stops
        if body.seed is not None:
            values["seed"] = body.seed % 2**64
            if body.request_key is not None:
                raise invalid("request_key: not with a seed, which decides every draw", "request_key")
        if body.request_key is not None and (body.n or 1) > 1:
            raise invalid("request_key: for one choice only", "request_key")
        if body.response_format is not None:
            for name in ("ignore_eos", "min_tokens"):
                if values.get(name):
                    raise invalid(f"{name}: not with response_format, which decides where the output ends", name)
            processor = self._grammars.processor(body.response_format)
            if processor is not None:
                values["logits_processors"] = (processor,)
        return values


_RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""What ``apply_chat_template`` takes by these names is no variable of the template."""


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: parts joined, empty fields left out."""
    content = message.content
    out: dict[str, Any] = {
        "role": message.role,
        "content": content if isinstance(content, str) else "".join(part.text for part in content),
    }
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            out[name] = getattr(message, name)
    return out
