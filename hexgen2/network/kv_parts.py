"""Which parts of a KV cache move between which stages, and which GPUs, of two replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hexgen2.placement import Replica, RouteLink


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


def route_links(source: Replica, target: Replica, layer_bytes: float) -> list[RouteLink]:
    """The GPU pairs between which a request's KV cache moves, and the bytes on each: the layers that
    both stages hold, the share of heads that both ranks hold."""
    sides = [[stage.layer_count for stage in replica.stages] for replica in (source, target)]
    links = []
    for i, j, layers in layer_overlaps(*sides):
        senders, receivers = source.stages[i].gpus, target.stages[j].gpus
        for a, sender in enumerate(senders):
            for b, receiver in enumerate(receivers):
                low = max(a / len(senders), b / len(receivers))
                high = min((a + 1) / len(senders), (b + 1) / len(receivers))
                if high - low > 1e-12:
                    moved = layers * layer_bytes * (high - low)
                    links.append(
                        RouteLink.model_validate({"from": sender, "to": receiver, "bytes_per_req": moved})
                    )
    return links
