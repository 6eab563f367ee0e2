"""``response_format`` as a logits processor: llguidance's matcher, forked over drafts, advanced by what is committed.

llguidance was taken before xgrammar because it refuses the parts of JSON schema that it can't enforce instead of
leaving them out, compiles nothing ahead (a schema that a stranger sends costs milliseconds), and needs neither torch
nor a compiler at run time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dspark.errors import DSparkError
from dspark.server.errors import invalid

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.server.schemas import ResponseFormat

WHERE = "response_format.json_schema.schema"
_COMPILE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One spacing: a model that may write any number of blanks between two tokens can do so until its tokens are spent."""


class GrammarProcessor:
    """Masks every token that no valid output continues with.

    Args:
        matcher: an ``llguidance.LLMatcher`` in the state after the tokens so far.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fork(self) -> GrammarProcessor:
        """A copy in the same state; the compiled grammar is shared."""
        return GrammarProcessor(self._matcher.deep_copy())

    def advance(self, token_id: int) -> None:
        """Follow one token.

        Raises:
            DSparkError: it is not one that the grammar allows.
        """
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return  # complete: what ended the output
        if not self._matcher.consume_token(token_id):
            raise DSparkError(f"the grammar does not allow token {token_id}: {self._matcher.get_error()}")

    def process(self, logits: Tensor) -> Tensor:
        """[V] -> [V], what is not allowed at -inf."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, bitorder="little")[: logits.shape[0]].astype(bool)
        if len(allowed) < logits.shape[0]:
            allowed = np.pad(allowed, (0, logits.shape[0] - len(allowed)))
        return logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), float("-inf"))


class Grammars:
    """Makes processors for one tokenizer. May be used by several threads.

    Args:
        tokenizer: a fast transformers tokenizer, or None.
        vocab_size: V, width of the target's logits.
        eos_token_ids: ids that may follow a complete output.
        max_bytes: largest schema.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...], max_bytes: int) -> None:
        self._tokenizer, self._vocab_size, self._eos, self._max = tokenizer, vocab_size, eos_token_ids, max_bytes
        self._lock = threading.Lock()
        self._own: Any = None
        self._unfit = ""

    def processor(self, wanted: ResponseFormat) -> GrammarProcessor | None:
        """The processor of a response format; None for free text.

        Raises:
            ApiError: naming the field.
        """
        if wanted.type != "json_schema" and wanted.json_schema is not None:
            where = "response_format.json_schema"
            raise invalid(f"{where}: only with type json_schema, and it is {wanted.type}", where)
        if wanted.type == "text":
            return None
        schema: Mapping[str, Any] = {"type": "object"}
        if wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise invalid("response_format.json_schema: missing", "response_format.json_schema", "missing")
            schema = wanted.json_schema.schema_
        return GrammarProcessor(self._matcher(schema))

    def _matcher(self, schema: Mapping[str, Any]) -> Any:
        import llguidance

        try:
            text = json.dumps(schema, allow_nan=False)
        except (ValueError, RecursionError) as err:
            raise invalid(f"{WHERE}: {err}", WHERE, "invalid_schema") from err
        if len(text) > self._max:
            raise invalid(f"{WHERE}: {len(text)} bytes, at most {self._max} are taken", WHERE, "schema_too_large")
        tokenizer = self.prepare()
        if tokenizer is None:
            raise invalid(f"response_format: {self._unfit}", "response_format")
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_COMPILE)  # type: ignore[arg-type]
        except ValueError as err:
            raise invalid(f"{WHERE}: {err}", WHERE, "invalid_schema") from err
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()  # what is found out only here is the schema's fault, too
        if matcher.is_error():
            raise invalid(f"{WHERE}: {_first_line(matcher.get_error())}", WHERE, "invalid_schema")
        return matcher

    def prepare(self) -> Any:
        """llguidance's view of the tokenizer; None where it has none, which every request for a grammar is told.

        Made at the first call, which takes seconds for a large vocabulary and lets no other thread of Python run: not
        for when requests are being served.
        """
        with self._lock:
            if self._own is None and not self._unfit:
                self._wrap()
            return self._own

    def _wrap(self) -> None:
        import llguidance.hf

        if self._tokenizer is None:
            self._unfit = "this server has no tokenizer"
            return
        if not self._eos:
            self._unfit = "the target has no token that ends a text"
            return
        try:
            self._own = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=list(self._eos)
            )
        except Exception as err:  # the binding's own kinds
            self._unfit = f"not with this tokenizer: {err}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
