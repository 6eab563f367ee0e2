"""``dspark data`` on a tiny random target: what it says, and processes that are killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import data as command
from dspark.cli._data_progress import progress
from dspark.errors import ConfigError
from dspark.training.data_output import Report
from dspark.training.data_plan import Estimate


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keys(path: Path) -> list[tuple[Any, ...]]:
    return [(r["index"], r["temperature"], r["sample"], r["turn"]) for r in lines(path)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ("the quick fox", "a lazy dog", "the sea", "a small white house", "by the sea")
    records = [*({"turns": [text], "source": "s"} for text in texts), {"turns": []}]
    path.write_text("".join(f"{json.dumps(r)}\n" for r in records))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def data(dspark: Callable[..., Any], tiny_folder: str, out: Path) -> Callable[..., Any]:
    def run(*args: object, tokens: int = 6) -> Any:
        return dspark(
            "data",
            "--target",
            tiny_folder,
            "-o",
            out,
            "--max-tokens",
            tokens,
            "--max-prompt",
            100,
            "--max-slots",
            2,
            *args,
        )

    return run


def test_a_run_says_what_it_will_write_and_what_it_wrote(data: Callable[..., Any], prompts: Path, out: Path) -> None:
    done = data(prompts, "--temperature", 0, "--temperature", 1, "--seed", 3)
    assert (done.code, done.err) == (0, "")
    first, second, *rest = done.out.splitlines()
    assert first == "5 prompts, 10 responses (T = 0, T = 1)"
    assert second.startswith("estimate: up to 60 tokens of response and ")
    assert "can't be answered: empty conversation: 1" in rest
    assert f"in '{out}'" in done.out
    assert "  1 x empty conversation" in rest
    assert sorted(keys(out)) == [(i, t, 0, 0) for i in range(5) for t in (0.0, 1.0)]
    again = data(prompts, "--temperature", 0, "--temperature", 1, "--seed", 3)
    assert "10 of them there" in again.out
    assert "0 responses written, 10 in" in again.out
    other = data(prompts, "--temperature", 0, "--temperature", 1, "--seed", 3, "--top-k", 5)
    assert other.code == 1
    assert "sampling.top_k was 0, is 5" in other.err
    assert other.err.count("\n") == 1


def test_every_option_reaches_its_setting(monkeypatch: pytest.MonkeyPatch, prompts: Path, out: Path) -> None:
    from dspark.cli.main import main
    from dspark.training.data_plan import DataConfig
    from dspark.training.selfprompt import SelfPromptConfig

    seen: list[Any] = []

    def stop(options: Any, config: Any, output: Path, source: Any, adopt: bool) -> Any:
        seen.extend((options, config, output, source, adopt))
        raise ConfigError("seen")

    monkeypatch.setattr(command, "make_run", stop)
    args = [
        "--target", "t", "--dtype", "float32", "--drafter", "ngram", "--max-slots", "5", "--set", "gamma=2",
        "--temperature", "0.5", "--samples", "3", "--max-tokens", "9", "--max-prompt", "8", "--min-response", "4",
        "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1", "--seed", "6",
        "--system", "s", "--no-thinking", "--template", "date=today", "--template", "level=2", "--adopt",
    ]  # fmt: skip
    for source in ([str(prompts)], ["--self", "4", "--self-temperature", "0.8", "--self-tokens", "30"]):
        with pytest.raises(SystemExit):
            main(["data", *source, "-o", str(out), *args])
    options, config, output, source, adopt = seen[:5]
    template_args = {"enable_thinking": False, "date": "today", "level": 2}
    assert config == DataConfig((0.5,), 3, 9, 8, 4, 7, 0.9, 0.1, 1.1, 6, system="s", template_args=template_args)
    assert (output, source, adopt) == (out, prompts, True)
    assert (options.target, options.dtype, options.drafter, options.max_slots) == ("t", "float32", "ngram", 5)
    assert options.engine_settings()["gamma"] == 2
    assert seen[8] == SelfPromptConfig(4, 0.8, max_tokens=30)


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        ((), 2, "--self"),
        (("prompts.jsonl", "--self", 3), 2, "--self"),
        (("prompts.jsonl", "--self-tokens", 3), 2, "--self-tokens"),
        (("prompts.jsonl", "--fill"), 2, "--fill"),
        (("nowhere.jsonl",), 1, "nowhere.jsonl"),
        (("prompts.jsonl", "-o", "no/where.jsonl"), 1, "no folder"),
        (("prompts.jsonl", "-o", "prompts.jsonl"), 2, "is the file of prompts"),
        (("prompts.jsonl", "--temperature", -1), 2, "temperature"),
        (("prompts.jsonl", "--budget-bytes", "many"), 2, "500MB"),
        (("prompts.jsonl", "--template", "x"), 2, "KEY=VALUE"),
        (("prompts.jsonl", "--thinking"), 2, "enable_thinking"),
        (("prompts.jsonl", "--max-prompt", 5000), 1, "--max-prompt plus --max-tokens"),
    ],
)
def test_wrong_usage_or_configuration_is_2_and_a_refusal_is_1(
    data: Callable[..., Any], prompts: Path, monkeypatch: pytest.MonkeyPatch, args: Any, code: int, word: str
) -> None:
    monkeypatch.chdir(prompts.parent)
    done = data(*args)
    assert (done.code, done.out) == (code, "")
    assert word in " ".join(done.err.split())
    assert sorted(p.name for p in prompts.parent.iterdir() if p.name != "cache") == ["prompts.jsonl"]


def test_an_output_is_needed(dspark: Callable[..., Any], prompts: Path) -> None:
    done = dspark("data", prompts)
    assert done.code == 2
    assert "--output" in done.err


def test_a_budget_is_checked_before_anything_is_written_and_filled_on_demand(
    data: Callable[..., Any], prompts: Path, out: Path
) -> None:
    refused = data(prompts, "--budget-tokens", 29)
    assert refused.code == 1
    assert "30 tokens against 29 allowed" in refused.err
    assert data(prompts, "--budget-bytes", "1kB").code == 1
    assert data(prompts, "--budget-tokens", 30, "--dry-run").code == 0
    assert not list(out.parent.glob("out*"))
    filled = data(prompts, "--budget-tokens", 13, "--fill", "--seed", 4)
    assert filled.code == 0
    assert "budget: 13 tokens, to be filled" in filled.out
    assert "ended early: token budget; the same command goes on" in filled.out
    assert 0 < len(lines(out)) < 5
    assert data(prompts, "--budget-bytes", "1MB", "--seed", 4).code == 0
    assert sorted(keys(out)) == [(i, 1.0, 0, 0) for i in range(5)]


def test_a_disk_that_is_too_small_is_said(
    data: Callable[..., Any], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(prompts)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1500))
    assert "warning: 1.5 kB are free" in data(prompts, "--dry-run").err
    monkeypatch.undo()
    assert data(prompts, "--dry-run").err == ""


def test_a_target_that_writes_no_prompts_says_why(data: Callable[..., Any], out: Path) -> None:
    """This one writes random bytes."""
    done = data("--self", 2, "--seed", 8, "--self-tokens", 40, "--dry-run")
    assert done.out.startswith("2 prompts, 2 responses (T = 1)\nestimate: up to 92 tokens")
    assert not list(out.parent.glob("out*"))
    done = data("--self", 2, "--seed", 8, "--self-tokens", 40)
    assert done.code == 1
    assert "0 of 2 prompts after 80 candidates" in done.err
    assert "broken characters" in done.err
    assert len(lines(out.with_name("out.skipped.jsonl"))) == 80


def test_failed_requests_are_exit_code_1(
    data: Callable[..., Any], prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.errors import RowFault
    from dspark.verifiers.greedy import GreedyVerifier

    verify = GreedyVerifier.verify
    calls: list[int] = []

    def once(self: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RowFault("a bad row", [0])
        return verify(self, batch)

    monkeypatch.setattr(GreedyVerifier, "verify", once)
    done = data(prompts, "--temperature", 0)
    assert done.code == 1
    assert "1 requests failed; the same command tries them again:" in done.out
    assert "a bad row" in done.out
    assert data(prompts, "--temperature", 0).code == 0
    assert sorted(keys(out)) == [(i, 0.0, 0, 0) for i in range(5)]


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("500MB", 500_000_000), ("1.5 kB", 1500), ("2GiB", 2**31), ("3g", 3_000_000_000), ("1Ki", 1024)],
)
def test_sizes(text: str, size: int) -> None:
    assert command.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "1XB", "-1", "1 i"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError):
        command.parse_bytes(text)


def test_human_bytes() -> None:
    sizes = {999: "999 bytes", 1000: "1.0 kB", 1_234_567: "1.2 MB", 5e9: "5.0 GB", 38e12: "38.0 TB"}
    assert {n: command.human_bytes(n) for n in sizes} == sizes


# --- progress --------------------------------------------------------------------------------------------------------


class Made:
    """As much of a run as is shown."""

    report = Report(responses=2)


def test_elsewhere_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now: Iterator[float] = iter([0.0, 10.0, 31.0, 31.0, 40.0, 70.0, 70.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with progress(Made(), Estimate(prompts=9, responses=8, there=2)) as show:  # type: ignore[arg-type]
        show(Report(responses=3, tokens=100))
        show(Report(responses=4, tokens=1550))
        show(Report(responses=5, tokens=2000))
        show(Report(phase="prompts", prompts=6, tokens=2100))
    assert capsys.readouterr().err.splitlines() == [
        "4 of 10 responses, 1,550 tokens, 50/s",
        "6 of 9 prompts, 2,100 tokens, 30/s",
    ]


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    monkeypatch.setattr(
        "dspark.cli._render.console_for", lambda stderr: Console(stderr=True, force_terminal=True, width=120)
    )
    made = Made()
    with progress(made, Estimate(prompts=9, responses=8, there=2)) as show:  # type: ignore[arg-type]
        made.report.responses, made.report.tokens = 7, 1234
        show(made.report)
    shown = capsys.readouterr().err
    assert "responses" in shown
    assert "7/10" in shown
    assert "1,234 tokens" in shown


# --- processes -------------------------------------------------------------------------------------------------------

MANY, TOKENS = 24, 16


@pytest.fixture
def many(tmp_path: Path) -> Path:
    path = tmp_path / "many.jsonl"
    words = ("the", "quick", "brown", "fox", "sea")
    texts = [f"{words[i % 5]} {words[i // 5 % 5]} {i}" for i in range(MANY)]
    path.write_text("".join(f"{json.dumps({'turns': [text, 'and then']})}\n" for text in texts))
    return path


class Child:
    """``dspark data`` in a process of its own."""

    def __init__(self, target: str, prompts: Path, out: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSPARK_CACHE": str(out.parent / "cache")}
        self.out = out
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dspark", "data", str(prompts), *arguments(target, out)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def wait_for(self, records: int) -> None:
        """Until so many lines are written."""
        while not self.out.exists() or self.out.read_bytes().count(b"\n") < records:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.002)

    def end(self, number: int) -> tuple[int, str, str]:
        """Send a signal; exit code, standard output and error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


@pytest.fixture
def child(tiny_folder: str, many: Path, out: Path) -> Iterator[Child]:
    """Over many prompts; gone after the test in any case."""
    made = Child(tiny_folder, many, out)
    yield made
    made.process.kill()
    made.process.communicate()


def arguments(target: str, out: Path) -> list[str]:
    return [
        "-t", target, "-o", str(out), "--max-tokens", str(TOKENS), "--max-prompt", "250", "--max-slots", "4",
        "--temperature", "1", "--temperature", "0", "--seed", "11",
    ]  # fmt: skip


def kept_by(target: str, prompts: Path, out: Path, run: Callable[..., Any]) -> dict[tuple[Any, ...], list[int]]:
    """Responses by key after the command has run to its end in this process."""
    done = run("data", prompts, *arguments(target, out))
    assert done.code == 0, done.err
    found = {key: r["response_ids"] for key, r in zip(keys(out), lines(out), strict=True)}
    assert len(found) == len(lines(out)), "a response is there twice"
    return found


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_goes_on_without_loss_or_duplicates(
    child: Child, tiny_folder: str, many: Path, out: Path, dspark: Callable[..., Any]
) -> None:
    """kill -9 once after a few responses, with a line torn as a kill within a write leaves it; then to the end."""
    child.wait_for(5)
    code, _, _ = child.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    torn = out.read_bytes()
    first = torn[: torn.rfind(b"\n") + 1]
    assert 5 <= first.count(b"\n") < 4 * MANY, "killed in the middle"
    out.write_bytes(first + first.splitlines()[0][:70])
    found = kept_by(tiny_folder, many, out, dspark)
    assert out.read_bytes().startswith(first), "what was there is untouched"
    whole = kept_by(tiny_folder, many, out.with_name("whole.jsonl"), dspark)
    assert found == whole
    assert len(whole) > 3 * MANY


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_run_cleanly(
    child: Child, tiny_folder: str, many: Path, out: Path, dspark: Callable[..., Any], number: int
) -> None:
    child.wait_for(3)
    code, said, err = child.end(number)
    assert code == command.INTERRUPTED
    assert "Traceback" not in err
    assert "ended early: interrupted; the same command goes on" in said
    assert out.read_bytes().endswith(b"\n")
    there = len(lines(out))
    assert 3 <= there < 4 * MANY
    assert f"{there:,} in '{out}'" in said.replace("\n", "")
    assert f"{there} of them there" in dspark("data", many, *arguments(tiny_folder, out), "--dry-run").out


def test_a_second_interrupt_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell runs the tests in the background
    with command.stop_signals() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.real
@pytest.mark.timeout(900)
def test_smollm2_answers_and_asks(dspark: Callable[..., Any], tmp_path: Path) -> None:
    """The real model: greedy answers are those of ``generate``; a question of its own is one."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    question = "What is the capital of France?"
    path.write_text(json.dumps({"turns": [question]}) + "\n")
    common = ("-t", "smollm2", "--dtype", "float32", "--max-tokens", 8, "--seed", 1)
    done = dspark("data", path, "-o", out, *common, "--max-prompt", 64, "--temperature", 0, "--temperature", 1)
    assert done.code == 0, done.err
    greedy, sampled = sorted(lines(out), key=lambda r: r["temperature"])
    said = dspark("generate", question, "-t", "smollm2", "--dtype", "float32", "--max-tokens", 8, "--drafter", "none")
    assert greedy["messages"][-1]["content"] == said.out.removesuffix("\n")
    assert "Paris" in said.out
    assert sampled["prompt_ids"] == greedy["prompt_ids"]
    own = tmp_path / "own.jsonl"
    done = dspark("data", "-o", own, *common, "--max-prompt", 120, "--self", 1, "--self-tokens", 60)
    assert done.code == 0, done.err
    (record,) = lines(own)
    assert len(record["messages"][0]["content"].split()) > 2
