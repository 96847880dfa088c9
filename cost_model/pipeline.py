"""How pipeline stages add up: three readings, because the choice decides the answer.

- "literal": Appendix A of HexGen-2. One batch at a time walks through all stages: capacity is
  batch / sum of the stage times.
- "pipelined": the physical one and the default. Stages work at the same time on micro-batches that
  share the KV memory: the slowest stage sets the pace.
- "paper_optimistic": every stage always has a full batch, as if each micro-batch had the KV memory
  to itself: the only reading under which Appendix E.2's decode choice (TP=1, PP=2) comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PipelineSemantics = Literal["literal", "pipelined", "paper_optimistic"]
PIPELINE_SEMANTICS: tuple[str, ...] = get_args(PipelineSemantics)


@dataclass(frozen=True)
class Pace:
    """What a replica does: requests/s at full load, and the seconds one request waits for a prefill
    or for one output token."""

    capacity_req_s: float
    latency_s: float


def micro_batch(semantics: PipelineSemantics, batch: int, stages: int) -> float:
    """Requests in one stage at a time when `batch` requests are in the KV memory."""
    return batch / stages if semantics == "pipelined" else batch


def prefill_pace(
    semantics: PipelineSemantics, stage_s: Sequence[float], boundary_s: Sequence[float], batch: int
) -> Pace:
    """Pace of a prefill replica whose stages take stage_s for `batch` prompts and whose hops boundary_s.

    Latency is the sum of all. Requests/s are batch / latency (Appendix A), but batch / slowest stage or hop
    where stages work on batches of their own ("pipelined").
    """
    latency = sum(stage_s) + sum(boundary_s)
    period = max(*stage_s, *boundary_s, 0.0) if semantics == "pipelined" else latency
    return Pace(batch / period, latency)


def decode_pace(
    semantics: PipelineSemantics,
    stage_s: Sequence[float],
    boundary_s: Sequence[float],
    batch: int,
    osl: float,
) -> Pace:
    """Pace of a decode replica whose stages take stage_s for one step of one micro-batch.

    A request's next token starts when its last one left the last stage. "literal": batch / (sum * osl)
    requests/s (Appendix A). Otherwise as many micro-batches as stages are under way, so a token takes the
    longer of the sum and of one turn of the slowest stage or hop for each micro-batch; the requests under
    way are `batch` together ("pipelined") or in each micro-batch ("paper_optimistic").
    """
    walk = sum(stage_s) + sum(boundary_s)
    if semantics == "literal":
        return Pace(batch / (walk * osl), walk)
    stages = len(stage_s)
    cycle = max(stages * max(*stage_s, *boundary_s, 0.0), walk)
    served = batch if semantics == "pipelined" else batch * stages
    return Pace(served / (cycle * osl), cycle)
