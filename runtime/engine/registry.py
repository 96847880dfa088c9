"""The engines by name. Each is loaded when it is needed: only one of them needs torch."""

from __future__ import annotations

import importlib

from runtime.engine.base import Engine
from runtime.engine.rank import Rank
from runtime.options import EMULATED, TORCH
from runtime.protocol.to_workers import Configure

_CLASSES = {
    TORCH: ("runtime.engine.torch.engine", "TorchEngine"),
    EMULATED: ("runtime.engine.emulated.engine", "EmulatedEngine"),
}


def make_engine(config: Configure, rank: Rank) -> Engine:
    """The engine that a worker was configured for; KeyError if there is no such one."""
    module, kind = _CLASSES[config.engine]
    made: Engine = getattr(importlib.import_module(module), kind)(config, rank)
    return made
