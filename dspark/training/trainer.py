"""The training loop: one optimizer step after the other, with a log, evaluations and checkpoints on the way.

Everything random is a function of seed, epoch and sample, or of seed and step. So a checkpoint needs no generator's
state, and a resumed run takes the same steps bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dspark.errors import TrainingError
from dspark.training.checkpoint import load_state, read_state, save_state
from dspark.training.config import TrainConfig
from dspark.training.finite import first_fault
from dspark.training.memory import give_back
from dspark.training.metrics import Tally
from dspark.training.objective import Objective, trained
from dspark.training.parallel import OneProcess
from dspark.training.samples import Skipped, fault
from dspark.training.schedule import learning_rate
from dspark.training.sources import Source
from dspark.types import IntArray

_ORDER, _ANCHORS, _HELD, _STEP = 1, 2, 3, 4
"""What a random number is for; part of its seed."""


class Trainer:
    """Trains a drafter.

    Args:
        config: the run.
        objective: what is trained, and how.
        source: conversations and the target's view of them.
        output: folder of the checkpoints.
        constants: tensors that go into every checkpoint.
        processes: which of how many this is.
        say: gets a line for people now and then.
        refresh: called at the start of an epoch where the data grows.
        on_log, on_save: called in the main process with each record, and after each checkpoint.

    Attributes:
        step, steps: optimizer steps taken, and of the whole run.
        epoch, done: passes over the data, and steps taken in this one.
        blocks: blocks seen by all processes.
        skipped: conversations that nothing can be learnt from.
        stopping: set it, and the run ends after this step with a checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        source: Source,
        *,
        output: Path,
        constants: dict[str, Tensor] | None = None,
        processes: OneProcess | None = None,
        say: Callable[[str], None] = print,
        refresh: Callable[[], None] | None = None,
        on_log: Callable[[dict[str, Any]], None] | None = None,
        on_save: Callable[[], None] | None = None,
    ) -> None:
        self.config, self.objective, self.source, self.output = config, objective, source, output
        self.constants = constants or {}
        self.processes = processes or OneProcess()
        self.say, self.refresh, self.on_log, self.on_save = say, refresh, on_log, on_save
        self.parameters = trained(objective.drafter)
        self.device: torch.device = objective.drafter.core.device
        objective.module = self.processes.wrap(objective.drafter)
        o = config.optim
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            weight_decay=o.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self.step = self.steps = self.epoch = self.done = self.blocks = 0
        self.samples = len(source)
        self.skipped = Skipped()
        self.order: IntArray = np.zeros(0, dtype=np.int64)
        self.held: list[int] = []
        self.recent = Tally(objective.gamma)
        self.stopping = False

    # -- order of the data --------------------------------------------------------------------------------------

    def divide(self, count: int) -> tuple[list[int], list[int]]:
        """Numbers of the samples to train on and of those held out; what can't be learnt from is counted."""
        self.skipped = Skipped()
        train, held, apart = [], [], self.config.data.holdout
        for number in range(count):
            sample = self.source.sample(number)
            why = fault(sample.loss_mask, self.objective.gamma)
            if why is not None:
                self.skipped.add(why, sample.line)
            elif apart and sample.index % apart == 0:
                held.append(number)
            else:
                train.append(number)
        return train, held

    def begin_epoch(self, samples: int | None = None) -> None:
        """Shuffle what there is, or the first ``samples`` of it when an epoch goes on.

        Raises:
            TrainingError: there is nothing to train on, or too little for so many processes.
        """
        if samples is None:
            if self.refresh is not None:
                self.refresh()
            samples = len(self.source)
        self.samples = samples
        train, self.held = self.divide(samples)
        if len(train) < self.processes.world:
            raise TrainingError(
                f"{len(train)} conversations to train on by {self.processes.world} processes; {samples} were read, "
                f"{len(self.held)} are held out, left out: {self.skipped}"
            )
        self.order = np.array(train, dtype=np.int64)[self.random(_ORDER, self.epoch).permutation(len(train))]

    def random(self, *key: int) -> np.random.Generator:
        """The generator of a key: what it is for, and where."""
        return np.random.default_rng([self.config.optim.seed, *key])

    @property
    def per_step(self) -> int:
        """Conversations of one step, of all processes."""
        return self.config.optim.sequences * self.config.optim.accumulate * self.processes.world

    @property
    def epoch_steps(self) -> int:
        """Steps of this epoch; what is left over waits for the next. Less data than a step's is one step."""
        return max(len(self.order) // self.per_step, 1)

    def batches(self) -> list[list[int]]:
        """This process's forwards of the next step: numbers of their samples."""
        first = self.done * self.per_step
        numbers = self.order[first : first + self.per_step]
        forwards = np.array_split(numbers, min(self.config.optim.accumulate * self.processes.world, len(numbers)))
        return [part.tolist() for part in forwards[self.processes.rank :: self.processes.world]]

    def plan(self, numbers: Sequence[int], *key: int) -> Any:
        """What one forward looks at: a function of seed, key and numbers alone."""
        samples = [self.source.sample(n) for n in numbers]
        return self.objective.plan(samples, [self.random(*key, n) for n in numbers])

    # -- one step -----------------------------------------------------------------------------------------------

    def run_step(self) -> tuple[dict[str, float], Tally]:
        """One optimizer step. Returns its figures, and what this process's blocks showed.

        Raises:
            TrainingError: a loss or a gradient is not finite; the weights are as they were.
        """
        o, world, module = self.config.optim, self.processes.world, self.objective.module
        torch.manual_seed(int(self.random(_STEP, self.step, self.processes.rank).integers(2**63)))
        share = self.step / max(self.steps - 1, 1)
        batches = self.batches()
        plans = [self.plan(numbers, _ANCHORS, self.epoch) for numbers in batches]
        zero = self.objective.totals(plans[0]) * 0
        totals = self.processes.sum(sum((self.objective.totals(p) for p in plans), zero))
        tally, local = Tally(self.objective.gamma), torch.zeros(1, dtype=torch.float64)
        self.optimizer.zero_grad(set_to_none=True)
        for i, (numbers, plan) in enumerate(zip(batches, plans, strict=True)):
            together = contextlib.nullcontext() if i == len(plans) - 1 else self.processes.unsynchronised(module)
            with together:
                loss = self.forward(plan, numbers, totals, share, tally)
                (loss * world).backward()  # type: ignore[no-untyped-call]
            local += float(loss.detach())
        total = float(self.processes.sum(local))
        rate = learning_rate(self.step, lr=o.lr, steps=self.steps, warmup=o.warmup, final=o.final)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        if not np.isfinite(total) or not bool(torch.isfinite(norm)):
            self.stop_at_fault(total, float(norm), list(zip(batches, plans, strict=True)))
        if o.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), o.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        self.done += 1
        return {"loss": total, "lr": rate, "grad_norm": float(norm)}, tally

    def forward(self, plan: Any, numbers: Sequence[int], totals: Tensor, share: float, tally: Tally) -> Tensor:
        """The loss of one forward."""
        features = self.source.features(numbers)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.optim.precision == "bf16"):
            return self.objective.loss(plan, features, totals, share, tally)

    def stop_at_fault(self, loss: float, norm: float, forwards: Sequence[tuple[list[int], Any]]) -> None:
        """Say what is not finite.

        Raises:
            TrainingError: always, naming the first such tensor.
        """
        what = f"step {self.step}: the loss is {loss}, the gradient's norm {norm}"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.optim.precision == "bf16"):
            found = first_fault(self.objective, self.source, forwards)
        if found is None:
            alone = self.processes.world == 1
            found = f"none: every tensor {'' if alone else 'here '}is finite, "
            found += "the norm itself overflows" if alone else "another process has it, or the norm overflows"
        raise TrainingError(f"{what}. First tensor that is not finite: {found}. The last checkpoint is whole")

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Figures on held-out conversations, at the same anchors every time."""
        tally = Tally(self.objective.gamma)
        numbers = self.held[: self.config.run.eval_sequences][self.processes.rank :: self.processes.world]
        size = self.config.optim.sequences
        for i in range(0, len(numbers), size):
            part = numbers[i : i + size]
            plan = self.plan(part, _HELD)
            self.forward(plan, part, self.objective.totals(plan), 0.0, tally)
        return self.total(tally).summary()

    def total(self, tally: Tally) -> Tally:
        """A tally over all processes."""
        out = Tally(tally.gamma)
        out.sums = self.processes.sum(tally.sums)
        return out

    # -- the run ------------------------------------------------------------------------------------------------

    def start(self, resume: Path | None = None) -> None:
        """Begin, or go on from a checkpoint."""
        samples = None
        if resume is not None:
            state = read_state(resume)
            load_state(resume, self.parameters, self.optimizer)
            self.step, self.epoch, self.done, self.blocks, samples = (
                int(state[k]) for k in ("step", "epoch", "done", "blocks", "samples")
            )
        self.begin_epoch(samples)
        o = self.config.optim
        self.steps = o.steps if o.steps is not None else o.epochs * self.epoch_steps

    def save(self) -> None:
        """Write a checkpoint."""
        unlogged = int(self.total(self.recent).blocks)
        if self.processes.main:
            state = {
                "epoch": self.epoch,
                "done": self.done,
                "samples": self.samples,
                "blocks": self.blocks + unlogged,
                "config": self.config.plain(),
            }
            keep = self.config.run.keep
            save_state(self.output, self.step, state, self.parameters, self.optimizer, self.constants, keep)
            if self.on_save is not None:
                self.on_save()
        self.processes.wait()

    def run(self) -> None:
        """Train to the last step, or until ``stopping`` is set."""
        run, gamma = self.config.run, self.objective.gamma
        begun, first = time.monotonic(), self.step
        since = begun
        while self.step < self.steps and not self.stopping:
            if self.done >= self.epoch_steps:
                self.epoch, self.done = self.epoch + 1, 0
                self.begin_epoch()
            figures, tally = self.run_step()
            give_back()
            self.recent.sums += tally.sums
            last = self.step == self.steps

            def due(every: int, last: bool = last) -> bool:
                return bool(every) and (self.step % every == 0 or last)

            if due(run.log_every):
                whole, now = self.total(self.recent), time.monotonic()
                self.blocks += int(whole.blocks)
                pace = whole.blocks / max(now - since, 1e-9)
                left = (now - begun) / (self.step - first) * (self.steps - self.step)
                self.report("train", figures | {"blocks_per_second": pace, "seconds_left": left}, whole.summary())
                self.recent, since = Tally(gamma), now
            paused = time.monotonic()
            if self.held and due(run.eval_every):
                self.report("eval", {}, self.evaluate())
            if due(run.save_every) or last or self.stopping:
                self.save()
            since += time.monotonic() - paused

    def report(self, kind: str, figures: dict[str, float], summary: dict[str, Any]) -> None:
        """One line for people, one record for programs."""
        if not self.processes.main:
            return
        if self.on_log is not None:
            where = {"kind": kind, "step": self.step, "epoch": self.epoch, "total_blocks": self.blocks}
            self.on_log({**where, **figures, **summary})
        percent = {k: " ".join(f"{100 * x:.0f}" for x in summary[k]) for k in ("accept", "match")}
        parts = [
            f"{kind} {self.step}/{self.steps}",
            f"ce {summary['ce']:.3f} tv {summary['tv']:.3f} conf {summary['confidence_error']:.3f}",
            f"accept {percent['accept']} match {percent['match']} %",
            f"length {summary['accepted_length']:.2f} greedy {summary['greedy_length']:.2f}",
        ]
        if "loss" in figures:
            parts.insert(1, f"loss {figures['loss']:.3f}")
            parts.append(f"{figures['blocks_per_second']:.0f} blocks/s, {figures['seconds_left'] / 3600:.1f} h left")
        self.say(" | ".join(parts))
