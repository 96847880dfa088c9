"""The placement: one JSON schema for every strategy, the only thing that search and runtime share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster_specs.schema import ClusterSpec
from cost_model.architecture import ModelArchitecture
from cost_model.errors import InputError
from cost_model.files import write_text
from hexgen2.goal import Goal
from hexgen2.moves import Migration, Move
from hexgen2.shared_links import Links
from hexgen2.workload import Workload

OPTIMAL = 1e-4
"""Relative gap to the bound up to which an answer counts as optimal: that of the integer program."""

Role = Literal["prefill", "decode", "colocated"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Stage(_Strict):
    """One pipeline stage: the tensor-parallel degree is len(gpus); layers is [first, end)."""

    gpus: list[str] = Field(min_length=1)
    layers: tuple[int, int]

    @property
    def tensor_parallel(self) -> int:
        return len(self.gpus)

    @property
    def layer_count(self) -> int:
        return self.layers[1] - self.layers[0]


class Replica(_Strict):
    """One copy of the model. capacity_req_s is what it can process alone (within the goal's targets, if the
    placement is to keep them), utilisation its share in use."""

    id: str
    role: Role
    stages: list[Stage] = Field(min_length=1)
    max_batch: int = Field(gt=0)
    capacity_req_s: float = Field(ge=0)
    utilisation: float = Field(default=0.0, ge=0)

    @property
    def gpus(self) -> list[str]:
        return [gpu for stage in self.stages for gpu in stage.gpus]

    @property
    def shape(self) -> str:
        """For example "tp2,tp1": the tensor-parallel degree of each stage."""
        return ",".join(f"tp{stage.tensor_parallel}" for stage in self.stages)


class RouteLink(_Strict):
    """One device pair that carries a part of each request's KV cache on a route."""

    from_: str = Field(alias="from")
    to: str
    bytes_per_req: float = Field(ge=0)


class Route(_Strict):
    """KV cache from a prefill replica to a decode replica."""

    from_: str = Field(alias="from")
    to: str
    flow_req_s: float = Field(ge=0)
    capacity_req_s: float = Field(ge=0)
    kv_bytes_per_req: float = Field(ge=0)
    links: list[RouteLink] = []


class CostModelName(_Strict):
    """error is the mean relative error to expect of times on the placement's devices; unmeasured are those
    types of them of which no step was measured."""

    name: str
    calibration: str
    error: float | None = Field(default=None, ge=0)
    unmeasured: list[str] = []
    pipeline: str
    links: Links = "pairwise"


class Throughput(_Strict):
    req_s: float = Field(ge=0)
    output_tok_s: float = Field(ge=0)


class Latency(_Strict):
    """Service times without queueing: first token at batch 1, one decode step at the placement's batch (of a
    colocated replica at full load, so with the prefills between its steps)."""

    ttft_ms: float = Field(ge=0)
    tpot_ms: float = Field(ge=0)


class Goodput(_Strict):
    """What requests see when request_rate of them arrive each second, at random; waiting is included.

    Predicted, under `assumptions`. goodput_req_s is the largest rate, at most that which arrives, at which
    the goal's share of the requests meets its targets, and attainment the share at request_rate; both are
    absent where the goal has no targets. Times are absent where the rate is more than can be carried: waits
    then grow without limit.
    """

    request_rate: float = Field(ge=0)
    goodput_req_s: float | None = Field(ge=0)
    attainment: float | None = Field(ge=0, le=1)
    mean_ttft_ms: float | None = Field(ge=0)
    p90_ttft_ms: float | None = Field(ge=0)
    mean_tpot_ms: float | None = Field(ge=0)
    mean_e2el_ms: float | None = Field(ge=0)
    assumptions: list[str]


class Bound(_Strict):
    """A proven upper limit on throughput, valid under `assumptions`; gap = 1 - req_s / bound.

    With the objective "cost", price_per_hour is what any rental that carries the load costs at least.
    method : "rates" of single GPUs, a "linear program" over replicas, an "integer program" over whole ones,
        or "enumeration" of all placements
    kv_free_req_s : what the linear program gives if KV transfers took no time
    """

    req_s: float = Field(ge=0)
    gap: float
    method: Literal["rates", "linear program", "integer program", "enumeration"] = "rates"
    kv_free_req_s: float | None = None
    assumptions: list[str]
    price_per_hour: float | None = Field(default=None, ge=0)


class Rented(_Strict):
    """GPUs of one type and price."""

    accelerators: str
    count: int = Field(gt=0)
    price_per_gpu_hour: float = Field(ge=0)


class FrontierPoint(_Strict):
    """The best rental found within a budget."""

    budget_per_hour: float = Field(ge=0)
    price_per_hour: float = Field(ge=0)
    req_s: float = Field(ge=0)
    output_tok_s: float = Field(ge=0)
    usd_per_million_output_tokens: float = Field(ge=0)
    rented: list[Rented]


class SearchRecord(_Strict):
    """How the placement was found. `cut` names what stopped the search early, if anything did."""

    seconds: float = Field(ge=0)
    seed: int
    evaluations: int = Field(ge=0)
    trace: list[dict[str, Any]] = []
    cut: str | None = None


class Placement(_Strict):
    """What a strategy returns, the simulator times and the runtime launches. `lost` are GPUs of the cluster
    that are out of service; `moves` and `migration` say how a re-plan gets here from the placement before."""

    version: Literal[1] = 1
    strategy: str
    cluster: ClusterSpec
    model: ModelArchitecture
    workload: Workload
    cost_model: CostModelName
    goal: Goal = Goal()
    lost: list[str] = []
    replicas: list[Replica] = Field(min_length=1)
    routes: list[Route]
    attention_workers: list[dict[str, Any]] = []
    throughput: Throughput
    latency: Latency
    goodput: Goodput | None = None
    price_per_hour: float = Field(ge=0)
    rented: list[Rented] = []
    frontier: list[FrontierPoint] = []
    bound: Bound
    bottlenecks: list[str]
    search: SearchRecord
    moves: list[Move] = []
    migration: Migration | None = None

    def replica(self, replica_id: str) -> Replica:
        """The replica of that id; KeyError if there is none."""
        for replica in self.replicas:
            if replica.id == replica_id:
                return replica
        raise KeyError(replica_id)

    def to_json(self) -> str:
        """Canonical text: same placement, same bytes."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write atomically: the file is the whole placement or is not touched."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Placement:
        """Read and validate the schema; the invariants are checked by hexgen2.checks.

        Raises
        ------
        InputError : unreadable, not JSON, or not a placement
        """
        source = str(path)
        remedy = "make one with `hexgen2 search ... -o placement.json`"
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(source, "", f"cannot be read ({error})", remedy) from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise InputError(source, key, first["msg"], remedy) from error


def json_schema() -> dict[str, Any]:
    """The published JSON Schema of the placement (docs/placement.schema.json)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Placement.model_json_schema(by_alias=True),
    }
