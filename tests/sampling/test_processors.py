"""Processed scores against transformers, token by token; penalties against a reference written out here."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from dspark.config import SamplingParams
from dspark.errors import ComponentError, RequestError, RowFault
from dspark.sampling.history import RequestSampling
from dspark.sampling.processors import ProcessEntry, process
from dspark.types import Mode

V = 61
EOS = (3, 7)


def reference(logits, prompt, output, params):
    """One row, from scratch: transformers' processors in its order; presence and frequency over ``output``."""
    ids = torch.tensor([[*prompt, *output]])
    scores = logits[None].to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
    if params.logit_bias:
        scores = hf.SequenceBiasLogitsProcessor({(k,): v for k, v in params.logit_bias.items()})(ids, scores)
    if params.repetition_penalty != 1.0:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in sorted(set(output)):
        scores[0, token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    if params.min_tokens:
        ends = [*(() if params.ignore_eos else EOS), *params.stop_token_ids]
        scores = hf.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends)(ids, scores)
    if not params.greedy:
        for on, warper in (
            (params.temperature != 1.0, lambda: hf.TemperatureLogitsWarper(params.temperature)),
            (params.top_k > 0, lambda: hf.TopKLogitsWarper(params.top_k)),
            (params.top_p < 1.0, lambda: hf.TopPLogitsWarper(params.top_p)),
            (params.min_p > 0.0, lambda: hf.MinPLogitsWarper(params.min_p)),
        ):
            if on:
                scores = warper()(ids, scores)
    return scores[0]


def state(params, prompt=(1, 2), output=(), mode=None):
    made = RequestSampling(params, prompt, V, EOS, mode)
    made.commit(output)
    return made


ALL = [
    {"temperature": 1.0, "logit_bias": {5: 4.0, 0: -100.0, 3: 0.5}},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8},
    {"temperature": 1.0, "presence_penalty": 0.7},
    {"temperature": 1.0, "frequency_penalty": 2.0},
    {"temperature": 1.0, "frequency_penalty": -0.6, "presence_penalty": -0.2},
    {"temperature": 1.0, "min_tokens": 4},
    {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": (9, 11), "ignore_eos": True},
    {"temperature": 0.7, "top_k": 9},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.3},
    {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {4: -2.0},
        "min_tokens": 5,
        "stop_token_ids": (12,),
    },
    {"temperature": 0.0, "top_k": 3, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    {"do_sample": False, "temperature": 0.3, "top_k": 2, "top_p": 0.5, "min_p": 0.9},
    {},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_verified_row_equals_one_by_one_decoding(dtype):
    """Case 5: all parameters at once in one batch, blocks of 0 to 5 drafts, each row against its own history."""
    rng = np.random.default_rng(0)
    entries, wanted, row = [], [], 0
    logits = torch.randn(400, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul_(3).to(dtype)
    for trial in range(5):
        for setting in ALL:
            params = SamplingParams(**setting)
            prompt, output, drafts = (rng.integers(0, V, size=n).tolist() for n in (6, trial, rng.integers(0, 6)))
            entries.append(ProcessEntry(state(params, prompt, output), row, drafts))
            for k in range(len(drafts) + 1):
                wanted.append(reference(logits[row], prompt, [*output, *drafts[:k]], params))
                row += 1
    before = logits[:row].clone()
    got = process(logits[:row], entries)
    assert torch.equal(logits[:row], before)
    for have, want in zip(got, wanted, strict=True):
        assert torch.equal(torch.isinf(have), torch.isinf(want))
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6
        assert torch.allclose(have, want.to(have.dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("setting", ALL[:3] + ALL[6:11] + ALL[12:])
def test_what_transformers_has_is_bit_identical(setting):
    params = SamplingParams(**(setting | {"frequency_penalty": 0.0, "presence_penalty": 0.0}))
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1)) * 4
    got = process(logits, [ProcessEntry(state(params, (1, 2, 1), (5,)), 0, (6, 6, 2))])
    for k in range(4):
        assert torch.equal(got[k], reference(logits[k], (1, 2, 1), [5, 6, 6, 2][: k + 1], params))


def test_frequency_penalty_counts_each_accepted_token_at_its_own_position():
    """Case 6: a loop of period 3, three drafts at once, against one-by-one decoding."""
    params = SamplingParams(frequency_penalty=2.0)
    loop = [4, 5, 6] * 3
    blocked, single = state(params, (4, 5, 6)), state(params, (4, 5, 6))
    rows = []
    for start in (0, 3, 6):
        scores = process(torch.zeros(4, V), [ProcessEntry(blocked, 0, loop[start : start + 3])])
        rows += scores[: 4 if start == 6 else 3]
        blocked.commit(loop[start : start + 3])
    for i in range(10):
        assert torch.equal(process(torch.zeros(1, V), [ProcessEntry(single, 0)])[0], rows[i])
        single.commit(loop[i : i + 1])
    assert rows[9][[4, 5, 6]].tolist() == [-6.0, -6.0, -6.0]


def test_prompt_counts_for_repetition_and_not_for_presence_or_frequency():
    logits = torch.full((1, V), 2.0)
    repeated = process(logits, [ProcessEntry(state(SamplingParams(repetition_penalty=2.0), (8, 8)), 0)])
    assert repeated[0, 8] == 1.0
    counted = process(
        logits, [ProcessEntry(state(SamplingParams(presence_penalty=1.0, frequency_penalty=1.0), (8, 8)), 0)]
    )
    assert (counted == 2.0).all()


def test_rejected_drafts_leave_no_trace():
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=1.0)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(2))
    one, other = state(params), state(params)
    process(logits, [ProcessEntry(one, 0, (20, 21, 22))])
    one.commit([30])
    other.commit([30])
    assert torch.equal(process(logits[:1], [ProcessEntry(one, 0)]), process(logits[:1], [ProcessEntry(other, 0)]))


def test_ids_beyond_the_logits_are_ignored():
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0)
    logits = torch.ones(1, V)
    assert torch.equal(process(logits, [ProcessEntry(state(params, (V + 5, -1), (V,)), 0)]), logits)


def test_min_tokens_ends_on_time():
    made = state(SamplingParams(min_tokens=3, stop_token_ids=(9,)))
    scores = process(torch.zeros(5, V), [ProcessEntry(made, 0, (1, 1, 1, 1))])
    masked = torch.isinf(scores)
    assert masked[:, [3, 7, 9]].all(-1).tolist() == [True, True, True, False, False]
    assert masked.sum().item() == 9
    made.commit([1, 1, 1])
    assert not made.edits


def test_nothing_to_do_returns_the_logits_themselves():
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, V).to(dtype)
        greedy = [ProcessEntry(state(SamplingParams(top_k=3, top_p=0.4)), i) for i in range(3)]
        assert process(logits, greedy) is logits
        plain = [ProcessEntry(state(SamplingParams(temperature=1.0)), i) for i in range(3)]
        assert process(logits, plain) is logits


def test_greedy_mode_takes_no_warpers_whatever_the_parameters():
    """Case 9: leftovers of T and top_k change nothing."""
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(5))
    left = SamplingParams(do_sample=False, temperature=0.3, top_k=2, top_p=0.1)
    assert process(logits, [ProcessEntry(state(left), 0, (1,))]) is logits
    forced = state(SamplingParams(temperature=0.5, top_k=2), mode=Mode.GREEDY)
    assert process(logits, [ProcessEntry(forced, 0, (1,))]) is logits


class Counter:
    """Counts tokens and lowers each by its count; notes what it was fed."""

    def __init__(self, fed=()):
        self.fed = list(fed)

    def fork(self):
        return Counter(self.fed)

    def advance(self, token_id):
        self.fed.append(token_id)

    def process(self, logits):
        logits = logits.clone()
        for token in self.fed:
            logits[token] -= 2.0
        return logits


def test_a_stateful_processor_equals_the_penalty_it_copies():
    """Case 7: accepted tokens counted once, at their position; rejected ones never."""
    user = Counter()
    custom = state(SamplingParams(logits_processors=[user]))
    builtin = state(SamplingParams(frequency_penalty=2.0))
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(6))
    for drafts, accepted in (((5, 6, 5), (5, 9)), ((9, 9, 9), (9, 9, 9, 4)), ((1, 1, 1), (2,))):
        rows = len(drafts) + 1
        got = process(logits[:rows], [ProcessEntry(custom, 0, drafts)])
        assert torch.equal(got, process(logits[:rows], [ProcessEntry(builtin, 0, drafts)]))
        custom.commit(accepted)
        builtin.commit(accepted)
    assert custom.processors[0].fed == [5, 9, 9, 9, 9, 4, 2]
    assert user.fed == []  # requests and choices share the parameters, never the state


class Grammar:
    """Token after 0 must be 1, after 1 must be 0 or 2; raises when fed what it does not allow."""

    NEXT: ClassVar = {0: {1}, 1: {0, 2}, 2: {2}}

    def __init__(self, state=0):
        self.state = state

    def fork(self):
        return Grammar(self.state)

    def advance(self, token_id):
        if token_id not in self.NEXT[self.state]:
            raise ValueError(f"illegal {token_id} in state {self.state}")
        self.state = token_id

    def process(self, logits):
        out = torch.full_like(logits, -math.inf)
        legal = sorted(self.NEXT[self.state])
        out[legal] = logits[legal]
        return out


def test_an_automaton_is_not_advanced_by_an_illegal_draft():
    """Case 11: the illegal draft is masked at its own row; the rows after it, which nothing reads, stay raw."""
    made = state(SamplingParams(temperature=1.0, logits_processors=[Grammar()]))
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(7))
    scores = process(logits, [ProcessEntry(made, 0, (1, 4, 0))])
    assert torch.isfinite(scores[0]).nonzero().flatten().tolist() == [1]
    assert torch.isfinite(scores[1]).nonzero().flatten().tolist() == [0, 2]
    assert torch.equal(scores[2:], logits[2:])
    assert made.processors[0].state == 0
    made.commit([1])
    assert made.processors[0].state == 1


def test_custom_processors_run_between_penalties_and_warpers():
    class Seen(Counter):
        def fork(self):
            return self

        def process(self, logits):
            self.row = logits.clone()
            return logits

    seen = Seen()
    params = SamplingParams(temperature=0.5, top_k=2, logit_bias={1: 3.0}, min_tokens=1, logits_processors=[seen])
    logits = torch.zeros(1, V)
    process(logits, [ProcessEntry(state(params), 0)])
    assert seen.row[1] == 3.0
    assert torch.isinf(seen.row).nonzero().flatten().tolist() == [3, 7]
    assert seen.row[2] == 0.0


class Broken(Counter):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def fork(self):
        return Broken(self.how)

    def advance(self, token_id):
        if self.how == "advance":
            raise RuntimeError("boom")

    def process(self, logits):
        if self.how == "process":
            raise RuntimeError("boom")
        if self.how == "shape":
            return logits[:-1]
        if self.how == "type":
            return logits.tolist()
        if self.how == "nan":
            return logits * math.nan
        if self.how == "all":
            return torch.full_like(logits, -math.inf)
        return logits


@pytest.mark.parametrize("how", ["advance", "process", "shape", "type", "nan", "all"])
def test_faults_are_attributed_to_their_entries(how):
    good = SamplingParams(temperature=1.0, logits_processors=[Counter()])
    bad = SamplingParams(temperature=1.0, logits_processors=[Broken(how)])
    logits = torch.zeros(8, V)
    entries = [ProcessEntry(state(p), 2 * i, (1,)) for i, p in enumerate((good, bad, good, bad))]
    with pytest.raises(RowFault) as caught:
        process(logits, entries)
    assert caught.value.rows == (1, 3)
    assert (logits == 0).all()
    process(logits, entries[::2])  # the others go on


def test_a_processor_that_raises_at_commit_is_named():
    made = state(SamplingParams(logits_processors=[Broken("advance")]))
    with pytest.raises(ComponentError, match=r"Broken\.advance: RuntimeError: boom") as caught:
        made.commit([1])
    assert caught.value.phase == "commit"


def test_what_submit_refuses():
    with pytest.raises(RequestError, match=r"\[61, 99\]"):
        state(SamplingParams(logit_bias={61: 1.0, 2: 1.0}, stop_token_ids=(99,)))
    with pytest.raises(RequestError, match="lacks fork, advance, process"):
        state(SamplingParams(logits_processors=[object()]))
