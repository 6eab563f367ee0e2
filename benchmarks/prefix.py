"""The prefix cache: ``python -m benchmarks.prefix --target smollm2``.

What is spared where prompts begin with what was read before, with the cache and without it, in turn and on the same
target: a conversation of four turns, alone, and sixteen requests at once behind a system prompt of about 400 tokens.
Shown are seconds, seconds to the first token (of each turn; median of the requests) and tokens that the target ran;
medians over the passes. An engine that has seen nothing runs each pass, so that nothing is left of the last one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

from benchmarks._common import describe, machine, prepare, table, write_json, write_section

QUESTIONS = (
    "I have a week in Lisbon in October. What should I see, and how would you split the days?",
    "I like old trams and tiles more than beaches. Does that change anything?",
    "Which of these days would you give up if it rains, and what would you do instead?",
    "Write the whole plan down in one short paragraph that I can send to a friend.",
)
RULES = (
    "You are the assistant of a public library. Answer in two or three plain sentences. Opening hours are nine to "
    "seven on weekdays and ten to four on Saturdays; the library is closed on Sundays and on public holidays. A "
    "card costs nothing for those who live or study in the town, and ten a year for others. Books are lent for "
    "four weeks, films and music for one, tools for three days, and nothing that stands in the reading room is "
    "lent at all. Loans are renewed twice unless somebody else has asked for them. What comes back late costs "
    "twenty cents a day, at most what it cost new, and children are never charged. Whoever loses a book brings "
    "the same one or pays for it. Books that another library has come by car on Tuesdays and Fridays. There are "
    "sixteen places with a computer, of which four can be reserved for a day, and printing costs ten cents a "
    "page, fifteen in colour. The hall on the first floor takes sixty people and is let to clubs for nothing if "
    "all may come in. Children under ten come with somebody who looks after them. Dogs wait outside, guide dogs "
    "excepted. On the first Thursday of a month somebody reads aloud in the evening; in summer this is in the "
    "garden. Never give the names, loans or addresses of readers away, whoever asks. If you do not know an "
    "answer, say so, and send people to the desk or to the telephone, which is answered during opening hours. Do "
    "not invent rules, prices or dates. Be friendly, be brief, do not use lists, and write numbers as words up to "
    "twelve."
)
ASKED = (
    "How late may I bring a film back?", "Can I reserve a computer?", "Is there parking?", "Are you open on Sunday?",
    "What does a card cost?", "May I bring my dog?", "Do you lend drills?", "Where do I print in colour?",
    "Who borrowed my favourite book?", "How often can I renew?", "What if I lose a book?", "Is the hall free?",
    "When is the next reading?", "Do children pay fines?", "Can you get books from elsewhere?", "Is there a garden?",
)  # fmt: skip


def build(target: Any, options: argparse.Namespace, kept: bool) -> Any:
    """A decoder of an empty cache."""
    from dspark import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(
        target, options.drafter, cost=None, scheduler="fixed", max_slots=len(ASKED), max_len=options.max_len,
        prefix_cache=kept, prefix_min_tokens=options.minimum,
    )  # fmt: skip


def conversation(decoder: Any, tokens: int) -> dict[str, Any]:
    """Four turns, each after the answer to the last."""
    messages: list[dict[str, str]] = []
    firsts, outputs = [], []
    began = time.perf_counter()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        result = decoder.generate(encode(decoder, messages), max_tokens=tokens)[0]
        firsts.append(result.stats.first_token_seconds)
        outputs.append(list(result.ids))
        messages.append({"role": "assistant", "content": result.text})
    return figures(decoder, time.perf_counter() - began, statistics.mean(firsts[1:])) | {"outputs": outputs}


def crowd(decoder: Any, tokens: int) -> dict[str, Any]:
    """Sixteen requests at once, behind one system prompt."""
    chats = [[{"role": "system", "content": RULES}, {"role": "user", "content": asked}] for asked in ASKED]
    prompts = [encode(decoder, chat) for chat in chats]
    began = time.perf_counter()
    results = decoder.generate(prompts, max_tokens=tokens)
    seconds = time.perf_counter() - began
    first = statistics.median(r.stats.first_token_seconds for r in results)
    return figures(decoder, seconds, first) | {"outputs": [list(r.ids) for r in results]}


def encode(decoder: Any, chat: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat."""
    from dspark.prompts import encode_chat

    return list(encode_chat(chat, decoder.tokenizer))


def figures(decoder: Any, seconds: float, first: float) -> dict[str, Any]:
    """What one pass took."""
    stats = decoder.stats
    return {
        "seconds": seconds, "first_token_seconds": first, "executed_tokens": stats.executed_tokens,
        "prefill_tokens": stats.prefill_tokens, "cached_tokens": stats.cached_tokens, "hits": stats.prefix_hits,
        "prefix_seconds": stats.phase_seconds["prefix"],
    }  # fmt: skip


def measure(target: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both cases with and without the cache, in turn."""
    found = []
    for name, run in (("conversation of 4 turns", conversation), (f"{len(ASKED)} requests, one system prompt", crowd)):
        passes: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for _ in range(options.passes):
            for kept in (False, True):
                decoder = build(target, options, kept)
                passes[kept].append(run(decoder, options.max_tokens))
                decoder.close()
        same = sum(a == b for a, b in zip(passes[True][0]["outputs"], passes[False][0]["outputs"], strict=True))
        medians = {
            key: {
                field: statistics.median(one[field] for one in passes[kept])
                for field in passes[kept][0]
                if field != "outputs"
            }
            for key, kept in (("on", True), ("off", False))
        }
        found.append({"case": name, "answers": len(passes[True][0]["outputs"]), "same_answers": same, **medians})
    return found


def report(results: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The section of the results page."""
    head = ["case", "prefix cache", "seconds", "first token", "tokens run", "not read again", "copying", "same answers"]
    rows = []
    for r in results:
        for key in ("off", "on"):
            one = r[key]
            rows.append([
                r["case"], key, f"{one['seconds']:.2f}", f"{one['first_token_seconds']:.2f} s",
                f"{one['executed_tokens']:,.0f}", f"{one['cached_tokens']:,.0f}",
                f"{1e3 * one['prefix_seconds']:.1f} ms", f"{r['same_answers']} of {r['answers']}",
            ])  # fmt: skip
    return f"{table(head, rows, left=2)}\n\n{describe(about)}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", default="none", help="a registered drafter or a checkpoint")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--max-len", type=int, default=1024, help="tokens of a slot")
    parser.add_argument("--minimum", type=int, default=16, help="fewest tokens that are taken over")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(None if arguments is None else list(arguments))
    prepare()
    from dspark.targets.hf import HFTarget

    about = machine() | {
        name: getattr(options, name) for name in ("target", "dtype", "drafter", "passes", "max_tokens", "minimum")
    }
    target = HFTarget.from_pretrained(options.target, dtype=options.dtype, device="cpu")
    results = measure(target, options)
    text = report(results, about)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('prefix', {'about': about, 'cases': results})}")
        write_section("prefix", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
