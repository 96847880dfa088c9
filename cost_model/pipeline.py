"""How the times of pipeline stages add up: three readings, because results depend on the choice.

- "literal": Appendix A of HexGen-2. One batch at a time walks through all stages: capacity is
  batch / sum of the stage times.
- "pipelined": what engines do, and the default. Stages work at the same time on micro-batches that share the
  KV memory; the slowest stage sets the pace.
- "paper_optimistic": every stage always has a full batch, as if each micro-batch had the KV memory to itself;
  the only reading that gives the decode plan of Appendix E.2 (TP=1, PP=2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from cost_model.portable import exp

PipelineSemantics = Literal["literal", "pipelined", "paper_optimistic"]
CHUNKS = (128, 192, 256, 384, 512, 768, 1024, 2048)
"""Tokens of a prompt in a mixed step of a colocated replica that are worth trying."""
_EXACT = 1 - 1e-9
"""Sums of equal stage times may exceed a multiple by rounding."""
PIPELINE_SEMANTICS: tuple[str, ...] = get_args(PipelineSemantics)


@dataclass(frozen=True)
class Pace:
    """How fast a replica is: requests/s at full load, and the seconds of one request's prefill or output
    token. A replica that runs both phases has latency_s for the prefill and token_s for an output token."""

    capacity_req_s: float
    latency_s: float
    token_s: float = 0.0


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of each stage and of each hop between them for one step of a phase, and the requests in
    the step (prefill) or under way (decode)."""

    stage_s: Sequence[float]
    hop_s: Sequence[float]
    batch: float


def micro_batch(semantics: PipelineSemantics, batch: float, stages: int) -> float:
    """Requests in one stage at a time when `batch` requests are in the KV memory."""
    return batch / stages if semantics == "pipelined" else batch


def under_way(semantics: PipelineSemantics, batch: float, stages: int) -> float:
    """Requests in all stages together when `batch` requests are in the KV memory: more than those where each
    micro-batch has that memory to itself."""
    return batch * stages if semantics == "paper_optimistic" else batch


def prefill_batches_held(semantics: PipelineSemantics, stages: int) -> int:
    """Batches whose KV caches a busy prefill replica holds: those under way in its stages, and the one that
    it sends."""
    return (stages if semantics == "pipelined" else 1) + 1


BATCHES_PER_REPLICA = 2
"""Batches of requests that a replica has at a time at most, so that it never waits for the next one."""


def prompts_held(batch: float, steps: int) -> float:
    """Prompts whose KV caches a prefill replica holds for so many steps of `batch` prompts: one for each step
    at least, since a prompt has all of its memory while parts of it are computed."""
    return max(1.0, batch) * steps


SPARE_PROMPTS, SPARE_SHARE = 2, 0.05
"""Prompts for other replicas for which a mixed replica keeps room beyond their share, and the most of its
requests that these may be."""


def outgoing_prompts(chunk: float, steps: int) -> float:
    """Prompts for other replicas for whose KV caches a mixed replica keeps room if it computes prompts for
    them only, so that its steps, `steps` of them in flight, always find a chunk of `chunk` prompts, while
    others are sent."""
    return BATCHES_PER_REPLICA * prompts_held(chunk, steps + 1)


def kept_prompts(share: Any, chunk: float, steps: Any, batch: Any) -> Any:
    """Prompts for other replicas for whose KV caches a mixed replica of `batch` requests keeps room, if that
    share of its prompts is for others; one in any case. [n] of n replicas.

    What is kept is lost for its own requests. Where it holds many, SPARE_PROMPTS more cost little, and a
    chunk is rarely missing.
    """
    spare = np.minimum(SPARE_PROMPTS, SPARE_SHARE * np.asarray(batch))
    return np.maximum(1.0, share * outgoing_prompts(chunk, steps) + spare)


def steps_to_fill(stage_s: Sequence[float], hop_s: Sequence[float]) -> int:
    """How many steps must be in flight so that the slowest stage or hop never waits for one: at least one
    for each stage, and more where hops take time."""
    filling = math.fsum((*stage_s, *hop_s)) / max(*stage_s, *hop_s, 0.0)
    return max(len(stage_s), math.ceil(filling * _EXACT))


def prefill_pace(
    semantics: PipelineSemantics,
    stage_s: Sequence[float],
    hop_s: Sequence[float],
    batch: float,
    in_flight: int | None = None,
) -> Pace:
    """Pace of a prefill replica whose stages take stage_s for a step of `batch` prompts and whose hops hop_s.

    Requests/s are batch / sum of all (Appendix A), but batch / slowest stage or hop where stages work on
    steps of their own ("pipelined"); with only so many steps in flight, at most that many per sum of all.
    Latency is the sum of all.
    """
    walk = math.fsum((*stage_s, *hop_s))
    period = walk
    if semantics == "pipelined":
        period = max(*stage_s, *hop_s, 0.0, walk / in_flight if in_flight else 0.0)
    return Pace(batch / period, walk)


def prompt_s(pace: Pace, batch: float) -> float:
    """Seconds of a mean prompt on a prefill replica of that pace, whose steps hold `batch` prompts: one step,
    or several that follow each other."""
    return pace.latency_s + max(0.0, 1 - batch) / pace.capacity_req_s


def decode_pace(
    semantics: PipelineSemantics,
    stage_s: Sequence[float],
    hop_s: Sequence[float],
    batch: float,
    osl: float,
) -> Pace:
    """Pace of a decode replica whose stages take stage_s for one step of one micro-batch.

    A request's next token starts when its last one left the last stage. "literal": batch / (sum * osl)
    requests/s (Appendix A). Otherwise as many micro-batches as stages are under way, so a token takes the
    longer of the sum and of one turn of the slowest stage or hop for each micro-batch; the requests under
    way are `batch` together ("pipelined") or in each micro-batch ("paper_optimistic").
    """
    walk = math.fsum((*stage_s, *hop_s))
    if semantics == "literal":
        return Pace(batch / (walk * osl), walk)
    stages = len(stage_s)
    cycle = max(stages * max(*stage_s, *hop_s, 0.0), walk)
    return Pace(under_way(semantics, batch, stages) / (cycle * osl), cycle)


def mixed_request_s(mixed_s: float, decode_s: float, chunk: float, decodes: float, osl: float) -> float:
    """Seconds that a request takes on a stage or hop of a colocated replica: 1 / chunk mixed steps in the
    place of decode steps, and osl / decodes decode steps in all: less than with what mixed_pace adds."""
    return (mixed_s - decode_s) / chunk + osl * decode_s / decodes


def mixed_decodes(batch: float, stages: int, chunk: float, osl: float) -> float:
    """Requests that decode in each stage of a colocated replica that holds `batch` requests, whose steps
    have room for chunks of `chunk` prompts: at most so many that their prompts keep up with their ends."""
    return min(batch / stages, osl * chunk)


def mixed_steps(chunk: float, decodes: float, osl: float) -> list[tuple[float, float, float]]:
    """The mixed steps of a colocated replica at full load: prompts and decodes in a step, and the share of
    the steps that have so many.

    Each of the `decodes` requests in a step is its last with the probability 1 / osl, and another begins
    then. Prompts longer than a chunk are divided equally, unless the next one fills the last chunk. Shorter
    ones share a step if they begin together (the number that does is Poisson), at most `chunk` of them.
    Where prompts fill every step, as many requests decode as the prompts leave: each for osl - 1 steps, since
    its first token comes with its prompt.
    """
    begin = decodes / osl
    if begin >= chunk * _EXACT:
        return [(chunk, max(decodes - chunk, 0.0), 1.0)]
    if chunk <= 1:
        busy = begin / chunk
        return [(busy * chunk + (1 - busy) / math.ceil(_EXACT / chunk), decodes, 1.0)]
    mean = min(chunk, begin / (1 - exp(-begin)))
    single = (chunk - mean) / (chunk - 1)
    return [(1.0, decodes, single), (chunk, decodes, 1 - single)]


def mean_times(steps: Sequence[tuple[PhaseTimes, float]]) -> PhaseTimes:
    """The mean of steps that each are a share of all."""
    stages = zip(*(times.stage_s for times, _ in steps), strict=True)
    hops = zip(*(times.hop_s for times, _ in steps), strict=True)
    stage_s, hop_s = (
        [math.fsum(s * share for s, (_, share) in zip(each, steps, strict=True)) for each in of]
        for of in (stages, hops)
    )
    return PhaseTimes(stage_s, hop_s, math.fsum(times.batch * share for times, share in steps))


def mixed_pace(mixed: PhaseTimes, decode: PhaseTimes, decodes: float, osl: float, chunk: float) -> Pace:
    """Pace of a colocated replica whose prompts are computed in chunks beside decodes (mixed steps).

    As many steps are under way as there are stages, each in a stage of its own, and they wait for the slowest
    of them: one with a prompt holds up all others. A request's tokens follow one another no faster than a
    step passes through all stages and hops. At full load the batch stays full, so an output token takes the
    batch's seconds per request over osl (Little's law). The first token takes as many turns of mixed steps as
    the prompt has chunks per stage.

    Parameters
    ----------
    mixed : mean times of a mixed step, and the prompts in it (see mixed_steps)
    decode : times of a step with the decodes only
    decodes : requests that decode in each of the stages' steps (see mixed_decodes)
    chunk : the prompts in a mixed step, at most
    """
    stages = len(decode.stage_s)
    share = min(1.0, decodes / (osl * mixed.batch))
    period = mixed_period_s(mixed, decode, share)
    request_s = osl * period / decodes
    turn = decode_pace("pipelined", mixed.stage_s, mixed.hop_s, 1.0, 1.0).latency_s
    return Pace(1 / request_s, max(1.0, 1 / (chunk * stages)) * turn, stages * period)


def mixed_period_s(mixed: PhaseTimes, decode: PhaseTimes, share: float) -> float:
    """Mean seconds from one step to the next where a share of them is mixed; mixed.batch is the prompts in
    such a step."""
    hop_s = [share * m + (1 - share) * d for m, d in zip(mixed.hop_s, decode.hop_s, strict=True)]
    walk = math.fsum((share * math.fsum(mixed.stage_s), (1 - share) * math.fsum(decode.stage_s), *hop_s))
    begins = 1 - exp(-share * mixed.batch)
    slowest_s = _slowest_s(mixed.stage_s, decode.stage_s, share, begins)
    return max(slowest_s, walk / len(decode.stage_s), *hop_s, 0.0)


def _slowest_s(mixed_s: Sequence[float], decode_s: Sequence[float], share: float, begins: float) -> float:
    """Mean seconds of the slowest stage, where the steps in successive stages are a Markov chain: a share of
    them is mixed, and one after a decode step with the probability `begins`. A prompt of several chunks makes
    as many steps in a row mixed."""
    if len(mixed_s) == 1:
        return share * mixed_s[0] + (1 - share) * decode_s[0]
    # The chain forgets what the step was by this factor with each stage.
    memory = 1 - begins / share if 0 < share < 1 else 0.0
    mean, below, least_s = 0.0, 0.0, max(decode_s)
    for seconds in sorted({least_s, *(m for m in mixed_s if m > least_s)}):
        # The stages that must not have a mixed step, for none to be slower.
        within, remembered = 1.0, 0.0
        for m in mixed_s:
            remembered *= memory
            if m > seconds:
                within *= 1 - share + share * remembered
                remembered = 1.0
        mean += (within - below) * seconds
        below = within
    return mean


def colocated_pace(semantics: PipelineSemantics, prefill: PhaseTimes, decode: PhaseTimes, osl: float) -> Pace:
    """Pace of a replica that runs both phases, on the same stages and the same split of the layers.

    Let F_p and F_d be the requests/s of prefill_pace and decode_pace, each phase having the replica to
    itself. Where one phase at a time runs ("literal", "paper_optimistic") the replica divides its time:
    1 / F = 1 / F_p + 1 / F_d. Under "pipelined" each stage and each hop divides its own, so the busiest sets
    the pace, and tokens still follow one another no faster than a micro-batch walks through all stages:
    1 / F = max(1 / F_d, max over stages and hops of prefill_s / prefill batch + osl decode_s / micro-batch).
    That is for prefills in steps of their own; engines mix both phases in a step (see mixed_pace).

    The first token takes the prefill's latency. At full load the decode batch stays full, so by Little's
    law an output token takes the decode cycle times F_d / F; on one stage that is cycle / (1 - rho), with
    rho = F / F_p the share of time spent in prefills. Phases only share time here: that a prefill makes
    single decode steps late, and that a prompt holds memory during its prefill, is left out.
    """
    first = prefill_pace(semantics, prefill.stage_s, prefill.hop_s, prefill.batch)
    rest = decode_pace(semantics, decode.stage_s, decode.hop_s, decode.batch, osl)
    if semantics == "pipelined":
        running = micro_batch(semantics, decode.batch, len(decode.stage_s))
        both = zip((*prefill.stage_s, *prefill.hop_s), (*decode.stage_s, *decode.hop_s), strict=True)
        busy = (p / prefill.batch + osl * d / running for p, d in both)
        request_s = max(1 / rest.capacity_req_s, *busy)
    else:
        request_s = 1 / first.capacity_req_s + 1 / rest.capacity_req_s
    return Pace(1 / request_s, first.latency_s, rest.latency_s * rest.capacity_req_s * request_s)
