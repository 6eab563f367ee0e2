"""Runs with speculators' own interpreter: loads exported drafters with its classes and compares what they compute.

    python speculators_side.py FOLDER

FOLDER holds a folder a case, with the exported checkpoint and ``inputs.safetensors``. Prints JSON. Needs torch,
safetensors and speculators, and nothing of this project.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core

DERIVED = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
"""What speculators takes from the verifier."""


def load(folder: Path) -> Any:
    """The drafter, by speculators' own choice of class."""
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(str(folder), config=config, dtype=torch.float32).eval()


def keys(folder: Path, model: Any) -> dict[str, list[str]]:
    """Names that only one side has; what the verifier gives is expected to be missing."""
    stored = set(load_file(folder / "model.safetensors"))
    wanted = {name for name, tensor in model.state_dict().items() if tensor is not None}
    return {"missing": sorted(wanted - stored - DERIVED), "unexpected": sorted(stored - wanted)}


def block(model: Any, features: torch.Tensor, ids: torch.Tensor, anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and base logits [B, ..] of one block behind the features of ``anchor`` positions."""
    size = model.block_size
    width, length = features.shape[1], anchor + size + 1
    padded = torch.zeros(1, length, width)
    padded[0, :anchor] = features
    text = torch.zeros(1, length, dtype=torch.int64)
    text[0, : len(ids)] = ids
    chosen = torch.tensor([anchor]), torch.tensor([True])
    core.select_anchors = lambda *_: chosen
    hidden, logits, *_ = model._backbone_forward(
        padded,
        text,
        torch.ones(1, length, dtype=torch.int64),
        torch.zeros(1, length, model.hidden_size),
        torch.zeros(1, length, dtype=torch.int64),
        max_anchors=1,
    )
    return hidden[0], logits[0]


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest magnitude."""
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


@torch.no_grad()
def check(folder: Path) -> dict[str, Any]:
    """One case: loads, then compares every recorded block."""
    model = load(folder)
    data = load_file(folder / "inputs.safetensors")
    worst: dict[str, float] = {}
    tokens_equal = True
    for i in range(int(data["blocks"])):
        at = f"block{i}."
        hidden, logits = block(model, data[at + "features"], data[at + "ids"], int(data[at + "anchor"]))
        skip = len(hidden) - len(data[at + "hidden"])
        hidden, logits = hidden[skip:], logits[skip:]
        found = {"hidden": hidden, "base_logits": logits}
        if getattr(model, "markov_head", None) is not None:
            prev, states = data[at + "prev"][None], hidden[None]
            logits = logits + model.markov_head.block_bias(prev_token_ids=prev, hidden_states=states)[0]
            found["corrected_logits"] = logits
            if model.confidence_head is not None:
                read = [states] + (
                    [model.markov_head.prev_embeddings(prev)] if model.config.confidence_head_with_markov else []
                )
                found["confidence_logits"] = model.confidence_head(torch.cat(read, dim=-1))[0]
        for name, value in found.items():
            if at + name in data:
                worst[name] = max(worst.get(name, 0.0), difference(value, data[at + name]))
        drafted = logits.argmax(-1)
        drafted = drafted if model.d2t is None else drafted + model.d2t[drafted]
        tokens_equal &= torch.equal(drafted, data[at + "drafts"])
    return {
        "class": type(model).__name__,
        **keys(folder, model),
        "blocks": int(data["blocks"]),
        "largest_relative_difference": {name: float(f"{value:.2g}") for name, value in worst.items()},
        "drafts_equal": tokens_equal,
    }


def main() -> None:
    torch.set_num_threads(1)
    folders = sorted(p for p in Path(sys.argv[1]).iterdir() if (p / "inputs.safetensors").is_file())
    versions = {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}
    print(json.dumps({"versions": versions, "cases": {p.name: check(p) for p in folders}}))


if __name__ == "__main__":
    main()
