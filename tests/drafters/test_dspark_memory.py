"""A draft holds its logits once: what is live while it is made, counted in blocks of [R, gamma, Vd] float32."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.types import BatchView, Mode
from tests.drafters.golden import make_drafter, request
from tests.drafters.toys import toy_checkpoint

torch.set_num_threads(1)
VOCAB, GAMMA, ROWS = 4000, 8, 3
BLOCK = ROWS * GAMMA * VOCAB * 4


class Live(TorchDispatchMode):
    """Bytes of all storages that operations made since it was entered and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage(), given)
        return out

    def _note(self, storage: Any, given: set[int]) -> None:
        key = storage._cdata
        if key in given or key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._gone, key, size)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.bytes -= size


def draft(head: str, modes: tuple[Mode, ...], reuse: bool = True, **settings: Any) -> tuple[Live, Any, list[Any]]:
    drafter = make_drafter(toy_checkpoint(head, vocab=VOCAB, gamma=GAMMA, **settings), _target(), **CANDIDATES)
    drafter.taps.length = lambda slot, generation: 99  # type: ignore[method-assign]
    requests = tuple(request([1, 2, 3], slot=i, mode=mode) for i, mode in enumerate(modes))
    sampler = RoundSampler(BatchView(requests, GAMMA), CounterDraws(), VOCAB)
    if not reuse:
        own = sampler.sample
        sampler.sample = lambda *args, reuse: own(*args)  # type: ignore[method-assign,assignment,misc]
    bases: list[Any] = []
    logits = drafter.backbone.logits

    def note(hidden: Any) -> Any:
        bases.append(logits(hidden))
        return bases[-1]

    drafter.backbone.logits = note  # type: ignore[method-assign]
    with Live() as live:
        block = drafter.propose(BatchView(requests, GAMMA), sampler)
    return live, block, bases


CANDIDATES: dict[str, Any] = {}
SAMPLED = (Mode.REJECTION, Mode.COUPLED, Mode.REJECTION)
MIXED = (Mode.REJECTION, Mode.GREEDY, Mode.COUPLED)


def _target() -> Any:
    from tests.drafters.golden import stub_target

    return stub_target(VOCAB, name="toy")


@pytest.mark.parametrize("head", ["markov", "none"])
@pytest.mark.parametrize("modes", [SAMPLED, MIXED], ids=["sampled", "mixed"])
def test_base_logits_and_q_are_one_block(head: str, modes: tuple[Mode, ...]) -> None:
    """The peak is one block and what a single position needs; a sampler that copies holds two."""
    live, block, bases = draft(head, modes)
    (base,) = bases
    assert base.nbytes == BLOCK
    own = base.untyped_storage().data_ptr()
    assert {w.untyped_storage().data_ptr() for w in block.q._weights} == {own}
    assert live.peak < 1.9 * BLOCK
    copying, _, _ = draft(head, modes, reuse=False)
    assert copying.peak > live.peak + 0.5 * BLOCK
