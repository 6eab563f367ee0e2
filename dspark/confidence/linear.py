"""The estimator ``linear``: c_k = sigmoid(w^T [h_k; W1[x_{k-1}]] + b) (METHOD eq. 7), with STS applied where it fits.

It reads the hidden state of position k and the token before it, never x_k.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.capabilities import EstimatorCapabilities
from dspark.confidence.calibration import FILE_NAME, Calibration, CalibrationEntry, read_calibration, target_key
from dspark.confidence.drift import DriftMonitor
from dspark.errors import ConfigError, DSparkWarning
from dspark.protocols import BuildContext
from dspark.types import BatchView, Committed, DraftBlock, FloatArray, Mode, RequestView, RoundRecord

CAPABILITIES = EstimatorCapabilities(needs_hidden=True)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Settings of ``linear``.

    Attributes:
        calibration: path of a ``calibration.json``, or its content; None for the one beside the drafter's checkpoint,
            if there is one.
        calibrate: False leaves scores raw whatever there is.
        drift_tolerance: calibrated survivals whose running ECE against outcomes exceeds what noise explains by more
            than this raise a warning, once; None does not watch.
    """

    calibration: str | Path | Mapping[str, Any] | None = None
    calibrate: bool = True
    drift_tolerance: float | None = 0.03

    def __post_init__(self) -> None:
        t = self.drift_tolerance
        if t is not None and (not isinstance(t, (int, float)) or isinstance(t, bool) or not 0 <= t <= 1):
            raise ConfigError(f"LinearConfig.drift_tolerance: expected a number from 0 to 1 or None, got {t!r}")


class LinearConfidence:
    """A linear score of hidden state and Markov embedding.

    Args:
        weight: [1, d] or [1, d + r].
        bias: [1], or None.
        calibration: fitted temperatures, or None.
        target: key of the target, for the choice among them, see :func:`dspark.confidence.calibration.target_key`.
        name: of the target, for messages.
        verifiers: mode -> registered name of its verifier; ``dspark/MODE`` where it says nothing.
        drift_tolerance: see :class:`LinearConfig`.

    Attributes:
        uncalibrated: (mode, gamma, temperature) of rounds whose scores stayed raw, since nothing fitted.
        drift: a monitor for each calibration entry in use.
    """

    capabilities = CAPABILITIES

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        calibration: Calibration | None = None,
        target: str = "",
        *,
        name: str = "",
        verifiers: Mapping[str, str] | None = None,
        drift_tolerance: float | None = 0.03,
    ) -> None:
        self.weight = weight.reshape(-1).float()
        self.bias = 0.0 if bias is None else float(bias)
        self.calibration = calibration
        self.target, self.name = target, name or target
        self.verifiers = dict(verifiers or {})
        self.drift_tolerance = drift_tolerance
        self.uncalibrated: set[tuple[str, int, float]] = set()
        self.drift: dict[tuple[Any, ...], DriftMonitor] = {}

    def logits(self, hidden: Tensor, markov: Tensor | None = None) -> Tensor:
        """Raw logits [..] float32 of hidden [.., d] and, where the head reads them, Markov embeddings [.., r].

        Raises:
            ConfigError: widths that do not fit the weights.
        """
        d, width = hidden.shape[-1], len(self.weight)
        if width == d:
            return hidden.float() @ self.weight + self.bias
        if markov is None or d + markov.shape[-1] != width:
            got = "no Markov embedding" if markov is None else f"a Markov embedding of width {markov.shape[-1]}"
            raise ConfigError(f"linear: weights of width {width} for hidden states of width {d} and {got}")
        return hidden.float() @ self.weight[:d] + markov.float() @ self.weight[d:] + self.bias

    @torch.inference_mode()
    def estimate(self, batch: BatchView, draft: DraftBlock) -> FloatArray:
        """c [R, gamma] float64, calibrated where temperatures fit the row.

        Raises:
            ConfigError: the drafter gives no hidden states.
        """
        if draft.hidden is None:
            if not draft.lens.any():
                return np.zeros(tuple(draft.token_ids.shape), dtype=np.float64)
            raise ConfigError("linear: the drafter gives no hidden states; use an estimator that needs none")
        logits = self.logits(draft.hidden, draft.features.get("markov")).double().cpu().numpy()
        if self.calibration is not None:
            logits = logits / self._temperatures(batch, logits.shape[1])
        probs: FloatArray = 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))
        return probs

    def _temperatures(self, batch: BatchView, gamma: int) -> FloatArray:
        """T [R, gamma]; ones for rows that no entry fits, which is said once for each kind of row."""
        out = np.ones((len(batch), gamma))
        for row, request in enumerate(batch.requests):
            entry = self._entry(request, gamma)
            if entry is not None:
                out[row] = entry.temperatures[:gamma]
            else:
                self._say_raw(request, gamma)
        return out

    def _entry(self, request: RequestView, gamma: int) -> CalibrationEntry | None:
        if self.calibration is None:
            return None
        mode = request.mode.value
        verifier = self.verifiers.get(mode, f"dspark/{mode}")
        return self.calibration.find(self.target, verifier, mode, gamma, _temperature(request))

    def _say_raw(self, request: RequestView, gamma: int) -> None:
        kind = (request.mode.value, gamma, _temperature(request))
        if kind in self.uncalibrated:
            return
        self.uncalibrated.add(kind)
        fitted = self.calibration.describe() if self.calibration else "nothing"
        warnings.warn(
            f"linear: no calibration fits target {self.name!r}, mode {kind[0]!r}, gamma {gamma}, temperature "
            f"{kind[2]:g} (fitted for {fitted}); these confidences are raw",
            DSparkWarning,
            stacklevel=3,
        )

    def observe(self, record: RoundRecord) -> None:
        """Compare calibrated survivals with outcomes; nothing is learnt online."""
        if self.calibration is None or self.drift_tolerance is None or record.batch is None:
            return
        if record.confidence is None or record.draft is None:
            return
        gamma = int(record.draft.token_ids.shape[1])
        rows: dict[tuple[Any, ...], list[Committed]] = {}
        for done in record.committed:
            entry = self._entry(done.request, gamma) if done.row >= 0 and done.finish_reason != "error" else None
            if entry is not None:
                rows.setdefault(entry.key, []).append(done)
        for key, some in rows.items():
            monitor = self.drift.get(key)
            if monitor is None:
                name = (
                    f"the confidences calibrated for mode {key[2]!r}, gamma {gamma}, temperature {key[4]:g}-{key[5]:g}"
                )
                monitor = self.drift[key] = DriftMonitor(tolerance=self.drift_tolerance, name=name)
            monitor.take(record.confidence, some)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept per request."""


def build(config: LinearConfig, context: BuildContext) -> LinearConfidence:
    """Factory of ``linear``.

    Raises:
        ConfigError: the drafter has no confidence head, or the calibration can't be read.
    """
    weights = getattr(context.drafter, "confidence_weights", None)
    if not weights:
        raise ConfigError(
            "linear: the drafter has no confidence head; use estimator 'online' or 'constant', or a checkpoint with one"
        )
    calibration = None
    if config.calibrate:
        source = config.calibration if config.calibration is not None else _beside(context.drafter)
        calibration = None if source is None else read_calibration(source)
        if calibration is None:
            warnings.warn(
                "linear: the drafter has no calibration.json beside its checkpoint; its confidences are raw "
                "(`dspark calibrate` fits one; calibrate=False says that this is meant)",
                DSparkWarning,
                stacklevel=2,
            )
    return LinearConfidence(
        weights["weight"],
        weights.get("bias"),
        calibration,
        target_key(context.target),
        name=str(getattr(context.target, "name", "")),
        verifiers=context.extras.get("verifiers"),
        drift_tolerance=config.drift_tolerance,
    )


def _temperature(request: RequestView) -> float:
    """The sampling temperature that calibration is keyed by; 0 for greedy."""
    return 0.0 if request.mode is Mode.GREEDY else float(request.params.temperature)


def _beside(drafter: Any) -> Path | None:
    folder = getattr(getattr(drafter, "checkpoint", None), "path", None)
    path = None if folder is None else Path(folder) / FILE_NAME
    return path if path is not None and path.is_file() else None
