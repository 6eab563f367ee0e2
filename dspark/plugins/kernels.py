"""Registered kernels, as the choice of one for an operation takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dspark.plugins.catalog import Catalog
from dspark.plugins.kinds import BUILTIN_DIST, Kind
from dspark.protocols import BuildContext

if TYPE_CHECKING:
    import torch

    from dspark.ops.dispatch import Choice, Offer


def offers(catalog: Catalog, device: Any = None, dtype: Any = None) -> list[Offer]:
    """Every registered kernel; one is built, for a device and dtype, when it is chosen."""
    from dspark.ops.dispatch import Offer

    context = BuildContext(device=device, dtype=dtype)

    def build(key: str) -> Callable[[], Any]:
        return lambda: catalog.build(Kind.KERNEL, key, None, context)

    return [
        Offer(entry.name, entry.key, entry.capabilities, build(entry.key), entry.dist == BUILTIN_DIST)  # type: ignore[arg-type]
        for entry in catalog.of(Kind.KERNEL)
    ]


def choose_kernels(
    catalog: Catalog, requested: Mapping[str, str], device: torch.device, dtype: torch.dtype
) -> dict[str, Choice]:
    """The kernel of every operation of an engine; see :func:`dspark.ops.dispatch.choose`.

    Raises:
        ConfigError, UnknownComponentError: what is asked for by name can't run, or nobody offers it.
    """
    from dspark.ops.dispatch import choose_all

    return choose_all(device, dtype, offers(catalog, device, dtype), requested)


def kernel_table(catalog: Catalog) -> list[Choice]:
    """What runs each operation on each device and dtype of this machine where nothing is asked for."""
    from dspark.ops.dispatch import table

    return table(offers(catalog))
