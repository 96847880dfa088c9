"""How much of a flow requests can keep up, given how long each of them holds its KV caches.

Max flow knows no latency: on a long path of slow nodes, a request is under way for so long that KV caches are
full before nodes are busy. By Little's law the requests on a node are their rate times their time under way,
and there is room for so many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cost_model.base import CostModel, TensorGroup
from hexgen2.prediction.range_times import lone_s, scale_to
from hexgen2.search.layer_ranges.instance import Instance, Range, Ranges
from hexgen2.search.layer_ranges.max_flow import Flow, FlowValue
from hexgen2.search.layer_ranges.nodes import RangeNodes
from hexgen2.search.problem import Problem

FILLED = 0.9
"""Share of its KV cache to which a node is filled (HIGH_WATER of the router)."""
HALVINGS = 9
IDLE = 0.01
"""A node is idle for this share of its time at least, in the formula for waiting times."""


class _Node(NamedTuple):
    """A node with a range: seconds of a prompt and of a decode step, tokens/s, requests in a step and in its
    KV cache."""

    prompt_s: float
    token_s: float
    tok_s: float
    batch: float
    room: float


class Service:
    """Rates that placements of an instance keep up.

    Each token waits for steps of others, as in a queue with general service times (Pollaczek and Khinchine):
    half the mean of the squared step times per second, over the share of the time that the node is idle.
    """

    def __init__(self, problem: Problem, nodes: RangeNodes) -> None:
        self._nodes, self._costs = nodes, problem.costs
        self._isl, self._osl = problem.workload.isl, problem.workload.osl
        cluster = problem.cluster
        leaders = [own[0] for own in nodes.gpus]
        pairs = np.ix_(leaders, leaders)
        between = [int(cluster.node_of[leader]) for leader in leaders]
        self._groups = [
            TensorGroup(
                problem.node_accelerator[machine],
                len(own),
                problem.node_links[machine][machine],
            )
            for machine, own in zip(between, nodes.gpus, strict=True)
        ]
        byte_s = self._costs.activation_bytes_per_token / cluster.bandwidth_bytes_s[pairs]
        latency_s = cluster.latency_s[pairs]
        steps = max(self._osl - 1, 0.0)
        self._hop_s = ((self._isl + steps) * byte_s + (1 + steps) * latency_s).tolist()
        self._back_s = (steps * latency_s).tolist()
        self._known: dict[tuple[int, Range], _Node] = {}

    def _node(self, node: int, held: Range) -> _Node:
        instance = self._nodes.instance
        count, last = held[1] - held[0], held[1] == instance.layers
        key = instance.kind[node], (int(held[0] == 0) + 2 * last, count)
        if key not in self._known:
            room = self._nodes.most_requests(node, held)
            self._known[key] = _timed(
                self._costs, self._groups[node], count, last, room, instance.tok_s(node, held)
            )
        return self._known[key]

    def share(self, flow: Flow, ranges: Ranges) -> float:
        """The share of the flow at which every KV cache is full to FILLED at most."""
        if not flow.tok_s:
            return 0.0
        load = self._load(flow, ranges)
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if load(middle) <= FILLED:
                low = middle
            else:
                high = middle
        return low

    def _load(self, flow: Flow, ranges: Ranges) -> Callable[[float], float]:
        """How full the fullest KV cache is, by the share of the flow."""
        tokens, osl = self._isl + self._osl, self._osl
        order = sorted(
            (v for v, tok_s in enumerate(flow.node_tok_s) if tok_s > 0), key=lambda v: ranges[v][1]
        )
        nodes = {v: self._node(v, ranges[v]) for v in order}
        into: dict[int, list[tuple[int, float, float]]] = {v: [] for v in order}
        out: dict[int, list[tuple[int, float, float]]] = {v: [] for v in order}
        for (a, b), tok_s in flow.edges.items():
            into[b].append((a, tok_s / flow.node_tok_s[b], self._hop_s[a][b]))
            out[a].append((b, tok_s / flow.node_tok_s[a], self._hop_s[a][b]))
        back_s = sum(
            self._back_s[z][a] * leaving * entering / flow.tok_s**2
            for z, leaving in flow.leaving.items()
            for a, entering in flow.entering.items()
        )

        def load(share: float) -> float:
            own: dict[int, float] = {}
            before: dict[int, float] = {}
            after: dict[int, float] = {}
            for v in order:
                node, req_s = nodes[v], share * flow.node_tok_s[v] / tokens
                idle = max(IDLE, 1 - share * flow.node_tok_s[v] / node.tok_s)
                squares = req_s * (node.prompt_s**2 + osl / node.batch * node.token_s**2)
                wait_s = squares / (2 * idle)
                own[v] = node.prompt_s + wait_s + (osl - 1) * (node.token_s + wait_s)
                before[v] = sum(part * (before[a] + own[a] + hop_s) for a, part, hop_s in into[v])
            fullest = 0.0
            for v in reversed(order):
                after[v] = sum(part * (after[b] + own[b] + hop_s) for b, part, hop_s in out[v])
                under_way_s = before[v] + own[v] + after[v] + back_s
                fullest = max(fullest, share * flow.node_tok_s[v] / tokens * under_way_s / nodes[v].room)
            return fullest

        return load


class KeptUp(FlowValue):
    """What is kept up of the max flow, in place of the flow."""

    def __init__(self, instance: Instance, service: Service) -> None:
        super().__init__(instance)
        self._service = service

    def __call__(self, ranges: Ranges | list) -> float:
        """Tokens/s."""
        flow = self.flow(tuple(ranges))
        return flow.tok_s * self._service.share(flow, tuple(ranges))


def _timed(costs: CostModel, group: TensorGroup, count: int, last: bool, room: int, tok_s: float) -> _Node:
    """By the cost model, corrected to the node's tokens/s where these were given."""
    scale, least_s = scale_to(tok_s, costs, group, count, last, room), lone_s(costs, group, count, last)
    batch = max(1.0, room * count / costs.model.layers)
    prompt_s = count * costs.layer_s("prefill", group, 1.0) + costs.edge_s("prefill", group, 1.0, last)
    token_s = count * costs.layer_s("decode", group, batch) + costs.edge_s("decode", group, batch, last)
    return _Node(scale(prompt_s, least_s), scale(token_s, least_s), tok_s, batch, room)
