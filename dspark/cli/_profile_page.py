"""Tables and charts of a cost profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark.evaluation.report import grid, note, page, section, table
from dspark.evaluation.svg import Axis, Series, line_chart

if TYPE_CHECKING:
    from dspark.scheduling.cost import CostProfile

Table = tuple[list[str], list[list[str]]]


def _labels(profile: CostProfile) -> list[str]:
    return ["longer context" if b.max_context is None else f"context to {b.max_context}" for b in profile.buckets]


def forward_rows(profile: CostProfile) -> Table:
    """Milliseconds and steps per second by executed tokens."""
    labels = _labels(profile) if len(profile.buckets) > 1 else ["any context"]
    counts = sorted({n for b in profile.buckets for n, _ in b.points})
    by = [dict(b.points) for b in profile.buckets]
    rows = []
    for n in counts:
        cells = [(f"{1e3 * t[n]:.2f}", f"{1 / t[n]:.1f}") if n in t else ("", "") for t in by]
        rows.append([str(n), *(cell for pair in cells for cell in pair)])
    return ["tokens", *(name for label in labels for name in (f"{label}, ms", "steps/s"))], rows


def draft_rows(profile: CostProfile) -> Table:
    """Milliseconds of drafting, requests by gamma."""
    gammas = sorted({g for _, g, _ in profile.draft})
    times = {(r, g): t for r, g, t in profile.draft}
    rows = [
        [str(r), *(f"{1e3 * times[r, g]:.2f}" if (r, g) in times else "" for g in gammas)]
        for r in sorted({r for r, _, _ in profile.draft})
    ]
    return ["requests", *(f"gamma {g}" for g in gammas)], rows


def batch_rows(profile: CostProfile) -> Table:
    """The same tokens over other numbers of sequences, against what the table says of them."""
    costs = profile.table()
    rows = [
        [str(r), f"{n // r}", str(n), f"{1e3 * t:.2f}", f"{100 * (t / costs.verify_seconds(n, c) - 1):+.1f} %"]
        for c, r, n, t in profile.batches
    ]
    return ["sequences", "tokens each", "executed", "ms", "against the table"], rows


def profile_page(profile: CostProfile) -> str:
    """A document with every curve."""
    what = ", ".join(f"{key} {value}" for key, value in {**profile.fingerprint, **profile.drafter}.items() if value)
    parts = [
        section("What was measured", note(what), note(f"State: {profile.state}; {profile.mode}.")),
        section("Forwards", grid([_seconds(profile), _steps(profile)]), table(*forward_rows(profile))),
    ]
    if profile.draft:
        parts.append(section("Drafts", grid([_drafts(profile)]), table(*draft_rows(profile))))
    if profile.batches:
        parts.append(section("Tokens over sequences", grid([_by_batch(profile)]), table(*batch_rows(profile))))
    return page(f"Cost of decoding: {profile.fingerprint.get('model', 'target')}", parts)


def _curves(profile: CostProfile, *, rate: bool) -> list[Series]:
    labels = _labels(profile) if len(profile.buckets) > 1 else ["forward"]
    return [
        Series(label, [n for n, _ in b.points], [1 / t if rate else 1e3 * t for _, t in b.points])
        for label, b in zip(labels, profile.buckets, strict=True)
    ]


def _tokens(profile: CostProfile) -> Axis:
    return Axis.around("executed tokens", [0.0, *(float(n) for b in profile.buckets for n, _ in b.points)], low=0.0)


def _seconds(profile: CostProfile) -> str:
    lines = _curves(profile, rate=False)
    return line_chart("Milliseconds of a forward", lines, _tokens(profile), _from_zero("ms", lines))


def _steps(profile: CostProfile) -> str:
    lines = _curves(profile, rate=True)
    return line_chart("Steps per second, SPS", lines, _tokens(profile), _from_zero("steps per second", lines))


def _drafts(profile: CostProfile) -> str:
    rows = sorted({r for r, _, _ in profile.draft})
    lines = []
    for r in rows:
        mine = sorted((g, t) for n, g, t in profile.draft if n == r)
        lines.append(Series(f"{r} requests", [g for g, _ in mine], [1e3 * t for _, t in mine]))
    x = Axis.of_integers("gamma", [g for _, g, _ in profile.draft])
    return line_chart("Milliseconds of drafting", lines, x, _from_zero("ms", lines))


def _by_batch(profile: CostProfile) -> str:
    queries = sorted({n // r for _, r, n, _ in profile.batches})
    lines = []
    for q in queries:
        mine = sorted((r, t) for _, r, n, t in profile.batches if n // r == q)
        lines.append(Series(f"{q} tokens each", [r for r, _ in mine], [1e3 * t for _, t in mine]))
    x = Axis.around("sequences", [0.0, *(float(r) for _, r, _, _ in profile.batches)], low=0.0)
    return line_chart("Milliseconds of a forward by batch size", lines, x, _from_zero("ms", lines))


def _from_zero(label: str, lines: list[Series]) -> Axis:
    return Axis.around(label, [0.0, *(float(y) for line in lines for y in line.ys if y is not None)], low=0.0)
