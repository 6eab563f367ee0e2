"""JSON by schema: 200 prompts over 20 schemas, all valid, and greedy output equal to plain decoding under the grammar.

    python -m benchmarks.serve_schemas [--prompts 200 --target smollm2 --drafters auto ngram]

All decoders run behind the server's own reader of requests, without HTTP. Results go to
``benchmarks/results/serve-schemas.json`` and, with ``--write``, into docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema

from benchmarks._common import Progress, describe, machine, prepare, table, write_json, write_section
from benchmarks.margins import BOUND
from benchmarks.prompts import load_prompts
from benchmarks.schemas import SCHEMAS, response_format

MAX_LEN = 1024
TOKENS = 400
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_len": MAX_LEN, "cost": None}


def main() -> None:
    """Run, store, and say whether it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafters", nargs="+", default=["auto", "ngram"])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--name", default="serve-schemas", help="of the result")
    parser.add_argument("--write", action="store_true", help="put the table into docs/results.md")
    arguments = parser.parse_args()
    prepare()
    result = {"machine": machine(), **run(arguments.target, arguments.drafters, arguments.prompts, Progress())}
    path = write_json(arguments.name, result)
    print(json.dumps({k: v for k, v in result.items() if k != "faults"}, indent=1))
    if arguments.write:
        write_section("serve-schemas", report(result))
    print(f"written to {path}")
    sys.exit(1 if result["faults"] else 0)


def run(target: str, drafters: Sequence[str], prompts: int, say: Any) -> dict[str, Any]:
    """Decode all of them one by one without drafts, then together with each drafter's."""
    from dspark.api import SpeculativeDecoder

    plain = SpeculativeDecoder.from_pretrained(target, drafter="none", max_slots=1, **COMMON)
    jobs = work(plain, prompts)
    say(f"{len(jobs)} prompts one by one without drafts")
    expected = [plain.generate([ids], params)[0].ids for ids, params, _ in jobs]
    faults: list[dict[str, Any]] = []
    rows = []
    for drafter in drafters:
        say(f"together with the drafts of {drafter}")
        row, wrong = together(target, drafter, plain, jobs, expected)
        rows.append(row)
        faults += wrong
    plain.close()
    return {
        "prompts": len(jobs),
        "schemas": len({schema for *_, schema in jobs}),
        "tokens": sum(map(len, expected)),
        "rows": rows,
        "faults": faults,
    }


def together(
    target: str, drafter: str, plain: Any, jobs: list[tuple[list[int], Any, str]], expected: list[list[int]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What eight slots with drafts make of the prompts: (counts, faults)."""
    from dspark.api import SpeculativeDecoder

    drafting = SpeculativeDecoder.from_pretrained(target, drafter=drafter, max_slots=8, **COMMON)
    names = [drafting.engine.submit(ids, params) for ids, params, _ in jobs]
    got: dict[str, list[int]] = {name: [] for name in names}
    texts: dict[str, str] = dict.fromkeys(names, "")
    for chunk in drafting.engine.run():
        got[chunk.request_id] += chunk.ids
        texts[chunk.request_id] += chunk.text or ""
    faults, counts = [], Counter(valid=0, equal=0, within_rounding=0)
    for name, (ids, params, schema), wanted in zip(names, jobs, expected, strict=True):
        problem = invalid(texts[name], SCHEMAS[schema])
        counts["valid"] += not problem
        if problem:
            faults.append({"drafter": drafter, "schema": schema, "text": texts[name], "problem": problem})
        if got[name] == wanted:
            counts["equal"] += 1
        elif narrow(plain, ids, params, wanted, got[name]):
            counts["within_rounding"] += 1
        else:
            faults.append({"drafter": drafter, "schema": schema, "expected": wanted, "got": got[name]})
    stats = drafting.stats
    row = {
        "drafter": drafting.engine.parts.name("drafter"),
        **counts,
        "accepted_length": stats.acceptance.accepted_length,
        "verified_drafts": stats.verified,
        "accepted_drafts": sum(stats.acceptance.accepted),
    }
    drafting.close()
    return row, faults


def report(result: dict[str, Any]) -> str:
    """The table as markdown."""
    head = ["drafter", "valid", "equal to plain decoding", "within rounding", "verified", "accepted", "accepted length"]
    rows = [
        [
            r["drafter"].rpartition("/")[2], str(r["valid"]), str(r["equal"]), str(r["within_rounding"]),
            f"{r['verified_drafts']:,}", f"{r['accepted_drafts']:,}", f"{r['accepted_length']:.2f}",
        ]
        for r in result["rows"]
    ]  # fmt: skip
    said = (
        f"{result['prompts']} prompts over {result['schemas']} schemas, {result['tokens']:,} tokens, greedy; drafts of "
        "eight requests together against each alone without drafts, under the same grammar."
    )
    return f"{describe(result['machine'])}\n\n{said}\n\n{table(head, rows)}"


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
