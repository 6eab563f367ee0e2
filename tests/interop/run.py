"""Export the golden drafters in speculators' format, and let the speculators package load and run them.

    python -m tests.interop.run VENV [--make]

VENV is an environment of its own, since speculators caps transformers below what this project uses. ``--make`` creates
it and installs speculators from PyPI, which brings a CUDA build of torch of several gigabytes. Writes
``tests/interop/speculators.json``; the exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dspark
from dspark.checkpoints import load_checkpoint, read_target, write_speculators

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
TARGET = "target_qwen3_tiny"
RESULT = HERE / "speculators.json"
PACKAGE = "speculators==0.9.0"
TOLERANCE = 1e-5
"""Of the largest magnitude."""

ROUNDS = {
    "deepspec_dspark_vanilla": 6,
    "deepspec_dspark_gated": 6,
    "deepspec_dspark_rnn": 6,
    "deepspec_dflash": 6,
    "zlab_dflash": 22,
}
"""Cases with recorded rounds, and how many."""
SINGLE = (
    "speculators_dspark_vanilla",
    "speculators_dspark_gated",
    "speculators_dspark_rnn_bonus_anchor",
    "speculators_dspark_vanilla_legacy_layout",
    "speculators_dflash",
)
"""Cases with one recorded block."""


def make_environment(folder: Path) -> None:
    """A fresh environment with speculators. torchvision and torchaudio are CUDA builds that break on other machines."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "--quiet"]
    subprocess.run([*pip, "install", PACKAGE], check=True)
    subprocess.run([*pip, "uninstall", "--yes", "torchvision", "torchaudio"], check=True)


def recorded_rounds(case: str) -> list[dict[str, Tensor]]:
    """Blocks of a generation: all features before the anchor, the text, and what was recorded of the block."""
    data = load_file(GOLDEN / case / "io.safetensors")
    text, context, blocks = data["infer.output_ids"][0], list[Tensor](), []
    for i in range(ROUNDS[case]):
        at = f"infer.round{i}."
        start = int(data[at + "start"])
        context.append(data[at + "target_hidden"][0])
        drafts = data[at + "draft_tokens"][0]
        hidden = data[at + "block_hidden"][0]
        block = {
            "features": torch.cat(context),
            "ids": text[: start + 1],
            "anchor": torch.tensor(start),
            "prev": torch.cat((text[start : start + 1], drafts[:-1])),
            "drafts": drafts,
            "hidden": hidden[len(hidden) - len(drafts) :],
        }
        for name in ("base_logits", "corrected_logits", "confidence_logits"):
            if at + name in data:
                block[name] = data[at + name][0]
        if at + "draft_logits" in data:
            block["base_logits"] = data[at + "draft_logits"][0]
        blocks.append(block)
    return blocks


def recorded_block(case: str) -> list[dict[str, Tensor]]:
    """The single block of a speculators case; slots that draft nothing are left out."""
    data = load_file(GOLDEN / case / "io.safetensors")
    drafts, context = data["single.draft_tokens"][0], data["single.context_hidden"][0]
    anchor = data["single.anchor_token"]
    block = {
        "features": context,
        "ids": torch.cat((torch.zeros(len(context), dtype=torch.int64), anchor)),
        "anchor": torch.tensor(len(context)),
        "prev": torch.cat((anchor, drafts[:-1])),
        "drafts": drafts,
    }
    for name in ("hidden", "base_logits", "corrected_logits", "confidence_logits"):
        if f"single.{name}" in data:
            block[name] = data[f"single.{name}"][0][-len(drafts) :]
    return [block]


def export(case: str, folder: Path) -> None:
    """Write a golden drafter in speculators' format, with what was recorded of it.

    Its description alone is written: no key of the config that it was read from is copied.
    """
    checkpoint = dataclasses.replace(load_checkpoint(GOLDEN / case, target_layers=6), raw=None)
    write_speculators(folder, checkpoint, target=read_target(GOLDEN / TARGET))
    blocks = recorded_rounds(case) if case in ROUNDS else recorded_block(case)
    out = {f"block{i}.{name}": t.clone().contiguous() for i, block in enumerate(blocks) for name, t in block.items()}
    save_file(out | {"blocks": torch.tensor(len(blocks))}, folder / "inputs.safetensors")


def run(python: Path) -> dict[str, Any]:
    """Export all cases, and ask the other interpreter."""
    with tempfile.TemporaryDirectory() as name:
        for case in (*ROUNDS, *SINGLE):
            export(case, Path(name) / case)
        command = [str(python), str(HERE / "speculators_side.py"), name]
        # the exported configs name the target by its folder's name
        answer = subprocess.run(command, cwd=GOLDEN, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def wrong(case: dict[str, Any]) -> bool:
    """Whether a case is not what it was before it was exported."""
    differences = case["largest_relative_difference"].values()
    return bool(
        case["missing"] or case["unexpected"] or not case["drafts_equal"] or any(d > TOLERANCE for d in differences)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--make", action="store_true", help="create the environment first")
    options = parser.parse_args()
    if options.make:
        make_environment(options.venv)
    found = run(options.venv / "bin" / "python")
    found["versions"]["dspark"] = dspark.__version__
    bad = [name for name, case in found["cases"].items() if wrong(case)]
    RESULT.write_text(json.dumps({**found, "tolerance": TOLERANCE, "wrong": bad}, indent=2) + "\n", encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
