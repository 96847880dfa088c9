"""The Mistral family: Llama with sliding-window attention."""

from __future__ import annotations

from typing import ClassVar

from runtime.engine.torch.loader import CheckpointConfig
from runtime.engine.torch.models.llama import LlamaStage


class MistralStage(LlamaStage):
    """One worker's part of a Mistral model."""

    kv_heads_required = True
    default_window: ClassVar[int | None] = 4096

    def _biases(self, config: CheckpointConfig) -> tuple[bool, bool, bool]:
        return False, False, False

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        config.require("layer_types", None, None)
        present = "sliding_window" in config.values
        window = config.get("sliding_window") if present else self.default_window
        return [None if window is None else config.count("sliding_window", window)] * layers
