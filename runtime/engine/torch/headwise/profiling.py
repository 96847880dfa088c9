"""Hetis's Profiler on the devices that are there: linear models of decode attention, fitted to runs of it
(SC 2025, section 5.1)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from hexgen2.headwise.profile import AttentionRun, DeviceProfile, fit
from runtime.engine.torch.headwise.heads import Heads
from runtime.engine.torch.headwise.pages import HeadPages, Rows
from runtime.engine.torch.headwise.remote import RemoteHeads

log = logging.getLogger(__name__)

COUNTS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 64, 256, 1024, 4096)
REPEATS = 7
_NOBODY = "\x00profile"
"""A request that no driver names."""


@torch.inference_mode()
def measured(heads: Heads, ranks: int) -> list[DeviceProfile]:
    """The profiles of a lane's devices. The time of an attention worker has the way there and back in it.

    Parameters
    ----------
    ranks : of the stage, which share the attention workers
    """
    found = list[DeviceProfile]()
    for number, device in enumerate(heads.lane.devices):
        profile = DeviceProfile(*device.profile)
        try:
            holder = heads.remote(number) if number else heads.own
            runs = list(attention_runs(holder, heads, device.blocks * heads.cache.block_tokens))
        except OSError:
            runs = []
        if runs:
            profile = fit(runs)
            log.info("attention on %s is linear within %.1f %%", device.worker, 100 * profile.error)
        if number:
            profile = profile.off_by((ranks, ranks, 1.0, 1.0, 1.0))
        found.append(profile)
    return found


def attention_runs(holder: HeadPages | RemoteHeads, heads: Heads, most_tokens: int) -> Iterator[AttentionRun]:
    """Runs of one layer with several numbers of KV heads and lengths of context, on a device without requests
    that has memory for so many tokens of a head. Heads share their blocks, which nobody reads later.

    Raises
    ------
    OSError : the attention worker is lost
    """
    lane, shape, size = heads.lane, heads.one_head, heads.cache.block_tokens
    contexts = [context for context in CONTEXTS if context <= most_tokens]
    if not contexts:
        return
    names = [(_NOBODY, number) for number in range(max(COUNTS))]
    size_of_all = shape.layers, 2, contexts[-1], shape.width
    empty = torch.zeros(size_of_all, dtype=shape.stored_dtype, device=shape.device)
    blocks = range(-(-contexts[-1] // size))
    for name in names:
        filled = contexts[-1] if name == names[0] else 0
        holder.put(name, 0, filled, blocks, empty[:, :, :filled])
    for count in COUNTS:
        query = torch.zeros(count, lane.query_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
        key = torch.zeros(count, 1, shape.head_dim, dtype=shape.dtype, device=shape.device)
        for context in contexts:
            rows = [(name, context - 1, 1) for name in names[:count]]
            run = _layer(holder, rows, query, key, shape.part.first_layer)
            taken_s = min(_seconds(run) for _ in range(REPEATS))
            kv_bytes = count * context * lane.head_bytes
            yield AttentionRun(count * lane.query_heads, kv_bytes, taken_s)
    holder.forget(_NOBODY, max(COUNTS))


def _layer(
    holder: HeadPages | RemoteHeads, rows: Rows, query: torch.Tensor, key: torch.Tensor, layer: int
) -> Callable[[], torch.Tensor]:
    """One layer of decode attention of these heads."""
    if isinstance(holder, RemoteHeads):
        there = holder
        there.begin(rows, ())

        def exchange() -> torch.Tensor:
            there.ask(layer, None, query, key, key)
            return there.attended(len(query))

        return exchange
    batch, here = holder.batch(rows), holder

    def attend() -> torch.Tensor:
        here.store(key, key, layer, batch)
        return here.attend(query, key, key, layer, batch, None)

    return attend


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    """How long until its result is there."""
    began = time.perf_counter()
    run().sum().item()
    return time.perf_counter() - began
