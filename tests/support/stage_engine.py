"""The torch engine of a pipeline stage, in the process of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runtime.engine.rank import Rank
from runtime.engine.torch.engine import TorchEngine
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.message import PROTOCOL_VERSION, StageShape
from runtime.protocol.to_workers import Configure


def stage_engine(
    folder: Path, stages: tuple[StageShape, ...], number: int, tp_rank: int = 0, **settings: Any
) -> TorchEngine:
    """The loaded engine of a worker of a stage. Where nothing is written, its KV cache is not a number."""
    told: dict[str, Any] = {
        "replica": "w",
        "role": "colocated",
        "device": "cpu",
        "dtype": "float32",
        "max_prefill_tokens": 64,
        "max_mixed_tokens": 16,
        "steps_in_flight": 1,
        "reuse_prefixes": False,
        "host": "127.0.0.1",
        "secret": "",
        "threads": 1,
        **settings,
    }
    worker = stages[number].workers[tp_rank]
    config = Configure(
        protocol=PROTOCOL_VERSION, worker=worker, stages=stages, checkpoint=str(folder), **told
    )
    engine = TorchEngine(config, Rank.find(stages, worker))
    engine.load()
    assert isinstance(engine.cache, PagedCache)
    engine.cache.pool.fill_(torch.nan)
    return engine
