"""``dspark doctor``: what it sees, what it calls a problem, and whom its control run accuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import _control as control
from dspark.cli._compare import Comparison, Judge


def test_the_environment_alone(dspark: Callable[..., Any]) -> None:
    done = dspark("doctor", "--json")
    found = done.json
    assert done.code == 0, found["problems"]
    assert found["ok"] is True
    assert found["target"] is None
    assert found["control"] is None
    environment = found["environment"]
    import torch
    import transformers

    assert environment["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert environment["versions"]["transformers"] == transformers.__version__
    assert environment["native"]["ok"] is True
    assert environment["devices"][0] == {"device": "cpu"}
    assert environment["cpu"]["threads"] == torch.get_num_threads()
    assert environment["cache"].endswith("cache")
    assert found["plugins"][0]["name"] == "builtin"


def test_for_people(dspark: Callable[..., Any]) -> None:
    done = dspark("doctor")
    assert done.code == 0, done.out
    for word in ("environment", "native module", "plugins", "builtin", "everything is in order"):
        assert word in done.out
    assert "control run" not in done.out


def test_a_broken_native_module_is_a_problem(dspark: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import dspark as package

    monkeypatch.setitem(sys.modules, "dspark._sched", None)
    monkeypatch.delattr(package, "_sched", raising=False)
    done = dspark("doctor", "--json")
    assert done.code == 1
    assert any("dspark._sched" in problem for problem in done.json["problems"])


def test_a_package_that_is_too_old_is_a_problem(dspark: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=999", "nosuchthing>=1", "other>=1; extra == 'x'"])
    done = dspark("doctor", "--json")
    assert done.code == 1
    first, second = done.json["problems"]
    assert "numpy" in first
    assert ">=999" in first
    assert "nosuchthing is not installed" in second


def test_a_broken_plugin_is_a_problem(
    dspark: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin_module.py").write_text("raise RuntimeError('no such thing')")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dspark]\nbroken = broken_plugin_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = dspark("doctor", "--json")
    assert done.code == 1
    (problem,) = done.json["problems"]
    assert "broken 1.0" in problem
    assert "no such thing" in problem


def test_a_target_is_described_and_its_control_run_finds_nobody(dspark: Callable[..., Any], tiny_folder: str) -> None:
    done = dspark("doctor", "--target", tiny_folder, "--tokens", 12, "--json")
    assert done.code == 0, done.out
    found = done.json
    target = found["target"]
    assert (target["vocab_size"], target["num_layers"], target["dtype"]) == (300, 2, "float32")
    assert target["chat_template"] is True
    assert 0.0 <= target["probe_error"] < 1e-4
    assert found["cost"]["measured_now"] is True
    assert Path(found["cost"]["file"]).is_file()
    assert found["cost"]["state"] in ("measured", "flat-cost")
    assert found["cost"]["forward_ms"]["1"] > 0
    assert len(found["control"]) == 10
    assert {case["sampling"] for case in found["control"]} == {"greedy", "seeded"}
    for case in found["control"]:
        assert case["ok"] is True
        assert case["who"] in (control.NOBODY, control.BATCH, control.NEAR_TIE)
        assert case["reference_margin"] < 1e-4
        assert 1 <= case["tokens"] <= 12
    again = dspark("doctor", "--target", tiny_folder, "--tokens", 2, "--json")
    assert again.json["cost"]["measured_now"] is False


def test_without_a_table_it_says_so(dspark: Callable[..., Any], tiny_folder: str) -> None:
    done = dspark("doctor", "--target", tiny_folder, "--tokens", 4, "--cost", "none")
    assert done.code == 0, done.out
    assert "no-cost-table" in done.out
    assert "none is kept" in done.out
    assert "plain alone, speculative together, plain together" in done.out


@pytest.mark.parametrize(("verifier", "sampling"), [("greedy", "greedy"), ("coupled", "seeded")])
def test_a_verifier_that_depends_on_drafts_is_accused(
    dspark: Callable[..., Any], tiny_folder: str, spoil: Callable[[str], Any], verifier: str, sampling: str
) -> None:
    spoiler = spoil(verifier)
    done = dspark("doctor", "--target", tiny_folder, "--tokens", 24, "--cost", "none", "--json")
    assert spoiler.spoilt
    assert done.code == 1
    accused = [case for case in done.json["control"] if not case["ok"]]
    assert accused
    for case in accused:
        assert (case["sampling"], case["who"]) == (sampling, control.SPECULATION)
        assert case["plain_plain"] == {"verdict": "identical"}
        assert case["plain_speculative"]["margin"] is None or case["plain_speculative"]["margin"] > 1e-4
    assert any(control.SPECULATION in problem for problem in done.json["problems"])


def test_a_forward_whose_sums_depend_on_its_batch_is_told_from_speculation(
    dspark: Callable[..., Any], tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise by the number of sequences: within the bound it is the batch's shape, beyond it plain decoding's fault."""
    from dspark.targets.hf import HFTarget
    from dspark.types import TargetOutput

    real = HFTarget.forward
    scale = 2.0

    def forward(self: Any, layout: Any, taps: Any = ()) -> Any:
        import torch

        output = real(self, layout, taps)
        if len(layout.slots) < 2 or not len(output.logits):
            return output
        wave = torch.sin(torch.arange(output.logits.shape[1]) * 1.7 + len(layout.slots))
        return TargetOutput(output.logits + scale * wave, output.taps)

    monkeypatch.setattr(HFTarget, "forward", forward)
    args = ("doctor", "--target", tiny_folder, "--tokens", 24, "--cost", "none", "--json", "--set",
            "target_config.probe=false")  # fmt: skip
    done = dspark(*args)
    assert done.code == 1
    blamed = {case["who"] for case in done.json["control"]}
    assert control.PLAIN in blamed
    tolerant = dspark(*args, "--bound", 2 * scale)
    assert tolerant.code == 0, tolerant.out
    blamed = {case["who"] for case in tolerant.json["control"]}
    assert control.BATCH in blamed
    assert control.PLAIN not in blamed


def test_a_target_that_cannot_be_loaded_is_a_problem_and_the_rest_is_shown(
    dspark: Callable[..., Any], tmp_path: Path
) -> None:
    done = dspark("doctor", "--target", tmp_path)
    assert done.code == 1
    assert "native module" in done.out
    assert "PROBLEM: target" in done.out
    assert "everything is in order" not in done.out


def compare(verdict: str, position: int | None = None, margin: float = 0.0) -> Comparison:
    return Comparison(verdict, position, (1, 2), margin, 0.0, 0.1)


@pytest.mark.parametrize(
    ("plain", "speculative", "reference", "who", "ok"),
    [
        (compare("identical"), compare("identical"), 0.0, control.NOBODY, True),
        (compare("tie", 3), compare("identical"), 0.05, control.BATCH, True),
        (compare("tie", 3), compare("tie", 5), 0.05, control.BATCH, True),
        (compare("identical"), compare("tie", 3), 0.05, control.NEAR_TIE, True),
        (compare("identical"), compare("different", 3), 0.05, control.SPECULATION, False),
        (compare("different", 3), compare("identical"), 0.05, control.PLAIN, False),
        (compare("different", 3), compare("different", 3), 0.05, control.SPECULATION, False),
        (compare("identical"), compare("identical"), 0.2, control.REFERENCE, False),
        (compare("identical"), compare("identical"), float("nan"), control.REFERENCE, False),
    ],
)
def test_who_differs(plain: Comparison, speculative: Comparison, reference: float, who: str, ok: bool) -> None:
    case = control.Case("t", "greedy", plain, speculative, reference, 9, 0.1)
    assert (case.who, case.ok) == (who, ok)


def test_the_speculative_run_is_compared_with_the_closer_plain_run(tiny_folder: str) -> None:
    from dspark import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pretrained(tiny_folder, "none", cost=None, max_slots=1)
    prompt = [5, 9, 13, 40, 41]
    out = decoder.generate([prompt], max_tokens=6, ignore_eos=True)[0].ids
    other = [*out[:3], (out[3] + 1) % 300, *out[4:]]
    case = control.judge_case(Judge(decoder.engine), "t", "greedy", prompt, (other, out, out))
    assert case.speculative.verdict == "identical"
    assert case.plain.verdict == "different"
    assert case.who == control.PLAIN
    assert case.reference > 1e-3
