"""The KV cache that fits into the memory of a replica beside the weights."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.base import PREFILL_TOKENS, CostModel, Phase
from hexgen2.attention_workers import AttentionWorker, stage_requests
from hexgen2.cluster import Cluster
from hexgen2.placement import Replica


def kv_capacity_tokens(
    replica: Replica,
    cluster: Cluster,
    costs: CostModel,
    workers: Sequence[AttentionWorker] = (),
) -> int:
    """Tokens of KV cache for which a replica has memory, with its attention workers, limited by its tightest
    stage; 0 if not even the weights fit. Beside attention workers, layers with a window keep all tokens."""
    held = kv_tokens_held(replica, costs, keep_all=bool(workers))
    if workers:
        return max(0, int(min(stage_requests(replica, workers, cluster, costs)) * held))
    phase, requests = _phase(replica), []
    for stage in replica.stages:
        accelerator = cluster.accelerators[cluster.index(stage.gpus[0])]
        first, last = stage.layers[0] == 0, stage.layers[1] == costs.model.layers
        memory = costs.stage_memory(phase, stage.tensor_group(accelerator), first=first, last=last)
        room = memory.limit - memory.fixed - stage.layer_count * memory.per_layer
        requests.append(room / (stage.layer_count * memory.per_layer_request + memory.per_request))
    return max(0, int(min(requests) * held))


def kv_tokens_held(replica: Replica, costs: CostModel, keep_all: bool = False) -> float:
    """Of these tokens, how many the mean request under way takes: all of its own. With `keep_all`, only so
    many that a window's layers would keep, on average over the layers: the memory is planned for that."""
    window = costs.model.window if keep_all else None
    if _phase(replica) == "prefill":
        return costs.lengths.kv_tokens_prefill(window, PREFILL_TOKENS)
    return costs.lengths.kv_tokens_decode(window)


def _phase(replica: Replica) -> Phase:
    return "prefill" if replica.role == "prefill" else "decode"
