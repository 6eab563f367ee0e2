"""A drafter for your target, from prompts to text: data, training, calibration, evaluation, generation.

    pip install "dspark[training]"
    python examples/train_your_drafter.py prompts.jsonl work --target smollm2

A line of the prompts is ``{"prompt": "text"}``, a user's message. Every part is a command as well (``dspark data``,
``train``, ``calibrate``, ``eval``), with more settings; this is what they call. Answers that are there stay; the rest
begins anew. The defaults are for a first try: for a drafter worth having, use tens of thousands of prompts, as many
steps, and 15,000 rounds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dspark import SamplingParams, SpeculativeDecoder
from dspark.api import Generation
from dspark.evaluation.acceptance import Bootstrap
from dspark.evaluation.collect import Item, Sampling
from dspark.evaluation.compare import Run as Measured
from dspark.evaluation.compare import run_prompts, run_settings, summarise
from dspark.evaluation.entries import Collected, fit_entry
from dspark.evaluation.rounds import RoundLog
from dspark.training.config import TrainConfig
from dspark.training.data_plan import DataConfig
from dspark.training.data_run import DataRun
from dspark.training.run import DRAFTER, Run


@dataclass
class Question:
    """A prompt for the evaluation: one user's turn, and no further one."""

    todo: list[str]

    def next_prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.todo.pop(0)}]

    def answer(self, result: Generation) -> None:
        """There is nothing to go on with."""


def item(dataset: str, text: str) -> Item:
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Item(dataset, digest, digest, lambda: Question([text]))


def split(prompts: Path, work: Path) -> tuple[Path, list[str], list[str]]:
    """Prompts to train on, and those held out: for calibration and for evaluation, a tenth each."""
    texts = list(dict.fromkeys(json.loads(line)["prompt"] for line in prompts.read_text("utf-8").split("\n") if line))
    train = work / "train.jsonl"
    kept = [text for n, text in enumerate(texts) if n % 10 not in (0, 5)]
    train.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in kept), encoding="utf-8")
    return train, texts[0::10], texts[5::10]


def answer(target: Any, prompts: Path, output: Path, max_tokens: int, slots: int) -> int:
    """The target's own answers: what a drafter has to learn. Answers that are there already are kept."""
    settings = DataConfig(temperatures=(1.0,), max_tokens=max_tokens, max_prompt=256, seed=0)
    room = settings.max_prompt + settings.max_tokens
    with SpeculativeDecoder.from_pretrained(target, "none", cost=None, max_slots=slots, max_len=room) as decoder:
        return DataRun(decoder, settings, output, prompts).run().responses


def train(target: Any, responses: Path, output: Path, steps: int, **drafter: Any) -> Path:
    """A block drafter with a Markov head and a confidence head; its folder."""
    settings = {
        "target": {"model": target.name},
        "data": {"files": str(responses), "max_length": 512, "holdout": 20},
        "drafter": {"head": "markov", "layers": 2, **drafter},
        # Far from the target its whole law teaches more than total variation, which is to count in the end.
        "loss": {"against": "law", "ce": [[0.0, 1.0], [1.0, 0.2]], "tv": [[0.0, 0.1], [1.0, 0.9]]},
        "optim": {"steps": steps, "sequences": 4, "lr": 2e-3, "precision": "fp32"},
        "run": {"output": str(output), "log_every": max(1, steps // 10), "eval_every": 0, "save_every": 0},
    }
    Run(TrainConfig.of(settings), target=target).train()
    return output / DRAFTER


def measure(target: Any, drafter: str, texts: list[str], path: Path, rounds: int | None = None, **more: Any) -> Any:
    """Decode prompts with every draft verified in full: (what was seen of each round, its settings)."""
    log, sampling = RoundLog(), Sampling(SamplingParams(max_tokens=64, temperature=0.7))
    items = [item("held-out", text) for text in texts]
    if rounds is not None:  # draw the prompts again, with other seeds, until there are enough
        items = [one.again(n) for n in range(1000) for one in items]
    more = {"scheduler": "fixed", "cost": None, "max_slots": 8, "max_len": 512, **more}
    with SpeculativeDecoder.from_pretrained(target, drafter, observers=[log], **more) as decoder:
        label = Path(drafter).name
        run: Measured = run_prompts(decoder, log, items, sampling, path, label=label, rounds=rounds, restart=True)
        return run, run_settings(decoder, run, sampling)


def main(
    prompts: Path,
    work: Path,
    target: str = "smollm2",
    steps: int = 300,
    gamma: int = 5,
    rank: int = 64,
    max_tokens: int = 128,
    rounds: int = 1000,
    mask_token_id: int | None = None,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with SpeculativeDecoder.from_pretrained(target, "none", cost=None, max_slots=8, max_len=512) as loaded:
        model = loaded.engine.parts.target  # loaded once, and used by everything below
    to_learn, to_calibrate, to_judge = split(prompts, work)

    count = answer(model, to_learn, work / "responses.jsonl", max_tokens, slots=8)
    print(f"{count} answers of {model.name}")
    shape = {"gamma": gamma, "rank": rank, "mask_token_id": mask_token_id}  # None: a special token that is not used
    drafter = train(model, work / "responses.jsonl", work / "run", steps, **shape)

    # Calibration: temperatures under which the confidence head's scores are probabilities; kept in the checkpoint.
    raw = {"estimator": "linear", "estimator_config": {"calibrate": False}}
    seen, settings = measure(model, str(drafter), to_calibrate, work / "calibrate.jsonl", rounds, **raw)
    fitted = fit_entry(Collected(settings, seen.records, "calibrate"), drafter / "calibration.json", rounds, bucket=0.1)
    print(f"mean ECE {fitted['before']['mean_ece']:.3f} before calibration, {fitted['after']['mean_ece']:.3f} after")

    # Evaluation, beside prompt lookup on the same prompts and draws.
    runs = [
        measure(model, name, to_judge, work / f"eval-{Path(name).name}.jsonl")[0] for name in ("ngram", str(drafter))
    ]
    for found in summarise(runs, Bootstrap(200), {})["drafters"]:
        print(f"{found['label']:>8}: accepted length and 95 % interval {found['accepted_length']['held-out']}")

    with SpeculativeDecoder.from_pretrained(model, str(drafter), cost=None, max_slots=8, max_len=512) as decoder:
        [result] = decoder.generate([[{"role": "user", "content": to_judge[0]}]], max_tokens=64)
        print(f"{result.text!r}\n{sum(result.accepted)} of {len(result.ids)} tokens were drafted and accepted")


if __name__ == "__main__":
    typer.run(main)
