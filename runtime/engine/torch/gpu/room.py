"""Whether a KV cache fits into a GPU beside weights and the largest step, which is run to find out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cost_model.errors import InputError
from runtime.engine.torch.attention import make_attention
from runtime.engine.torch.attention.base import Batch
from runtime.engine.torch.models.base import DecoderStage
from runtime.kv_cache.formats import PLAIN
from runtime.kv_cache.pool import CacheShape, PagedCache
from runtime.protocol.to_workers import Configure

_SPARE_BYTES = 512 << 20
"""For graphs, and what libraries take later."""


def check_room(stage: DecoderStage, caches: Sequence[tuple[CacheShape, int]], config: Configure) -> None:
    """Refuse KV caches for which the GPU has no room.

    Parameters
    ----------
    caches : shape and number of blocks of each

    Raises
    ------
    InputError : so it is
    """
    needed = sum(
        shape.part.cells * shape.bytes_per_token_cell * blocks * config.block_tokens
        for shape, blocks in caches
    )
    step = step_bytes(stage, config)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(stage.device)
    if needed + step + _SPARE_BYTES <= free:
        return
    sizes = f"{needed / 2**30:.1f} GiB of KV cache and {step / 2**30:.1f} GiB for a step"
    problem = f"needs {sizes}, but {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free beside the weights"
    remedy = "end what else uses the GPU, or give its memory in the cluster as less and search again"
    raise InputError(str(stage.device), config.worker, problem, remedy)


@torch.inference_mode()
def step_bytes(stage: DecoderStage, config: Configure) -> int:
    """Bytes that the largest step takes for a while: as many tokens of prompts as it may have, and as many
    samples."""
    tokens = max(config.max_prefill_tokens, config.max_mixed_tokens, 1)
    if limit := stage.spec.position_limit:
        tokens = min(tokens, limit)
    device, blocks = stage.device, -(-tokens // config.block_tokens)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        cache = PagedCache(replace(stage.cache_shape, format=PLAIN), blocks, config.block_tokens)
        before = torch.cuda.memory_allocated(device)
        attention = make_attention(cache)
        batch = Batch.make(attention, [[0] * tokens], [0], [list(range(blocks))], [True])
        hidden = None
        if not stage.rank.is_first:
            hidden = torch.zeros((tokens, stage.spec.hidden), dtype=stage.dtype, device=device)
        found = stage.forward(batch, hidden)
        if stage.rank.is_last:
            rows = torch.zeros(config.max_batch, dtype=torch.int64, device=device)
            logits = stage.logits(found, replace(batch, sampled=rows))
            if logits is not None:
                logits.float().log_softmax(-1)
    except torch.cuda.OutOfMemoryError as error:
        problem = f"a step of {tokens} tokens does not fit beside the weights"
        remedy = "lower prefill_tokens of the replica's engine, or search for more or larger GPUs"
        raise InputError(str(device), config.worker, problem, remedy) from error
    return torch.cuda.max_memory_allocated(device) - before
