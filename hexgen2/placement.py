"""The placement: one JSON schema for all strategies, and all that the search passes on to the runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from cluster_specs.loader import resolve
from cluster_specs.schema import ClusterSpec
from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel
from cost_model.errors import InputError
from cost_model.fields import Name, Prose, between, schema_error
from cost_model.files import read_text, write_text
from hexgen2.attention_workers import AttentionWorker
from hexgen2.costs import CostModelName
from hexgen2.goal import Goal
from hexgen2.layer_ranges import LayerRanges, places_in_ranges
from hexgen2.moves import LARGEST, Figure, Migration, Move
from hexgen2.network.kv_parts import GpuPart, copies, gpu_parts
from hexgen2.replica import Count, Replica, Stage
from hexgen2.robustness import Robustness
from hexgen2.workload.lengths import MAX_TOKENS, Workload

if TYPE_CHECKING:
    import networkx

__all__ = ["CostModelName", "Placement", "Replica", "Route", "Stage"]

OPTIMAL = 1e-4
"""Relative gap to the bound up to which a placement counts as optimal; also the integer program's."""

_MAX_BYTES = 512 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class RouteLink(_Strict):
    """One device pair that carries a part of each request's KV cache on a route."""

    from_: Name = Field(alias="from")
    to: Name
    bytes_per_req: Figure


_Tokens = Annotated[int, Field(ge=0), between(0, MAX_TOKENS)]


class Route(_Strict):
    """KV cache from a replica that prefills to one that decodes. Of a mixed replica to itself: the requests
    that it serves alone, whose KV caches stay where they are. Between ranges of layers: the activations of
    all tokens of a request, in place of its KV cache.

    min_prompt_tokens : requests with shorter prompts take the route only while no other has room for them.
        flow_req_s counts the requests that it gets; capacity and bytes are for the mean prompt
    """

    from_: Name = Field(alias="from")
    to: Name
    flow_req_s: Figure
    capacity_req_s: Figure
    kv_bytes_per_req: Figure
    links: list[RouteLink] = []
    min_prompt_tokens: _Tokens = Field(default=0, exclude_if=lambda tokens: tokens == 0)

    @classmethod
    def between(
        cls,
        source: Replica,
        target: Replica,
        layer_bytes: float,
        capacity_req_s: float = 0.0,
        flow_req_s: float = 0.0,
        to_every_rank: bool = False,
    ) -> Route:
        """The route between two replicas, with the GPU pairs that its KV caches take.

        Parameters
        ----------
        layer_bytes : KV cache of one request in one layer
        to_every_rank : each GPU of a target's attention group takes all of it (latent attention)
        """
        parts = gpu_parts(source.stages, target.stages, layer_bytes, to_every_rank)
        layers = sum(s.layer_count * copies(s.attention_degree, to_every_rank) for s in target.stages)
        links = [
            {"from": sender, "to": receiver, "bytes_per_req": moved} for sender, receiver, moved in parts
        ]
        return cls.model_validate(
            {
                "from": source.id,
                "to": target.id,
                "flow_req_s": flow_req_s,
                "capacity_req_s": capacity_req_s,
                "kv_bytes_per_req": layer_bytes * layers,
                "links": links,
            }
        )

    @classmethod
    def within(cls, replica: Replica, flow_req_s: float) -> Route:
        """The route of a mixed replica to itself, for requests that it serves alone."""
        figures = {
            "flow_req_s": flow_req_s,
            "capacity_req_s": replica.capacity_req_s,
            "kv_bytes_per_req": 0.0,
        }
        return cls.model_validate({"from": replica.id, "to": replica.id, **figures})

    @property
    def parts(self) -> Iterator[GpuPart]:
        """(from GPU, to GPU, bytes per request) of each link."""
        return ((link.from_, link.to, link.bytes_per_req) for link in self.links)


class Throughput(_Strict):
    """Requests/s and output tokens/s of the whole placement; of ranges of layers also the tokens/s of prompts
    and answers together, which is the max flow."""

    req_s: Figure
    output_tok_s: Figure
    total_tok_s: Figure | None = Field(default=None, exclude_if=lambda tokens: tokens is None)


class Latency(_Strict):
    """Service times without queueing: first token at batch 1, one decode step at the placement's batch (of a
    colocated replica at full load, so with the prefills between its steps)."""

    ttft_ms: Figure
    tpot_ms: Figure


class Goodput(_Strict):
    """What requests see when request_rate of them arrive each second, at random; waiting is included.

    Simulated, under `assumptions`. goodput_req_s is the largest rate, at most that which arrives, at which
    the goal's share of the requests meets its targets, with its 95 % confidence interval, and attainment the
    share at request_rate; all are absent where the goal has no targets. Times are absent where the rate is
    more than can be carried: waits then grow without limit. Placements from before promises were simulated
    have formulas' figures, and no interval.
    """

    request_rate: Figure
    goodput_req_s: Figure | None
    attainment: Annotated[float, Field(ge=0, le=1), between(0, 1)] | None
    mean_ttft_ms: Figure | None
    p90_ttft_ms: Figure | None
    mean_tpot_ms: Figure | None
    mean_e2el_ms: Figure | None
    interval_req_s: tuple[Figure, Figure] | None = None
    assumptions: list[Prose]


class BoundRecord(_Strict):
    """A proven upper limit on throughput, valid under `assumptions`; gap = 1 - req_s / bound.

    With the objective "cost", price_per_hour is what any rental that carries the load costs at least. Of
    ranges of layers, total_tok_s is the bound on the tokens/s of prompts and answers together.
    method : "rates" of single GPUs, a "linear program" over replicas, an "integer program" over whole ones,
        all "partitions" of the nodes as far as they were not tried, or "enumeration" of all placements
    kv_free_req_s : what the linear program gives if KV transfers took no time
    """

    req_s: Figure
    gap: Annotated[float, between(-LARGEST, LARGEST)]
    method: Literal["rates", "linear program", "integer program", "partitions", "enumeration"] = "rates"
    kv_free_req_s: Annotated[float, between(0, LARGEST)] | None = None
    assumptions: list[Prose]
    price_per_hour: Figure | None = None
    total_tok_s: Figure | None = Field(default=None, exclude_if=lambda tokens: tokens is None)


class Rented(_Strict):
    """GPUs of one type and price."""

    accelerators: Name
    count: Count
    price_per_gpu_hour: Figure


class FrontierPoint(_Strict):
    """The best rental found within a budget."""

    budget_per_hour: Figure
    price_per_hour: Figure
    req_s: Figure
    output_tok_s: Figure
    usd_per_million_output_tokens: Figure
    rented: list[Rented]


def _trace_step(step: dict[str, Any]) -> dict[str, Any]:
    """What the report reads of a step: how many replicas of each kind, and the requests/s."""
    numbers = {key: value for key, value in step.items() if key == "req_s" or key.endswith("_replicas")}
    for key, value in numbers.items():
        kinds = (int, float) if key == "req_s" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= LARGEST:
            raise PydanticCustomError("trace_step", "{key} should be a number of at least 0", {"key": key})
    return step


TraceStep = Annotated[dict[str, Any], AfterValidator(_trace_step)]


class Alternative(_Strict):
    """What formulas give the best found where all replicas have to be "disaggregated", or all "colocated", or
    none ("flexible"); kv_limited says whether KV routes limited it."""

    phases: Literal["disaggregated", "colocated", "flexible"]
    req_s: Figure
    kv_limited: bool = False


class SearchRecord(_Strict):
    """How the placement was found. `cut` names what stopped the search early, if anything did;
    `alternatives` are what a flexible search started from and came to."""

    seconds: Figure
    seed: Annotated[int, between(-(2**64), 2**64)]
    evaluations: Annotated[int, Field(ge=0), between(0, LARGEST)]
    trace: list[TraceStep] = []
    cut: Name | None = None
    alternatives: list[Alternative] = Field(default=[], exclude_if=lambda found: not found)


class Placement(_Strict):
    """What a strategy returns, the simulator times and the runtime launches. `lost` are GPUs of the cluster
    that are out of service; with `layer_ranges`, replicas hold parts of the model; `robustness` says how it
    was chosen where costs may be off; `moves` and `migration` say how a re-plan gets here from the placement
    before."""

    version: Literal[1] = 1
    strategy: Name
    cluster: ClusterSpec
    model: ModelArchitecture
    workload: Workload
    cost_model: CostModelName
    goal: Goal = Goal()
    lost: list[Name] = []
    replicas: list[Replica] = Field(min_length=1)
    routes: list[Route]
    attention_workers: list[AttentionWorker] = []
    layer_ranges: LayerRanges | None = Field(default=None, exclude_if=lambda ranges: ranges is None)
    throughput: Throughput
    latency: Latency
    goodput: Goodput | None = None
    price_per_hour: Figure
    rented: list[Rented] = []
    frontier: list[FrontierPoint] = []
    bound: BoundRecord
    bottlenecks: list[Name]
    search: SearchRecord
    robustness: Robustness | None = Field(default=None, exclude_if=lambda found: found is None)
    moves: list[Move] = []
    migration: Migration | None = None

    def replica(self, replica_id: str) -> Replica:
        """The replica of that id; KeyError if there is none."""
        for replica in self.replicas:
            if replica.id == replica_id:
                return replica
        raise KeyError(replica_id)

    def workers_of(self, replica_id: str) -> list[AttentionWorker]:
        """The attention workers of a replica; most have none."""
        return [worker for worker in self.attention_workers if worker.replica == replica_id]

    @property
    def phases(self) -> Literal["flexible", "disaggregated"]:
        """What a search among placements of its kind may do: flexible if it has mixed replicas."""
        return "flexible" if any(replica.role == "mixed" for replica in self.replicas) else "disaggregated"

    @property
    def places(self) -> int:
        """Requests that its replicas decode at a time at most, those without any route left aside."""
        if self.layer_ranges is not None:
            return places_in_ranges(self)
        reached = {route.to for route in self.routes if route.flow_req_s > 0}
        return sum(r.max_batch for r in self.replicas if r.role == "colocated" or r.id in reached)

    def costs(self) -> CostModel:
        """The cost model that it was planned with, for its requests.

        Raises
        ------
        InputError : there is none of that name
        """
        return self.cost_model.costs(self.model, self.workload.lengths)

    def to_json(self) -> str:
        """The placement as text: the same placement always gives the same bytes."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1) + "\n"

    def to_networkx(self) -> networkx.DiGraph:
        """The replicas as nodes and the KV routes as edges.

        Nodes have `role`, `gpus`, `shape`, `capacity_req_s` and `utilisation`; edges have `flow_req_s`,
        `capacity_req_s` and `kv_bytes_per_req`.

        >>> import hexgen2
        >>> p = hexgen2.search(cluster="hexgen2-case-study", model="llama-2-13b", workload="LPLD")
        >>> graph = p.to_networkx()
        >>> len(graph) == len(p.replicas), graph.number_of_edges() == len(p.routes)
        (True, True)
        """
        import networkx

        graph = networkx.DiGraph()
        for replica in self.replicas:
            figures = {"capacity_req_s": replica.capacity_req_s, "utilisation": replica.utilisation}
            graph.add_node(replica.id, role=replica.role, gpus=replica.gpus, shape=replica.shape, **figures)
        for route in self.routes:
            figures = route.model_dump(include={"flow_req_s", "capacity_req_s", "kv_bytes_per_req"})
            graph.add_edge(route.from_, route.to, **figures)
        return graph

    def save(self, path: str | Path) -> None:
        """Write the placement to a file, as `-o` does; the file is written completely or not touched."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Placement:
        """Read a placement, validate its schema, and resolve its cluster (an edited one may name cards of the
        catalogue). Its invariants are not checked: see hexgen2.checks.

        Raises
        ------
        InputError : unreadable, not JSON, not a placement, or its cluster alone is wrong already
        """
        source = str(path)
        remedy = "make one with `hexgen2 search ... -o placement.json`"
        try:
            text = read_text(Path(path), _MAX_BYTES)
        except InputError as error:
            raise InputError(source, error.key, error.problem, remedy) from None
        try:
            placement = cls.model_validate_json(text)
        except ValidationError as error:
            raise schema_error(error, source, remedy) from None
        cluster = resolve(placement.cluster, f"{source}: cluster", Path(path).parent)
        return placement.model_copy(update={"cluster": cluster})


def json_schema() -> dict[str, Any]:
    """The published JSON Schema of the placement (docs/placement.schema.json)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Placement.model_json_schema(by_alias=True),
    }
