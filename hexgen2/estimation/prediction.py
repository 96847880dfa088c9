"""Predicts the times of a run by simulating it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from cluster_specs.loader import resolve
from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel
from cost_model.errors import HexGen2Error, InputError
from cost_model.lengths import RequestLengths
from cost_model.registry import CostSource, cost_models_of_runs
from hexgen2.cluster import Cluster
from hexgen2.estimation.deployment import check_room, placement_of, workload_of
from hexgen2.estimation.run import Run
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from hexgen2.results import SimulationResult
from hexgen2.simulator.batching import ENGINE_STEP_TOKENS, Batching
from hexgen2.simulator.options import Options
from hexgen2.simulator.run import simulate
from hexgen2.workload.arrivals import LengthSource, offline

REQUESTS_PER_CLIENT = 10
SHORTEST_SHARE = 0.8
"""Lengths are drawn uniformly from this share of the nominal one to all of it."""
SHIPPED = cost_models_of_runs(None)
"""The cost models of runs by engine, where none is asked for."""
_SEED = 0


class Prediction(NamedTuple):
    """Mean times of a run in ms, or why there are none."""

    ttft_ms: float | None
    tpot_ms: float | None
    why_not: str = ""


def predict(run: Run, sources: Mapping[str, CostSource] | None = None) -> Prediction:
    """The times of a run, or the reason why they cannot be predicted; sources are cost models by engine."""
    try:
        return times_with(run, _source(run.engine, sources))
    except HexGen2Error as error:
        return Prediction(None, None, str(error))
    except Exception as error:  # One row is not worth losing all the others.
        return Prediction(None, None, f"cannot be simulated: {type(error).__name__}: {error}"[:200])


def times_with(run: Run, source: CostSource) -> Prediction:
    """The times of a run under a cost model: TTFT with the wait for the tokens that are sent with the first
    one. A decode step that gives several tokens is simulated as one token of a shorter answer.

    Raises
    ------
    InputError : it does not fit into memory, or requests fail
    """
    costs = _cost_model(source, run.model, workload_of(run).lengths)
    per_step = run.tokens_per_step or costs.tokens_per_step(run.version)
    found = simulated(run, costs, max(1, round(run.osl / per_step)))
    tpot_ms = found.mean_tpot_ms / per_step
    together = min(run.stream_interval, run.osl) - 1
    return Prediction(found.mean_ttft_ms + together * tpot_ms, tpot_ms)


def simulated(run: Run, costs: CostModel, osl: int) -> SimulationResult:
    """The results of simulating a run, with answers of this many steps."""
    placement = placement_of(run, costs)
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    check_room(run, placement, {r.id: kv_capacity_tokens(r, cluster, costs) for r in placement.replicas})
    lengths = LengthSource.load(None, run.isl, osl, SHORTEST_SHARE)
    requests = offline(lengths, REQUESTS_PER_CLIENT * run.concurrency, _SEED)
    found = simulate(placement, requests, options_of(run, costs), costs=costs)
    if found.failed:
        reason, count = max(found.failures.items(), key=lambda item: item[1])
        raise InputError("simulation", "", f"{count} requests failed ({reason})", "take more GPUs")
    return found


def options_of(run: Run, costs: CostModel) -> Options:
    """How a run is simulated: its engine's batching, in a closed loop."""
    workers = run.colocated or run.prefill
    assert workers is not None
    attention_dp = workers.shape.attention_dp
    batching = Batching.of_engine(run.engine, attention_dp, run.isl, _max_batch(run))
    step_tokens = batching.step_tokens
    if run.prefill is not None:
        prompts = max(ENGINE_STEP_TOKENS, (run.prefill.batch or 1) * run.isl)
        step_tokens = attention_dp * max(batching.step_tokens // attention_dp, prompts)
    return Options(
        policy=batching.policy,
        front_end_s=costs.first_token_s(run.gpu),
        step_tokens=step_tokens,
        max_batch=batching.max_batch,
        max_concurrency=run.concurrency,
        gathered=batching.gathered,
        look_steps=run.look_steps,
    )


def _max_batch(run: Run) -> int:
    """Most requests of a worker that decodes."""
    workers = run.colocated or run.decode
    assert workers is not None
    return min(workers.worker_batch or run.concurrency, run.concurrency)


def _source(engine: str, sources: Mapping[str, CostSource] | None = None) -> CostSource:
    """The cost model of an engine's runs."""
    known = SHIPPED if sources is None else sources
    if engine not in known:
        remedy = f"give one of {', '.join(known)}, or another --cost-model"
        raise InputError("backend", "", f"the cost model has no numbers of {engine}", remedy)
    return known[engine]


@lru_cache(maxsize=256)
def _cost_model(source: CostSource, model: ModelArchitecture, lengths: RequestLengths) -> CostModel:
    """The cost model; runs that are alike share what it has computed."""
    return source.costs(model, lengths)
