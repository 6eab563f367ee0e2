"""Seeded faults of the checkpoint writers."""

from __future__ import annotations

from tests.mutants.run import Mutant

WRITE = "tests/checkpoints/test_write.py"

WRITER_MUTANTS: list[Mutant] = [
    Mutant(
        "the mask-only layout is left to DeepSpec's default",
        "dspark/checkpoints/write.py",
        '        raw["sample_from_anchor"] = False  # absent, it is true\n',
        "        pass\n",
        (f"{WRITE}::test_mask_only_layout_is_written_out",),
    ),
    Mutant(
        "what would read back as another drafter is written",
        "dspark/checkpoints/write.py",
        "    if different:\n",
        "    if len(different) > 9:\n",
        (f"{WRITE}::test_what_would_read_back_as_another_drafter_is_refused",),
    ),
    Mutant(
        "an own head is left out without a look at the target's",
        "dspark/checkpoints/write.py",
        "if own.shape != same.shape or not torch.equal",
        "if own.shape != same.shape and not torch.equal",
        (f"{WRITE}::test_what_is_left_out_is_compared_first",),
    ),
    Mutant(
        "full layers are written as causal for vLLM",
        "dspark/checkpoints/configs.py",
        "not sliding[0].causal if sliding else True",
        "not sliding[0].causal if sliding else False",
        (f"{WRITE}::test_keys_that_servers_read",),
    ),
    Mutant(
        "temperatures stay behind",
        "dspark/checkpoints/write.py",
        "return path if path is not None and path.is_file() else None",
        "return None",
        (f"{WRITE}::test_calibration_travels_beside_the_tensors",),
    ),
    Mutant(
        "an old folder is gone before the new one is whole",
        "dspark/checkpoints/files.py",
        '        yield new\n        if final.is_dir():\n            final.rename(work / "old")\n',
        "        if final.is_dir():\n            shutil.rmtree(final)\n        yield new\n",
        (f"{WRITE}::test_a_failed_write_leaves_what_was_there",),
    ),
]
