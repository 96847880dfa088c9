"""The schema of cluster files. Units are part of the key names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cost_model.fields import Name, Prose, between
from cost_model.gpu_catalogue import Generation

# Beyond any real machine in both directions (1 kbit/s, 1 KiB, 1 MFLOP/s), so that results computed from such
# figures stay finite.
SMALLEST, LARGEST = 1e-6, 1e9
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False), between(SMALLEST, LARGEST)]
NonNegative = Annotated[
    float, Field(ge=0, le=LARGEST, allow_inf_nan=False), between(SMALLEST, LARGEST, or_zero=True)
]
Price = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False), between(1e-4, 1e5, or_zero=True)]
InterconnectClass = Literal["nvlink", "infinity-fabric", "pcie3", "pcie4", "pcie5", "shared-memory"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InterconnectSpec(_Strict):
    """Links between the devices of one node, given by figures instead of a class name."""

    bandwidth_gbyte_s: Positive
    latency_us: NonNegative = 10.0


class NodeSpec(_Strict):
    """One machine: `accelerators` is NAME:COUNT, `network_gbit_s` the bandwidth of its network card in each
    direction (default: that of its fastest link)."""

    name: Name = Field(min_length=1, pattern=r"^[^/\s]+$")
    address: Name | None = None
    accelerators: Name
    interconnect: InterconnectClass | InterconnectSpec = "pcie4"
    network_gbit_s: Positive | None = None
    price_per_gpu_hour: Price | None = None
    region: Name | None = None


class NetworkDefault(_Strict):
    """The network between any two nodes that no link joins."""

    bandwidth_gbit_s: Positive = 10.0
    latency_us: NonNegative = 50.0


class NetworkLink(_Strict):
    """The network between two nodes, in both directions."""

    from_: Name = Field(alias="from")
    to: Name
    bandwidth_gbit_s: Positive
    latency_us: NonNegative = 50.0

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class UplinkSpec(_Strict):
    """The uplink that a set of nodes, such as a rack or a site, shares for traffic with all others, per
    direction."""

    name: Name = Field(min_length=1)
    nodes: list[Name] = Field(min_length=1)
    bandwidth_gbit_s: Positive


class NetworkSpec(_Strict):
    """`measured` is a CSV file beside the spec (GPU x GPU, Gbit/s) or, once loaded, the matrix itself."""

    default: NetworkDefault = NetworkDefault()
    links: list[NetworkLink] = []
    uplinks: list[UplinkSpec] = []
    measured: str | list[list[float]] | None = None


class AcceleratorSpec(_Strict):
    """A card that the catalogue lacks (or, once resolved, every card of the cluster). `generation` says which
    number formats it has kernels for; a card with the name of one of the catalogue has that card's."""

    memory_gib: Positive
    bf16_dense_tflops: Positive
    memory_bandwidth_gbyte_s: Positive
    kind: Literal["gpu", "cpu"] = "gpu"
    generation: Generation = Field(default="", exclude_if=lambda generation: not generation)
    price_per_gpu_hour: Price | None = None


class OfferSpec(_Strict):
    """GPUs that `--budget` may rent, one by one: up to max_count, in nodes of gpus_per_node, each with a
    network card of network_gbit_s in each direction (default: that of its fastest link)."""

    accelerators: Name
    price_per_gpu_hour: Price
    max_count: int = Field(gt=0)
    interconnect: InterconnectClass | InterconnectSpec = "pcie4"
    network_gbit_s: Positive | None = None
    gpus_per_node: int = Field(default=8, gt=0)


class ClusterSpec(_Strict):
    """A cluster file: existing nodes, offers that `--budget` may rent, or both.

    `assumptions` lists every figure that was not measured, with its reason.
    """

    name: Name = Field(min_length=1)
    description: Prose = ""
    assumptions: list[Prose] = []
    nodes: list[NodeSpec] = []
    network: NetworkSpec = NetworkSpec()
    accelerators: dict[Name, AcceleratorSpec] = {}
    offers: list[OfferSpec] = []
