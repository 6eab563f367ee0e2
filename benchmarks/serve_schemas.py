"""JSON by schema: 200 prompts over 20 schemas, all valid, and greedy output equal to plain decoding under the grammar.

    python -m benchmarks.serve_schemas [--prompts 200 --target smollm2]

Both decoders run behind the server's own reader of requests, without HTTP. Results go to
``benchmarks/results/serve-schemas.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jsonschema

from benchmarks._common import Progress, machine, prepare, write_json
from benchmarks.margins import BOUND
from benchmarks.prompts import load_prompts
from benchmarks.schemas import SCHEMAS, response_format

MAX_LEN = 1024
TOKENS = 400


def main() -> None:
    """Run, store, and say whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--name", default="serve-schemas", help="of the result")
    arguments = parser.parse_args()
    prepare()
    result = run(arguments.target, arguments.drafter, arguments.prompts, Progress())
    path = write_json(arguments.name, {"machine": machine(), **result})
    print(json.dumps({k: v for k, v in result.items() if k != "faults"}, indent=1))
    print(f"written to {path}")
    sys.exit(1 if result["faults"] else 0)


def run(target: str, drafter: str, prompts: int, say: Any) -> dict[str, Any]:
    """Decode all of them, together with drafts and one by one without."""
    from dspark.api import SpeculativeDecoder

    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_len": MAX_LEN, "cost": None}
    plain = SpeculativeDecoder.from_pretrained(target, drafter="none", max_slots=1, **common)
    drafting = SpeculativeDecoder.from_pretrained(target, drafter=drafter, max_slots=8, **common)
    jobs = work(plain, prompts)
    say(f"{len(jobs)} prompts with drafts")
    names = [drafting.engine.submit(ids, params) for ids, params, _ in jobs]
    got: dict[str, list[int]] = {name: [] for name in names}
    texts: dict[str, str] = dict.fromkeys(names, "")
    for chunk in drafting.engine.run():
        got[chunk.request_id] += chunk.ids
        texts[chunk.request_id] += chunk.text or ""
    say("one by one without")
    faults, equal, close = [], 0, 0
    for name, (ids, params, schema) in zip(names, jobs, strict=True):
        problem = invalid(texts[name], SCHEMAS[schema])
        if problem:
            faults.append({"schema": schema, "text": texts[name], "problem": problem})
        expected = plain.generate([ids], params)[0].ids
        if got[name] == expected:
            equal += 1
        elif narrow(plain, ids, params, expected, got[name]):
            close += 1
        else:
            faults.append({"schema": schema, "expected": expected, "got": got[name]})
    stats = drafting.stats
    return {
        "prompts": len(jobs),
        "schemas": len({schema for *_, schema in jobs}),
        "equal": equal,
        "within_rounding": close,
        "accepted_length": stats.acceptance.accepted_length,
        "verified_drafts": stats.verified,
        "accepted_drafts": sum(stats.acceptance.accepted),
        "faults": faults,
    }


def work(decoder: Any, prompts: int) -> list[tuple[list[int], Any, str]]:
    """(token ids, parameters, schema) of every prompt; each schema in turn."""
    from dspark.server.chat import ChatDefaults
    from dspark.server.config import ServerConfig
    from dspark.server.prompts import RequestReader
    from dspark.server.schemas import ChatRequest

    reader = RequestReader(decoder.engine, ServerConfig(), ChatDefaults({}, None))
    texts = load_prompts(8)
    jobs = []
    for i in range(prompts):
        schema = list(SCHEMAS)[i % len(SCHEMAS)]
        said = (
            f"{texts[i % len(texts)].text[:200]} ({i})\nAnswer with JSON of this schema: {json.dumps(SCHEMAS[schema])}"
        )
        body = {
            "model": "x", "messages": [{"role": "user", "content": said}], "temperature": 0, "max_tokens": TOKENS,
            "response_format": response_format(schema),
        }  # fmt: skip
        (choice,) = reader.chat(ChatRequest.model_validate(body)).choices
        jobs.append((*choice, schema))
    return jobs


def invalid(text: str, schema: dict[str, Any]) -> str:
    """What is wrong with a document; an empty string for a valid one."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as err:
        return str(err).splitlines()[0]
    return ""


def narrow(decoder: Any, ids: list[int], params: Any, expected: list[int], got: list[int]) -> bool:
    """True where the two tokens at the first difference score within 1e-4 of each other, under the grammar."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if at is None:
        return False
    import dataclasses

    shown = dataclasses.replace(params, logprobs=2, logprobs_mode="processed", max_tokens=at + 1)
    entry = decoder.generate([ids], shown)[0].logprobs[at]
    scores = dict(entry.top)
    return {expected[at], got[at]} == set(scores) and max(scores.values()) - min(scores.values()) < BOUND


if __name__ == "__main__":
    main()
