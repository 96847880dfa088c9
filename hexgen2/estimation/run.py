"""A run of a serving engine in a closed loop, as a row of a CSV file describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cost_model.architecture import ModelArchitecture
from cost_model.dtypes import check_kernels
from cost_model.errors import InputError
from cost_model.hardware import Accelerator, find_accelerator
from hexgen2.estimation.checkpoints import checkpoint
from hexgen2.estimation.recipes import look_steps, stream_interval
from hexgen2.simulator.batching import ENGINE_POLICIES

COLUMNS = ("backend", "model_path", "system", "isl", "osl", "tp_size", "concurrency")
"""The columns that every file of runs has."""

_MOST_TOKENS = 10**6
_MOST_CLIENTS = 20_000
_MOST_GPUS = 4096
_MOST_WORKERS = 64
_MOST_SIMULATED_TOKENS = 4e9
_MOST_TOKENS_PER_STEP = 20
_LONGEST_VERSION = 60
_CARDS = {"a100": "A100-80GB", "a100_sxm": "A100-80GB", "a100_pcie": "A100-80GB-PCIe"}


@dataclass(frozen=True)
class Shape:
    """How the GPUs of one worker share the work: pipeline stages of tp x attention_dp GPUs each, over which
    the experts of a mixture are divided into expert_parallel parts."""

    tp: int
    pp: int = 1
    attention_dp: int = 1
    expert_parallel: int = 1

    @property
    def stage_gpus(self) -> int:
        """GPUs of a stage."""
        return self.tp * self.attention_dp

    @property
    def gpus(self) -> int:
        """GPUs of the worker."""
        return self.stage_gpus * self.pp


@dataclass(frozen=True)
class Workers:
    """Equal workers. `batch` is the most requests of each part of a worker that runs attention for requests
    of its own; None: no limit below the number of clients."""

    count: int
    shape: Shape
    batch: int | None = None

    @property
    def worker_batch(self) -> int | None:
        """Most requests of a worker."""
        return None if self.batch is None else self.batch * self.shape.attention_dp


@dataclass(frozen=True)
class Run:
    """What one row asks for.

    Attributes
    ----------
    engine : "vllm", "sglang" or "trtllm"
    isl, osl : longest prompt and longest answer; the shortest have 80 % of them
    concurrency : clients, each of which sends its next request as soon as its last one has ended
    colocated : the one worker of an aggregated run
    prefill, decode : the workers of a disaggregated run
    stream_interval : tokens that the engine sends at a time
    look_steps : decode steps from one look for new requests to the next
    tokens_per_step : mean tokens that a decode step gives each request (speculative decoding); None: what is
        known of the engine's version
    version : of the engine
    """

    engine: str
    model: ModelArchitecture
    gpu: Accelerator
    isl: int
    osl: int
    concurrency: int
    stream_interval: int = 1
    look_steps: int = 1
    tokens_per_step: float | None = None
    version: str = ""
    colocated: Workers | None = None
    prefill: Workers | None = None
    decode: Workers | None = None

    @property
    def workers(self) -> tuple[Workers, ...]:
        """All kinds of workers."""
        return tuple(kind for kind in (self.colocated, self.prefill, self.decode) if kind is not None)


def run_of(cells: Mapping[str, str]) -> Run:
    """The run that a row describes.

    Raises
    ------
    InputError : why it cannot be predicted, with the column as its source
    """
    engine = cells.get("backend", "").strip().lower()
    if engine not in ENGINE_POLICIES:
        known = ", ".join(ENGINE_POLICIES)
        raise InputError("backend", "", f"the engine {engine[:40]!r} is not known", f"use one of {known}")
    mode = cells.get("mode", "").strip().lower() or "agg"
    if mode not in ("agg", "disagg"):
        raise InputError("mode", "", f"is {mode[:40]!r}", "use agg or disagg")
    system = cells.get("system", "").strip()
    gpu = _card(system)
    labels = (cells.get(column, "").strip() for column in ("moe_quant_mode", "gemm_quant_mode", "precision"))
    kv = cells.get("kv_quant_mode", "").strip() or cells.get("kv_cache_dtype", "").strip()
    model = checkpoint(cells.get("model_path", ""), next(filter(None, labels), ""), kv)
    check_kernels([gpu], model.weight_type, "system")
    isl, osl = (_count(cells, column, _MOST_TOKENS) for column in ("isl", "osl"))
    concurrency = _count(cells, "concurrency", _MOST_CLIENTS)
    if 10 * concurrency * (isl + osl) > _MOST_SIMULATED_TOKENS:
        raise InputError(
            "concurrency", "", "asks for more tokens than can be simulated", "take fewer clients"
        )
    if model.max_position < isl + osl:
        problem = f"{isl} + {osl} tokens exceed the {model.max_position} positions of {model.name}"
        raise InputError("isl", "", problem, "take shorter requests")
    if mode == "agg":
        kinds = {"colocated": Workers(1, _shape(cells, model))}
    else:
        kinds = {role: _workers(cells, role, model) for role in ("prefill", "decode")}
    if sum(kind.count * kind.shape.gpus for kind in kinds.values()) > _MOST_GPUS:
        raise InputError("tp_size", "", f"needs more than {_MOST_GPUS} GPUs", "take fewer")
    usual = stream_interval(engine, model), look_steps(engine, model, gpu, concurrency)
    streamed, look = (
        _count(cells, column, _MOST_TOKENS, default)
        for column, default in zip(("stream_interval", "scheduler_recv_interval"), usual, strict=True)
    )
    tokens, version = _tokens_per_step(cells), cells.get("backend_version", "").strip()[:_LONGEST_VERSION]
    return Run(engine, model, gpu, isl, osl, concurrency, streamed, look, tokens, version, **kinds)


def _card(system: str) -> Accelerator:
    """The card of a system such as "h100_sxm"."""
    try:
        return find_accelerator(_CARDS.get(system.lower(), system))
    except InputError as error:
        raise InputError("system", "", error.problem, "name one of `hexgen2 list gpus`") from None


def _workers(cells: Mapping[str, str], role: str, model: ModelArchitecture) -> Workers:
    """The workers of a role."""
    count = _count(cells, f"{role}_num_workers", _MOST_WORKERS)
    batch = _count(cells, f"{role}_batch_size", _MOST_TOKENS, default=0)
    return Workers(count, _shape(cells, model, f"{role}_"), batch or None)


def _shape(cells: Mapping[str, str], model: ModelArchitecture, prefix: str = "") -> Shape:
    """The shape that the columns with a prefix give.

    Where a row divides experts over more GPUs than it divides attention over, the GPUs are those of the
    experts, and groups of tp of them run attention for requests of their own.
    """
    tp = _count(cells, f"{prefix}tp_size", _MOST_GPUS)
    pp = _count(cells, f"{prefix}pp_size", _MOST_GPUS, default=1)
    attention_dp = _count(cells, f"{prefix}attention_dp_size", _MOST_GPUS, default=1)
    if tp not in model.tensor_degrees(tp):
        problem = f"{tp} does not split the {model.heads} heads of {model.name} evenly"
        raise InputError(f"{prefix}tp_size", "", problem, "take another degree")
    if pp > model.layers:
        problem = f"{pp} stages for {model.layers} layers"
        raise InputError(f"{prefix}pp_size", "", problem, "take fewer stages")
    parts = 1
    if model.experts > 1:
        parts = _count(cells, f"{prefix}moe_ep_size", _MOST_GPUS, default=1)
        over = parts * _count(cells, f"{prefix}moe_tp_size", _MOST_GPUS, default=1)
        if over > tp * attention_dp and over % tp == 0:
            attention_dp = over // tp
    if (tp * attention_dp) % parts:
        problem = f"{parts} parts of the experts do not divide {tp * attention_dp} GPUs evenly"
        raise InputError(f"{prefix}moe_ep_size", "", problem, "take a divisor")
    return Shape(tp, pp, attention_dp, parts)


def _tokens_per_step(cells: Mapping[str, str]) -> float | None:
    """The column of this name; None where it is empty or 0."""
    column = "tokens_per_step"
    text = cells.get(column, "").strip()
    try:
        value = float(text or "0")
    except ValueError:
        value = math.nan
    if value == 0:
        return None
    if not 1 <= value <= _MOST_TOKENS_PER_STEP:
        problem = f"is {text[:40]!r}"
        raise InputError(column, "", problem, f"it must be a number from 1 to {_MOST_TOKENS_PER_STEP}")
    return value


def _count(cells: Mapping[str, str], column: str, most: int, default: int | None = None) -> int:
    """A whole number from 1 to `most` (written 4 or 4.0); the default, if there is one, where it is empty or
    0."""
    text = cells.get(column, "").strip()
    try:
        value = float(text or "0")
    except ValueError:
        value = math.nan
    if value == 0 and default is not None:
        return default
    if not 1 <= value <= most or value != int(value):
        problem = f"is {text[:40]!r}" if text else "is missing"
        raise InputError(column, "", problem, f"it must be a whole number from 1 to {most}")
    return int(value)
