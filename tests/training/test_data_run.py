"""Regenerated responses: what they are, and that no end of a run loses or repeats one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import SpeculativeDecoder
from dspark.errors import ConfigError, DataError
from dspark.sampling.draws import choice_seed
from dspark.testing.faults import FaultyTarget, Trip
from dspark.testing.toys import TableTarget, random_table
from dspark.training import regenerate
from dspark.training.data_output import DataFiles
from dspark.training.data_plan import Budget, DataConfig
from dspark.training.data_run import DataRun

V = 12
CONFIG = DataConfig(temperatures=(1.0, 0.0), max_tokens=8, max_prompt=8, seed=5, chat=False)


@pytest.fixture(scope="module")
def chatter(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    """A tiny random Llama that chats."""
    return SpeculativeDecoder.from_pretrained(
        tiny_model, "none", tokenizer=tiny_tokenizer, cost=None, max_slots=4, max_len=160
    )


CHAT = DataConfig(max_tokens=10, max_prompt=150, seed=5)


def toy(target: Any = None, slots: int = 3) -> SpeculativeDecoder:
    """A table of 12 tokens, of which 0 ends the text."""
    if target is None:
        target = TableTarget(random_table(V, V, seed=3), mix=1.0, eos_token_ids=(0,))
    return SpeculativeDecoder.from_pretrained(target, "none", cost=None, max_slots=slots, max_len=16)


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
        return path

    return write


@pytest.fixture
def numbers(prompts: Callable[..., Path]) -> Path:
    """Twenty prompts of token ids."""
    return prompts(*({"prompt": [1 + i % 11, 1 + i // 2, 1 + 3 * i % 11], "source": f"s{i % 3}"} for i in range(20)))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_key(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Records by (index, temperature, sample, turn), each once."""
    found = {}
    for record in lines(path):
        key = tuple(record[name] for name in ("index", "temperature", "sample", "turn"))
        assert key not in found, f"{key} is there twice"
        found[key] = record
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# --- what is written ---------------------------------------------------------------------------------------------


def test_responses_are_the_targets_own(chatter: Any, prompts: Callable[..., Path], tmp_path: Path) -> None:
    path = prompts({"turns": ["the fox"], "source": "here"}, {"prompt": [5, 6, 7]})
    config = dataclasses.replace(CHAT, temperatures=(0.0, 1.0), samples=2, top_k=40)
    report = DataRun(chatter, config, tmp_path / "out.jsonl", path).run()
    found = by_key(tmp_path / "out.jsonl")
    assert set(found) == {(i, t, s, 0) for i in (0, 1) for t, s in ((0.0, 0), (1.0, 0), (1.0, 1))}
    assert report.responses == report.written == 6
    for (index, temperature, sample, _), record in found.items():
        prompt: Any = [user("the fox")] if index == 0 else [5, 6, 7]
        seed = choice_seed(choice_seed(5, index), 1 + sample) if temperature else None
        want = chatter.generate(prompt, max_tokens=10, top_k=40, temperature=temperature, seed=seed)[0]
        assert record["prompt_ids"] == want.prompt_ids
        assert record["response_ids"] == want.ids
        assert record["finish_reason"] == want.finish_reason
        assert record["sampling"] == {"max_tokens": 10, "top_k": 40, **({"seed": seed} if temperature else {})}
        assert record["source"] == ("here" if index == 0 else None)
        assert record.get("messages") == ([user("the fox"), said(want.text)] if index == 0 else None)
    assert len({tuple(r["response_ids"]) for r in found.values()}) == 6


def test_one_variant_uses_the_seed_of_its_prompt(chatter: Any, prompts: Callable[..., Path], tmp_path: Path) -> None:
    path = prompts("", {"prompt": "the fox"})
    DataRun(chatter, CHAT, tmp_path / "out.jsonl", path).run()
    (record,) = lines(tmp_path / "out.jsonl")
    assert (record["index"], record["sampling"]["seed"]) == (1, choice_seed(5, 1)), "blank lines count"
    want = chatter.generate([user("the fox")], max_tokens=10, temperature=1.0, seed=choice_seed(5, 1))[0]
    assert record["response_ids"] == want.ids


def test_every_turn_is_answered_upon_the_targets_own_answers(
    chatter: Any, prompts: Callable[..., Path], tmp_path: Path
) -> None:
    system = {"role": "system", "content": "be quick"}
    old = [system, user("the fox"), said("never"), user("the dog"), said("said"), user("a")]
    path = prompts({"messages": old}, {"turns": ["a", "b"]})
    DataRun(chatter, dataclasses.replace(CHAT, temperatures=(0.0,)), tmp_path / "out.jsonl", path).run()
    found = by_key(tmp_path / "out.jsonl")
    assert [key[3] for key in found if key[0] == 0] == [0, 1, 2]
    chat = [system]
    for turn, text in enumerate(("the fox", "the dog", "a")):
        chat.append(user(text))
        want = chatter.generate(chat, max_tokens=10)[0]
        record = found[0, 0.0, 0, turn]
        assert record["prompt_ids"] == want.prompt_ids
        assert record["response_ids"] == want.ids
        assert record["turns"] == 3
        chat.append(said(want.text))
        assert record["messages"] == chat
    assert found[1, 0.0, 0, 1]["messages"][0] == user("a")


def test_turns_of_a_conversation_have_seeds_of_their_own() -> None:
    seeds = {CHAT.params(index, 0, turn).seed: (index, turn) for index in range(20) for turn in range(5)}
    assert len(seeds) == 100
    assert CHAT.params(3, 0).seed == choice_seed(5, 3)
    assert dataclasses.replace(CHAT, seed=None).params(3, 0).seed is None


def test_the_header_says_how_it_was_made(chatter: Any, prompts: Callable[..., Path], tmp_path: Path) -> None:
    path = prompts({"prompt": "the fox"})
    DataRun(chatter, dataclasses.replace(CHAT, system="be quick"), tmp_path / "out.jsonl", path).run()
    header = json.loads((tmp_path / "out.meta.json").read_text())
    assert header["sampling"] == {
        "temperatures": [1.0], "samples": 1, "max_tokens": 10, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "seed": 5,
    }  # fmt: skip
    assert (header["system"], header["thinking"], header["template_args"]) == ("be quick", None, {})
    assert len(header["chat_template"]) == 16
    assert header["target"]["dtype"] == "float32"
    assert (header["input"]["file"], header["input"]["bytes"]) == ("prompts.jsonl", path.stat().st_size)
    assert set(header["about"]) == {"dspark", "drafter", "device", "torch", "transformers"}


# --- ends and beginnings -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What an uninterrupted run over ``numbers`` writes."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "prompts.jsonl"
    records = ({"prompt": [1 + i % 11, 1 + i // 2, 1 + 3 * i % 11], "source": f"s{i % 3}"} for i in range(20))
    path.write_text("".join(f"{json.dumps(r)}\n" for r in records))
    DataRun(toy(), CONFIG, folder / "out.jsonl", path).run()
    found = by_key(folder / "out.jsonl")
    skipped = lines(folder / "out.skipped.jsonl")
    assert len(found) + len(skipped) == 40
    assert 0 < len(skipped) < 20, "some answers have one token"
    return found


def after(steps: int) -> Callable[[], bool]:
    """Says stop from the given question on."""
    asked = iter(range(10**9))
    return lambda: next(asked) >= steps


@pytest.mark.parametrize("steps", [0, 1, 3, 10, 30, 100])
def test_a_run_in_pieces_writes_the_same(numbers: Path, tmp_path: Path, whole: Any, steps: int) -> None:
    out = tmp_path / "out.jsonl"
    reports = []
    while not reports or reports[-1].stopped:
        reports.append(DataRun(toy(slots=2 + len(reports) % 3), CONFIG, out, numbers).run(stopped=after(steps + 1)))
        assert reports[-1].responses == len(lines(out))
        if reports[-1].stopped and len(reports) % 2:  # a process that was killed while it wrote
            with out.open("ab") as file:
                file.write(b'{"index":3,"temperature":1.0,"respo')
        steps = 2 * steps + 2
    assert by_key(out) == whole
    assert sum(report.written for report in reports) == len(whole)
    assert len(reports) > 1
    skipped = [(r["index"], r["temperature"]) for r in lines(tmp_path / "out.skipped.jsonl")]
    assert len(set(skipped)) == len(skipped) == 40 - len(whole)
    again = DataRun(toy(), CONFIG, out, numbers).run()
    assert (again.written, again.tokens, again.responses) == (0, 0, len(whole))


@pytest.mark.parametrize("kept", range(7))
def test_conversations_go_on_in_the_middle(
    chatter: Any, prompts: Callable[..., Path], tmp_path: Path, kept: int
) -> None:
    path = prompts({"turns": ["a", "b", "c"]}, {"turns": ["the fox", "the dog"]}, {"turns": ["d"]})
    out = tmp_path / "out.jsonl"
    DataRun(chatter, CHAT, out, path).run()
    want = by_key(out)
    assert len(want) == 6
    first = out.read_bytes().splitlines(keepends=True)[:kept]
    out.write_bytes(b"".join(first))
    report = DataRun(chatter, CHAT, out, path).run()
    assert report.written == 6 - kept
    assert by_key(out) == want
    assert out.read_bytes().startswith(b"".join(first))


def test_an_interrupt_in_a_step_leaves_what_is_finished(numbers: Path, tmp_path: Path, whole: Any) -> None:
    class Interrupted(TableTarget):
        def forward(self, layout: Any, taps: Any = ()) -> Any:
            if len(self.forwards) == 12:
                raise KeyboardInterrupt
            return super().forward(layout, taps)

    out = tmp_path / "out.jsonl"
    decoder = toy(Interrupted(random_table(V, V, seed=3), mix=1.0, eos_token_ids=(0,)))
    with pytest.raises(KeyboardInterrupt):
        DataRun(decoder, CONFIG, out, numbers).run()
    assert not decoder.engine.live()
    assert 0 < len(by_key(out)) < len(whole)
    DataRun(toy(), CONFIG, out, numbers).run()
    assert by_key(out) == whole


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_tokens": 7}, "sampling.max_tokens was 8, is 7"),
        ({"temperatures": (1.0,)}, "temperatures"),
        ({"seed": 6}, "sampling.seed was 5, is 6"),
        ({"seed": None}, "sampling.seed was 5, is null"),
        ({"samples": 2}, "sampling.samples"),
        ({"top_k": 3, "min_p": 0.1}, "sampling.min_p was 0.0, is 0.1; sampling.top_k was 0, is 3"),
        ({"max_prompt": 7}, "max_prompt"),
        ({"min_response": 1}, "min_response"),
        ({"system": "be quick"}, "system"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_touched(
    numbers: Path, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    out = tmp_path / "out.jsonl"
    DataRun(toy(), CONFIG, out, numbers).run(stopped=after(8))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match="other settings") as error:
        DataRun(toy(), dataclasses.replace(CONFIG, **changed), out, numbers)
    assert named in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_target_is_refused(numbers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    DataRun(toy(), CONFIG, out, numbers).run(stopped=after(8))
    other = TableTarget(random_table(V, V, seed=3))
    other.name = "another"
    with pytest.raises(DataError, match=r'target\.model was "toy-table", is "another"'):
        DataRun(toy(other), CONFIG, out, numbers)


def test_a_target_that_was_trained_further_is_refused(
    tiny_model: Any, tiny_tokenizer: Any, prompts: Callable[..., Path], tmp_path: Path
) -> None:
    """Same name, same configuration, one weight of a norm."""

    def run() -> DataRun:
        target = SpeculativeDecoder.from_pretrained(
            tiny_model, "none", tokenizer=tiny_tokenizer, cost=None, max_slots=1, max_len=160
        )
        return DataRun(target, CHAT, tmp_path / "out.jsonl", path)

    path = prompts({"prompt": "the fox"})
    run().run()
    run().run()
    weight = tiny_model.model.layers[1].input_layernorm.weight.data
    weight[3] += 0.01
    try:
        with pytest.raises(DataError, match=r"target\.weights was "):
            run()
    finally:
        weight[3] -= 0.01


def test_prompts_may_grow_at_their_end_and_nowhere_else(numbers: Path, tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "out.jsonl"
    all_lines = numbers.read_bytes().splitlines(keepends=True)
    numbers.write_bytes(b"".join(all_lines[:5]))
    DataRun(toy(), CONFIG, out, numbers).run()
    numbers.write_bytes(b"".join(all_lines))
    DataRun(toy(), CONFIG, out, numbers).run()
    assert by_key(out) == whole
    for other in (all_lines[:5], [all_lines[1], *all_lines[1:]]):
        numbers.write_bytes(b"".join(other))
        with pytest.raises(DataError, match=r"prompts\.jsonl.*only be added"):
            DataRun(toy(), CONFIG, out, numbers)


def test_damaged_data_is_named(numbers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    DataRun(toy(), CONFIG, out, numbers).run()
    good = out.read_bytes()
    first = json.loads(good.splitlines()[0])
    for wrong in (first, {**first, "temperature": 0.3}, {**first, "index": "x"}, {"index": 1, "temperature": 1.0}):
        out.write_bytes(good + json.dumps(wrong).encode() + b"\n")
        with pytest.raises(DataError, match=rf"out\.jsonl' line {len(good.splitlines()) + 1}"):
            DataRun(toy(), CONFIG, out, numbers)


def test_killed_before_the_first_response(numbers: Path, tmp_path: Path) -> None:
    """The files may be there, and the header not."""
    out = tmp_path / "out.jsonl"
    out.touch()
    (tmp_path / "out.skipped.jsonl").touch()
    (tmp_path / "out.meta.json.new").write_text("{")
    assert DataRun(toy(), CONFIG, out, numbers).run().responses == len(lines(out)) > 20


def test_settings_are_checked_again_when_the_files_are_taken(numbers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    late = DataRun(toy(), dataclasses.replace(CONFIG, top_k=3), out, numbers)
    DataRun(toy(), CONFIG, out, numbers).run(stopped=lambda: True)
    assert out.stat().st_size == 0
    with pytest.raises(DataError, match=r"sampling\.top_k was 0, is 3"):
        late.run()


# --- responses without a header --------------------------------------------------------------------------------------


def bare(out: Path) -> None:
    """Leave only what any script would write."""
    names = ("index", "source", "temperature", "prompt_ids", "response_ids", "finish_reason")
    kept = [json.dumps({name: record[name] for name in names}) for record in lines(out)]
    out.write_text("".join(f"{line}\n" for line in kept))
    for other in (DataFiles(out).header, DataFiles(out).skipped):
        other.unlink()


def test_responses_without_a_header_are_adopted_on_demand(numbers: Path, tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "out.jsonl"
    DataRun(toy(), CONFIG, out, numbers).run(stopped=after(30))
    bare(out)
    before = out.read_bytes()
    with pytest.raises(DataError, match="without the header"):
        DataRun(toy(), CONFIG, out, numbers)
    DataRun(toy(), CONFIG, out, numbers, adopt=True).run()
    assert out.read_bytes().startswith(before)
    assert {(r["index"], r["temperature"]): r["response_ids"] for r in lines(out)} == {
        key[:2]: record["response_ids"] for key, record in whole.items()
    }
    DataRun(toy(), CONFIG, out, numbers)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"prompt_ids": [9, 9, 9]}, "prompt_ids"),
        ({"index": 20}, "no prompt 20"),
        ({"response_ids": list(range(9))}, "9 tokens"),
        ({"temperature": 0.7}, "temperature 0.7"),
    ],
)
def test_what_this_run_would_not_have_written_is_not_adopted(
    numbers: Path, tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    out = tmp_path / "out.jsonl"
    DataRun(toy(), CONFIG, out, numbers).run(stopped=after(30))
    bare(out)
    first, *others = lines(out)
    out.write_text("".join(f"{json.dumps(r)}\n" for r in [{**first, **changed}, *others]))
    with pytest.raises(DataError, match=f"line 1 .*{why}"):
        DataRun(toy(), CONFIG, out, numbers, adopt=True)


# --- what gets no answer ---------------------------------------------------------------------------------------------


def test_what_is_skipped_is_counted_reported_and_not_tried_again(
    chatter: Any, prompts: Callable[..., Path], tmp_path: Path
) -> None:
    path = prompts(
        {"turns": ["the fox"]}, "{bad", {"turns": []}, {"messages": [user("")]}, {"prompt": "the dog " * 100},
        {"prompt": [999]}, {"turns": ["a", "the dog " * 100, "b"]},
    )  # fmt: skip
    out = tmp_path / "out.jsonl"
    config = dataclasses.replace(CHAT, temperatures=(1.0, 0.0))
    run = DataRun(chatter, config, out, path)
    plan = run.plan()
    assert plan.prompts == 4
    assert plan.too_long == 1
    assert plan.skipped == {"not JSON": 1, "empty conversation": 1, "empty message": 1}
    report = run.run()
    want = {
        "not JSON": 1, "empty conversation": 1, "empty message": 1, "prompt too long": 4, "refused by the engine": 2,
    }  # fmt: skip
    assert report.skipped == want
    assert {key[0::3] for key in by_key(out)} == {(0, 0), (6, 0)}
    skipped = lines(tmp_path / "out.skipped.jsonl")
    assert len(skipped) == 9
    assert {r["index"] for r in skipped if r["reason"] == "prompt too long"} == {4, 6}
    assert next(r for r in skipped if r["reason"] == "refused by the engine")["detail"].count("999")
    size = (tmp_path / "out.skipped.jsonl").stat().st_size
    again = DataRun(chatter, config, out, path).run()
    assert again.skipped == want
    assert again.tokens == 0
    assert (tmp_path / "out.skipped.jsonl").stat().st_size == size


def test_an_answer_of_one_token_ends_its_conversation(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """The target says nothing but its EOS."""
    table = torch.zeros(300, 300, dtype=torch.float64)
    table[:, 0] = 50.0
    decoder = SpeculativeDecoder.from_pretrained(
        TableTarget(table, eos_token_ids=(0,)), "none", tokenizer=tiny_tokenizer, cost=None, max_slots=2, max_len=160
    )
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n{"turns": ["c"]}\n')
    report = DataRun(decoder, CHAT, tmp_path / "out.jsonl", path).run()
    assert report.skipped == {"response of fewer than 2 tokens": 2}
    assert (report.responses, report.tokens, report.total_tokens) == (0, 2, 2)
    assert lines(tmp_path / "out.jsonl") == []
    assert [r["turn"] for r in lines(tmp_path / "out.skipped.jsonl")] == [0, 0]
    kept = DataRun(decoder, dataclasses.replace(CHAT, min_response=1), tmp_path / "all.jsonl", path).run()
    assert kept.responses == 3


def test_a_template_that_refuses_a_chat(chatter: Any, prompts: Callable[..., Path], tmp_path: Path) -> None:
    template = chatter.tokenizer.chat_template
    path = prompts({"turns": ["the fox"]}, {"messages": [{"role": "developer", "content": "x"}, user("a")]})
    try:
        chatter.tokenizer.chat_template = (
            "{% if messages[0]['role'] == 'developer' %}{{ raise_exception('no developers') }}{% endif %}" + template
        )
        run = DataRun(chatter, CHAT, tmp_path / "out.jsonl", path)
        assert run.plan().prompts == 2
        report = run.run()
    finally:
        chatter.tokenizer.chat_template = template
    assert report.skipped == {"refused by the chat template": 1}
    assert "no developers" in lines(tmp_path / "out.skipped.jsonl")[0]["detail"]
    assert report.responses == 1


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_request_that_fails_is_reported_and_tried_again(numbers: Path, tmp_path: Path, whole: Any) -> None:
    table = random_table(V, V, seed=3)
    out = tmp_path / "out.jsonl"
    faulty = toy(FaultyTarget(table, Trip(4), mix=1.0, eos_token_ids=(0,)))
    report = DataRun(faulty, CONFIG, out, numbers).run()
    assert len(report.failed) == 4, "prompts 6 and 7 begin [x, 4]"
    assert all("x_1 is 4" in message for message in report.failed)
    assert report.stopped == ""
    assert {key for key in whole if key not in by_key(out)} <= {(i, t, 0, 0) for i in (6, 7) for t in (0.0, 1.0)}
    again = DataRun(toy(), CONFIG, out, numbers).run()
    assert again.failed == []
    assert by_key(out) == whole


def test_a_target_that_fails_always_ends_the_run(
    prompts: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "MOST_FAILURES", 5)
    path = prompts(*({"prompt": [1, 4, 3]} for _ in range(20)))
    faulty = toy(FaultyTarget(random_table(V, V, seed=3), Trip(4)))
    with pytest.raises(DataError, match=r"5 requests failed one after another.*x_1 is 4"):
        DataRun(faulty, CONFIG, tmp_path / "out.jsonl", path).run()
    assert not faulty.engine.live()


def test_two_runs_at_once(numbers: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    out = tmp_path / "out.jsonl"
    second = DataRun(toy(), CONFIG, out, numbers)

    def meanwhile(report: Any) -> None:
        with pytest.raises(DataError, match="another process"):
            second.run()

    DataRun(toy(), CONFIG, out, numbers).run(on_step=meanwhile)
    with pytest.raises(DataError, match="changed"):
        second.run()
    by_key(out)


# --- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [8, 30, 100])
def test_a_budget_of_tokens_is_never_exceeded_and_can_be_raised(
    numbers: Path, tmp_path: Path, whole: Any, tokens: int
) -> None:
    out = tmp_path / "out.jsonl"
    report = DataRun(toy(), CONFIG, out, numbers).run(Budget(tokens=tokens))
    assert report.stopped == "token budget"
    both = [*lines(out), *lines(tmp_path / "out.skipped.jsonl")]
    spent = sum(len(r["response_ids"]) if "response_ids" in r else r["tokens"] for r in both)
    assert tokens - CONFIG.max_tokens < spent == report.tokens == report.total_tokens <= tokens
    assert DataRun(toy(), CONFIG, out, numbers).run(Budget(tokens=tokens)).tokens == 0
    assert DataRun(toy(), CONFIG, out, numbers).run(Budget(tokens=10**6)).stopped == ""
    assert by_key(out) == whole


@pytest.mark.parametrize("size", [1, 500, 2000])
def test_a_budget_of_bytes_is_never_exceeded_and_can_be_raised(
    numbers: Path, tmp_path: Path, whole: Any, size: int
) -> None:
    out = tmp_path / "out.jsonl"
    report = DataRun(toy(), CONFIG, out, numbers).run(Budget(bytes=size))
    assert report.stopped == "byte budget"
    taken = out.stat().st_size + (tmp_path / "out.skipped.jsonl").stat().st_size
    assert size - 500 < taken <= size
    DataRun(toy(), CONFIG, out, numbers).run()
    assert by_key(out) == whole


def test_the_estimate_comes_before_anything_is_written(numbers: Path, tmp_path: Path, whole: Any) -> None:
    out = tmp_path / "out.jsonl"
    run = DataRun(toy(), CONFIG, out, numbers)
    plan = run.plan()
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
    assert (plan.prompts, plan.responses, plan.there, plan.tokens, plan.prompt_tokens) == (20, 40, 0, 320, 120)
    plan.check(Budget())
    plan.check(Budget(320, plan.bytes))
    with pytest.raises(DataError, match="320 tokens against 319 allowed"):
        plan.check(Budget(tokens=319))
    with pytest.raises(DataError, match=f"{plan.bytes:,} bytes against 9 allowed"):
        plan.check(Budget(bytes=9))
    run.run()
    plan = DataRun(toy(), CONFIG, out, numbers).plan()
    assert (plan.responses, plan.there) == (0, len(whole))
    assert plan.bytes == out.stat().st_size + (tmp_path / "out.skipped.jsonl").stat().st_size


def test_the_estimate_is_near(chatter: Any, prompts: Callable[..., Path], tmp_path: Path) -> None:
    """Answers of a random model seldom end early, so the size at the longest is near what is written."""
    texts = ["the quick brown fox", "jumps over the lazy dog and runs away", "by the sea"]
    path = prompts(*({"turns": [texts[i % 3], texts[(i + 1) % 3]][: 1 + i % 2]} for i in range(12)))
    out = tmp_path / "out.jsonl"
    run = DataRun(chatter, dataclasses.replace(CHAT, max_tokens=24, max_prompt=136), out, path)
    plan = run.plan()
    report = run.run()
    assert report.tokens <= plan.tokens
    assert 0.6 * plan.bytes < out.stat().st_size < 1.2 * plan.bytes
    prompt_tokens = sum(len(r["prompt_ids"]) for r in lines(out))  # a history of odd bytes has more than it had before
    assert prompt_tokens == pytest.approx(plan.prompt_tokens, rel=0.35)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_settings_that_do_not_fit_are_refused(chatter: Any, numbers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match=r"hold 16 tokens.*are 17"):
        DataRun(toy(), dataclasses.replace(CONFIG, max_tokens=9), out, numbers)
    with pytest.raises(ConfigError, match="no chat template"):
        DataRun(toy(), dataclasses.replace(CONFIG, chat=True), out, numbers)
    with pytest.raises(ConfigError, match="enable_thinking"):
        DataRun(chatter, dataclasses.replace(CHAT, template_args={"enable_thinking": True}), out, numbers)
    for wrong in (
        {"temperatures": ()}, {"temperatures": (1.0, 1)}, {"temperatures": (-1.0,)}, {"samples": 0},
        {"max_tokens": 0}, {"top_p": 2.0}, {"min_response": 0}, {"min_response": 9},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            dataclasses.replace(CONFIG, **wrong)
    with pytest.raises(ConfigError, match="tokens"):
        Budget(tokens=0)
