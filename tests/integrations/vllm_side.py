"""What runs in vLLM's own environment: the tiny target, plain and with dspark's proposer. Prints JSON.

dspark has to be importable there (its sources on PYTHONPATH will do).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 10, 11, 9, 10, 11], [40, 41, 42, 43, 40, 41, 42], [8, 8, 8, 8, 8]]


def decode(model: str, **more: Any) -> tuple[list[list[int]], float]:
    """Token ids of each prompt, and how many drafts were accepted."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=3,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **more,
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    counts = [getattr(m, "value", 0) for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    return [list(o.outputs[0].token_ids) for o in outputs], float(sum(counts))


def main() -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    plain, _ = decode(sys.argv[1])
    drafted, accepted = decode(
        sys.argv[1],
        speculative_config={
            "method": "custom_class",
            "model": "dspark.integrations.vllm.DSparkProposer",
            "num_speculative_tokens": 4,
        },
        additional_config={"dspark": {"drafter": "ngram", "drafter_config": {"min_n": 1}}},
    )
    print(json.dumps({"plain": plain, "drafted": drafted, "accepted": accepted}))


if __name__ == "__main__":
    main()
