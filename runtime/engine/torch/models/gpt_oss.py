"""The gpt-oss family: experts with biases, in mxfp4 or 16 bits, attention sinks, and a window in every second
layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.engine.torch.attention.base import Scoring
from runtime.engine.torch.experts import Experts, Mixture, Routing
from runtime.engine.torch.linear import Linear, Product
from runtime.engine.torch.loader import CheckpointConfig
from runtime.engine.torch.models.mixture import MixtureStage, Router
from runtime.engine.torch.models.rope import Rotary, rope_parameters
from runtime.engine.torch.models.windows import layer_windows
from runtime.engine.torch.mxfp4 import BLOCK, BLOCK_BYTES, mxfp4_product

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssStage(MixtureStage):
    """One worker's part of a gpt-oss model. Weights of experts in mxfp4 stay so in memory."""

    kv_heads_required = True
    default_theta = 150000.0
    default_eps = 1e-5
    own_formats = ("mxfp4",)

    def _biases(self, config: CheckpointConfig) -> tuple[bool, bool, bool]:
        attention = bool(config.get("attention_bias", True))
        return attention, attention, False

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        return 64

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        return layer_windows(config, layers, config.count("sliding_window", 128), lambda n: n % 2 == 0)

    def _parse_mixture(self, config: CheckpointConfig) -> Mixture:
        self._sharpness = float(config.get("swiglu_alpha", 1.702))
        self._limit = float(config.get("swiglu_limit", 7.0))
        self._packed = config.get("quantization_config") is not None
        experts, chosen = config.count("num_local_experts"), config.count("num_experts_per_tok")
        return Mixture(experts, chosen, config.count("intermediate_size"))

    def _load_rotary(self, config: CheckpointConfig, head_dim: int) -> Rotary:
        scaling = rope_parameters(config) or _ROPE
        return Rotary(config, head_dim, self.dtype, self.device, self.default_theta, scaling)

    def _load_scoring(self, name: str, layer: int) -> Scoring:
        heads, first, end = self.cut(self.spec.heads)
        sinks = self.checkpoint.read(f"{name}.sinks", (heads,), rows=(first, end))
        return Scoring(self.windows[layer], sinks=sinks.float())

    def _load_router(self, name: str) -> Router:
        experts = self._mixture.experts
        router = self.fused_columns((f"{name}.router",), ((experts, 0, experts),), bias=True)
        routing = Routing(self._mixture.chosen, renormalises=True)
        return lambda x: routing(router(x))

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and self._kernels.clamped_gate is not None:
            return self._kernels.clamped_gate(gate_up, self._sharpness, self._limit)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return gate.mul(self._sharpness).sigmoid_().mul_(gate).mul_(up + 1)

    def _load_experts(self, name: str) -> Experts:
        held, (width, first, end) = self._share_of_experts()
        hidden, name = self.spec.hidden, f"{self._mixture_name(name)}.experts"
        rows, columns = (2 * width, 2 * first, 2 * end), (width, first, end)
        adds = len(held) < self._mixture.experts or self.rank.tp_rank == 0  # of ranks that share experts, one
        gate_up, down = list[Product](), list[Product]()
        for expert in held:
            gate_up.append(self._load_expert(f"{name}.gate_up_proj", expert, rows, (hidden, 0, hidden), True))
            down.append(self._load_expert(f"{name}.down_proj", expert, (hidden, 0, hidden), columns, adds))
        return self._experts(held.start, gate_up, down)

    def _load_expert(
        self, name: str, expert: int, rows: Sequence[int], columns: Sequence[int], biased: bool
    ) -> Product:
        """A part of one matrix [out, in] of those that one tensor holds. Gates and ups take turns in it."""
        apart = _apart if "gate_up" in name else lambda part: part
        bias = None
        if biased:
            whole = (self._mixture.experts, rows[0])
            bias = self.checkpoint.read(f"{name}_bias", whole, (expert, expert + 1), (rows[1], rows[2]))
            bias = apart(bias[0])
        if not self._packed:
            return Linear(apart(self._expanded(name, expert, rows, columns)), bias, self.dtype)
        blocks, scales = self._blocks(name, expert, rows, columns)
        return mxfp4_product(apart(blocks), apart(scales), bias, self.dtype)

    def _expanded(self, name: str, expert: int, rows: Sequence[int], columns: Sequence[int]) -> torch.Tensor:
        """From [experts, in, out]."""
        whole = (self._mixture.experts, columns[0], rows[0])
        cut = (expert, expert + 1), (columns[1], columns[2])
        kept = self.checkpoint.kept(name)
        return self.checkpoint.read(name, whole, *cut, dtype=kept)[0, :, rows[1] : rows[2]].t()

    def _blocks(
        self, name: str, expert: int, rows: Sequence[int], columns: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From [experts, out, in / 32, 16] and scales of [experts, out, in / 32]."""
        if any(number % BLOCK for number in columns):
            problem = f"parts of {columns[2] - columns[1]} columns are no whole blocks of {BLOCK}"
            remedy = f"choose another tensor-parallel degree than {self.rank.tp}"
            raise self.checkpoint.config.error("intermediate_size", problem, remedy)
        whole = (self._mixture.experts, rows[0], columns[0] // BLOCK)
        cut = (expert, expert + 1), (rows[1], rows[2])
        inner = slice(columns[1] // BLOCK, columns[2] // BLOCK)
        blocks = self.checkpoint.read_stored(f"{name}_blocks", (*whole, BLOCK_BYTES), ("U8",), *cut)
        scales = self.checkpoint.read_stored(f"{name}_scales", whole, ("U8",), *cut)
        blocks, scales = blocks[0, :, inner].contiguous(), scales[0, :, inner].contiguous()
        self.checkpoint.bytes_read += blocks.nbytes + scales.nbytes
        return blocks, scales


def _apart(part: torch.Tensor) -> torch.Tensor:
    """Rows that take turns, gates and ups, with all gates first."""
    return torch.cat([part[0::2], part[1::2]])
