"""The conformance kit: toy components with tables for laws, exact enumeration of output laws, and an oracle."""

from dspark.testing.enumerate import EnumerationError, ScriptedDraws, TableNoise, law, total_variation
from dspark.testing.oracle import TokenRule, next_scores, target_law
from dspark.testing.toys import TableDrafter, TableEstimator, TableTarget

__all__ = [
    "EnumerationError",
    "ScriptedDraws",
    "TableDrafter",
    "TableEstimator",
    "TableNoise",
    "TableTarget",
    "TokenRule",
    "law",
    "next_scores",
    "target_law",
    "total_variation",
]
