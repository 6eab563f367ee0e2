"""The public surface is the committed one, and what is to leave has not overstayed."""

from __future__ import annotations

import difflib
import warnings

import pytest

import dspark
from dspark import deprecations
from dspark.deprecations import DEPRECATED, Deprecation

from .surface import SNAPSHOT, surface


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def test_the_public_surface_is_as_committed() -> None:
    """A change of it is meant, or a mistake: ``make api`` writes the new one, for the review to see."""
    frozen = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(frozen, surface(), "public.txt", "the code", lineterm="", n=0))
    assert changes == [], "the public surface has changed; if this is meant, run `make api`"


def test_the_surface_holds_what_users_write_against() -> None:
    lines = surface()
    for start in (
        "dspark.SpeculativeDecoder.generate(",
        "dspark.EngineConfig.__init__(",
        "dspark.plugins.load_plugins(",
        "dspark.protocols.Drafter.propose(self, batch: 'BatchView', sampler: 'DraftSampler')",
        "dspark.types.VerifyPlan.__init__(",
        "dspark.testing.SequentialHeadSuite.test_prefix_causality(",
        "hook dspark_register_sequential_heads(register)",
        "hook dspark_load_checkpoint(source, config)",
        "command generate: --drafter, -d: str = ",
        "command new-plugin: NAME: str",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert len(lines) == len(set(lines))
    assert not any(" at 0x" in line for line in lines)


def test_nothing_overstays() -> None:
    for name, entry in DEPRECATED.items():
        assert version(entry.since) <= version(dspark.__version__), name
        assert version(entry.removed_in)[:2] > version(entry.since)[:2], f"{name}: a minor version at least"
        assert version(dspark.__version__) < version(entry.removed_in), f"{name} was to be gone in {entry.removed_in}"
        assert entry.instead, name


def test_a_deprecated_name_works_and_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Deprecation("0.1.0", "0.3.0", "dspark.EngineConfig", "dspark.config:EngineConfig")
    monkeypatch.setattr(deprecations, "DEPRECATED", {"dspark.EngineSettings": entry})
    with pytest.warns(DeprecationWarning, match="use dspark.EngineConfig") as caught:
        assert dspark.EngineSettings is dspark.EngineConfig  # type: ignore[attr-defined]
    assert str(caught[0].message) == (
        "dspark.EngineSettings is deprecated since dspark 0.1.0 and will be gone in 0.3.0; use dspark.EngineConfig"
    )
    assert caught[0].filename == __file__
    with warnings.catch_warnings(), pytest.raises(AttributeError, match="EngineSetings"):
        dspark.EngineSetings  # type: ignore[attr-defined] # noqa: B018
