"""Which format a file is in, what its keys mean, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.checkpoints import EagleConfig, read_config
from dspark.checkpoints.formats import default_zlab_layers, detect
from dspark.errors import CheckpointError

ROOT = Path(__file__).parents[1] / "golden"


def raw(case: str) -> dict[str, Any]:
    return json.loads((ROOT / case / "config.json").read_text())


# case -> format, algorithm, layout, max gamma, taps in DeepSpec's numbering, head, rank, confidence, with Markov
GOLDEN = {
    "deepspec_dspark_vanilla": ("deepspec", "dspark", "anchor-first", 4, (1, 3), "markov", 8, True, True),
    "deepspec_dspark_gated": ("deepspec", "dspark", "anchor-first", 4, (1, 3), "gated", 8, True, False),
    "deepspec_dspark_rnn": ("deepspec", "dspark", "anchor-first", 4, (-1, 2, 4), "rnn", 8, True, True),
    "deepspec_dspark_gemma4": ("deepspec", "dspark", "anchor-first", 4, (1, 3), "markov", 8, True, True),
    "deepspec_dflash": ("deepspec", "dflash", "anchor-first", 4, (1, 3), "none", 0, False, False),
    "speculators_dspark_vanilla": ("speculators", "dspark", "anchor-first", 4, (1, 3), "markov", 8, True, True),
    "speculators_dspark_gated": ("speculators", "dspark", "anchor-first", 4, (1, 3), "gated", 8, True, False),
    "speculators_dspark_rnn_bonus_anchor": ("speculators", "dspark", "mask-only", 3, (1, 3), "rnn", 8, True, True),
    "speculators_dspark_vanilla_legacy_layout": (
        *("speculators", "dspark", "anchor-first", 4, (1, 3)),
        *("markov", 8, True, True),
    ),
    "speculators_dflash": ("speculators", "dflash", "mask-only", 3, (1, 3), "none", 0, False, False),
    "zlab_dflash": ("zlab", "dflash", "mask-only", 4, (1, 3), "none", 0, False, False),
    "specforge_dspark_gated_swa": ("specforge", "dspark", "anchor-first", 4, (1, 3), "gated", 8, True, True),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_configs(case: str) -> None:
    c = read_config(raw(case))
    got = (c.source_format, c.algorithm, c.layout, c.max_gamma, c.target_layer_ids, c.head, c.markov_rank)
    assert (*got, c.confidence, c.confidence_with_markov) == GOLDEN[case]
    assert c.mask_token_id == (4 if "gemma4" in case else 96)


def test_sliding_conventions() -> None:
    """speculators measures windows from the anchor, SpecForge from the query; both are causal in sliding layers."""
    first, second = read_config(raw("speculators_dspark_vanilla")).layers
    assert (first.window, first.window_from, first.causal) == (6, "anchor", True)
    assert (second.window, second.causal) == (None, False)
    first, second = read_config(raw("specforge_dspark_gated_swa")).layers
    assert (first.window, first.window_from, first.causal) == (6, "query", True)
    assert (second.window, second.causal) == (None, False)
    for layer in read_config(raw("speculators_dspark_rnn_bonus_anchor")).layers:
        assert (layer.window, layer.causal) == (5, False), "sliding_window_non_causal"


def test_gemma4_shapes_in_both_spellings() -> None:
    values = raw("deepspec_dspark_gemma4")
    old = read_config(values)
    assert [(x.head_dim, x.num_kv_heads, x.k_eq_v) for x in old.layers] == [(16, 1, True)] * 2
    assert old.layers[0].rope.rope_type == "proportional"
    assert old.logit_softcap == 30.0
    assert old.embed_scale == 32**0.5
    new = dict(values)
    del new["global_head_dim"], new["num_global_key_value_heads"]
    new["per_layer_config"] = {str(i): {"head_dim": 16, "num_key_value_heads": 1} for i in range(2)}
    assert read_config(new) == old
    sliding = dict(values, layer_types=["sliding_attention", "full_attention"])
    layer = read_config(sliding).layers[0]
    assert (layer.head_dim, layer.num_kv_heads, layer.k_eq_v, layer.window) == (8, 2, False, 16)
    assert layer.rope.theta == 10_000.0


@pytest.mark.parametrize(
    ("case", "key", "layout"),
    [
        ("deepspec_dspark_vanilla", None, "anchor-first"),
        ("speculators_dspark_vanilla", "sample_from_anchor", "mask-only"),
        ("speculators_dflash", "sample_from_anchor", "mask-only"),
        ("specforge_dspark_gated_swa", None, "anchor-first"),
        ("zlab_dflash", None, "mask-only"),
    ],
)
def test_absent_layout_key_takes_the_formats_default(case: str, key: str | None, layout: str) -> None:
    """Case 33: a config without the field is what its format was before the field existed, and says so."""
    values = raw(case)
    assert "sample_from_anchor" not in values or key is not None
    values.pop("sample_from_anchor", None)
    config = read_config(values)
    assert config.layout == layout
    if layout == "mask-only":
        assert any("sample_from_anchor is absent" in note for note in config.notes)


def test_layer_id_defaults() -> None:
    assert default_zlab_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_zlab_layers(36, 1) == (18,)
    values = raw("zlab_dflash")
    del values["dflash_config"]["target_layer_ids"]
    assert read_config(values).target_layer_ids == (1, 3)
    values = raw("speculators_dspark_vanilla")
    del values["aux_hidden_state_layer_ids"]
    assert read_config(values, target_layers=28).target_layer_ids == (1, 13, 24)
    with pytest.raises(CheckpointError, match="aux_hidden_state_layer_ids: missing"):
        read_config(values)


@pytest.mark.parametrize("case", ["deepspec_dspark_vanilla", "specforge_dspark_gated_swa"])
def test_missing_target_layer_ids_is_named(case: str) -> None:
    """Case 34."""
    values = raw(case)
    values.get("dflash_config", values).pop("target_layer_ids")
    with pytest.raises(CheckpointError, match="target_layer_ids: missing"):
        read_config(values)


def test_all_problems_in_one_error() -> None:
    values = raw("deepspec_dspark_vanilla")
    del values["block_size"], values["mask_token_id"]
    values["hidden_size"] = "wide"
    with pytest.raises(CheckpointError) as err:
        read_config(values)
    for words in ("block_size: missing", "mask_token_id: missing", "hidden_size: expected an integer, got 'wide'"):
        assert words in str(err.value)


Change = Callable[[dict[str, Any]], None]


def setting(key: str, value: Any) -> Change:
    def change(values: dict[str, Any]) -> None:
        values[key] = value

    return change


REFUSED: list[tuple[str, Change, str]] = [
    (  # case 37
        "deepspec_dspark_vanilla",
        setting("mask_token_id", 97),
        "mask_token_id: 97 has no row in an embedding of 97 rows",
    ),
    ("deepspec_dspark_vanilla", setting("target_layer_ids", [1, 5]), "5 is the target's last layer"),
    ("deepspec_dspark_vanilla", setting("target_layer_ids", [3, 1]), "expected increasing ids"),
    ("deepspec_dspark_vanilla", setting("target_layer_ids", [-2, 1]), "-2 is below -1"),
    ("deepspec_dspark_vanilla", setting("markov_head_type", "gatted"), "expected one of vanilla, gated, rnn"),
    ("deepspec_dspark_vanilla", setting("model_type", "qwen4"), "layers of 'qwen4' are not supported"),
    ("deepspec_dspark_vanilla", setting("rope_parameters", {"rope_type": "longrope"}), "rope type 'longrope'"),
    ("deepspec_dspark_vanilla", setting("num_key_value_heads", 3), "4 heads can't share 3"),
    ("deepspec_dspark_vanilla", setting("layer_types", ["sliding_attention"] * 2), "sliding_window: missing"),
    ("deepspec_dspark_gemma4", setting("enable_moe_block", True), "mixture-of-experts"),
    ("speculators_dspark_vanilla", setting("mask_token_id", None), "mask_token_id: missing"),
    ("speculators_dflash", setting("block_size", 1), "leaves nothing to draft in the mask-only layout"),
    ("zlab_dflash", lambda v: v["dflash_config"].update(attention_sink_bias=True), "attention sinks"),
    ("zlab_dflash", lambda v: v["dflash_config"].update(target_layer_ids=[1, 6]), "6 is not a layer"),
]


@pytest.mark.parametrize(("case", "change", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_refused_values(case: str, change: Change, words: str) -> None:
    values = copy.deepcopy(raw(case))
    change(values)
    with pytest.raises(CheckpointError, match=words):
        read_config(values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (raw("speculators_peagle"), "'peagle' is not supported: P-EAGLE"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3 is not supported: EAGLE-3 in SGLang's"),
        ({"speculators_model_type": "dflash2"}, "'dflash2' is not supported"),
        ({"speculators_model_type": "mtp"}, "'mtp' is not supported"),
        ({"speculators_model_type": "dspak"}, "unknown to this version"),
        ({"architectures": ["DSparkDraftModel"], "dspark_block_size": 5}, "DeepSeek-V4's own DSpark modules"),
        ({"architectures": ["X"], "dflash_config": {"projector_type": "domino"}}, "Domino is not supported"),
        (raw("target_qwen3_tiny"), "not a drafter checkpoint"),
        ({}, "not a drafter checkpoint"),
    ],
)
def test_refused_formats(values: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        detect(values, "config.json")


def test_ambiguous_architecture() -> None:
    """DSparkDraftModel is written by two projects; a serving export of SpecForge carries DeepSpec's architecture."""
    assert detect(raw("speculators_dspark_vanilla"), "") == "speculators"
    assert detect(raw("specforge_dspark_gated_swa"), "") == "specforge"
    export = raw("specforge_dspark_gated_swa")
    nested = export["dflash_config"]
    export["architectures"] = ["Qwen3DSparkModel"]
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        export[key] = nested[key]
    assert detect(export, "") == "specforge"
    assert read_config(export) == read_config(raw("specforge_dspark_gated_swa"))


def test_eagle3_configs() -> None:
    """Ids in DeepSpec's numbering; DeepSpec norms nothing on the way back, speculators says it in keys."""
    c = read_config(raw("deepspec_eagle3"))
    assert (c.source_format, c.algorithm, c.layout, c.family) == ("deepspec", "eagle3", "autoregressive", "qwen3")
    assert (c.target_layer_ids, c.block_size, c.eagle) == ((0, 1, 2, 3, 4), 3, EagleConfig())
    assert (c.requires_embeddings, c.mask_token_id, c.num_target_layers) == (True, -1, 6)
    c = read_config(raw("speculators_eagle3"))
    assert (c.source_format, c.algorithm, c.family, c.draft_vocab_size) == ("speculators", "eagle3", "llama", 66)
    assert (c.target_layer_ids, c.block_size) == ((1, 2, 3), 3)
    assert c.eagle == EagleConfig(norm_before_residual=True, norm_before_fc=True, norm_output=True)
    assert (c.requires_embeddings, c.target_name) == (False, "target_qwen3_tiny")
    values = raw("speculators_eagle3")
    for key in ("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "norm_output"):
        del values[key]
    c = read_config(values, target_layers=28)
    assert c.target_layer_ids == (1, 13, 24)
    assert c.eagle == EagleConfig()
    assert any("eagle_aux_hidden_state_layer_ids is absent" in note for note in c.notes)


EAGLE3_REFUSED: list[tuple[str, Change, str]] = [
    ("deepspec_eagle3", setting("target_layer_ids", [0, 5]), "5 is the target's last layer"),
    ("deepspec_eagle3", setting("num_hidden_layers", 2), "EAGLE-3 with 2 layers is not supported"),
    ("deepspec_eagle3", setting("ttt_length", None), "ttt_length: missing"),
    ("deepspec_eagle3", setting("model_type", "gemma4_text"), "EAGLE-3 with Gemma 4's layers is not supported"),
    ("speculators_eagle3", setting("fc_norm", True), "fc_norm: norms of single taps are not supported"),
    ("speculators_eagle3", setting("transformer_layer_config", None), "transformer_layer_config: missing"),
]


@pytest.mark.parametrize(("case", "change", "words"), EAGLE3_REFUSED, ids=[words for _, _, words in EAGLE3_REFUSED])
def test_refused_eagle3_values(case: str, change: Change, words: str) -> None:
    values = raw(case)
    change(values)
    if values.get("num_hidden_layers") == 2:
        values["layer_types"] = ["full_attention"] * 2
    with pytest.raises(CheckpointError, match=words):
        read_config(values)


def test_explicit_causality_of_a_block() -> None:
    values = raw("specforge_dspark_gated_swa")
    values["dflash_config"]["causal"] = False
    assert [layer.causal for layer in read_config(values).layers] == [False, False]
    values["dflash_config"]["causal"] = True
    assert [layer.causal for layer in read_config(values).layers] == [True, True]
