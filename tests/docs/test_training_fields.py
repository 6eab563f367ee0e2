"""The page on training lists every field of a run's configuration, with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from dspark.training.config import SECTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8").split("## All fields", 1)[1]


def listed(section: str) -> dict[str, str]:
    """Field -> default, as a section's table has them."""
    table = re.search(rf"^\*\*{section}\*\*\n(.*?)(?=^\*\*|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert table is not None, section
    found: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.+?) \| (.+?) \| .+ \|$", table[1], re.MULTILINE):
        fields, values = re.findall(r"`(\w+)`", names), defaults.split(", ")
        found |= dict(zip(fields, values if len(values) == len(fields) else values * len(fields), strict=True))
    return found


def shown(field: dataclasses.Field[Any]) -> str:
    made = field.default_factory is not dataclasses.MISSING
    value = field.default_factory() if made else field.default  # type: ignore[misc]
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return str(value) if value not in ((), {}, "") else "empty"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_with_its_default(section: str) -> None:
    assert listed(section) == {f.name: shown(f) for f in dataclasses.fields(SECTIONS[section])}
