"""What a sequential head is held to."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dspark.plugins import Kind
from dspark.protocols import BuildContext
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.pipeline import check_law, make_parts
from dspark.testing.suite import ComponentSuite
from dspark.testing.toy_heads import HeadDrafter, loud, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ((1, 1), (1, 2), (2, 1), (2, 3), (3, 5), (1, 7))
"""(rows, gamma), small ones first: the first failure is the smallest."""


class SequentialHeadSuite(ComponentSuite):
    """Holds a head to ``dspark.protocols.SequentialHead``. Weights are made large, so that every term shows.

    Attributes:
        hidden_size, vocab_size, draft_vocab_size, rank: sizes to build it with, all different.
        tolerance: between two ways to compute one bias in float64, relative.
    """

    kind: ClassVar[Kind] = Kind.SEQUENTIAL_HEAD
    hidden_size: int = 6
    vocab_size: int = 11
    draft_vocab_size: int = 9
    rank: int = 4
    tolerance: float = 1e-9

    def defaults(self) -> Mapping[str, Any]:
        """The sizes that a drafter gives to whichever head it builds."""
        names = ("hidden_size", "vocab_size", "draft_vocab_size", "rank")
        return {name: getattr(self, name) for name in names}

    def context(self) -> BuildContext:
        """float64 on the CPU."""
        return BuildContext(vocab_size=self.vocab_size, gamma=7, device=torch.device("cpu"), dtype=torch.float64)

    def head(self, **settings: Any) -> Any:
        """A head with large random weights; two calls make equal ones."""
        return loud(self.build(**settings), seed=self.seed)

    def inputs(self, rows: int, gamma: int, purpose: str = "") -> tuple[Tensor, Tensor]:
        """Previous tokens [rows, gamma] (the anchor first) and hidden states [rows, gamma, d]."""
        rng = self.random(f"{purpose}{rows}.{gamma}")
        prev = torch.from_numpy(rng.integers(0, self.vocab_size, size=(rows, gamma)))
        return prev, torch.from_numpy(rng.normal(size=(rows, gamma, self.hidden_size)))

    @torch.no_grad()
    def steps(self, head: Any, prev: Tensor, hidden: Tensor) -> Tensor:
        """The bias of a block, step by step, [rows, gamma, Vd]."""
        state, out = head.start(prev[:, 0], hidden), []
        for k in range(prev.shape[1]):
            bias, state = head.step(state, prev[:, k], hidden[:, k])
            out.append(bias)
        return torch.stack(out, dim=1)

    @torch.no_grad()
    def block(self, head: Any, prev: Tensor, hidden: Tensor) -> Tensor:
        """The bias of a block at once, [rows, gamma, Vd]."""
        made: Tensor = head.block(prev, hidden)
        return made

    def _same(self, got: Tensor, wanted: Tensor, what: str, **case: Any) -> None:
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        gap = float((got - wanted).abs().max()) if wanted.numel() else 0.0
        if not gap <= self.tolerance * max(scale, 1.0):
            raise Seen(f"{what}: they differ by {gap:.3g}", **case)

    @contract(
        "`step` gives a bias [R, Vd] and a state, `block` a bias [R, gamma, Vd]; finite, in the dtype of `hidden`"
    )
    def test_shapes_and_dtypes(self) -> None:
        head = self.head()
        for rows, gamma in SIZES:
            prev, hidden = self.inputs(rows, gamma)
            self.case = {"rows": rows, "gamma": gamma}
            for name, made in (("step", self.steps(head, prev, hidden)), ("block", self.block(head, prev, hidden))):
                wanted = (rows, gamma, self.draft_vocab_size)
                if tuple(made.shape) != wanted:
                    raise Seen(f"`{name}` gave {tuple(made.shape)}, expected {wanted}", **self.case)
                if made.dtype != hidden.dtype or made.device != hidden.device:
                    raise Seen(f"`{name}` gave {made.dtype} on {made.device}", **self.case, dtype=str(hidden.dtype))
                if not bool(torch.isfinite(made).all()):
                    raise Seen(f"`{name}` gave values that are not finite", **self.case, prev=prev, hidden=hidden)

    @contract("it runs in the dtype that it is built for: float32 and bfloat16 besides float64")
    def test_other_dtypes(self) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            context = BuildContext(vocab_size=self.vocab_size, gamma=7, device=torch.device("cpu"), dtype=dtype)
            values = {**self.defaults(), **self.settings}
            head = self.catalog.build(self.kind, self.component, values, context)
            prev, hidden = self.inputs(2, 3)
            self.case = {"dtype": str(dtype), "rows": 2, "gamma": 3}
            made = self.steps(head, prev, hidden.to(dtype))
            if made.dtype != dtype:
                raise Seen(f"the bias is {made.dtype}", **self.case)

    @contract("it stays on the device of its inputs")
    def test_device(self) -> None:
        where = torch.device("meta")  # a device that every machine has, on which nothing is computed
        context = BuildContext(vocab_size=self.vocab_size, gamma=7, device=where, dtype=torch.float32)
        head = self.catalog.build(self.kind, self.component, {**self.defaults(), **self.settings}, context)
        prev = torch.zeros(2, 3, dtype=torch.int64, device=where)
        hidden = torch.zeros(2, 3, self.hidden_size, device=where)
        self.case = {"device": "meta (a stand-in for any accelerator)", "rows": 2, "gamma": 3}
        for made in (self.steps(head, prev, hidden), self.block(head, prev, hidden)):
            if made.device != where:
                raise Seen(f"the bias is on {made.device}", **self.case)

    @contract("`block` gives what `step` gives one by one: training and decoding see one law")
    def test_step_equals_block(self) -> None:
        head = self.head()
        for rows, gamma in SIZES:
            prev, hidden = self.inputs(rows, gamma)
            self.case = {"rows": rows, "gamma": gamma, "prev": prev}
            self._same(self.steps(head, prev, hidden), self.block(head, prev, hidden), "step and block", **self.case)

    @contract("it is a function of its inputs: the same block gives the same bias, whatever came between")
    def test_determinism(self) -> None:
        head = self.head()
        for rows, gamma in SIZES:
            prev, hidden = self.inputs(rows, gamma)
            first = self.steps(head, prev, hidden), self.block(head, prev, hidden)
            self.steps(head, *self.inputs(3, 4, "other"))
            self.block(head, *self.inputs(3, 4, "another"))
            again = self.steps(head, prev, hidden), self.block(head, prev, hidden)
            for name, a, b in (("step", first[0], again[0]), ("block", first[1], again[1])):
                if not torch.equal(a, b):
                    raise Seen(f"`{name}` gave another bias the second time", rows=rows, gamma=gamma, prev=prev)

    @contract("changing x_k leaves the bias of positions up to k as it is (prefix causality)")
    def test_prefix_causality(self) -> None:
        head = self.head()
        for rows, gamma in SIZES:
            prev, hidden = self.inputs(rows, gamma)
            for k in range(gamma):
                other = prev.clone()
                other[:, k] = (other[:, k] + 1) % self.vocab_size
                for name, run in (("step", self.steps), ("block", self.block)):
                    moved = (run(head, prev, hidden) - run(head, other, hidden)).abs().flatten(2).amax(2).amax(0)
                    early = [j for j in range(k) if not float(moved[j]) <= self.tolerance]
                    if early:
                        j, gap = early[0], float(moved[early[0]])
                        raise Seen(
                            f"`{name}`: changing x_{k} moved the bias of x_{j + 1} by {gap:.3g}",
                            rows=rows,
                            gamma=gamma,
                            prev=prev,
                            changed=other,
                        )

    @contract("a row's bias does not depend on the other rows of the batch, nor on their order")
    def test_rows_are_apart(self) -> None:
        head = self.head()
        prev, hidden = self.inputs(3, 4)
        for name, run in (("step", self.steps), ("block", self.block)):
            whole = run(head, prev, hidden)
            for rows in ([0], [2], [2, 0], [1, 2, 0]):
                self._same(run(head, prev[rows], hidden[rows]), whole[rows], f"`{name}` of rows {rows}", prev=prev)

    @contract("state is what `start` and `step` return: two blocks can be drafted in turns")
    def test_state_is_passed_not_kept(self) -> None:
        head = self.head()
        blocks = [self.inputs(2, 3, "a"), self.inputs(2, 3, "b")]
        wanted = [self.steps(head, *b) for b in blocks]
        with torch.no_grad():
            states = [head.start(prev[:, 0], hidden) for prev, hidden in blocks]
            for k in range(3):
                for i, (prev, hidden) in enumerate(blocks):
                    bias, states[i] = head.step(states[i], prev[:, k], hidden[:, k])
                    self._same(bias, wanted[i][:, k], f"block {i}, position {k + 1}, drafted in turns", prev=prev)

    @contract("it changes none of its inputs")
    def test_inputs_stay(self) -> None:
        head = self.head()
        prev, hidden = self.inputs(2, 3)
        kept = prev.clone(), hidden.clone()
        for name, run in (("step", self.steps), ("block", self.block)):
            run(head, prev, hidden)
            if not (torch.equal(prev, kept[0]) and torch.equal(hidden, kept[1])):
                raise Seen(f"`{name}` wrote to prev or hidden", rows=2, gamma=3)

    @contract("without `stateful` in its capabilities, each position can be computed by itself, as training does")
    def test_stateless_is_true(self) -> None:
        head = self.head()
        declared: Any = getattr(head, "capabilities", self.registration.capabilities)
        if declared.stateful:
            raise NotApplicable("it declares stateful=True")
        prev, hidden = self.inputs(2, 4)
        alone = self.block(head, prev.reshape(-1, 1), hidden.reshape(-1, 1, self.hidden_size))
        whole = self.block(head, prev, hidden)
        self._same(alone.reshape(whole.shape), whole, "positions one by one and the whole block", prev=prev)

    @contract("tensors of `canonical()` go through a file and come back as `weights`: the same head")
    def test_serialisation_round_trip(self) -> None:
        from safetensors.torch import load_file, save_file

        head = self.head()
        tensors = tensors_of(head)
        trained = list(head.parameters()) if isinstance(head, torch.nn.Module) else []
        if not tensors and not trained:
            raise NotApplicable("it has no weights")
        missing = len(trained) - sum(any(t.data_ptr() == p.data_ptr() for t in tensors.values()) for p in trained)
        if missing:
            raise Seen(f"`canonical()` names {sorted(tensors)}, and leaves out {missing} of {len(trained)} parameters")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "head.safetensors"
            save_file({n: t.contiguous() for n, t in tensors.items()}, path)
            back = self.build(weights=load_file(path))
        prev, hidden = self.inputs(2, 3)
        self._same(self.steps(back, prev, hidden), self.steps(head, prev, hidden), "the head and what was read back")

    @contract("every parameter gets a gradient from `block`, so that the head can be trained")
    def test_gradients(self) -> None:
        head = self.head()
        named = dict(head.named_parameters()) if isinstance(head, torch.nn.Module) else {}
        if not named:
            raise NotApplicable("it has no parameters")
        for parameter in named.values():
            parameter.requires_grad_(True)
        prev, hidden = self.inputs(3, 5)
        bias = head.block(prev, hidden.requires_grad_(True))
        if not bias.requires_grad:
            raise Seen("the bias of `block` has no gradient at all: is it computed under no_grad?")
        (bias * torch.from_numpy(self.random("g").normal(size=bias.shape))).sum().backward()
        without = [n for n, p in named.items() if p.grad is None or not bool(p.grad.any())]
        if without:
            raise Seen(f"no gradient reaches {', '.join(without)}", rows=3, gamma=5)

    @contract("a head with `project` takes `candidates` [R, K], and gives the full bias's entries there")
    def test_candidates(self) -> None:
        head = self.head()
        if getattr(head, "project", None) is None:
            raise NotApplicable("it has no `project`; drafters then ask for the whole bias")
        prev, hidden = self.inputs(3, 4)
        full = self.steps(head, prev, hidden)
        order = torch.from_numpy(self.random("c").permuted(_rows(12, self.draft_vocab_size), axis=1))
        ids = order.view(3, 4, -1)[:, :, :3]
        state = head.start(prev[:, 0], hidden)
        for k in range(4):
            with torch.no_grad():
                bias, state = head.step(state, prev[:, k], hidden[:, k], ids[:, k])
            self._same(bias, full[:, k].gather(1, ids[:, k]), f"position {k + 1}", candidates=ids[:, k])

    @contract("a whole engine that drafts with it emits the target's law, by enumeration under `rejection`")
    def test_exact_law(self) -> None:
        head = self.head(vocab_size=3, draft_vocab_size=3)
        check_law(
            lambda draws: make_parts(draws, drafter=HeadDrafter(head, 3, self.hidden_size, seed=self.seed)),
            gamma=2,
            drafter="a toy backbone with this head",
        )


def _rows(count: int, width: int) -> Sequence[Sequence[int]]:
    """``count`` times 0..width - 1."""
    return [list(range(width)) for _ in range(count)]
