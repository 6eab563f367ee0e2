"""Every exception that dspark raises on purpose.

All derive from :class:`DSparkError`, so ``except DSparkError`` catches what the library can explain.
Messages say what is wrong, where, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class DSparkError(Exception):
    """Base class of all dspark errors."""


class ConfigError(DSparkError, ValueError):
    """A configuration or sampling parameter is unknown, out of range or contradictory."""


class PluginError(DSparkError):
    """A plugin can't be loaded, or what it registers can't be used."""


class UnknownComponentError(PluginError, KeyError):
    """No component of that kind is registered under that name."""

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0]) if self.args else ""


class TargetError(DSparkError):
    """The target can't be loaded, or can't be decoded by this engine."""


class CheckpointError(DSparkError):
    """A drafter checkpoint is incomplete, misshapen, or does not fit its target."""


class CostTableError(DSparkError, ValueError):
    """A cost table is malformed, or was measured for another machine, dtype or model."""


class DataError(DSparkError):
    """Training data can't be read, made or continued."""


class EvaluationError(DSparkError):
    """A calibration or evaluation can't be run, continued or read."""


class CapacityError(DSparkError):
    """A request or a cache does not fit: too long for a slot, or more memory than allowed."""


class TrainingError(DSparkError):
    """A training run can't go on: its data, its state or its numbers."""


class RequestError(DSparkError):
    """A request was refused at submit. Other requests are not affected."""


class ComponentError(DSparkError):
    """A component raised while the engine was running a phase of a round.

    Attributes:
        component: ``dist/name`` of the component that raised.
        version: of the distribution that offers it; empty for what no plugin registered.
        phase: ``draft``, ``confidence``, ``schedule``, ``target``, ``process``, ``verify``, ``commit`` or ``observe``.
        request_ids: the requests that it is attributed to; empty for a batch-wide fault.
    """

    def __init__(
        self,
        message: str,
        *,
        component: str = "",
        version: str = "",
        phase: str = "",
        request_ids: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.component = component
        self.version = version
        self.phase = phase
        self.request_ids = tuple(request_ids)

    @property
    def distribution(self) -> str:
        """Who offers the component; empty for what no plugin registered."""
        return self.component.rpartition("/")[0]


class RowFault(DSparkError):
    """Raised by a component to attribute a fault to some rows of its batch; the others go on.

    Args:
        message: what went wrong.
        rows: indices into the batch that the component was given.
    """

    def __init__(self, message: str, rows: Iterable[int]) -> None:
        super().__init__(message)
        self.rows = tuple(int(r) for r in rows)


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class DSparkWarning(UserWarning):
    """Base class of the warnings that dspark gives."""
