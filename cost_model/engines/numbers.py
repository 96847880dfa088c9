"""Numbers of serving engines: what their steps cost beside operators, fitted to runs of whole servers.

A set is a file: engines.json ships, `hexgen2 calibrate --runs` writes others.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cost_model.architecture import WeightType
from cost_model.fields import Name, Prose, between, schema_error
from cost_model.files import read_text
from cost_model.operators.numbers import OperatorFits, merged
from cost_model.operators.numbers import shipped as shipped_operators

_SHIPPED = Path(__file__).parent / "engines.json"
_MAX_BYTES = 1 << 20

Error = Annotated[float, Field(ge=0, allow_inf_nan=False), between(0, 1e9)]
Rows = Annotated[int, Field(ge=0), between(0, 10**9)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Factor = Annotated[float, Field(ge=0.05, le=20.0, allow_inf_nan=False)]
TokensPerStep = Annotated[float, Field(ge=1.0, le=20.0, allow_inf_nan=False)]


def _factor() -> Any:
    return Field(default=1.0, ge=0.05, le=20.0, allow_inf_nan=False)


def _microseconds(start: float) -> Any:
    return Field(default=start, ge=0.0, le=1e7, allow_inf_nan=False)


class EngineNumbers(_Strict):
    """What an engine makes of operators (cost_model/operators), and what it adds to them.

    products, prompts, decodes, experts, exchange : factors on the measured times of matrix products, of
        attention over prompts and of decodes, of routed experts and of all-reduces over NVLink
    latent_prompts, latent_decodes : factors on modules of latent attention with their projections
    skew : how many more tokens the busiest of many GPUs gets for its experts than the mean, in parts of that,
        where experts are divided among GPUs (expert parallelism); tables have less even loads than servers
    groups : factor on whole layers where parts of a stage run attention for requests of their own (attention
        data parallelism) and wait for the slowest part
    elementwise : how many times as long as reading and writing activations once, norms, rotations and
        activation functions take
    layer_us, mixture_us, latent_us : of each layer, and of each layer with experts and of each with latent
        attention besides
    prompt_layer_us : of each layer in steps with prompts, whose kernels the host starts one by one
    step_us : of each step on each stage
    request_us : of each request that gets a token in a step
    first_token_us : until a request's first token, outside steps: parsing, tokenising, queues, the network
    first_layer_us : of each layer until a request's first token, since the GPU waits for kernels of prompts
        that the host starts one by one
    """

    products: float = _factor()
    prompts: float = _factor()
    decodes: float = _factor()
    latent_prompts: float = _factor()
    latent_decodes: float = _factor()
    experts: float = _factor()
    exchange: float = _factor()
    skew: float = Field(default=0.3, ge=0.0, le=20.0, allow_inf_nan=False)
    groups: float = Field(default=1.25, ge=1.0, le=20.0, allow_inf_nan=False)
    elementwise: float = _factor()
    layer_us: float = _microseconds(5.0)
    mixture_us: float = _microseconds(10.0)
    latent_us: float = _microseconds(5.0)
    prompt_layer_us: float = _microseconds(30.0)
    step_us: float = _microseconds(500.0)
    request_us: float = _microseconds(5.0)
    first_token_us: float = _microseconds(30000.0)
    first_layer_us: float = _microseconds(300.0)


class HostNumbers(_Strict):
    """How the hosts of one GPU's servers differ: factors on step_us and request_us, and on first_token_us and
    first_layer_us.

    rows : runs on such servers that they were fitted to
    error : mean |predicted - measured| / measured TPOT of these runs, by fits without them
    """

    steps: float = _factor()
    first_token: float = _factor()
    rows: Rows = 0
    error: Error | None = None


class HeldOut(_Strict):
    """Mean |predicted - measured| / measured TPOT of runs that a fit had not seen: a quarter of them at
    random, or all of one model or GPU."""

    rows: Error | None = None
    model: Error | None = None
    gpu: Error | None = None


class FittedEngine(_Strict):
    """One engine: its numbers, and its hosts by GPU.

    experts : factors on routed experts by format of their weights, for which engines have different kernels
    versions : of the engine, that the runs were measured with
    speculative : tokens that a decode step gives each request, by version of the engine and model, where runs
        are so fast that many must have predicted several at a time (multi-token prediction): a mean over them
    rows : how many runs
    """

    versions: Prose = ""
    numbers: EngineNumbers = EngineNumbers()
    experts: dict[WeightType, Factor] = {}
    hosts: dict[Name, HostNumbers] = {}
    speculative: dict[Name, dict[Name, TokensPerStep]] = {}
    rows: Rows = 0
    held_out: HeldOut = HeldOut()


class EngineFits(_Strict):
    """Engines, and where their runs come from.

    operators : numbers of operators that replace those that ship, by operator, GPU and format
    """

    name: Name = "engines"
    source: Prose
    engines: dict[Name, FittedEngine]
    operators: OperatorFits | None = None

    @cached_property
    def all_operators(self) -> OperatorFits:
        """The numbers of operators: its own, and those that ship where it has none."""
        own = shipped_operators()
        return own if self.operators is None else merged(own, self.operators)

    def to_json(self) -> str:
        """Canonical text."""
        text: str = self.model_dump_json(indent=1, exclude_defaults=True)
        return text + "\n"


@cache
def shipped() -> EngineFits:
    """The engines that ship."""
    return load_engines(_SHIPPED)


def load_engines(path: Path) -> EngineFits:
    """Engines from a file.

    Raises
    ------
    InputError : unreadable, or not such a file
    """
    try:
        return EngineFits.model_validate_json(read_text(path, _MAX_BYTES))
    except ValidationError as error:
        raise schema_error(error, str(path), "make one with `hexgen2 calibrate --runs`") from None
