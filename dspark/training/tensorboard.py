"""TensorBoard events of a run, where the package is installed (the extra ``tensorboard``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError


def tensorboard_writer(output: Path) -> Callable[[dict[str, Any]], None]:
    """What takes the records of a run's log and writes their numbers under ``output/tensorboard``.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as err:
        raise ConfigError("run.tensorboard: needs TensorBoard (pip install tensorboard)") from err
    writer = SummaryWriter(output / "tensorboard")

    def write(record: dict[str, Any]) -> None:
        step, kind = int(record["step"]), record["kind"]
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in ("step", "epoch"):
                writer.add_scalar(f"{kind}/{name}", value, step)
            elif isinstance(value, list):
                for k, each in enumerate(value):
                    writer.add_scalar(f"{kind}/{name}/{k + 1}", each, step)
        writer.flush()

    return write
