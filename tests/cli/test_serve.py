"""``dspark serve``: options, keys, and a server that answers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import Server
from dspark.cli.serve import read_keys, template_args
from dspark.errors import ConfigError, DSparkWarning


def test_help_names_the_limits(dspark: Callable[..., Any]) -> None:
    ended = dspark("serve", "--help")
    assert ended.code == 0
    for option in ("--host", "--port", "--api-key-file", "--max-queue", "--drain-timeout", "--thinking"):
        assert option in ended.out


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_API_KEYS", " one, two,")
    path = tmp_path / "keys"
    path.write_text("# for the team\nthree\n\n four \n")
    assert read_keys(path) == ["one", "two", "three", "four"]
    assert read_keys(None) == ["one", "two"]
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(path)
    with pytest.raises(ConfigError, match="missing"):
        read_keys(tmp_path / "missing")


def test_template_variables_are_json_or_text() -> None:
    assert template_args(["a=true", "b=x y", "c=3"], False) == {"enable_thinking": False, "a": True, "b": "x y", "c": 3}
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        template_args(["a"], None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--queue-timeout", "0"], "queue_timeout"),
        (["--log-level", "loud"], "log-level"),
        (["--api-key-file", "/nowhere/keys"], "api-key-file"),
    ],
)
def test_wrong_options_are_named_before_anything_loads(
    dspark: Callable[..., Any], arguments: list[str], message: str
) -> None:
    ended = dspark("serve", "--target", "/nowhere", *arguments)
    assert ended.code == 2
    assert message in ended.err


def test_code_of_a_checkpoint_does_not_run(dspark: Callable[..., Any], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\nclass Config: ...\nclass Model: ...\n"
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "own.py").write_text(code)
    (folder / "config.json").write_text(json.dumps({"model_type": "own-kind", "auto_map": classes}))
    ended = dspark("serve", "--target", folder, "--cost", "none")
    assert ended.code == 1
    assert ended.err.startswith("dspark: ")
    assert str(folder) in ended.err
    assert not ran.exists()


def test_a_taken_port_is_an_error(dspark: Callable[..., Any], tiny_folder: str) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = dspark("serve", "--target", tiny_folder, "--cost", "none", "--max-slots", 1, "--port", port)
    assert ended.code == 1
    assert f"127.0.0.1:{port}" in ended.err
    assert "taken" in ended.err


def test_open_to_others_without_a_key_warns(
    tiny_model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.api import SpeculativeDecoder
    from dspark.server import run as module

    decoder = SpeculativeDecoder.from_pretrained(
        tiny_model, tokenizer=tiny_tokenizer, drafter="none", cost=None, max_slots=1, max_len=64
    )
    monkeypatch.setattr(module.GracefulServer, "run", lambda self: setattr(self, "started", True))
    with pytest.warns(DSparkWarning, match="no API key"):
        module.serve(decoder, host="0.0.0.0")
    assert decoder.engine.closed


def test_it_says_at_once_what_it_loads(dspark: Callable[..., Any], tmp_path: Path) -> None:
    """Loading takes minutes for a large model, and silence looks like a fault."""
    ended = dspark("serve", "--target", tmp_path, "--drafter", "ngram")
    first, *rest = ended.err.splitlines()
    assert first == f"dspark: loading {tmp_path} with drafter ngram"
    assert "has no config.json" in " ".join(rest)  # said before anything was read


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_serves_and_ends(tiny_folder: str) -> None:
    with Server(tiny_folder, ["--cost", "none", "--max-slots", "2"], wait=400) as server:
        answer = server.post("/v1/completions", {"model": "served", "prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200
        server.send(signal.SIGINT)
        assert server.process is not None
        assert server.process.wait(30) == 0
        assert "the page is at /" in server.output()
