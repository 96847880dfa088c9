"""Which parts of a request's KV cache move between which stages, and between which GPUs, of two replicas.

HexGen-2, Appendix A: the GPUs that hold a layer on the prefill side send it to those that hold it on the
decode side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

GpuPart = tuple[str, str, float]
"""(sending GPU, receiving GPU, bytes per request)."""


class StageGpus(Protocol):
    """A pipeline stage: the GPUs that split its layers by heads, in the order of their ranks. With attention
    data parallelism they form that many groups of neighbours, and each group splits them for requests of its
    own."""

    @property
    def gpus(self) -> Sequence[str]: ...

    @property
    def attention_data_parallel(self) -> int: ...

    @property
    def layer_count(self) -> int: ...


def layer_overlaps(prefill: Sequence[int], decode: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(prefill stage, decode stage, layers that both hold), from the layer counts of both pipelines."""
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


def gpu_parts(
    prefill: Sequence[StageGpus], decode: Sequence[StageGpus], layer_bytes: float, to_every_rank: bool = False
) -> Iterator[GpuPart]:
    """The GPU pairs between which a request's KV cache moves: the layers that both stages hold, and of
    these the share of heads that both ranks hold. Of attention groups, each two carry an equal share of the
    requests: the bytes are means over requests.

    Parameters
    ----------
    layer_bytes : KV cache of one request in one layer
    to_every_rank : each receiving rank takes all of a layer (latent attention), in equal parts from the
        senders whose rank, as a share of their stage, overlaps its own
    """
    layers = ([stage.layer_count for stage in stages] for stages in (prefill, decode))
    for i, j, count in layer_overlaps(*layers):
        senders, receivers = prefill[i].gpus, decode[j].gpus
        pairs = prefill[i].attention_data_parallel * decode[j].attention_data_parallel
        sending = len(senders) // prefill[i].attention_data_parallel
        receiving = len(receivers) // decode[j].attention_data_parallel
        moved = count * layer_bytes * copies(receiving, to_every_rank) / pairs
        for a, sender in enumerate(senders):
            for b, receiver in enumerate(receivers):
                p, d = a % sending, b % receiving
                low = max(p / sending, d / receiving)
                high = min((p + 1) / sending, (d + 1) / receiving)
                if high - low > 1e-12:
                    yield sender, receiver, moved * (high - low)


def copies(receivers: int, to_every_rank: bool) -> int:
    """How often a layer's KV cache moves to so many ranks that share the attention of a request."""
    return receivers if to_every_rank else 1
