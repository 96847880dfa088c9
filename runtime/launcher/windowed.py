"""How a replica's memory for KV caches is divided between layers that keep all tokens and layers with a
window, which keep the last ones alone."""

from __future__ import annotations

import math

from cost_model.base import PREFILL_TOKENS, CostModel
from cost_model.lengths import RequestLengths, Window
from cost_model.pipeline import BATCHES_PER_REPLICA
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.kv_capacity import kv_tokens_held
from runtime.kv_cache.windows import most_blocks
from runtime.protocol.to_workers import WindowedLayers


def keeps_windows_apart(placement: Placement) -> bool:
    """Whether layers with a window give back what lies outside it: not beside attention workers, nor where
    replicas hold ranges of layers."""
    model = placement.model
    return (
        model.window is not None
        and model.window.share > 0
        and not placement.attention_workers
        and placement.layer_ranges is None
    )


def divided(
    placement: Placement, replica: Replica, costs: CostModel, tokens: int, steps_in_flight: int, block: int
) -> tuple[int, WindowedLayers]:
    """The tokens that a replica's layers without a window keep, and its layers with one.

    Requests are as many as in the plan, each with as many tokens in the windowed layers as the plan counts.
    These have room for one long prompt at least, and for no more than all requests that may be there.

    Parameters
    ----------
    tokens : of requests of the planned lengths, which the plan has memory for
    block : tokens of a block
    """
    model = placement.model
    assert model.sliding_window is not None
    layers = tuple(sorted(set(range(model.layers)) - set(model.full_attention_layers)))
    running = steps_in_flight * max(replica.engine.step_tokens, replica.engine.chunk_tokens)
    most = min(most_blocks(model.sliding_window, block, running), math.ceil(tokens / block))
    requests = tokens / kv_tokens_held(replica, costs)
    planned = requests * _kept(replica, costs.lengths, Window(model.sliding_window))
    blocks = max(most, min(int(planned / block), BATCHES_PER_REPLICA * replica.max_batch * most))
    excess = max(0.0, blocks * block - planned) * len(layers)
    others = len(model.full_attention_layers)
    rest = max(block, tokens - math.ceil(excess / others)) if others else tokens
    windowed = WindowedLayers(layers=layers, window=model.sliding_window, kv_budget_tokens=blocks * block)
    return max(1, rest // block) * block, windowed


def _kept(replica: Replica, lengths: RequestLengths, window: Window) -> float:
    """Tokens that the mean request under way keeps in a layer with a window."""
    if replica.role == "prefill":
        return lengths.kv_tokens_prefill(window, PREFILL_TOKENS)
    return lengths.kv_tokens_decode(window)
