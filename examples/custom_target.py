"""A target of your own: any model that can be asked for logits along a text.

    python examples/custom_target.py

The target ``hf`` refuses models with recurrent state, since rejected drafts can't be taken back from it. A target of
your own decides what it keeps: this GRU over bytes keeps its state after *every* position, so that going back is
starting from an earlier one. ``docs/plugins/contracts.md`` lists what a target promises, and
``dspark.testing.TargetSuite`` checks it; the tests hold this one to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import typer
from torch import Tensor, nn

from dspark import CapacityError, SpeculativeDecoder
from dspark.capabilities import TargetCapabilities
from dspark.types import TargetOutput, VerifyLayout

TEXT = b"she sells sea shells by the sea shore, and the shells she sells are sea shells, so she says. "


class ByteGRU(nn.Module):
    """A language model over bytes: embedding, GRU, head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits and states [n, T, width] after each of ``ids`` [n, T]."""
        states, _ = self.cell(self.embed(ids), state)
        return self.head(states), states


class GRUTarget:
    """``dspark.protocols.Target`` around a :class:`ByteGRU`."""

    name, vocab_size, num_layers = "byte-gru", 256, 1
    eos_token_ids: tuple[int, ...] = ()
    capabilities = TargetCapabilities(ragged=True, taps=False)  # no padding is run; no hidden states are given away

    def __init__(self, model: ByteGRU, max_len: int = 512) -> None:
        self.model, self.max_len = model.eval(), max_len
        self.device, self.dtype = model.head.weight.device, model.head.weight.dtype
        self.states = torch.empty(0)
        self.cache_version = 0

    def allocate(self, slots: int, max_len: int | None, budget_bytes: int | None = None) -> int:
        """Room for the states of every position of every slot."""
        length, width = max_len or self.max_len, self.model.embed.embedding_dim
        size = slots * length * width * self.dtype.itemsize
        if budget_bytes is not None and size > budget_bytes:
            raise CapacityError(f"{self.name}: states take {size} bytes, and {budget_bytes} are allowed")
        self.states = torch.zeros(slots, length, width, dtype=self.dtype, device=self.device)
        self.max_len = length
        self.cache_version += 1
        return length

    @torch.inference_mode()
    def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
        """Run every sequence from where it starts; what an earlier round left behind that is overwritten."""
        self.cache_version += 1
        sequences = layout.token_ids.split(layout.query_lens.tolist())
        logits = []
        for slot, start, ids in zip(layout.slots.tolist(), layout.starts.tolist(), sequences, strict=True):
            before = self.states[slot, start - 1][None, None] if start else None
            out, states = self.model(ids[None], before)
            self.states[slot, start : start + len(ids)] = states[0]
            logits.append(out[0])
        rows = torch.from_numpy(layout.logit_rows).to(self.device)  # the rows that somebody wants
        return TargetOutput(torch.cat(logits)[rows])

    @torch.inference_mode()
    def copy_prefix(self, source: int, slot: int, length: int) -> bool:
        """Optional: a slot goes on from what another holds, so that a prompt's beginning is not read again."""
        self.states[slot, :length] = self.states[source, :length]
        self.cache_version += 1
        return True

    def executed_tokens(self, layout: VerifyLayout) -> int:
        """What cost tables are keyed by; a target that pads counts its padding."""
        return layout.num_tokens

    def fingerprint(self) -> Mapping[str, str]:
        """What a measured cost depends on."""
        return {"model": self.name, "width": str(self.model.embed.embedding_dim), "device": str(self.device)}


def trained(steps: int, seed: int = 0) -> ByteGRU:
    """A model that has learnt TEXT by heart, more or less."""
    torch.manual_seed(seed)
    model = ByteGRU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([list(TEXT)])
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(ids[:, :-1])[0][0], ids[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def main(steps: int = 150, max_tokens: int = 200) -> None:
    model = trained(steps)
    prompt = list(b"she sells sea shells")  # token ids: without a tokenizer, those go in and come out
    results = {}
    for drafter in ("none", "ngram"):
        with SpeculativeDecoder.from_pretrained(GRUTarget(model), drafter, cost=None, max_slots=4) as decoder:
            results[drafter] = decoder.generate(prompt, max_tokens=max_tokens)[0]
    fast = results["ngram"]
    print(bytes(fast.ids).decode("utf-8", "replace"))
    print(f"{sum(fast.accepted)} of {len(fast.ids)} tokens were drafted and accepted")
    print("the same as without drafts:", fast.ids == results["none"].ids)


if __name__ == "__main__":
    typer.run(main)
