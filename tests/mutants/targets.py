"""Seeded faults of packed forwards: the faster layers, the slot cache and long queries."""

from __future__ import annotations

from tests.mutants.run import Mutant

LAYERS = "tests/targets/test_layers.py"
EQUAL = f"{LAYERS}::test_known_kinds_are_written_out_and_stay_equal_in_float32"
PARTS = f"{LAYERS}::test_long_queries_in_parts_are_the_plain_attention_up_to_rounding"

TARGET_MUTANTS = [
    Mutant(
        "values are read where the keys lie",
        "dspark/targets/groups.py",
        "offset = cache.storage_offset() + ",
        "offset = ",
        (f"{EQUAL}[1-llama]",),
    ),
    Mutant(
        "layers that do not agree are used all the same",
        "dspark/targets/layers.py",
        "    if not _agree(layers[0], made[0]):\n        return []\n",
        "",
        (f"{LAYERS}::test_layers_that_do_not_agree_are_left_alone",),
    ),
    Mutant(
        "query norms are dropped",
        "dspark/targets/layers.py",
        "        if self.head_norms:\n",
        "        if not self.head_norms:\n            pass\n        elif hidden.shape[0] > 6:\n",
        (f"{EQUAL}[1-qwen3]",),
    ),
    Mutant(
        "a part of a long query sees one key too many",
        "dspark/targets/groups.py",
        "found = mask.triu_(keys - rows + 1)",
        "found = mask.triu_(keys - rows + 2)",
        (f"{PARTS}[llama]",),
    ),
    Mutant(
        "a part of a long query forgets the window",
        "dspark/targets/groups.py",
        "            if window is not None:\n                found = found +",
        "            if window is not None and keys < 0:\n                found = found +",
        (f"{PARTS}[mistral]",),
    ),
]
