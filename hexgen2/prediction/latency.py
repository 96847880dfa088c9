"""Time to first token and time per output token of a placement, without queueing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_model.base import CostModel, Phase, Work
from cost_model.pipeline import (
    Pace,
    PhaseTimes,
    PipelineSemantics,
    colocated_pace,
    decode_pace,
    mean_times,
    micro_batch,
    mixed_decodes,
    mixed_pace,
    mixed_steps,
    prefill_pace,
    prompt_s,
)
from hexgen2.attention_workers import AttentionWorker
from hexgen2.cluster import Cluster
from hexgen2.placement import Latency, Replica
from hexgen2.prediction.headwise_times import step_times
from hexgen2.prediction.step_times import StepTimes


def latency_of(
    replicas: Sequence[Replica],
    cluster: Cluster,
    costs: CostModel,
    semantics: PipelineSemantics,
    workers: Sequence[AttentionWorker] = (),
) -> Latency:
    """Means over requests, each replica weighted by its load: the time of a prefill step and of a decode
    step, which on a colocated replica includes the prefills in between. Zeros if there is no load."""
    first_s = token_s = served = 0.0
    for replica in replicas:
        own = [worker for worker in workers if worker.replica == replica.id]
        pace = pace_of(replica, step_times(replica, own, cluster, costs, semantics))
        load = replica.utilisation * replica.capacity_req_s
        if replica.role == "decode":
            token_s += load * pace.latency_s
            continue
        served += load
        first_s += load * pace.latency_s
        token_s += load * pace.token_s
    served = served or 1.0
    return Latency(ttft_ms=first_s / served * 1e3, tpot_ms=token_s / served * 1e3)


def pace_of(replica: Replica, times: StepTimes) -> Pace:
    costs, engine, stages = times.costs, replica.engine, times.stages
    batch, semantics, osl = replica.max_batch, times.semantics, costs.osl
    if replica.role == "prefill":
        prompts = min(batch, engine.step_tokens / costs.isl)
        prefill = phase_times(times, "prefill", prompts)
        pace = prefill_pace(semantics, prefill.stage_s, prefill.hop_s, prompts, times.in_flight)
        return replace(pace, latency_s=prompt_s(pace, prompts))
    running = phase_times(times, "decode", micro_batch(semantics, batch, times.stages))
    decode = PhaseTimes(running.stage_s, running.hop_s, batch)
    if replica.role == "decode":
        return decode_pace(semantics, decode.stage_s, decode.hop_s, batch, osl)
    if semantics == "pipelined":
        chunk = engine.chunk_tokens / costs.isl
        decodes = mixed_decodes(batch, stages, chunk, osl)
        steps = mixed_steps(chunk, decodes, osl)
        mixed = mean_times(
            [(_work_times(times, costs.mixed_work(n, beside), n), share) for n, beside, share in steps]
        )
        return mixed_pace(mixed, phase_times(times, "decode", decodes), decodes, osl, chunk)
    prompts = max(1, int(min(batch, costs.prefill_batch())))
    return colocated_pace(semantics, phase_times(times, "prefill", prompts), decode, osl)


def phase_times(times: StepTimes, phase: Phase, batch: float) -> PhaseTimes:
    return _work_times(times, times.costs.work(phase, batch), batch)


def _work_times(times: StepTimes, work: Work, batch: float) -> PhaseTimes:
    return PhaseTimes(*times.step(work), batch)
