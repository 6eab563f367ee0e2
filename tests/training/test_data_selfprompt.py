"""Prompts that the target writes itself: whole users' turns, each once, the same in pieces."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import SpeculativeDecoder
from dspark.errors import ConfigError, DataError
from dspark.sampling.draws import choice_seed
from dspark.testing.toys import TableTarget
from dspark.training.chat_format import ChatFormat
from dspark.training.data_plan import Budget, DataConfig
from dspark.training.data_run import DataRun
from dspark.training.selfprompt import SelfPromptConfig, SelfPrompts

END, START = 0, 1
CONFIG = DataConfig(max_tokens=6, max_prompt=90, seed=5)


def decoder(tokenizer: Any, table: torch.Tensor, slots: int = 3) -> SpeculativeDecoder:
    target = TableTarget(table, mix=0.5, eos_token_ids=(END,))
    return SpeculativeDecoder.from_pretrained(
        target, "none", tokenizer=tokenizer, cost=None, max_slots=slots, max_len=CONFIG.max_len
    )


@pytest.fixture
def babbler(tiny_tokenizer: Any) -> Callable[..., SpeculativeDecoder]:
    """Draws from two words, an end and, seldom, a start: short turns, some of them twice, some broken."""
    table = torch.full((300, 300), -40.0, dtype=torch.float64)
    for words, logit in ((tiny_tokenizer("the do ")["input_ids"], 1.0), ([END], 1.0), ([START], -1.0)):
        table[:, words] = logit
    return lambda slots=3: decoder(tiny_tokenizer, table, slots)


WRITE = SelfPromptConfig(12, min_tokens=2, max_tokens=8)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_prompts_are_users_turns_and_every_other_candidate_has_a_reason(
    babbler: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    report = DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE).run()
    prompts = lines(tmp_path / "out.prompts.jsonl")
    texts = [record["messages"][0]["content"] for record in prompts]
    assert report.prompts == len(prompts) == 12
    assert len({" ".join(text.casefold().split()) for text in texts}) == 12
    assert all(text.strip() == text != "" for text in texts)
    assert not any("<|" in text for text in texts)
    rejected = [r for r in lines(tmp_path / "out.skipped.jsonl") if "candidate" in r]
    reasons = {r["reason"].removeprefix("self-written prompt: ") for r in rejected}
    assert reasons == {"too short", "too long", "a duplicate", "not a user's turn", "empty"}
    judged = sorted([r["candidate"] for r in prompts] + [r["candidate"] for r in rejected])
    assert judged == list(range(len(judged)))
    answered = {r["index"]: r for r in lines(tmp_path / "out.jsonl")}
    for index, record in answered.items():
        assert record["messages"][0]["content"] == texts[index]
        assert record["prompt_ids"] == ChatFormat(tiny_tokenizer).encode(record["messages"][:1])
        assert record["source"] == "self"
    assert len(answered) + sum("index" in r for r in lines(tmp_path / "out.skipped.jsonl")) == 12


def test_a_candidate_is_what_the_target_says_after_the_opening(
    babbler: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """With the seed of its number, alone as in the batch."""
    DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE).run()
    alone = babbler()
    opening = ChatFormat(tiny_tokenizer).user_turn().opening
    for record in lines(tmp_path / "out.prompts.jsonl"):
        seed = choice_seed(choice_seed(5, 2**63), record["candidate"])
        result = alone.generate(list(opening), max_tokens=9, temperature=1.0, seed=seed)[0]
        assert result.ids[-1] == END
        assert result.text.strip() == record["messages"][0]["content"]
        assert record["tokens"] == len(result.ids)


def test_seeds_of_candidates_are_no_seeds_of_answers(babbler: Callable[..., Any], tmp_path: Path) -> None:
    run = DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE)
    assert isinstance(run._writer, SelfPrompts)
    writing = {run._writer.params(k).seed for k in range(500)}
    answers = {CONFIG.params(k, 0).seed for k in range(500)}
    assert len(writing) == len(answers) == 500
    assert not writing & answers


@pytest.mark.parametrize("steps", [1, 4, 9, 25])
def test_in_pieces_the_same_is_written(babbler: Callable[..., Any], tmp_path: Path, steps: int) -> None:
    DataRun(babbler(), CONFIG, tmp_path / "whole.jsonl", WRITE).run()
    out, pieces = tmp_path / "out.jsonl", 0
    while True:
        pieces += 1
        asked = iter(range(10**9))
        most = steps * pieces
        run = DataRun(babbler(2 + pieces % 3), CONFIG, out, WRITE)
        report = run.run(stopped=lambda asked=asked, most=most: next(asked) > most)  # type: ignore[misc]
        if not report.stopped:
            break
        for name in ("out.prompts.jsonl", "out.skipped.jsonl", "out.jsonl"):
            with (tmp_path / name).open("ab") as file:
                file.write(b'{"candidate":')
    assert pieces > 1
    for ending in (".prompts.jsonl", ".skipped.jsonl", ".jsonl"):
        key = lambda r: (r.get("candidate", -1), r.get("index", -1))  # noqa: E731
        want, got = (sorted(lines(tmp_path / f"{name}{ending}"), key=key) for name in ("whole", "out"))
        assert got == want


def test_more_prompts_may_be_asked_for_later(babbler: Callable[..., Any], tmp_path: Path) -> None:
    few = SelfPromptConfig(5, min_tokens=2, max_tokens=8)
    DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", few).run()
    first = (tmp_path / "out.prompts.jsonl").read_bytes()
    assert first.count(b"\n") == 5
    DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE).run()
    second = (tmp_path / "out.prompts.jsonl").read_bytes()
    assert second.startswith(first)
    assert second.count(b"\n") == 12
    DataRun(babbler(), CONFIG, tmp_path / "whole.jsonl", WRITE).run()
    assert second == (tmp_path / "whole.prompts.jsonl").read_bytes()
    longer = SelfPromptConfig(12, min_tokens=2, max_tokens=9)
    with pytest.raises(DataError, match=r"self_prompts\.max_tokens was 8, is 9"):
        DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", longer)


@pytest.mark.parametrize("tokens", [20, 120, 400])
def test_a_budget_covers_prompts_and_answers(babbler: Callable[..., Any], tmp_path: Path, tokens: int) -> None:
    many = SelfPromptConfig(200, min_tokens=2, max_tokens=8)
    report = DataRun(babbler(2), CONFIG, tmp_path / "out.jsonl", many).run(Budget(tokens=tokens))
    assert report.stopped == "token budget"
    spent = sum(r["tokens"] for r in lines(tmp_path / "out.prompts.jsonl") + lines(tmp_path / "out.skipped.jsonl"))
    spent += sum(len(r["response_ids"]) for r in lines(tmp_path / "out.jsonl"))
    assert spent == report.total_tokens <= tokens
    assert tokens < 400 or len(lines(tmp_path / "out.jsonl")) > 10, "prompts do not use it all up"


def test_the_estimate_and_a_budget_of_bytes(babbler: Callable[..., Any], tmp_path: Path) -> None:
    run = DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE)
    plan = run.plan()
    assert (plan.prompts, plan.responses, plan.tokens) == (12, 12, 12 * 8 + 12 * 6)
    assert list(tmp_path.iterdir()) == []
    report = run.run(Budget(bytes=1500))
    assert report.stopped == "byte budget"
    sizes = {p.name: p.stat().st_size for p in tmp_path.iterdir()}
    assert 1000 < sum(size for name, size in sizes.items() if name.endswith(".jsonl")) <= 1500
    DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE).run()
    plan = DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE).plan()
    assert plan.responses == 0
    assert plan.bytes == sum(p.stat().st_size for p in tmp_path.glob("*.jsonl"))


def test_a_target_that_writes_always_the_same_is_given_up(tiny_tokenizer: Any, tmp_path: Path) -> None:
    ids = tiny_tokenizer("the fox")["input_ids"]
    opening = ChatFormat(tiny_tokenizer).user_turn().opening
    table = torch.zeros(300, 300, dtype=torch.float64)
    for before, token in zip([opening[-1], *ids], [*ids, END], strict=True):
        table[before, token] = 60.0
    few = SelfPromptConfig(3, min_tokens=1, max_tokens=8)
    with pytest.raises(DataError, match=r"1 of 3 prompts after .* candidates .*a duplicate"):
        DataRun(decoder(tiny_tokenizer, table), CONFIG, tmp_path / "out.jsonl", few).run()
    (only,) = lines(tmp_path / "out.prompts.jsonl")
    assert only["messages"] == [{"role": "user", "content": "the fox"}]


def test_a_turn_that_text_closes(babbler: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path) -> None:
    """The closing text ends a prompt and is no part of it."""
    bracketed = copy.deepcopy(tiny_tokenizer)
    bracketed.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} do do{% endfor %}"
    table = babbler().engine.parts.target.table[0].clone()
    table[:, [END, START]] = -40.0
    report = DataRun(decoder(bracketed, table), CONFIG, tmp_path / "out.jsonl", WRITE).run()
    assert report.prompts == 12
    texts = [r["messages"][0]["content"] for r in lines(tmp_path / "out.prompts.jsonl")]
    assert any("do" in text for text in texts)
    assert not any("do do" in text for text in texts)


def test_settings_that_do_not_fit_are_refused(babbler: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path) -> None:
    for wrong in ({"count": 0}, {"temperature": 0.0}, {"min_tokens": 0}, {"min_tokens": 9, "max_tokens": 8}):
        with pytest.raises(ConfigError):
            SelfPromptConfig(**{"count": 3, **wrong})
    with pytest.raises(ConfigError, match="do not fit a slot of 96"):
        DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", SelfPromptConfig(3, max_tokens=95))
    raw = DataConfig(max_tokens=6, max_prompt=90, chat=False)
    with pytest.raises(ConfigError, match="chat=True"):
        DataRun(babbler(), raw, tmp_path / "out.jsonl", WRITE)
    (tmp_path / "out.meta.json").unlink(missing_ok=True)
    (tmp_path / "out.prompts.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"out\.prompts\.jsonl' line 1"):
        DataRun(babbler(), CONFIG, tmp_path / "out.jsonl", WRITE)
