"""``dspark generate`` on a tiny random target: prompts, chats, files, options."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dspark import SamplingParams
from dspark.cli import _options as opt
from dspark.cli import generate as command
from dspark.errors import ConfigError


@pytest.fixture(scope="module")
def decoder(tiny_folder: str) -> Any:
    """What the commands should say, from the library."""
    from dspark import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(tiny_folder, "none", cost=None, max_slots=4)


def said(decoder: Any, prompt: Any, **sampling: Any) -> str:
    return str(decoder.generate(prompt, **{"max_tokens": 12, **sampling})[0].text)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def generate(dspark: Callable[..., Any], tiny_folder: str) -> Callable[..., Any]:
    def run(*args: object, tokens: int = 12) -> Any:
        return dspark("generate", "--target", tiny_folder, "--cost", "none", "--max-tokens", tokens, *args)

    return run


def test_a_prompt_is_a_chat_where_there_is_a_template_and_raw_where_asked(
    generate: Callable[..., Any], decoder: Any
) -> None:
    assert generate("the fox").out == said(decoder, [user("the fox")]) + "\n"
    assert generate("the fox", "--raw").out == said(decoder, "the fox") + "\n"
    system = {"role": "system", "content": "be quick"}
    assert generate("the fox", "--system", "be quick").out == said(decoder, [system, user("the fox")]) + "\n"
    assert len({said(decoder, p) for p in ("the fox", [user("the fox")], [system, user("the fox")])}) == 3


def test_standard_input(generate: Callable[..., Any], decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the dog\n"))
        assert generate(*args).out == said(decoder, [user("the dog\n")]) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert generate().code == 1


def test_streaming_prints_the_same(generate: Callable[..., Any]) -> None:
    assert generate("the fox", "--stream").out == generate("the fox", "--no-stream").out


def test_json_holds_tokens_flags_logprobs_and_figures(generate: Callable[..., Any], decoder: Any) -> None:
    prompt = "the fox the fox the"
    done = generate(prompt, "--raw", "--json", "--logprobs", 2, "--top-k", 3, "--temperature", 1.0, "--seed", 3,
                    "--logprobs-mode", "processed", "--ignore-eos", tokens=40)  # fmt: skip
    want = decoder.generate(prompt, max_tokens=40, top_k=3, temperature=1.0, seed=3, ignore_eos=True)[0]
    (choice,) = done.json["choices"]
    assert choice["ids"] == want.ids
    assert choice["text"] == want.text
    assert choice["finish_reason"] == "length"
    assert len(choice["accepted"]) == len(choice["logprobs"]) == 40
    assert [entry["id"] for entry in choice["logprobs"]] == want.ids
    assert all(len(entry["top"]) == 2 for entry in choice["logprobs"])
    assert done.json["stats"]["committed"] == 40
    assert choice["stats"]["drafted"] == done.json["stats"]["drafted"] > 0
    assert done.json["prompt_ids"] == want.prompt_ids


def test_samples_with_a_seed_differ_and_repeat(generate: Callable[..., Any]) -> None:
    args = ("the fox", "--n", 3, "--seed", 5, "--temperature", 1.0, "--json")
    first, second = ([c["ids"] for c in generate(*args, *more).json["choices"]] for more in ((), ("--drafter", "none")))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3
    text = generate(*args[:-1]).out
    assert [line for line in text.splitlines() if line in ("[0]", "[1]", "[2]")] == ["[0]", "[1]", "[2]"]


def test_stats_go_to_standard_error(generate: Callable[..., Any]) -> None:
    done = generate("the fox", "--stats", "--ignore-eos", tokens=60)
    assert "accepted length" in done.err
    assert "states: no-cost-table" in done.err
    assert "accepted length" not in done.out


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("a", "--file", "x.jsonl"), 2, "exclude"),
        (("a", "-i"), 2, "exclude"),
        (("a", "--output", "x"), 2, "--file"),
        (("a", "--raw", "--system", "b"), 2, "--raw"),
        (("-i", "--json"), 2, "exclude"),
        (("a", "--temperature", "-1"), 2, "temperature"),
        (("a", "--top-p", "0"), 2, "top_p"),
        (("a", "--logit-bias", "x"), 2, "ID=BIAS"),
        (("a", "--logit-bias", "999=1"), 1, "999"),
        (("a", "--set", "gama=3"), 2, "'gamma'"),
        (("a", "--set", "gamma"), 2, "key=value"),
        (("a", "--set", "gamma.x=3"), 2, "gamma"),
        (("a", "--set", "drafter_config.max_m=3"), 2, "max_n"),
        (("a", "--drafter", "ngarm"), 2, "ngram"),
        (("a", "--verifier", "x"), 2, "--verifier"),
        (("--file", "nowhere.jsonl"), 1, "nowhere.jsonl"),
    ],
)
def test_wrong_usage_or_configuration_is_2_and_a_refusal_is_1(
    generate: Callable[..., Any], args: Any, code: int, word: str
) -> None:
    done = generate(*args)
    assert (done.code, done.out) == (code, "")
    assert word in done.err
    if not done.err.startswith("Usage:"):
        assert done.err.startswith("dspark: ")
        assert done.err.count("\n") == 1


def test_a_chat_needs_a_template(
    dspark: Callable[..., Any], tiny_folder: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    import copy
    import shutil

    folder = tmp_path / "plain"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    bare = copy.deepcopy(tiny_tokenizer)
    bare.chat_template = None
    bare.save_pretrained(folder)
    common = ("generate", "the fox", "--target", folder, "--cost", "none", "--max-tokens", 3)
    assert dspark(*common).code == 0
    done = dspark(*common, "--chat")
    assert done.code == 1
    assert "no chat template" in done.err
    assert "chat template" in dspark(*common, "--system", "x").err


def test_every_sampling_parameter_is_an_option_and_reaches_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """All fields but processors, which are objects, at values that are not their defaults."""
    wanted = SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, do_sample=False, top_k=4, top_p=0.9, min_p=0.1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, logit_bias={5: -2.0, 6: 1.5}, seed=8,
        stop=("x", "y z"), stop_token_ids=(3, 4), ignore_eos=True, logprobs=2, logprobs_mode="processed",
        request_key=6, n=2,
    )  # fmt: skip
    args = [
        "p", "--max-tokens", "9", "--min-tokens", "2", "--temperature", "0.5", "--greedy", "--top-k", "4",
        "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "0.2",
        "--frequency-penalty", "0.3", "--logit-bias", "5=-2", "--logit-bias", "6=1.5", "--seed", "8", "--stop", "x",
        "--stop", "y z", "--stop-token-id", "3", "--stop-token-id", "4", "--ignore-eos", "--logprobs", "2",
        "--logprobs-mode", "processed", "--request-key", "6", "--n", "2",
    ]  # fmt: skip
    seen = {}
    monkeypatch.setattr(opt, "build_decoder", lambda options, defaults: seen.update(options=options) or options)
    monkeypatch.setattr(opt, "use_chat", lambda decoder, chat: False)
    monkeypatch.setattr(command, "answer_one", lambda decoder, prompt, params, shown: seen.update(params=params))
    from dspark.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["generate", *args])
    assert not end.value.code
    assert seen["params"] == wanted
    changed = {
        f.name
        for f in dataclasses.fields(SamplingParams)
        if getattr(wanted, f.name) != getattr(SamplingParams(), f.name)
    }
    assert changed == {f.name for f in dataclasses.fields(SamplingParams)} - {"logits_processors"}


def test_set_reaches_any_field_and_wins() -> None:
    options = opt.DecoderOptions(
        gamma=3,
        settings=[
            "gamma=5", "max_len=64", "drafter_config.max_n=5", "drafter_config.min_n=1", "lossless=off",
            "estimator_config={\"probs\": [0.5, 0.25]}", "plugins=a, b", "seed=null", "overrides.greedy=x/greedy",
        ],
    )  # fmt: skip
    assert options.engine_settings() == {
        "drafter": "ngram",
        "gamma": 5,
        "max_len": 64,
        "drafter_config": {"max_n": 5, "min_n": 1},
        "lossless": "off",
        "estimator_config": {"probs": [0.5, 0.25]},
        "plugins": ("a", "b"),
        "seed": None,
        "overrides": {"greedy": "x/greedy"},
    }
    with pytest.raises(ConfigError, match="drafter_config"):
        opt.parse_settings(["drafter_config=3"])


def test_set_builds_the_engine(monkeypatch: pytest.MonkeyPatch, tiny_folder: str) -> None:
    options = opt.DecoderOptions(
        tiny_folder, cost="none", settings=["max_len=77", "drafter_config.gamma=4", "max_slots=2"]
    )
    decoder = opt.build_decoder(options, defaults={"max_slots": 9})
    assert (decoder.engine.max_len, decoder.engine.config.max_slots, decoder.engine.parts.gamma) == (77, 2, 4)
    twin = opt.plain_twin(decoder)
    assert twin.engine.parts.target is decoder.engine.parts.target
    assert (twin.engine.max_len, twin.engine.config.max_slots, twin.engine.parts.gamma) == (77, 2, 0)


# --- files -----------------------------------------------------------------------------------------------------------


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
        return path

    return write


def test_turns_are_answered_one_after_another(
    generate: Callable[..., Any], decoder: Any, prompts: Callable[..., Path], tmp_path: Path
) -> None:
    path = prompts(
        {"turns": ["the fox", "the dog", "the sea"], "source": "here"},
        {"messages": [{"role": "system", "content": "be quick"}, user("a house")]},
        {"prompt": "the lazy dog"},
        {"prompt": [5, 6, 7]},
    )
    out = tmp_path / "out.jsonl"
    done = generate("--file", path, "--output", out, "--stats")
    assert done.code == 0, done.err
    assert done.out == ""
    assert "4 of 4 answered" in done.err
    first, second, third, fourth = lines_of(out.read_text())
    chat: list[dict[str, str]] = []
    for turn, answer in zip(("the fox", "the dog", "the sea"), first["answers"], strict=True):
        chat.append(user(turn))
        assert answer == said(decoder, chat)
        chat.append({"role": "assistant", "content": answer})
    assert (first["source"], first["line"], len(first["finish_reasons"]), len(first["stats"])) == ("here", 1, 3, 3)
    assert second["answers"] == [said(decoder, [{"role": "system", "content": "be quick"}, user("a house")])]
    assert third["answers"] == [said(decoder, [user("the lazy dog")])]
    assert fourth["answers"] == [said(decoder, [5, 6, 7])]


BAD = (
    "{not json",
    '"text"',
    {"text": "x"},
    {"prompt": "a", "turns": ["b"]},
    {"turns": []},
    {"turns": ["a", 3]},
    {"messages": [{"role": "user"}]},
    {"prompt": ""},
    {"prompt": [999]},
    {"prompt": "the sea " * 800},
)


def test_bad_lines_are_named_and_stop_no_other(
    generate: Callable[..., Any], decoder: Any, prompts: Callable[..., Path]
) -> None:
    path = prompts({"prompt": "the fox"}, "", *BAD, {"prompt": "the dog"})
    done = generate("--file", path)
    assert done.code == 1
    found = lines_of(done.out)
    assert [record["line"] for record in found] == [1, *range(3, 3 + len(BAD)), 3 + len(BAD)], "blank lines count"
    assert found[0]["answers"] == [said(decoder, [user("the fox")])]
    assert found[-1]["answers"] == [said(decoder, [user("the dog")])]
    for number, record in zip(range(3, 3 + len(BAD)), found[1:-1], strict=True):
        assert record["error"]
        assert record["answers"] == []
        assert f"prompts.jsonl line {number}: {' '.join(record['error'].split())}" in done.err
    for word in ("JSON", "object", "'text'", "'turns'", "role", "999", "max_len"):
        assert word in done.err
    assert f"2 of {2 + len(BAD)} answered" in done.err


def test_a_refused_later_turn_keeps_the_answers_before_it(
    generate: Callable[..., Any], prompts: Callable[..., Path]
) -> None:
    done = generate("--file", prompts({"turns": ["the fox", "the sea " * 800]}, {"prompt": "the dog"}))
    first, second = lines_of(done.out)
    assert done.code == 1
    assert len(first["answers"]) == 1
    assert "max_len" in first["error"]
    assert "error" not in second


def test_seeds_follow_the_line_whatever_stands_around_it(
    generate: Callable[..., Any], prompts: Callable[..., Path]
) -> None:
    sampled = ("--temperature", 1.0, "--seed", 4, "--ignore-eos")
    line = {"turns": ["the fox", "the dog"]}
    together = lines_of(generate("--file", prompts(line, line, {"prompt": "a house"}), *sampled).out)
    alone = lines_of(generate("--file", prompts("{bad", line), *sampled, "--max-slots", 1, "--drafter", "none").out)
    assert together[1]["answers"] == alone[1]["answers"]
    assert together[0]["answers"] != together[1]["answers"], "each line has its own"
    many = lines_of(generate("--file", prompts(line), *sampled, "-n", 2).out)
    assert [(r["line"], r.get("choice", 0)) for r in many] == [(1, 0), (1, 1)]
    assert many[0]["answers"] != many[1]["answers"]


def test_a_line_of_responses_is_no_prompt_and_says_what_is(
    generate: Callable[..., Any], prompts: Callable[..., Path]
) -> None:
    line = {"turn": 0, "turns": 1, "messages": [user("a")], "prompt_ids": [1], "response_ids": [2]}
    done = generate("--file", prompts(line, {"prompt": "a house"}))
    first, second = lines_of(done.out)
    assert "`dspark data` wrote" in first["error"]
    assert ".prompts.jsonl" in first["error"]
    assert "answers" in second


def test_raw_prompts_of_a_file(generate: Callable[..., Any], decoder: Any, prompts: Callable[..., Path]) -> None:
    done = generate("--file", prompts({"prompt": "the fox"}), "--raw")
    assert lines_of(done.out)[0]["answers"] == [said(decoder, "the fox")]


def test_answers_keep_the_order_of_the_file_and_more_lines_than_slots_are_fed(
    generate: Callable[..., Any], decoder: Any, prompts: Callable[..., Path]
) -> None:
    texts = ["the quick fox " * (1 + i % 3) for i in range(7)]
    done = generate("--file", prompts(*({"prompt": t} for t in texts)), "--max-slots", 2)
    assert [r["prompt"] for r in lines_of(done.out)] == texts
    assert [r["answers"][0] for r in lines_of(done.out)] == [said(decoder, [user(t)]) for t in texts]


def test_held_answers_are_written_when_a_run_ends_early() -> None:
    from dspark.cli._prompt_file import OrderedWriter

    out = io.StringIO()
    writer = OrderedWriter(out)
    writer.put(2, {"line": 3})
    writer.put(0, {"line": 1, "value": float("-inf")})
    assert lines_of(out.getvalue()) == [{"line": 1, "value": None}]
    writer.close()
    assert [r["line"] for r in lines_of(out.getvalue())] == [1, 3]


# --- chat ------------------------------------------------------------------------------------------------------------


def test_an_interactive_chat_remembers_and_forgets(
    generate: Callable[..., Any], decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = iter(
        ["the fox", "", "the dog", "/stats", "/nonsense", "/reset", "the fox", "the sea " * 800, "the dog", "/quit"]
    )
    monkeypatch.setattr("builtins.input", lambda prompt: next(says))
    done = generate("-i")
    assert done.code == 0
    first = said(decoder, [user("the fox")])
    chat = [user("the fox"), {"role": "assistant", "content": first}, user("the dog")]
    assert done.out == f"{first}\n{said(decoder, chat)}\n" * 2, "a refused line is not remembered"
    assert "accepted length" in done.err
    assert "/nonsense: no such command" in done.err
    assert "max_len" in done.err
    assert next(says, None) is None


def test_a_terminal_without_a_prompt_is_a_chat_and_ends_with_the_input(
    generate: Callable[..., Any], decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    says: Iterator[Any] = iter([KeyboardInterrupt, "the fox", EOFError])

    def ask(prompt: str) -> str:
        line = next(says)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    done = generate("--raw")
    assert (done.code, done.out) == (0, said(decoder, "the fox") + "\n")


def test_an_interrupt_ends_the_answer_and_not_the_chat(decoder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from dspark.cli._chat import Chat

    said_first: list[str] = []

    class Interrupted:
        engine = decoder.engine
        calls = 0

        def stream(self, prompt: Any, params: Any) -> Any:
            self.calls += 1
            stream = decoder.stream(prompt, params)
            if self.calls > 1:
                said_first.extend(m["content"] for m in prompt if m["role"] == "assistant")
                return stream

            def broken() -> Any:
                try:
                    yield next(stream)
                    raise KeyboardInterrupt
                finally:
                    stream.close()

            return broken()

    chat = Chat(Interrupted(), SamplingParams(max_tokens=8), system=None, raw=False, stats=False)  # type: ignore[arg-type]
    chat._answer("the fox")
    assert "(ended)" in capsys.readouterr().out
    chat._answer("the dog")
    assert len(said_first) == 1, "what was said before the interrupt stays"
    decoder.engine.leave()
    assert not decoder.engine.live()


def test_usage_checks_raise_typers_error() -> None:
    with pytest.raises(typer.BadParameter):
        command.check_usage("a", Path("b"), None, False, None, None, False)
