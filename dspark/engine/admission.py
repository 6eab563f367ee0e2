"""Checks at submit: what is refused is refused here, by name, before it can cost anyone else."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspark.config import SamplingParams
from dspark.engine.state import RequestState
from dspark.errors import DSparkError, RequestError
from dspark.sampling.draws import RequestKeys
from dspark.sampling.history import RequestSampling
from dspark.text.stops import TextStream
from dspark.types import Mode

if TYPE_CHECKING:
    from dspark.engine.engine import Engine


class Admission:
    """Makes RequestStates: modes, keys, limits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._keys = RequestKeys(engine.config.seed)
        self._live_keys: set[int] = set()

    def request(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None) -> RequestState:
        """A checked request.

        Raises:
            RequestError: naming the field.
        """
        engine = self._engine
        target = engine.parts.target
        self._check_params(params)
        name = self._name(request_id)
        ids = self._check_prompt(prompt_ids, params)
        mode = self._mode(params)
        eos = frozenset() if params.ignore_eos else frozenset(target.eos_token_ids)
        stop_ids = eos | frozenset(params.stop_token_ids)
        text: Any = None
        if engine.tokenizer is not None:
            text = TextStream(engine.tokenizer, stops=tuple(params.stop), min_tokens=params.min_tokens)
        try:
            sampling = RequestSampling(params, ids, target.vocab_size, target.eos_token_ids, mode)
        except DSparkError:
            raise
        except Exception as fault:
            raise RequestError(f"logits_processors: fork() raised {type(fault).__name__}: {fault}") from fault
        key = self._key(params, mode)  # last, so that a refused request holds none
        request = RequestState(name, params, mode, key, ids, stop_ids, sampling, text)
        request.max_len = engine.max_len
        return request

    def release(self, request: RequestState) -> None:
        """Forget the key of a finished request."""
        if request.mode is Mode.REJECTION:
            self._live_keys.discard(request.key)

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            return next(name for i in self._names if not self._engine.is_live(name := f"request-{i}"))
        if not isinstance(request_id, str):
            raise RequestError(f"request_id: expected a string, got {request_id!r}")
        if self._engine.is_live(request_id):
            raise RequestError(f"request_id {request_id!r} is live already: choose another or leave it out")
        return request_id

    def _check_prompt(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        engine = self._engine
        try:
            ids = [operator.index(i) for i in prompt_ids]
        except TypeError as err:
            raise RequestError(f"prompt: expected token ids: {err}") from err
        vocab = engine.parts.target.vocab_size
        if not ids:
            raise RequestError("prompt: no tokens; give at least one (such as the BOS token)")
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise RequestError(f"prompt: token id {wrong} is outside the target's vocabulary of {vocab}")
        total = len(ids) + params.max_tokens
        if total > engine.max_len:
            raise RequestError(
                f"prompt of {len(ids)} tokens and max_tokens = {params.max_tokens} need {total} positions, a slot has "
                f"{engine.max_len}: shorten one of them or build the engine with max_len >= {total}"
            )
        return ids

    def _check_params(self, params: SamplingParams) -> None:
        engine = self._engine
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: expected SamplingParams, got {type(params).__name__}")
        if params.n != 1:
            raise RequestError("n: one request gives one sample; SpeculativeDecoder.generate expands n")
        if params.stop and engine.tokenizer is None:
            raise RequestError("stop: stop strings need a tokenizer, and this engine has none; use stop_token_ids")

    def _mode(self, params: SamplingParams) -> Mode:
        modes, config = self._engine.modes, self._engine.config
        mode = params.mode
        if mode is Mode.GREEDY:
            return mode
        if config.verifier == "auto" and mode not in modes and params.request_key is not None:
            raise RequestError(
                "request_key: it asks for 'rejection', which the scheduler or estimator of this engine would bias; "
                "leave it out, or give a seed"
            )
        if config.verifier == "auto":
            return mode if mode in modes else Mode.COUPLED
        sampled = modes - {Mode.GREEDY}
        if not sampled:
            raise RequestError(
                f"temperature: verifier {config.verifier!r} decodes greedily only; set temperature=0 or verifier='auto'"
            )
        forced = next(iter(sampled))
        if forced is Mode.REJECTION and params.seed is not None:
            raise RequestError(
                "seed: verifier 'rejection' gives one law but not one output; use verifier='coupled' or 'auto', "
                "or leave the seed out"
            )
        return forced

    def _key(self, params: SamplingParams, mode: Mode) -> int:
        if mode is Mode.GREEDY:
            return 0
        if mode is Mode.COUPLED:
            return params.seed if params.seed is not None else self._fresh()
        key = params.request_key if params.request_key is not None else self._fresh()
        if key in self._live_keys:
            raise RequestError(
                f"request_key: a live request draws under key {key} already; two of them would share their randomness"
            )
        self._live_keys.add(key)
        return key

    def _fresh(self) -> int:
        while (key := self._keys.fresh()) in self._live_keys:
            pass
        return key
