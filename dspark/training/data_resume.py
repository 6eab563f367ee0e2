"""What earlier runs left of a data set: read back, checked, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.errors import DataError
from dspark.training.data_plan import DataConfig
from dspark.training.line_file import read_records
from dspark.training.prompts_in import Dialogue


@dataclass(slots=True)
class Done:
    """What is there already. A key is index * variants + variant.

    Attributes:
        finished: keys that need nothing more.
        open: key -> (next turn, messages so far) of conversations that were left in the middle.
        lines: indices that were skipped as a whole.
        last_candidate: number of the last prompt that the target wrote and that was not kept; -1: none.
        responses, tokens, skipped: counts.
    """

    finished: set[int] = field(default_factory=set)
    open: dict[int, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    lines: set[int] = field(default_factory=set)
    last_candidate: int = -1
    responses: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def remaining(self, dialogue: Dialogue, variants: int) -> int:
        """Answers still to be written of a line."""
        if dialogue.index in self.lines:
            return 0
        left = 0
        for key in range(dialogue.index * variants, (dialogue.index + 1) * variants):
            if key not in self.finished:
                left += dialogue.turns - self.open.get(key, (0, []))[0]
        return left


def read_done(
    responses: Path, skipped: Path, config: DataConfig, *, check: Callable[[dict[str, Any]], None] | None = None
) -> Done:
    """Read the files of a data set.

    Args:
        responses, skipped: files that may not exist.
        config: the run that goes on.
        check: called with every response; raises ``ValueError`` for one that this run would not have written.

    Raises:
        DataError: naming file and line of what does not belong there.
    """
    done = Done()
    variant_of = {variant: v for v, variant in enumerate(config.variants)}
    for path, add in ((responses, _add_response), (skipped, _add_skipped)):
        for number, record in read_records(path):
            try:
                if check is not None and add is _add_response:
                    check(record)
                add(done, record, variant_of)
            except (ValueError, TypeError, KeyError) as err:
                what = f"no {err}" if isinstance(err, KeyError) else str(err)
                raise DataError(f"{str(path)!r} line {number} is not of this data set: {what}") from err
    return done


def _key(record: dict[str, Any], variant_of: dict[tuple[float, int], int]) -> int:
    variant = (float(record["temperature"]), int(record.get("sample", 0)))
    if variant not in variant_of:
        raise ValueError(f"temperature {variant[0]}, sample {variant[1]}")
    return int(record["index"]) * len(variant_of) + variant_of[variant]


def _add_response(done: Done, record: dict[str, Any], variant_of: dict[tuple[float, int], int]) -> None:
    key = _key(record, variant_of)
    turn, turns = int(record.get("turn", 0)), int(record.get("turns", 1))
    if key in done.finished or turn != done.open.get(key, (0, []))[0]:
        raise ValueError(f"turn {turn} of prompt {record['index']} is there twice, or an earlier one is missing")
    if turn + 1 < turns:
        done.open[key] = turn + 1, list(record["messages"])
    else:
        done.open.pop(key, None)
        done.finished.add(key)
    done.responses += 1
    done.tokens += len(record["response_ids"])


def _add_skipped(done: Done, record: dict[str, Any], variant_of: dict[tuple[float, int], int]) -> None:
    if "candidate" in record:
        done.last_candidate = max(done.last_candidate, int(record["candidate"]))
    elif "temperature" in record:
        key = _key(record, variant_of)
        done.open.pop(key, None)
        done.finished.add(key)
    else:
        done.lines.add(int(record["index"]))
    done.tokens += int(record.get("tokens", 0))
    done.skipped[str(record["reason"])] += 1
