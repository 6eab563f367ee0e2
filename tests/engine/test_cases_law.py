"""Faults of the field whose damage is the output law: found by exact enumeration through the real engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.errors import ComponentError, DSparkWarning
from dspark.protocols import DraftSampler
from dspark.testing import TableDrafter, TableEstimator, TableTarget, law, target_law, total_variation
from dspark.testing.cheats import LengthTable
from dspark.testing.faults import (
    FaultyDrafter,
    FaultyEstimator,
    FaultyProcessor,
    FaultyScheduler,
    FaultyTarget,
    FaultyVerifier,
    Trip,
)
from dspark.testing.toys import AutomatonProcessor, CountingProcessor, law_table, random_table
from dspark.types import BatchView, DraftBlock, Mode
from tests.exactness.harness import decode, engine, make_parts

Prompt = Sequence[int]


def exact(
    target: Callable[[], TableTarget],
    drafter: Callable[[], Any],
    params: SamplingParams,
    *,
    prompt: Prompt = (0, 1),
    gamma: int = 2,
    scheduler: Callable[[], Any] = lambda: LengthTable([99]),
    rule: Any = None,
    processors: Callable[[], Sequence[Any]] = tuple,
    wrap: Callable[[Any], Any] = lambda draws: draws,
    **settings: Any,
) -> float:
    """TV between the engine's law and the target's own; ``wrap`` stands between the enumerator and the engine."""
    import dataclasses

    def program(draws: Any) -> tuple[int, ...]:
        parts = make_parts(
            wrap(draws),
            drafter=drafter(),
            estimator=TableEstimator([[0.9] * target().vocab_size] * gamma),
            scheduler=scheduler(),
            target=target(),
            gamma=gamma,
        )
        keyed = dataclasses.replace(params, request_key=1, logits_processors=tuple(processors()))
        return decode(engine(parts, **settings), [(prompt, keyed)])[0]

    made = target()
    wanted = target_law(made.next_logits, prompt, params, eos_token_ids=made.eos_token_ids, rule=rule)
    return total_variation(law(program), wanted)


def sampled(tokens: int = 3, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": tokens, **settings})


def three() -> TableTarget:
    return TableTarget(random_table(4, 3, 3, seed=1, scale=1.0), mix=0.4)


class Bf16Drafter(TableDrafter):
    """Hands its logits over in bf16."""

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        self.table = self.table.bfloat16()
        return super().propose(batch, sampler)


def test_case_1_bf16_draft_logits_that_round_together() -> None:
    """One q, sampled from and accepted with, whatever the precision of the logits was."""
    table = torch.tensor([[2.0, 2.003, 0.1], [1.0, 1.001, 1.002], [0.3, 3.001, 3.0]], dtype=torch.float64)
    assert table.bfloat16()[0, 0] == table.bfloat16()[0, 1]
    # q is float32 here: the draw and the acceptance still use one object
    assert exact(three, lambda: Bf16Drafter(table), sampled()) < 1e-9


def test_case_2_an_argmax_drafter_is_a_point_mass() -> None:
    table = torch.tensor([[2.0, 1.5, 1.0]] * 3, dtype=torch.float64)
    assert exact(three, lambda: TableDrafter(table, argmax=True), sampled()) < 1e-9
    assert exact(three, lambda: TableDrafter(table), sampled()) < 1e-9


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"min_p": 0.3}, {"top_p": 0.6}, {"temperature": 0.6}])
def test_case_3_processors_run_once_before_both_laws(settings: dict[str, float]) -> None:
    """V = 8: acceptance computed with other logits than the ones sampled from would show."""
    target = lambda: TableTarget(random_table(9, 8, 8, seed=4, scale=1.2))  # noqa: E731
    table = random_table(8, 8, seed=6, scale=1.2)
    assert exact(target, lambda: TableDrafter(table, gamma=1), sampled(2, **settings), gamma=1) < 1e-9


PROCESSED = [
    {"min_p": 0.3},
    {"top_p": 0.6},
    {"logit_bias": {0: 1.5, 2: -0.7}},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 1.1},
    {"temperature": 0.5, "top_k": 2},
]


@pytest.mark.parametrize("settings", PROCESSED, ids=str)
def test_case_5_processors_reach_every_verified_row(settings: dict[str, Any]) -> None:
    """The drafter is the target's own table, so nearly everything is accepted and each row is used."""
    table = random_table(6, 6, seed=8, scale=0.9)
    for v in range(6):
        table[v, (v + 2) % 6] = table[v, (v + 3) % 6] = table[v, (v + 4) % 6] = -torch.inf
    assert exact(lambda: TableTarget(table), lambda: TableDrafter(table), sampled(**settings), prompt=(0, 3)) < 1e-9


def test_case_6_a_loop_under_a_frequency_penalty_counts_each_accepted_token() -> None:
    """Greedy text of period 3: with penalty 2 the loop breaks at the same token as one by one."""
    table = torch.full((4, 4), 0.0, dtype=torch.float64)
    for v in range(3):
        table[v, (v + 1) % 3] = 5.0
    table[:, 3] = 0.5
    for penalty in (0.0, 2.0, 0.7):
        params = SamplingParams(max_tokens=12, frequency_penalty=penalty)
        drafter = lambda: TableDrafter(table, gamma=3)  # noqa: E731
        assert exact(lambda: TableTarget(table), drafter, params, prompt=(0, 1, 2), gamma=3) == 0.0


@pytest.mark.parametrize("greedy", [True, False])
def test_case_7_rejected_tokens_never_reach_a_stateful_processor(greedy: bool) -> None:
    """A processor that lowers what it has counted equals a frequency penalty, if and only if it counts right."""
    params = SamplingParams(temperature=0.0, max_tokens=6) if greedy else sampled(3)

    def rule(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        out = logits.clone()
        for token in output:
            out[token] -= 0.8
        return out

    table = random_table(3, 3, seed=9, scale=1.0)
    distance = exact(
        three,
        lambda: TableDrafter(table, gamma=2),
        params,
        rule=rule,
        processors=lambda: [CountingProcessor(0.8)],
    )
    assert distance < 1e-9


GRAMMAR: tuple[dict[int, int], ...] = ({0: 1, 1: 1}, {1: 2, 2: 0}, {0: 0, 2: 2})


def grammar_rule(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    machine = AutomatonProcessor(GRAMMAR)
    for token in output:
        machine.advance(token)
    return machine.process(logits)


def test_case_11_a_grammar_with_illegal_drafts() -> None:
    """Illegal drafts are sent and rejected; the automaton moves by committed tokens alone."""
    distance = exact(
        three,
        lambda: TableDrafter(random_table(3, 3, seed=10, scale=0.8)),
        sampled(),
        rule=grammar_rule,
        processors=lambda: [AutomatonProcessor(GRAMMAR)],
    )
    assert distance < 1e-9


def test_case_11_by_hand() -> None:
    """q = (.4, .4, .2 illegal), p = (.7, .3, 0): cutting the illegal draft would give (.64, .36)."""
    target = lambda: TableTarget(law_table((0.7 * 0.8, 0.3 * 0.8, 0.2)))  # noqa: E731

    def rule(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([2]), -torch.inf)

    everywhere_legal = ({0: 0, 1: 0},)
    distance = exact(
        target,
        lambda: TableDrafter(law_table((0.4, 0.4, 0.2))),
        sampled(),
        rule=rule,
        processors=lambda: [AutomatonProcessor(everywhere_legal)],
    )
    assert distance < 1e-9


def test_case_15_a_draft_eos_that_is_rejected_does_not_end_the_sequence() -> None:
    """EOS = 2 has probability .5 in q and .2 in p; the output law, lengths included, is the target's."""
    target = lambda: TableTarget(law_table((0.5, 0.3, 0.2)), eos_token_ids=(2,))  # noqa: E731
    drafter = lambda: TableDrafter(law_table((0.2, 0.3, 0.5)))  # noqa: E731
    assert exact(target, drafter, sampled()) < 1e-9
    assert exact(target, drafter, sampled(min_tokens=2)) < 1e-9
    assert exact(target, drafter, sampled(ignore_eos=True)) < 1e-9


def test_a_pruned_draft_vocabulary_keeps_the_law() -> None:
    pruned = torch.tensor([2, 0])
    table = random_table(3, 2, seed=13)
    assert exact(three, lambda: TableDrafter(table, token_map=pruned), sampled()) < 1e-9


# case 32a: faults that depend on the draft --------------------------------------------------------------------------

APPENDIX_TARGET = law_table((0.7, 0.3))
APPENDIX_DRAFT = law_table((0.5, 0.5))
HALF = [[0.8, 0.8], [0.9, 0.0]]
PHASES = ("draft", "confidence", "schedule", "target", "process", "verify", "verify late")


def faulty_engine(phase: str, trip: Trip, draws: Any, *, slots: int, gamma: int = 1) -> Any:
    """An engine with a component that raises in ``phase`` exactly where x_1 = 1."""
    drafter = FaultyDrafter(APPENDIX_DRAFT, trip, gamma=gamma) if phase == "draft" else TableDrafter(APPENDIX_DRAFT)
    scheduler: Any = LengthTable([1])
    if phase == "schedule":
        scheduler = FaultyScheduler(scheduler, lambda: drafter.last_block.token_ids, trip)
    parts = make_parts(
        draws,
        drafter=drafter,
        estimator=FaultyEstimator(HALF, trip) if phase == "confidence" else TableEstimator(HALF),
        scheduler=scheduler,
        target=FaultyTarget(APPENDIX_TARGET, trip) if phase == "target" else TableTarget(APPENDIX_TARGET),
        gamma=gamma,
    )
    if phase.startswith("verify"):
        faulty = FaultyVerifier(parts.verifiers[Mode.REJECTION], trip, late=phase == "verify late")
        parts.verifiers = {**parts.verifiers, Mode.REJECTION: faulty}
    return engine(parts, slots=slots)


def request(key: int, *, faulty: bool = False, tokens: int = 2) -> tuple[list[int], SamplingParams]:
    processors = (FaultyProcessor(1),) if faulty else ()
    params = SamplingParams(temperature=1.0, max_tokens=tokens, request_key=key, logits_processors=processors)
    return [0], params


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("attributed", [True, False])
def test_case_32a_a_request_alone_errors_and_is_never_biased(phase: str, attributed: bool) -> None:
    """x_1 = B raises: half of the runs. The first token of the other half is accepted or replaced as always.

    An engine that fell back to l = 0 would end with (.85, .15) and no error.
    """

    def program(draws: Any) -> tuple[int, ...]:
        made = faulty_engine(phase, Trip(1, attributed=attributed), draws, slots=1)
        (out,) = decode(made, [request(1, faulty=phase == "process")], faults=True)
        assert not made.batcher.active
        assert len(made.batcher.pool) == 1
        return out[:1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DSparkWarning)
        assert law(program)[(-1,)] == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("phase", PHASES)
def test_case_32a_neighbours_keep_their_joint_law(phase: str) -> None:
    """Faults attributed to rows: the faulty rows end with an error, whoever is left has the target's law.

    Whether the neighbour errors is a matter of its own first draft; given that it does not in this round, its tokens
    must not depend on the other row.
    """
    single = target_law(TableTarget(APPENDIX_TARGET).next_logits, [0], SamplingParams(temperature=1.0, max_tokens=2))
    plain = (request(1, faulty=phase == "process"), request(2))

    def program(draws: Any) -> tuple[tuple[int, ...], ...]:
        made = faulty_engine(phase, Trip(1, only=1 if phase.startswith("verify") else 0), draws, slots=2)
        return decode(made, plain, faults=True)

    joint = law(program)
    faulty = sum(mass for (first, _), mass in joint.items() if first == (-1,))
    assert faulty == pytest.approx(0.5, abs=1e-12)
    neighbour: dict[tuple[int, ...], float] = {}
    given_fault: dict[tuple[int, ...], float] = {}
    for (first, second), mass in joint.items():
        neighbour[second] = neighbour.get(second, 0.0) + mass
        if first == (-1,):
            given_fault[second] = given_fault.get(second, 0.0) + mass / faulty
    assert total_variation(neighbour, single) < 1e-9
    assert total_variation(given_fault, single) < 1e-9


@pytest.mark.parametrize("phase", ["draft", "confidence", "schedule"])
def test_case_32a_a_batch_wide_fault_verifies_all_that_was_drawn(phase: str) -> None:
    """Nobody is to blame, two rows are exposed: both verify what was drawn, never less because of what it was.

    Here the plan would have verified it too, so the joint law is the product of the target's. l = 0 would bias it.
    """
    single = target_law(TableTarget(APPENDIX_TARGET).next_logits, [0], SamplingParams(temperature=1.0, max_tokens=2))

    unproven: set[int] = set()

    def program(draws: Any) -> tuple[tuple[int, ...], ...]:
        made = faulty_engine(phase, Trip(1, attributed=False), draws, slots=2)
        out = decode(made, (request(1), request(2)))
        unproven.add(made.stats.unproven_rounds)
        return out

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DSparkWarning)
        joint = law(program)
    product = {(a, b): p * q for a, p in single.items() for b, q in single.items()}
    assert total_variation(joint, product) < 1e-9
    assert unproven == {0, 1}


def test_case_32a_a_batch_wide_fault_is_counted_as_unproven() -> None:
    """Rows verify all that was drawn; the round is counted, and later rounds plan nothing."""
    from dspark.sampling.draws import CounterDraws

    class Always(Trip):
        def check(self, first_tokens: Sequence[int], names: Sequence[int]) -> None:
            raise RuntimeError("broken")

    made = faulty_engine("schedule", Always(), CounterDraws(), slots=3)
    requests = [request(1), request(2), ([0], SamplingParams(max_tokens=2))]
    with pytest.warns(DSparkWarning, match="schedule"):
        out = decode(made, requests)
    assert all(len(tokens) == 2 for tokens in out)
    assert made.stats.unproven_rounds == 1
    assert made.stats.faults["scheduler:schedule"] == 1
    first_round = made.parts.target.forwards[0]
    assert first_round == [2, 2, 2]


def test_case_32a_the_error_names_component_phase_and_request() -> None:
    from dspark.sampling.draws import CounterDraws

    class Always(Trip):
        def check(self, first_tokens: Sequence[int], names: Sequence[int]) -> None:
            super().check([self.token], [0])

    made = faulty_engine("confidence", Always(), CounterDraws(), slots=1)
    name = made.submit(*request(1))
    chunks = list(made.run())
    error = chunks[-1].error
    assert isinstance(error, ComponentError)
    assert (error.phase, error.component, error.request_ids) == ("confidence", "estimator", (name,))
