"""KV routes: what moves between the stages of two replicas, and how many requests/s that allows.

HexGen-2, section 3.3, connection type (3), and Appendix A: every GPU that holds layer j on the
prefill side sends to the GPUs that hold layer j on the decode side, all at once; the slowest part
sets the pace, and the order of the stages on both sides decides which parts cross which links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from hexgen2.search.plan import PlannedStage
from hexgen2.search.problem import Problem


def layer_overlaps(prefill: Sequence[int], decode: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(prefill stage, decode stage, layers that both hold), from the layer counts of both sides."""
    i = j = at = 0
    p_end, d_end = prefill[0], decode[0]
    while True:
        end = min(p_end, d_end)
        yield i, j, end - at
        at = end
        if p_end == end:
            i += 1
            if i == len(prefill):
                return
            p_end += prefill[i]
        if d_end == end:
            j += 1
            d_end += decode[j]


def transfer_s(problem: Problem, prefill: Sequence[PlannedStage], decode: Sequence[PlannedStage]) -> float:
    """Seconds to move one request's KV cache, all parts at once.

    Inside a node each GPU sends and receives through its own port; between two nodes all parts share
    the one link.
    """
    per_layer = problem.costs.kv_bytes_per_layer
    busy: dict[tuple, float] = defaultdict(float)
    latency = 0.0
    for i, j, layers in layer_overlaps([s.layers for s in prefill], [s.layers for s in decode]):
        source, target = prefill[i], decode[j]
        link = problem.node_links[source.node][target.node]
        seconds = layers * per_layer / link.bandwidth_bytes_s
        latency = max(latency, link.latency_s)
        if source.node == target.node:
            busy["send", i] += seconds / source.degree
            busy["receive", j] += seconds / target.degree
        else:
            busy["network", source.node, target.node] += seconds
    return latency + max(busy.values())
