"""The load-time probe: does this drafter predict this target, in the layout and from the layers that it claims?

A wrong block layout or a wrong tap layer loads without a word and then accepts next to nothing. The probe lets the
target write a short greedy text and compares how well the drafter predicts it as configured, in the other layout, and
from neighbouring layers. An alternative that is clearly better is the likely fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.block import Layout
from dspark.drafters.forced import forced_block
from dspark.drafters.probe_text import ProbeReport, Text, agreement, judged, shifted_layers, write_text
from dspark.errors import CheckpointError

if TYPE_CHECKING:
    from dspark.drafters.dspark import DSparkDraft


@torch.inference_mode()
def probe(drafter: DSparkDraft, target: Any, ids: Sequence[int] | None = None) -> ProbeReport:
    """Run the probe.

    Raises:
        CheckpointError: the target's features, or what the drafter makes of them, are not finite; names the layer.
    """
    taps = drafter.tap_layers
    shifted = shifted_layers(taps, target)
    text = write_text(target, ids, [taps, *shifted.values()])
    layout, other = drafter.layout, Layout(not drafter.layout.sample_from_anchor, drafter.layout.mask_token_id)
    _check_values(drafter, text)
    seen = _score(drafter, text, taps, layout)
    alternatives = {f"the {_name(other)} layout": _score(drafter, text, taps, other)}
    for name, layers in shifted.items():
        alternatives[name] = _score(drafter, text, layers, layout)
    return judged(drafter.checkpoint.source, seen, len(drafter.backbone.head), alternatives)


def _name(layout: Layout) -> str:
    return "anchor-first" if layout.sample_from_anchor else "mask-only"


def _check_values(drafter: DSparkDraft, text: Text) -> None:
    source = drafter.checkpoint.source
    for layer in drafter.tap_layers:
        values = text.features[layer].to(drafter.backbone.dtype)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{source}: features of target layer {layer} are not finite in {values.dtype}")
    backbone = drafter.backbone.scratch()
    taps = text.taps(drafter.tap_layers)
    context = len(text.ids) - 1
    backbone.remember(drafter.taps.normed(taps), np.zeros(context, dtype=np.int64), np.arange(context))
    trace: list[Tensor] = []
    inputs = drafter.layout.inputs(text.ids[-1:], drafter.checkpoint.config.max_gamma)
    backbone(inputs, np.zeros(1, dtype=np.int64), np.array([context]), trace=trace)
    for index, values in enumerate(trace):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{source}: hidden states of layers.{index} are not finite in {values.dtype}; use bfloat16 or float32"
            )


def _score(drafter: DSparkDraft, text: Text, layers: Sequence[int], layout: Layout) -> tuple[float, float]:
    """Mean log-probability of the text's tokens, teacher-forced, and the share of first tokens that are right.

    Every written position that has a whole block after it is an anchor; all blocks run as one batch.
    """
    gamma = drafter.checkpoint.config.block_size - layout.skip
    anchors = np.arange(text.first, len(text.ids) - gamma)
    if gamma < 1 or len(anchors) == 0:
        return -math.inf, 0.0
    taps = drafter.taps.normed(text.taps(layers))
    ids = text.ids.to(drafter.backbone.device)
    logits = forced_block(drafter.backbone, drafter.head, layout, ids, taps, anchors, gamma)
    at = torch.from_numpy(anchors).to(ids.device)
    wanted = ids[at[:, None] + 1 + torch.arange(gamma, device=ids.device)]
    return agreement(logits, wanted, drafter.token_map)
