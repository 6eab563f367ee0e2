"""The seeded faults, by what they break. Each names the tests that must notice it within 30 seconds."""

from __future__ import annotations

from tests.mutants.drafters import DRAFTER_MUTANTS
from tests.mutants.engine import FAULTS, SCHEDULE, STATE_FAULTS
from tests.mutants.evaluation import EVALUATION_MUTANTS
from tests.mutants.gamma import GAMMA_MUTANTS
from tests.mutants.kernels import KERNEL_MUTANTS
from tests.mutants.law import ACCEPTANCE, PROCESSORS, RANDOMNESS
from tests.mutants.prefix import PREFIX_MUTANTS
from tests.mutants.run import Mutant
from tests.mutants.stepwise import STEPWISE_MUTANTS
from tests.mutants.targets import TARGET_MUTANTS
from tests.mutants.writers import WRITER_MUTANTS

MUTANTS: list[Mutant] = [
    *ACCEPTANCE,
    *PROCESSORS,
    *RANDOMNESS,
    *SCHEDULE,
    *FAULTS,
    *STATE_FAULTS,
    *GAMMA_MUTANTS,
    *KERNEL_MUTANTS,
    *DRAFTER_MUTANTS,
    *EVALUATION_MUTANTS,
    *PREFIX_MUTANTS,
    *STEPWISE_MUTANTS,
    *WRITER_MUTANTS,
    *TARGET_MUTANTS,
]
