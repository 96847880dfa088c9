"""How a replica's memory for KV caches is divided between layers that keep all tokens and layers with a
window, which keep the last ones alone."""

from __future__ import annotations

import math
from dataclasses import replace

from cost_model.base import PREFILL_TOKENS, CostModel
from cost_model.lengths import BLOCK_TOKENS, RequestLengths, Window
from cost_model.pipeline import BATCHES_PER_REPLICA, PipelineSemantics
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.kv_capacity import kv_tokens_held
from runtime.routing.kv_budget import outgoing_tokens, useful_tokens
from runtime.routing.windowed_room import WindowedAccount, WindowedRoom


def keeps_windows_apart(placement: Placement) -> bool:
    """Whether layers with a window give back what lies outside it: not beside attention workers."""
    model = placement.model
    return model.window is not None and model.window.share > 0 and not placement.attention_workers


def divided(
    placement: Placement,
    replica: Replica,
    costs: CostModel,
    tokens: int,
    chunk_tokens: int | None = None,
    block: int = BLOCK_TOKENS,
) -> tuple[int, WindowedRoom]:
    """The tokens that a replica's layers without a window keep, and the room of its layers with one.

    Requests are as many as in the plan, each with as many tokens in the windowed layers as the plan counts.
    These have room for one long prompt at least, and for no more than all requests that may be there. Where
    a replica has layers of one kind only, the others take no memory, and so limit no requests.

    Parameters
    ----------
    tokens : of requests of the planned lengths, which the plan has memory for
    chunk_tokens : of prompts in a step that also decodes; None: as planned
    block : tokens of a block
    """
    model, window = placement.model, placement.model.sliding_window
    assert window is not None
    semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
    engine = replica.engine
    if chunk_tokens:
        engine = engine.model_copy(update={"chunk_tokens": chunk_tokens})
    steps = engine.steps_in_flight(semantics, len(replica.stages))
    first, end = replica.stages[0].layers[0], replica.stages[-1].layers[1]
    others = sum(first <= layer < end for layer in model.full_attention_layers)
    limited = end - first - others
    room = WindowedRoom(0, window, steps * max(engine.step_tokens, engine.chunk_tokens), block)
    most = min(room.most_computing, math.ceil(tokens / block) * block) // block
    requests = tokens / kv_tokens_held(replica, costs)
    planned = requests * _kept(replica, costs.lengths, Window(window))
    blocks = max(most, min(int(planned / block), BATCHES_PER_REPLICA * replica.max_batch * most))
    rest = tokens
    if not limited:
        blocks = math.ceil(tokens / block) + most
    elif others:
        excess = max(0.0, blocks * block - planned) * limited
        rest = max(block, tokens - math.ceil(excess / others))
    elif blocks * block >= room.most_computing:
        longest = math.ceil(blocks * block / room.most) * model.max_position
        rest = max(tokens, min(longest, useful_tokens(replica, placement)))
    return max(1, rest // block) * block, replace(room, tokens=blocks * block)


def windowed_account(placement: Placement, replica: Replica, room: WindowedRoom) -> WindowedAccount:
    """An empty account of a replica's layers with a window."""
    outgoing, isl = outgoing_tokens(replica, placement), placement.workload.isl
    if outgoing is None:
        return WindowedAccount(room)
    kept = math.ceil(outgoing / isl) * room.held(math.ceil(isl))
    return WindowedAccount(room, min(kept, room.beside_prompts // 2))


def _kept(replica: Replica, lengths: RequestLengths, window: Window) -> float:
    """Tokens that the mean request under way keeps in a layer with a window."""
    if replica.role == "prefill":
        return lengths.kv_tokens_prefill(window, PREFILL_TOKENS)
    return lengths.kv_tokens_decode(window)
