"""The last part of a round: cut, append, account. Only here do committed ids grow."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dspark.engine.faults import RoundFaults
from dspark.engine.pack import Packed
from dspark.engine.state import Chunk, RequestState
from dspark.engine.verification import Verified
from dspark.sampling.logprobs import TokenLogprobs, token_logprobs
from dspark.types import Committed, RequestView, TargetOutput, VerifyLayout


def commit(
    packed: Packed,
    views: dict[RequestState, RequestView],
    drafting_rows: tuple[RequestState, ...],
    output: TargetOutput,
    verified: Verified,
    faults: RoundFaults,
) -> tuple[list[Committed], list[Chunk]]:
    """Commit requests that have a decision, then prompt chunks. A processor that raises ends its own request alone."""
    drafted = {request: row for row, request in enumerate(drafting_rows)}
    committed: list[Committed] = []
    chunks: list[Chunk] = []
    for i, request in enumerate(packed.decode):
        if i not in verified.decisions:
            continue
        accepted, following = verified.decisions[i]
        tokens = (*packed.drafted[i][:accepted], following)
        try:
            done, chunk = commit_decode(
                request,
                views[request],
                row=drafted.get(request, -1),
                tokens=tokens,
                accepted=accepted,
                offered=int(packed.verify_lens[i]),
                taps=tap_rows(output.taps, packed.layout, i, request.pending + accepted),
                entropy=verified.entropies.get(i, math.nan),
                logprobs=logprobs_of(request, packed, i, tokens, output.logits, verified),
            )
        except Exception as fault:
            faults.fail(request, "commit", "sampling", fault)
            continue
        committed.append(done)
        chunks.append(chunk)
    for i, (request, take) in enumerate(packed.prefill):
        taps = tap_rows(output.taps, packed.layout, len(packed.decode) + i, take)
        committed.append(commit_prefill(request, views[request], take, taps))
    return committed, chunks


def commit_decode(
    request: RequestState,
    view: RequestView,
    *,
    row: int,
    tokens: Sequence[int],
    accepted: int,
    offered: int,
    taps: Tensor | None,
    entropy: float,
    logprobs: Sequence[Any],
) -> tuple[Committed, Chunk]:
    """Append accepted drafts and the token after them, cut at EOS, stop and max_tokens.

    ``num_cached`` grows by what the target read and kept: the pending tokens and the accepted drafts. What a rejected
    draft left in the cache is beyond it, hence stale.
    """
    pending = request.pending
    kept, reason, text = append(request, tokens)
    request.sampling.commit(kept)
    request.num_cached += pending + accepted
    if len(kept) <= accepted:  # what lies beyond the cut was neither offered nor accepted
        offered = accepted = len(kept)
    if request.stats.acceptance.rounds == 0:
        request.stats.first_token_seconds = time.perf_counter() - request.submitted
    request.stats.acceptance.add(offered, accepted, len(kept))
    request.finish_reason = reason
    chunk = Chunk(
        request_id=request.request_id,
        ids=tuple(kept),
        text=text,
        accepted=accepted,
        logprobs=tuple(logprobs[: len(kept)]),
        finish_reason=reason,
    )
    done = Committed(view, row, tuple(kept), offered, accepted, request.num_cached, taps, reason, entropy)
    return done, chunk


def append(request: RequestState, tokens: Sequence[int]) -> tuple[list[int], str | None, str | None]:
    """Append tokens until one ends the request: (kept, finish reason, text to show).

    The token that ends it is kept. A stop string ends it at the token that completes it; its text never shows.
    """
    kept: list[int] = []
    pieces: list[str] = []
    reason: str | None = None
    for token in tokens:
        request.append(token)
        kept.append(token)
        ends = token in request.stop_ids
        hit = None
        if request.text is not None and not ends:
            piece, hit = request.text.push(token)
            pieces.append(piece)
        if ends or hit is not None:
            reason = "stop"
        elif request.output_len >= request.params.max_tokens:
            reason = "length"
        if reason is not None:
            break
    if request.text is None:
        return kept, reason, None
    if reason is not None:
        pieces.append(request.text.flush())
        reason = "stop" if request.text.matched is not None else reason
    return kept, reason, "".join(pieces)


def commit_prefill(request: RequestState, view: RequestView, take: int, taps: Tensor | None) -> Committed:
    """A prompt chunk was read."""
    request.num_cached += take
    return Committed(view, -1, (), 0, 0, request.num_cached, taps, None)


def tap_rows(taps: Tensor | None, layout: VerifyLayout, sequence: int, count: int) -> Tensor | None:
    """Taps of the first ``count`` rows of a sequence: those whose positions stay cached."""
    if taps is None:
        return None
    start = int(layout.cu_query_lens[sequence])
    return taps[start : start + count]


def logprobs_of(
    request: RequestState, packed: Packed, index: int, tokens: Sequence[int], raw: Tensor, verified: Verified
) -> list[TokenLogprobs]:
    """The target's log-probabilities of committed tokens: accepted, corrected and bonus alike."""
    if request.params.logprobs is None:
        return []
    start = int(packed.row_starts[index])
    rows = slice(start, start + len(tokens))
    scores = raw[rows] if request.params.logprobs_mode == "raw" else verified.processed(request, rows)
    return token_logprobs(scores, list(tokens), request.params.logprobs)
