"""``dspark demo`` on a tiny random target: real runs, and a verdict that fails when it should."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dspark.cli._compare import Comparison, Judge, Rule, summarise
from dspark.cli._demo_prompts import PROMPTS

FAST = ("--tokens", 12, "--cost", "none")


def row(out: str, title: str) -> list[str]:
    """Cells of the table's line of a prompt."""
    line = next(line for line in out.splitlines() if line.startswith(title) and "x " in line)
    return re.split(r"\s{2,}", line.strip())


def test_plain_lines_a_table_and_a_verdict(dspark: Callable[..., Any], tiny_folder: str) -> None:
    done = dspark("demo", "--target", tiny_folder, *FAST)
    assert done.code == 0, done.out + done.err
    assert "\x1b" not in done.out, "no colours outside a terminal"
    assert "lossless: yes\n" in done.out
    assert f"greedy: {len(PROMPTS)} of {len(PROMPTS)} outputs identical" in done.out
    assert f"seeded: {len(PROMPTS)} of {len(PROMPTS)} outputs identical" in done.out
    for prompt in PROMPTS:
        assert f"{prompt.title}: plain" in done.out
        cells = row(done.out, prompt.title)
        assert cells[-2:] == ["same", "same"]
        assert float(cells[5]) >= 1.0, "accepted length"
    total = row(done.out, "all")
    plain, fast, ratio = float(total[2]), float(total[3]), float(total[4].rstrip("x"))
    assert ratio == pytest.approx(fast / plain, rel=0.02, abs=0.01)
    assert int(total[1]) == sum(int(row(done.out, p.title)[1]) for p in PROMPTS)


def test_several_drafters_stand_side_by_side(dspark: Callable[..., Any], tiny_folder: str) -> None:
    done = dspark("demo", "--target", tiny_folder, *FAST, "--drafter", "ngram", "--drafter", "none")
    assert done.code == 0, done.out + done.err
    assert "dspark/ngram with gamma" in done.out
    parts = re.split(r"^(dspark/\w+):\s*$", done.out, flags=re.MULTILINE)
    assert parts[1::2] == ["dspark/ngram", "dspark/none"]
    ngram, none = ([row(part, name)[5] for name in (*(p.title for p in PROMPTS), "all")] for part in parts[2::2])
    assert set(none) == {"1.00"}
    assert any(float(length) > 1.0 for length in ngram)
    assert f"greedy: {2 * len(PROMPTS)} of {2 * len(PROMPTS)} outputs identical" in done.out


def test_together_with_a_measured_cost_table(dspark: Callable[..., Any], tiny_folder: str) -> None:
    done = dspark("demo", "--target", tiny_folder, "--batch", "--tokens", 8, "--gamma", 3, "--scheduler", "lookahead")
    assert done.code == 0, done.out + done.err
    assert "gamma 3" in done.out
    assert "dspark/lookahead" in done.out
    assert "no-cost-table" not in done.out + done.err
    assert "lossless: yes" in done.out


@pytest.mark.parametrize(("verifier", "kind"), [("greedy", "greedy"), ("coupled", "seeded")])
def test_a_verifier_that_changes_the_output_fails_the_verdict(
    dspark: Callable[..., Any], tiny_folder: str, spoil: Callable[[str], Any], verifier: str, kind: str
) -> None:
    spoiler = spoil(verifier)
    done = dspark("demo", "--target", tiny_folder, "--tokens", 24, "--cost", "none")
    assert spoiler.spoilt, "drafts were verified"
    assert done.code == 1
    assert "lossless: FAILED" in done.out
    assert re.search(rf"{kind}, .*: different at token \d+: .* margin [\d.]+, above 0.0001", done.out)
    assert re.search(rf"{kind}: \d of 5 outputs identical, .*; \d DIFFERENT", done.out)
    other = "seeded" if kind == "greedy" else "greedy"
    assert f"{other}: 5 of 5 outputs identical" in done.out


def test_a_target_that_cannot_be_loaded_is_one_line(dspark: Callable[..., Any], tmp_path: Any) -> None:
    done = dspark("demo", "--target", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("dspark: ")
    assert done.err.count("\n") == 1


@pytest.fixture(scope="module")
def decoder(tiny_folder: str) -> Any:
    from dspark import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(tiny_folder, "none", cost=None, max_slots=2)


@pytest.fixture
def judge(decoder: Any) -> Judge:
    return Judge(decoder.engine)


PROMPT = [5, 9, 13, 40, 41]


@pytest.mark.parametrize("rule", [Rule(), Rule(temperature=1.3, seed=9)], ids=["greedy", "seeded"])
def test_what_the_engine_decodes_has_no_regret_and_anything_else_does(decoder: Any, judge: Judge, rule: Rule) -> None:
    seed = rule.seed if rule.temperature else None
    out = decoder.generate([PROMPT], max_tokens=12, temperature=rule.temperature, seed=seed, ignore_eos=True)[0].ids
    assert judge.bound == 1e-4
    assert judge.regrets(PROMPT, out, rule).max() < 1e-4
    wrong = [*out[:4], (out[4] + 1) % 300, *out[5:]]
    regrets = judge.regrets(PROMPT, wrong, rule)
    assert regrets[:4].max() < 1e-4
    assert regrets[4] > 1e-2
    np.testing.assert_array_equal(judge.regrets(PROMPT, wrong, rule, 3), regrets[3:])
    found = judge.compare(PROMPT, out, wrong, rule)
    assert (found.verdict, found.position, found.tokens) == ("different", 4, (out[4], wrong[4]))
    assert found.margin == pytest.approx(regrets[4])
    other = Rule(rule.temperature or 1.3, rule.seed + 1)
    assert judge.regrets(PROMPT, out, other).max() > 1e-2, "under another seed these are not the tokens"


def test_a_tie_excuses_one_token_and_not_what_follows(decoder: Any) -> None:
    """With a bound just above the margin of the runner-up, its own continuation is a tie; a spoilt one is not."""
    import torch

    out = decoder.generate([PROMPT], max_tokens=6, ignore_eos=True)[0].ids
    logits = decoder.engine.parts.target.plain_logits(PROMPT + out[:2])[-1].double()
    best, second = torch.topk(logits, 2)
    assert int(second[0]) == out[2]
    margin = float(best[0] - best[1])
    branch = [*out[:2], int(second[1])]
    rest = decoder.generate([PROMPT + branch], max_tokens=3, ignore_eos=True)[0].ids
    judge = Judge(decoder.engine, bound=margin * 1.01)
    tie = judge.compare(PROMPT, out, branch + rest)
    assert (tie.verdict, tie.position) == ("tie", 2)
    assert tie.margin == pytest.approx(margin, rel=1e-3)
    assert "within" in str(tie)
    below = Judge(decoder.engine, bound=margin * 0.9).compare(PROMPT, out, branch + rest)
    assert below.verdict == "different"
    worst = int(decoder.engine.parts.target.plain_logits(PROMPT + branch)[-1].argmin())
    spoilt = judge.compare(PROMPT, out, [*branch, worst, *rest[1:]])
    assert spoilt.verdict == "different"
    assert spoilt.margin <= judge.bound < spoilt.after
    assert "then a token" in str(spoilt)


def test_an_output_that_just_ends_early_is_different(judge: Judge) -> None:
    found = judge.compare(PROMPT, [7, 8], [7])
    assert (found.verdict, found.position, found.tokens) == ("different", 1, (8, None))
    assert found.as_dict()["margin"] is None


def test_a_target_without_a_reference_is_asked_through_a_packed_forward(decoder: Any) -> None:
    from types import SimpleNamespace

    engine = decoder.engine
    real = engine.parts.target
    bare = SimpleNamespace(forward=real.forward, device=real.device, dtype=real.dtype)
    parts = SimpleNamespace(target=bare, draws=engine.parts.draws)
    out = decoder.generate([PROMPT], max_tokens=5, ignore_eos=True)[0].ids
    packed = Judge(SimpleNamespace(parts=parts)).regrets(PROMPT, [*out[:4], 3], Rule())  # type: ignore[arg-type]
    plain = Judge(engine).regrets(PROMPT, [*out[:4], 3], Rule())
    np.testing.assert_allclose(packed, plain, atol=1e-4)


def test_summary_counts_each_verdict() -> None:
    found = [Comparison("identical"), Comparison("tie", 1), Comparison("different", 2)]
    assert summarise(found, 9) == "1 of 3 outputs identical, 9 tokens; 1 numeric tie; 1 DIFFERENT"


def test_accepted_tokens_are_coloured_in_a_terminal(decoder: Any) -> None:
    from rich.console import Console

    from dspark.cli._render import View
    from dspark.engine.state import Chunk

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system="standard", legacy_windows=False)
    ids = decoder.tokenizer("the quick brown fox")["input_ids"]
    with View(console, ["title"], ["plain", "ngram"], decoder.tokenizer) as view:
        view.feed(0, 0, Chunk("a", ids=tuple(ids), accepted=0))
        view.feed(0, 1, Chunk("a", ids=tuple(ids), accepted=len(ids) - 1, finish_reason="length"))
        view.note(0, 1, "9.9 tokens/s")
    shown = out.getvalue()
    assert "ngram 9.9 tokens/s" in shown
    last = shown.rsplit("9.9 tokens/s", 1)[1]
    coloured = "".join(re.findall(r"\x1b\[1;32m([^\x1b]*)", last))
    assert coloured.strip()
    assert coloured.strip() == decoder.tokenizer.decode(ids[:-1]).strip()
