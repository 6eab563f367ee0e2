"""``generate(custom_generate=speculative)`` gives what ``generate`` gives."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from dspark import SpeculativeDecoder

IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])


def test_greedy_is_the_same(example: Callable[[str], ModuleType], decoder: SpeculativeDecoder, tiny_model: Any) -> None:
    """With transformers' own processors, a limit of the whole length, and an end token."""
    loop = example("hf_generate").speculative
    settings: list[dict[str, Any]] = [
        {"max_new_tokens": 40},
        {"max_length": 30, "repetition_penalty": 1.3},
        {"max_new_tokens": 40, "no_repeat_ngram_size": 2, "min_new_tokens": 10, "eos_token_id": list(range(0, 300, 3))},
    ]
    for more in settings:
        plain = tiny_model.generate(IDS, do_sample=False, **more)
        fast = tiny_model.generate(IDS, do_sample=False, custom_generate=loop, decoder=decoder, **more)
        assert fast.tolist() == plain.tolist(), more
    assert decoder.stats.drafted > 0


def test_a_padded_batch_is_the_same(
    example: Callable[[str], ModuleType], decoder: SpeculativeDecoder, tiny_model: Any
) -> None:
    loop = example("hf_generate").speculative
    ids = torch.tensor([[0, 0, 9, 8, 7, 9, 8], [5, 6, 7, 5, 6, 7, 5]])
    more = {"attention_mask": (torch.arange(7) >= torch.tensor([[2], [0]])).long(), "pad_token_id": 0}
    settings = {"max_new_tokens": 24, "min_new_tokens": 6, "repetition_penalty": 1.2, "do_sample": False, **more}
    plain = tiny_model.generate(ids, **settings)
    fast = tiny_model.generate(ids, custom_generate=loop, decoder=decoder, **settings)
    assert fast.tolist() == plain.tolist()


def test_samples_are_those_of_the_seed(
    example: Callable[[str], ModuleType], decoder: SpeculativeDecoder, tiny_model: Any
) -> None:
    loop = example("hf_generate").speculative
    more = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 16, "num_return_sequences": 3}
    first, again, other = (
        tiny_model.generate(IDS, custom_generate=loop, decoder=decoder, seed=seed, **more).tolist()
        for seed in (1, 1, 50)
    )
    assert first == again
    assert first != other
    assert len({tuple(row) for row in first}) == 3
    # The same law as dspark's own warpers: the same seed gives the same tokens.
    own = decoder.generate([IDS[0].tolist()], temperature=0.8, top_k=20, max_tokens=16, seed=1)[0].ids
    assert first[0][8 : 8 + len(own)] == own


@pytest.mark.parametrize(
    "more", [{"num_beams": 2}, {"return_dict_in_generate": True}, {"max_time": 5.0}], ids=lambda more: next(iter(more))
)
def test_what_it_cannot_do_is_refused(
    more: dict[str, Any], example: Callable[[str], ModuleType], decoder: SpeculativeDecoder, tiny_model: Any
) -> None:
    loop = example("hf_generate").speculative
    with pytest.raises(ValueError, match="speculative"):
        tiny_model.generate(IDS, custom_generate=loop, decoder=decoder, max_new_tokens=4, do_sample=False, **more)
    assert not decoder.engine.live()


@pytest.mark.usefixtures("small")
def test_it_runs_as_it_stands(
    example: Callable[[str], ModuleType], tiny_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example("hf_generate").main(tiny_folder, max_new_tokens=8)
    assert "accepted length" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.usefixtures("small")
def test_it_runs_with_the_model_inside_the_wheel(
    example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its head says to start it."""
    module = example("hf_generate")
    monkeypatch.setattr("sys.argv", ["hf_generate.py", "--target", "smollm2", "--max-new-tokens", "8"])
    assert "python examples/hf_generate.py --target smollm2\n" in str(module.__doc__)
    with pytest.raises(SystemExit) as ended:
        typer.run(module.main)
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "The sky is" in said
    assert "accepted length" in said
