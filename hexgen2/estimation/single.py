"""Estimates of the steps of one model on some GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster_specs.loader import parse_accelerators
from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel
from cost_model.calibrated import Calibrated
from cost_model.dtypes import SIXTEEN_BIT, check_kernels, in_formats
from cost_model.engines.model import EngineSteps
from cost_model.errors import InputError
from cost_model.estimate import Shape, estimate
from cost_model.hardware import (
    INTERCONNECT_CLASSES,
    Accelerator,
    find_accelerator,
    interconnect_link,
    usual_interconnect,
)
from cost_model.lengths import RequestLengths
from cost_model.models import find_model
from cost_model.registry import find_cost_model
from hexgen2.results import Record


@dataclass(frozen=True, kw_only=True)
class StepEstimate(Record):
    """Predicted step times and memory of one model on some GPUs, with what they were asked for.

    Attributes
    ----------
    model, weights, kv, gpu, interconnect, tp, pp, attention_dp, expert_parallel, batch, isl, osl : the
        question, with defaults filled in
    prefill_ms : of the whole batch of prompts, through all stages
    decode_ms : of one decode step of the batch, at the mean context (prompt and half the output)
    error : mean relative error to expect of these times
    memory_bytes : on the fullest GPU, of which the KV cache of the whole batch takes kv_bytes
    memory_limit_bytes : what the engine may use of a GPU
    fits : whether the batch fits
    largest_batch : most requests whose whole KV cache fits; 0 if not one does
    numbers : which operators' times are fitted to this GPU, and which scaled from another, with errors
    cost_model : name, engine and source of the coefficients
    assumptions : figures that were not given or not measured
    """

    model: str
    weights: str
    kv: str
    gpu: str
    interconnect: str
    tp: int
    pp: int
    attention_dp: int
    expert_parallel: int
    batch: int
    isl: int
    osl: int
    prefill_ms: float
    decode_ms: float
    error: float
    memory_bytes: float
    kv_bytes: float
    memory_limit_bytes: float
    fits: bool
    largest_batch: int
    numbers: list[str]
    cost_model: dict[str, str | None]
    assumptions: list[str]


def estimate_step(
    gpu: str,
    model: str | Path | ModelArchitecture,
    isl: int,
    osl: int,
    tp: int | None,
    pp: int,
    batch: int,
    weights: str | None,
    kv: str | None,
    interconnect: str | None,
    engine: str | None,
    cost_model: str | Path | None,
    attention_dp: int = 1,
    expert_parallel: int = 1,
) -> StepEstimate:
    """The estimate for one batch; `hexgen2.estimate` describes the parameters.

    Raises
    ------
    InputError
    """
    source = find_cost_model(cost_model, engine)
    name, count = parse_accelerators(gpu, "--gpu", "")
    accelerator = find_accelerator(name, source="--gpu")
    architecture = in_formats(find_model(model), weights, kv)
    check_kernels([accelerator], architecture.weight_type, "--weights" if weights else "--model")
    joined = interconnect or usual_interconnect(accelerator)
    if joined not in INTERCONNECT_CLASSES:
        remedy = f"use one of {', '.join(INTERCONNECT_CLASSES)}"
        raise InputError("--interconnect", "", f"is {joined[:60]!r}", remedy)
    link, assumption = interconnect_link(joined, accelerator)
    shape = Shape(accelerator, link, tp or max(1, count // pp), pp, attention_dp, expert_parallel)
    if shape.tp * pp > count:
        problem = f"{shape.tp} x {pp} stages are more than {count} GPUs"
        raise InputError("--tp", "", problem, f"give --gpu {name}:{shape.tp * pp} or smaller degrees")
    _check_degrees(architecture, shape, count)
    if pp > architecture.layers:
        raise InputError("--pp", "", f"{pp} stages for {architecture.layers} layers", "use fewer stages")
    costs = source.costs(architecture, RequestLengths.fixed(isl, osl))
    found = estimate(costs, shape, batch)
    assumptions = [] if assumption is None or shape.tp * pp == 1 else [assumption]
    if max(attention_dp, expert_parallel) > 1 and not costs.times_expert_parallel:
        assumptions.append(
            "times are those without --attention-dp and --expert-parallel; memory is with them"
        )
    if not costs.measured(accelerator):
        assumptions.append(_unmeasured(costs, accelerator))
    return StepEstimate(
        model=architecture.name,
        weights=architecture.weight_type,
        kv=kv or (architecture.weight_type if architecture.weight_type in SIXTEEN_BIT else "16-bit"),
        gpu=accelerator.name,
        interconnect=joined,
        tp=shape.tp,
        pp=pp,
        attention_dp=attention_dp,
        expert_parallel=expert_parallel,
        batch=batch,
        isl=isl,
        osl=osl,
        prefill_ms=1e3 * found.prefill_s,
        decode_ms=1e3 * found.decode_s,
        error=found.error,
        memory_bytes=found.memory_bytes,
        kv_bytes=found.kv_bytes,
        memory_limit_bytes=found.limit_bytes,
        fits=found.fits,
        largest_batch=found.largest_batch,
        numbers=costs.fitted_or_not(shape.group),
        cost_model=costs.origin._asdict(),
        assumptions=assumptions,
    )


def _unmeasured(costs: CostModel, accelerator: Accelerator) -> str:
    """What is assumed of a device that the cost model's numbers do not rest on."""
    if isinstance(costs, EngineSteps) and accelerator.kind != "cpu":
        return f"no server with {accelerator.name} was measured: its host is a usual one"
    taken = "those of a mean GPU"
    if accelerator.kind == "cpu" or not isinstance(costs, Calibrated) or not costs.coefficients.gpus:
        taken = "the priors"
    return f"no step of {accelerator.name} was measured: its coefficients are {taken}"


def _check_degrees(model: ModelArchitecture, shape: Shape, count: int) -> None:
    """Refuse degrees of a stage that do not divide its GPUs, or the model's heads or experts (InputError)."""
    for option, parts in (
        ("--attention-dp", shape.attention_dp),
        ("--expert-parallel", shape.expert_parallel),
    ):
        if shape.tp % parts:
            problem = f"{parts} does not divide the {shape.tp} GPUs of a stage"
            raise InputError(option, "", problem, "use one of its divisors")
    attention = shape.tp // shape.attention_dp
    if attention not in model.tensor_degrees(attention):
        problem = f"{attention} does not split the {model.heads} heads of {model.name} evenly"
        degrees = [n * shape.attention_dp for n in model.tensor_degrees(count // shape.attention_dp)]
        raise InputError("--tp", "", problem, f"use one of {degrees}")
    if model.experts % shape.expert_parallel:
        problem = f"{shape.expert_parallel} does not divide the experts of {model.name}: {model.experts}"
        raise InputError("--expert-parallel", "", problem, "use a degree that does, or leave it out")
