"""Coefficients: the shares of data-sheet peaks that engines reach, and their fixed overheads; in named sets.

A set has a base, and factors for the GPUs and engines that were measured. Fitted sets are files (`hexgen2
calibrate` writes them, coefficients.json ships) that state their source and their error on rows left out of
the fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cost_model.fields import Name, Prose, between, schema_error
from cost_model.files import read_text
from cost_model.hardware import GIB, Accelerator

_SHIPPED = Path(__file__).parent / "coefficients.json"
_MAX_BYTES = 1 << 20

Share = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False), between(1e-6, 10)]
Seconds = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False), between(1e-6, 1000)]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False), between(0, 1e9)]
Rows = Annotated[int, Field(ge=0), between(0, 10**12)]


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of one GPU under one engine.

    compute_efficiency, memory_efficiency : shares of the peaks that matrix products and reads reach
    attention_efficiency : share of compute_efficiency that attention over prompts reaches
    overlap : p of (compute^p + read^p)^(1/p), the time of a kernel that does both; infinite where the
        shorter hides behind the longer (a roofline)
    layer_overhead_s : launch of one layer's kernels; all_reduce_overhead_s : of one collective
    nvlink_share : share of the all-reduce rate in the table of collectives that NVLink reaches
    step_overhead_s : a step's fixed cost on each stage; request_overhead_s : for each request in it
    memory_utilisation : share of device memory that an engine takes (vLLM's gpu_memory_utilization default)
    engine_bytes : of that, what context, communication buffers and graphs take
    kv_slack_tokens : tokens that a request's last KV block leaves unused
    """

    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    attention_efficiency: float = 1.0
    overlap: float = math.inf
    layer_overhead_s: float = 15e-6
    all_reduce_overhead_s: float = 10e-6
    nvlink_share: float = 1.0
    step_overhead_s: float = 0.0
    request_overhead_s: float = 0.0
    memory_utilisation: float = 0.9
    engine_bytes: float = 0.0
    kv_slack_tokens: float = 0.0


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Base(_Strict):
    """A set's coefficients before factors; see Coefficients. `overlap` is absent for a roofline."""

    compute_efficiency: Share = 0.5
    memory_efficiency: Share = 0.8
    attention_efficiency: Share = 1.0
    overlap: Annotated[float, Field(ge=1, allow_inf_nan=False), between(1, 1e3)] | None = None
    layer_overhead_s: Seconds = 15e-6
    all_reduce_overhead_s: Seconds = 10e-6
    step_overhead_s: Seconds = 0.0
    request_overhead_s: Seconds = 0.0
    engine_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False), between(0, 1e15)] = 0.0
    kv_slack_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False), between(0, 1e9)] = 0.0


class GpuFactors(_Strict):
    """One GPU's efficiencies over the base's, from so many rows; error is that of its rows by fits without
    their model."""

    compute: Factor = 1.0
    memory: Factor = 1.0
    rows: Rows = 0
    error: Error | None = None


class EngineFactors(_Strict):
    """One engine's coefficients over the base's, from so many rows."""

    compute: Factor = 1.0
    memory: Factor = 1.0
    layer_overhead: Factor = 1.0
    nvlink_share: Factor = 1.0
    step_overhead: Factor = 1.0
    request_overhead: Factor = 1.0
    rows: Rows = 0


class HeldOut(_Strict):
    """Mean |predicted - measured| / measured of rows that a fit had not seen: a fifth of them at random, or
    all of one GPU, model or engine. Absent where there is only one."""

    rows: Error | None = None
    gpu: Error | None = None
    model: Error | None = None
    engine: Error | None = None


class CoefficientSet(_Strict):
    """A named set: base, factors, where it comes from and how far off it is."""

    name: Name = Field(min_length=1)
    source: Prose
    base: Base = Base()
    gpus: dict[Name, GpuFactors] = {}
    engines: dict[Name, EngineFactors] = {}
    held_out: HeldOut = HeldOut()

    def of(self, accelerator: Accelerator, engine: str | None = None) -> Coefficients:
        """Coefficients of a device under an engine (None: a mean one; KeyError if it is not in the set).

        CPU devices that were not measured keep the priors: nothing fitted to GPUs holds for them.
        """
        if accelerator.kind == "cpu" and accelerator.name not in self.gpus:
            return Coefficients()
        base, gpu = self.base, self.gpus.get(accelerator.name, GpuFactors())
        factors = self.engines[engine] if engine is not None else EngineFactors()
        return Coefficients(
            compute_efficiency=base.compute_efficiency * gpu.compute * factors.compute,
            memory_efficiency=base.memory_efficiency * gpu.memory * factors.memory,
            attention_efficiency=base.attention_efficiency,
            overlap=base.overlap or math.inf,
            layer_overhead_s=base.layer_overhead_s * factors.layer_overhead,
            all_reduce_overhead_s=base.all_reduce_overhead_s,
            nvlink_share=factors.nvlink_share,
            step_overhead_s=base.step_overhead_s * factors.step_overhead,
            request_overhead_s=base.request_overhead_s * factors.request_overhead,
            engine_bytes=base.engine_bytes,
            kv_slack_tokens=base.kv_slack_tokens,
        )

    def error(self, accelerator: Accelerator, engine: str | None = None) -> float:
        """The relative error to expect: on models that were not measured, and the more on a GPU or an engine
        that was not. A device that no rows are like has the error of the priors."""
        gpu, held_out = self.gpus.get(accelerator.name), self.held_out
        if not self.gpus or (gpu is None and accelerator.kind == "cpu"):
            return ZERO_FIT_ERROR
        of_gpu = held_out.model if gpu is None or gpu.error is None else gpu.error
        errors = [held_out.rows, of_gpu]
        if gpu is None:
            errors.append(held_out.gpu if held_out.gpu is not None else ZERO_FIT_ERROR)
        if engine is None and len(self.engines) > 1:
            errors.append(held_out.engine)
        return max((error for error in errors if error is not None), default=ZERO_FIT_ERROR)

    def to_json(self) -> str:
        """Canonical text: figures to five digits, which is more than they are good for."""
        text: str = self.model_dump_json(indent=1, exclude_none=True)
        return text + "\n"


ZERO_FIT_ERROR = 0.28
"""Mean error of ZERO_FIT on measured times that include attention (benchmarks/simulator)."""

ZERO_FIT = CoefficientSet(name="zero-fit", source="priors, fitted to nothing")

PRIORS = ZERO_FIT.model_copy(update={"base": Base(engine_bytes=GIB, kv_slack_tokens=8.0)})
"""Where fits start. Assumed and not fitted: 1 GiB for CUDA context, NCCL buffers and graphs, and half of each
request's last KV block of 16 tokens (vLLM's default) lying idle."""


@cache
def fitted() -> CoefficientSet:
    """The set that ships."""
    return load_coefficients(_SHIPPED)


def load_coefficients(path: Path) -> CoefficientSet:
    """A set from the file that `hexgen2 calibrate` wrote.

    Raises
    ------
    InputError : unreadable, or not such a file
    """
    try:
        return CoefficientSet.model_validate_json(read_text(path, _MAX_BYTES))
    except ValidationError as error:
        raise schema_error(error, str(path), "make one with `hexgen2 calibrate`") from None
