"""Processes of a run: one, or several that Hugging Face Accelerate launched."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor, nn

from dspark.errors import ConfigError


class OneProcess:
    """A run of one process.

    Attributes:
        rank: which process this is.
        world: how many there are.
        device: where this process runs its target and drafter; None leaves the choice to the target's settings.
    """

    rank, world = 0, 1
    device: str | None = None

    @property
    def main(self) -> bool:
        """True in the process that writes files and speaks."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> Any:
        """What is called in the module's place, so that its gradients are the mean over processes."""
        return module

    def unsynchronised(self, module: Any) -> contextlib.AbstractContextManager[Any]:
        """Backward passes within keep their gradients to themselves."""
        return contextlib.nullcontext()

    def sum(self, values: Tensor) -> Tensor:
        """Sums over processes."""
        return values

    def wait(self) -> None:
        """Until all processes are here."""


class AcceleratedProcesses(OneProcess):
    """The processes of ``accelerate launch`` or ``torchrun``, on one machine or a cluster."""

    def __init__(self) -> None:
        try:
            from accelerate import Accelerator  # type: ignore[import-untyped]
        except ImportError as err:
            raise ConfigError("training on several processes needs Accelerate (pip install accelerate)") from err
        self._accelerator = Accelerator(cpu=not torch.cuda.is_available())
        self.rank, self.world = self._accelerator.process_index, self._accelerator.num_processes
        self.device = str(self._accelerator.device)

    def wrap(self, module: nn.Module) -> Any:
        return self._accelerator.prepare_model(module)

    def unsynchronised(self, module: Any) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self._accelerator.no_sync(module)
        return context

    def sum(self, values: Tensor) -> Tensor:
        moved = values.to(self._accelerator.device).float() if self._accelerator.device.type == "mps" else values
        total: Tensor = self._accelerator.reduce(moved.to(self._accelerator.device), reduction="sum")
        return total.to(values.device, values.dtype)

    def wait(self) -> None:
        self._accelerator.wait_for_everyone()


def processes() -> OneProcess:
    """What this process is part of, as its launcher says (``WORLD_SIZE``)."""
    return AcceleratedProcesses() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else OneProcess()
