"""What a kernel is held to: the plain operation that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from dspark.capabilities import KernelCapabilities
from dspark.plugins import Kind
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.suite import ComponentSuite

SIZES = (1, 2, 3, 7, 16, 17, 31, 33, 64, 127, 129, 255, 257, 1000)
"""Widths: powers of two and what lies beside them, where tiles end in the middle."""

ROWS = (1, 2, 3, 5)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class KernelSuite(ComponentSuite):
    """Holds a kernel to a reference: subclass it, and say what is computed and from what.

    Attributes:
        reference: the operation in plain torch, such as one of ``dspark.ops.reference``.
        sizes, rows: widths and numbers of rows to try.
        tolerances: largest difference by dtype of the result, relative to the largest value.
    """

    kind: ClassVar[Kind] = Kind.KERNEL
    reference: Callable[..., Any] | None = None
    sizes: Sequence[int] = SIZES
    rows: Sequence[int] = ROWS
    tolerances: Mapping[Any, float] = TOLERANCES

    def inputs(self, rows: int, width: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        """Arguments of the operation. Here: scores [rows, width], one of them -inf where there are more than two."""
        rng = self.random(f"{rows}.{width}")
        scores = torch.from_numpy(rng.normal(0.0, 3.0, size=(rows, width)))
        if width > 2:
            scores[:, int(rng.integers(width))] = -torch.inf
        return (scores.to(dtype=dtype, device=device),)

    def dtypes(self) -> list[torch.dtype]:
        """What the kernel takes: the dtypes that it declares, or float32, bfloat16 and float64."""
        declared = self._declared().dtypes
        return [getattr(torch, n) for n in declared] or [torch.float32, torch.bfloat16, torch.float64]

    def _declared(self) -> KernelCapabilities:
        capabilities = self.registration.capabilities
        if not isinstance(capabilities, KernelCapabilities):
            raise Seen(f"it was registered with {type(capabilities).__name__}")
        return capabilities

    def device(self) -> str:
        """A device of the kernel that this machine has."""
        for device in self._declared().devices:
            if device == "cpu" or (device == "cuda" and torch.cuda.is_available()):
                return device
        raise NotApplicable(f"this machine has none of {', '.join(self._declared().devices)}")

    def _reference(self) -> Callable[..., Any]:
        found: Any = type(self).__dict__.get("reference") or type(self).reference
        if found is None:
            raise Seen("the suite names no reference: set `reference = staticmethod(function)`")
        made: Callable[..., Any] = getattr(found, "__func__", found)
        return made

    @contract("it gives what the reference gives, at sizes beside powers of two, in every dtype that it declares")
    def test_reference(self) -> None:
        made, reference, device = self.build(), self._reference(), self.device()
        for dtype in self.dtypes():
            for width in self.sizes:
                for rows in self.rows:
                    self.case = {"rows": rows, "width": width, "dtype": str(dtype)}
                    given = self.inputs(rows, width, dtype, device)
                    _compare(made(*given), reference(*given), self.tolerances, self.case)

    @contract("it takes views that are not contiguous")
    def test_views(self) -> None:
        made, reference, device = self.build(), self._reference(), self.device()
        dtype = self.dtypes()[0]
        given = self.inputs(4, 33, dtype, device)
        for name, view in VIEWS.items():
            views = tuple(view(t) if torch.is_tensor(t) and t.dim() else t for t in given)
            self.case = {"view": name, "rows": 4, "width": 33}
            plain = tuple(t.contiguous() if torch.is_tensor(t) else t for t in views)
            _compare(made(*views), reference(*plain), self.tolerances, self.case)

    @contract("it is deterministic: the same inputs give the same bits")
    def test_determinism(self) -> None:
        made, device = self.build(), self.device()
        for dtype in self.dtypes():
            given = self.inputs(3, 257, dtype, device)
            for one, other in zip(_flat(made(*given)), _flat(made(*given)), strict=True):
                if not torch.equal(one, other):
                    raise Seen("the second call gave other bits", rows=3, width=257, dtype=str(dtype))

    @contract("it changes none of its inputs, and its result is its own memory")
    def test_inputs_stay(self) -> None:
        made, device = self.build(), self.device()
        given = self.inputs(2, 33, self.dtypes()[0], device)
        kept = [t.clone() if torch.is_tensor(t) else t for t in given]
        for result in _flat(made(*given)):
            result.zero_()
        for i, (now, before) in enumerate(zip(given, kept, strict=True)):
            if torch.is_tensor(now) and not torch.equal(now, before):
                raise Seen(f"argument {i} was changed, by the kernel or through its result", rows=2, width=33)


def _every_other(tensor: Any) -> Any:
    return tensor[::2]


def _inner(tensor: Any) -> Any:
    """The same values as a slice of a wider tensor that is poisoned around it."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 2), float("nan"), dtype=torch.float64).to(tensor.dtype)
    wide[..., 1:-1] = tensor
    return wide.to(tensor.device)[..., 1:-1]


VIEWS = {"every other row": _every_other, "a slice of columns": _inner}


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _compare(got: Any, wanted: Any, tolerances: Mapping[Any, float], case: dict[str, Any]) -> None:
    for i, (one, other) in enumerate(zip(_flat(got), _flat(wanted), strict=True)):
        if tuple(one.shape) != tuple(other.shape) or one.dtype != other.dtype or one.device != other.device:
            raise Seen(
                f"result {i} is {one.dtype} {tuple(one.shape)} on {one.device}, "
                f"the reference {other.dtype} {tuple(other.shape)} on {other.device}",
                **case,
            )
        if not one.is_floating_point():
            if not torch.equal(one, other):
                raise Seen(f"result {i} is {one.tolist()}, the reference {other.tolist()}", **case)
            continue
        finite = other[torch.isfinite(other)]
        scale = max(float(finite.abs().max()) if finite.numel() else 0.0, 1e-30)
        if not torch.allclose(
            one.double(), other.double(), rtol=0, atol=tolerances[other.dtype] * scale, equal_nan=True
        ):
            gap = float((one.double() - other.double()).abs().nan_to_num(torch.inf).max())
            raise Seen(f"result {i} differs from the reference by {gap:.3g}", **case)
