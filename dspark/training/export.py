"""Writing a trained drafter in speculators' format: block drafters by the writer of checkpoints, EAGLE-3 here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.checkpoints import Checkpoint, DrafterConfig, read_config
from dspark.checkpoints.borrow import TargetParts
from dspark.checkpoints.configs import differences, plain_json, speculators_verifier, transformer_keys
from dspark.checkpoints.files import dtype_name, new_folder, write_json, write_tensors
from dspark.checkpoints.write import vocabulary_maps, write_speculators
from dspark.errors import CheckpointError


def write_drafter(folder: Path, checkpoint: Checkpoint, target: TargetParts) -> None:
    """Write ``checkpoint`` so that it reads back as the same drafter; an old folder is replaced as a whole.

    Raises:
        CheckpointError: the format can't say what the drafter is.
    """
    if checkpoint.config.eagle is None:
        write_speculators(folder, checkpoint, target=target, keep_embeddings=True, overwrite=True)
        return
    c = checkpoint.config
    raw = plain_json(eagle3_keys(c, target) | {"dtype": dtype_name(checkpoint.tensors)})
    different = differences(c, read_config(raw, str(folder), target_layers=c.num_target_layers))
    if different:
        raise CheckpointError(f"{folder}: speculators' format can't say all of this drafter: {'; '.join(different)}")
    tensors = dict(checkpoint.tensors)
    if checkpoint.token_map is not None:
        tensors |= vocabulary_maps(checkpoint.token_map, c.vocab_size)
    with new_folder(folder, overwrite=True) as new:
        write_json(new / "config.json", raw)
        write_tensors(new / "model.safetensors", tensors)


def eagle3_keys(c: DrafterConfig, target: TargetParts) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter in speculators' spelling; its tap ids are one higher."""
    norms = c.eagle
    if norms is None:
        raise CheckpointError(f"a {c.algorithm} drafter is no EAGLE-3 drafter")
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "transformer_layer_config": transformer_keys(c),
        "draft_vocab_size": c.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in c.target_layer_ids],
        "norm_before_residual": norms.norm_before_residual,
        "norm_before_fc": norms.norm_before_fc,
        "norm_output": norms.norm_output,
        "fc_norm": False,
        "embed_requires_grad": False,
        "target_hidden_size": None if c.target_hidden_size == c.hidden_size else c.target_hidden_size,
        "tie_word_embeddings": False,
        "speculators_config": speculators_verifier(c, "eagle3", target.name, target.architectures),
    }
