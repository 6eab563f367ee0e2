"""What ``advise`` and ``simulate`` share: recording a trace on real prompts, and the cost of this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dspark.cli import _evaluation as ev
from dspark.cli import _options as opt
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.bench.trace import AcceptanceTrace
    from dspark.evaluation.collect import Sampling
    from dspark.scheduling.cost import CostProfile


def recording_decoder(options: opt.DecoderOptions, sampling: Sampling) -> SpeculativeDecoder:
    """A decoder that traces are recorded with.

    Raises:
        ConfigError: the drafter drafts nothing.
    """
    from dspark.bench.trace import recording_settings

    settings = recording_settings(sampling.params, coupled=sampling.coupled)
    options = dataclasses.replace(options, cost="none", scheduler=str(settings.pop("scheduler")))
    decoder = opt.build_decoder(options, defaults=settings)
    if decoder.engine.parts.gamma == 0:
        raise ConfigError(f"drafter {options.drafter!r} drafts nothing: name one with --drafter")
    return decoder


def record(
    decoder: SpeculativeDecoder, lines: Sequence[ev.Line], system: str | None, sampling: Sampling
) -> AcceptanceTrace:
    """The trace of the first turns of some prompts.

    Raises:
        EvaluationError: prompts of token ids, or none that was finished.
    """
    from dspark.bench.prompts import check_real, prompts_of
    from dspark.bench.trace import record_trace

    items = ev.items_of(lines, decoder, system)
    prompts = prompts_of(items, decoder.tokenizer)
    judged = check_real(prompts, decoder.engine.parts.target, decoder.tokenizer)
    with ev.progress("prompts") as bar:
        bar.begin("trace", len(prompts), 0)
        trace = record_trace(decoder, [ids for _, ids in prompts], lambda i: sampling.of(items[i], 0), bar.tokens)
    about = {**trace.about, "sampling": sampling.as_dict(), "prompts": judged}
    return dataclasses.replace(trace, about=about)


def cost_of(decoder: SpeculativeDecoder, cost: str) -> CostProfile:
    """What forwards, drafts and the rest of a step take here.

    Args:
        cost: ``auto`` (the profile that is kept, or a short measurement), ``measure``, or a file of ``dspark profile``.

    Raises:
        CostTableError: measured on something else; the message names what differs.
    """
    from dspark.cli.profile import measure_glue
    from dspark.engine.build import find_cost
    from dspark.engine.draft_cost import drafter_fingerprint, with_draft

    engine = decoder.engine
    drafter = drafter_fingerprint(engine.parts, engine.config)
    found: Any = find_cost(cost, engine.parts, needed=True, drafter=drafter)
    if found is None:
        raise ConfigError("--cost none: without a cost there is nothing to weigh drafts by")
    profile: CostProfile = found.of_drafter(drafter)
    if not profile.draft:
        profile = with_draft(profile, engine.parts, drafter, slots=engine.config.max_slots, kept=cost == "auto")
    if profile.glue_seconds == 0.0:
        profile = dataclasses.replace(profile, glue_seconds=measure_glue(decoder))
    return profile
