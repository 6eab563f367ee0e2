"""Which kernel runs an operation: chosen once for each (operation, device, dtype), with the reason.

A kernel is registered as ``operation.variant``, say ``bias_sample.triton``, with the devices and dtypes that it takes.
What is asked for by name is taken or refused, never replaced. Without a name, Triton's kernels run where there is a GPU
that they compile for, and elsewhere the engine's own torch code (``plain``), which on a CPU draws by one uniform
instead of noise over the vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dspark.capabilities import KernelCapabilities
from dspark.errors import ConfigError, UnknownComponentError, nearest

OPS = ("bias_sample", "reject_sample")
"""Operations that an engine dispatches."""
PLAIN = "plain"
"""The engine's own torch code: no kernel."""
AUTO = "auto"
_OLDEST_CUDA = (8, 0)


@dataclass(frozen=True, slots=True)
class Offer:
    """A registered kernel.

    Attributes:
        name: ``operation.variant``; ``key`` is ``dist/name``.
        capabilities: devices and dtypes.
        load: builds the callable.
        builtin: it ships with dspark.
    """

    name: str
    key: str
    capabilities: KernelCapabilities
    load: Callable[[], Callable[..., Any]]
    builtin: bool = True

    @property
    def op(self) -> str:
        return self.name.partition(".")[0]

    @property
    def variant(self) -> str:
        return self.name.partition(".")[2]


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs an operation on a device in a dtype.

    Attributes:
        op, device, dtype: for what it was chosen.
        name: ``plain``, or the kernel's ``dist/operation.variant``.
        reason: why.
        call: the kernel; None for ``plain``.
    """

    op: str
    device: str
    dtype: str
    name: str
    reason: str
    call: Callable[..., Any] | None = None


def choose(
    op: str,
    device: torch.device | str,
    dtype: torch.dtype,
    offers: Iterable[Offer],
    requested: str = AUTO,
) -> Choice:
    """The kernel of an operation.

    Args:
        op: ``bias_sample`` or ``reject_sample``.
        device, dtype: where it will run, and of the logits.
        offers: registered kernels.
        requested: ``auto``, ``plain``, a variant (``triton``), ``operation.variant``, or either with ``dist/`` before.

    Raises:
        UnknownComponentError: nobody offers what is requested; with the nearest name.
        ConfigError: what is requested can't run there; with the reason. Nothing else is tried.
    """
    device = torch.device(device)
    short = str(dtype).removeprefix("torch.")
    own = [offer for offer in offers if offer.op == op]
    if requested == PLAIN:
        return Choice(op, str(device), short, PLAIN, "asked for")
    if requested != AUTO:
        offer = _named(op, requested, own)
        obstacle = obstacle_of(offer, device, short)
        if obstacle:
            raise ConfigError(f"kernel {offer.key} was asked for and can't run {op} in {short} on {device}: {obstacle}")
        return Choice(op, str(device), short, offer.key, "asked for", offer.load())
    why = []
    for offer in own:
        if not offer.builtin or offer.variant == "reference":
            continue
        obstacle = obstacle_of(offer, device, short)
        if not obstacle and device.type == "cpu":
            obstacle = "the interpreter is for tests"
        if not obstacle:
            return Choice(op, str(device), short, offer.key, f"{offer.variant} runs on {_title(device)}", offer.load())
        why.append(f"{offer.variant}: {obstacle}")
    return Choice(op, str(device), short, PLAIN, "; ".join(why) or "no kernel is registered")


def choose_all(
    device: torch.device | str, dtype: torch.dtype, offers: Iterable[Offer], requested: Mapping[str, str] | None = None
) -> dict[str, Choice]:
    """The kernel of every operation; ``requested``: operation -> name, and ``auto`` for the others.

    Raises:
        ConfigError: an operation that there is not, or what :func:`choose` raises.
    """
    requested = dict(requested or {})
    for op in requested:
        if op not in OPS:
            raise ConfigError(f"kernels: no operation {op!r}{nearest(op, OPS)} (known: {', '.join(OPS)})")
    found = list(offers)
    return {op: choose(op, device, dtype, found, requested.get(op, AUTO)) for op in OPS}


def _named(op: str, requested: str, own: list[Offer]) -> Offer:
    dist, _, name = requested.rpartition("/")
    full = name if name.startswith(f"{op}.") else f"{op}.{name}"
    found = [o for o in own if (o.key == f"{dist}/{full}" if dist else o.name == full)]
    found = [o for o in found if o.builtin] or found
    if not found:
        known = [PLAIN, *(o.variant if o.builtin else o.key for o in own)]
        raise UnknownComponentError(
            f"no kernel {requested!r} of {op}{nearest(requested, known)} (known: {', '.join(known)})"
        )
    if len(found) > 1:
        raise ConfigError(f"kernel {requested!r} of {op} is offered by several: {', '.join(o.key for o in found)}")
    return found[0]


def obstacle_of(offer: Offer, device: torch.device, dtype: str) -> str:
    """Why a kernel can't run on a device in a dtype; empty where it can."""
    capabilities = offer.capabilities
    if capabilities.dtypes and dtype not in capabilities.dtypes:
        return f"it takes {', '.join(capabilities.dtypes)}, not {dtype}"
    if offer.builtin and offer.variant == "triton":
        return triton_obstacle(device)
    if device.type not in capabilities.devices:
        return f"it runs on {', '.join(capabilities.devices)}, not on {device.type}"
    return ""


def triton_obstacle(device: torch.device) -> str:
    """Why Triton's kernels can't run on a device; empty where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        return "" if _interpreting() else "it compiles for GPUs, not for a CPU"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"no GPU that it compiles for is at hand ({device.type})"
    return _old_gpu(device)


@cache
def _old_gpu(device: torch.device) -> str:
    if torch.version.hip:
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CUDA:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    return ""


def _interpreting() -> bool:
    from dspark.ops.triton.launch import interpreted

    return interpreted()


def _title(device: torch.device) -> str:
    from dspark.ops.triton.launch import architecture

    return architecture(device)


def devices() -> list[torch.device]:
    """The CPU and every CUDA or HIP device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(count))]


def table(offers: Iterable[Offer], dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> list[Choice]:
    """What ``auto`` chooses for every operation, device and dtype."""
    found = list(offers)
    return [choose(op, device, dtype, found) for op in OPS for device in devices() for dtype in dtypes]
