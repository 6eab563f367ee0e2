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
from dspark.confidence.calibration import Calibration, read_calibration
from dspark.errors import ConfigError, DSparkWarning
from dspark.protocols import BuildContext
from dspark.types import BatchView, DraftBlock, FloatArray, RoundRecord

CAPABILITIES = EstimatorCapabilities(needs_hidden=True)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Settings of ``linear``.

    Attributes:
        calibration: path of a ``calibration.json``, or its content; None for the one beside the drafter's checkpoint,
            if there is one.
        calibrate: False leaves scores raw whatever there is.
    """

    calibration: str | Path | Mapping[str, Any] | None = None
    calibrate: bool = True


class LinearConfidence:
    """A linear score of hidden state and Markov embedding.

    Args:
        weight: [1, d] or [1, d + r].
        bias: [1], or None.
        calibration: fitted temperatures, or None.
        target: name of the target, for the choice among them.

    Attributes:
        uncalibrated: (verifier, gamma, temperature) of rounds whose scores stayed raw, since nothing fitted.
    """

    capabilities = CAPABILITIES

    def __init__(
        self, weight: Tensor, bias: Tensor | None, calibration: Calibration | None = None, target: str = ""
    ) -> None:
        self.weight = weight.reshape(-1).float()
        self.bias = 0.0 if bias is None else float(bias)
        self.calibration = calibration
        self.target = target
        self.uncalibrated: set[tuple[str, int, float]] = set()

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
            mode = request.mode.value
            temperature = 0.0 if mode == "greedy" else float(request.params.temperature)
            entry = self.calibration.find(self.target, mode, gamma, temperature) if self.calibration else None
            if entry is not None:
                out[row] = entry.temperatures
            elif (mode, gamma, temperature) not in self.uncalibrated:
                self.uncalibrated.add((mode, gamma, temperature))
                fitted = self.calibration.target if self.calibration else ""
                warnings.warn(
                    f"linear: no calibration fits target {self.target!r}, verifier {mode!r}, gamma {gamma}, "
                    f"temperature {temperature:g} (fitted for {fitted!r}); these confidences are raw",
                    DSparkWarning,
                    stacklevel=2,
                )
        return out

    def observe(self, record: RoundRecord) -> None:
        """Nothing is learnt online."""

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
                "(calibrate=False says that this is meant)",
                DSparkWarning,
                stacklevel=2,
            )
    name = str(getattr(context.target, "name", ""))
    return LinearConfidence(weights["weight"], weights.get("bias"), calibration, name)


def _beside(drafter: Any) -> Path | None:
    folder = getattr(getattr(drafter, "checkpoint", None), "path", None)
    path = None if folder is None else Path(folder) / "calibration.json"
    return path if path is not None and path.is_file() else None
