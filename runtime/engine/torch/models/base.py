"""What all decoder-only model families share: a pipeline stage, cut by layers, heads and vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import ClassVar

import torch
import torch.nn.functional as F

from runtime.engine.torch.attention.base import Batch
from runtime.engine.torch.collectives import Collectives
from runtime.engine.torch.compiled import compiled_kernels
from runtime.engine.torch.linear import Linear, Rows
from runtime.engine.torch.loader import Checkpoint, Cut
from runtime.engine.torch.quantised.linear import Quantised
from runtime.kv_cache.layout import even_share, held
from runtime.kv_cache.pool import CacheShape


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of the whole model. position_limit is the longest sequence in tokens; None: no limit."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    position_limit: int | None
    tied: bool


class DecoderStage(ABC):
    """One worker's part of a model: the layers of its stage, the heads and columns of its rank.

    The stage of the first layer has the embedding, that of the last one the final norm and the LM head;
    embedding and head are cut by vocabulary. Activations [tokens, hidden] are whole on every rank.
    """

    prefixes: ClassVar[tuple[str, ...]]
    windows: Sequence[int | None] = ()
    """The tokens that each layer of the model attends to, None for all; empty: all layers to all."""
    replays: ClassVar[bool] = True
    """Whether a step of single tokens launches the same kernels on a GPU whatever the tokens are."""
    own_formats: ClassVar[tuple[str, ...]] = ()
    """The methods of quantisation (quant_method) of a family that has its own, and no others."""

    def __init__(self, checkpoint: Checkpoint, collectives: Collectives) -> None:
        self.checkpoint, self.collectives, self.rank = checkpoint, collectives, collectives.rank
        self.dtype, self.device = checkpoint.dtype, checkpoint.device
        self.quantised = Quantised(checkpoint, self.own_formats)
        self._kernels = compiled_kernels(self.dtype, self.device)
        self.spec = self._parse()
        self._check_split()
        self.part = held(self.rank.stages, self.rank.stage.workers[self.rank.tp_rank], self.spec.kv_heads)
        self.local_heads = self.spec.heads // self.rank.tp
        self.local_kv_heads = self.part.end_head - self.part.first_head
        self._embedding = self._vocabulary(self._embedding_name) if self.rank.is_first else None
        if self.rank.is_first:
            self._load_first()
        if self.rank.is_last:
            self._load_last()
            self._head = self._load_head()
        # Layers come last: packing needs memory for two copies, and the head is the largest matrix.
        self.layers = {
            layer: self._load_layer(layer) for layer in range(self.part.first_layer, self.part.end_layer)
        }
        checkpoint.rest()

    @abstractmethod
    def _parse(self) -> ModelSpec:
        """Read the sizes from config.json; InputError for variants that are not supported."""

    @abstractmethod
    def _load_layer(self, layer: int) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
        """Load a layer: a function (hidden [tokens, hidden], batch) -> hidden [tokens, hidden]."""

    @abstractmethod
    def _load_last(self) -> None:
        """Load the weights of the final norm."""

    @abstractmethod
    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        """The final norm of [samples, hidden], before the LM head."""

    def _load_first(self) -> None:  # noqa: B027
        """Load what the embedding needs besides the token table."""

    def _add_positions(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Add learned positions to [tokens, hidden], if the family has them."""
        return x

    def _begin(self, batch: Batch) -> None:  # noqa: B027
        """Prepare what all layers of a step share."""

    def _add(self, to: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """A summand of [tokens, hidden], and what came before it, in the summand's place."""
        return to.add_(hidden) if self._kernels is None else self._kernels.add(to, hidden)

    @property
    def cache_shape(self) -> CacheShape:
        """What this worker's KV cache holds."""
        return CacheShape(self.part, self.spec.head_dim, self.dtype, self.device)

    _embedding_name: ClassVar[str] = "embed_tokens.weight"

    def forward(
        self,
        batch: Batch,
        hidden: torch.Tensor | None,
        on_layer: Callable[[int], None] | None = None,
        part: range | None = None,
    ) -> torch.Tensor:
        """Run the stage's layers.

        Parameters
        ----------
        hidden : [tokens, hidden] from the layers before; None: the embedding of the batch's tokens
        on_layer : called with each global layer number once its keys and values are in the caches; None:
            nobody waits for them
        part : some of the layers; None: all
        """
        return self.run_layers(self.enter(batch, hidden), batch, on_layer, part)

    def enter(self, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        """What comes before the layers of a step; see `forward`."""
        if hidden is None:
            hidden = self._add_positions(self._embed(batch.tokens), batch)
        self._begin(batch)
        return hidden

    def run_layers(
        self,
        hidden: torch.Tensor,
        batch: Batch,
        on_layer: Callable[[int], None] | None = None,
        part: range | None = None,
    ) -> torch.Tensor:
        """The layers alone, of a step that `enter` has prepared; see `forward`."""
        for number in self.layers if part is None else part:
            hidden = self.layers[number](hidden, batch)
            if on_layer is not None:
                on_layer(number)
        return hidden

    def logits(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """Logits [samples, vocab] of the rows after which a token is sampled, on rank 0 of the last stage;
        None elsewhere."""
        found = self.head_logits(hidden, batch)
        return None if found is None else self.finished(found)

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """What a family makes of the LM head's logits, [samples, vocab]."""
        return logits

    def head_logits(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        """The logits as the LM head gives them; see `logits`."""
        local = self._head(self._final_norm(batch.rows_sampled(hidden)))
        whole = self.collectives.gather_columns(local)
        return None if whole is None else whole[:, : self.spec.vocab]

    # -- slices of weights

    def cut(self, size: int) -> Cut:
        """This rank's part of a dimension: its whole size, first and end."""
        return (size, *even_share(self.rank.tp_rank, self.rank.tp, size))

    def fused_columns(
        self, names: Sequence[str], rows: Sequence[Cut], bias: bool, inputs: int | None = None
    ) -> Linear:
        """Load matrices cut by output rows, stacked into one. They have `inputs` columns; None: hidden."""
        inputs = inputs or self.spec.hidden
        if self.quantised.holds(*names):
            parts = list(zip(names, rows, strict=True))
            biases = [self.checkpoint.read(f"{name}.bias", cut[:1], cut[1:]) for name, cut in parts if bias]
            added = torch.cat(biases) if bias else None
            return self.quantised.linear(parts, (inputs, 0, inputs), added)
        ends = list(accumulate(end - first for _, first, end in rows))
        weight, kept = self._rows(ends[-1], inputs, *(f"{name}.weight" for name in names))
        added = self.checkpoint.empty(ends[-1]) if bias else None
        for name, cut, start, stop in zip(names, rows, [0, *ends], ends, strict=False):
            whole = (cut[0], inputs)
            for first, chunk in self.checkpoint.chunks(f"{name}.weight", whole, cut[1:], None, kept):
                weight.put(start + first, chunk)
            if added is not None:
                self.checkpoint.read_into(added[start:stop], f"{name}.bias", whole[:1], rows=cut[1:])
        return weight.linear(added)

    def row_parallel(self, name: str, columns: Cut, bias: bool) -> Linear:
        """Load a matrix cut by input columns; its products are summed over ranks, so only rank 0 adds the
        bias."""
        whole = (self.spec.hidden, columns[0])
        added = None
        if bias and self.rank.tp_rank == 0:
            added = self.checkpoint.read(f"{name}.bias", whole[:1])
        if self.quantised.holds(name):
            is_part = columns[2] - columns[1] < columns[0]
            agree = self.collectives.all_reduce_largest if is_part else None
            return self.quantised.linear([(name, (whole[0], 0, whole[0]))], columns, added, agree=agree)
        weight, kept = self._rows(whole[0], columns[2] - columns[1], f"{name}.weight")
        for first, chunk in self.checkpoint.chunks(f"{name}.weight", whole, None, columns[1:], kept):
            weight.put(first, chunk)
        return weight.linear(added)

    def qkv(self, names: tuple[str, str, str], bias: bool) -> Linear:
        """Load the query, key and value projections of this rank's heads as one matrix."""
        dim = self.spec.head_dim
        key = (self.spec.kv_heads * dim, self.part.first_head * dim, self.part.end_head * dim)
        return self.fused_columns(names, (self.cut(self.spec.heads * dim), key, key), bias)

    def _check_split(self) -> None:
        tp, spec, config = self.rank.tp, self.spec, self.checkpoint.config
        remedy = f"choose another tensor-parallel degree than {tp}"
        if spec.heads % tp:
            raise config.error(
                "num_attention_heads", f"{spec.heads} heads don't split over {tp} GPUs", remedy
            )
        if spec.kv_heads % tp and tp % spec.kv_heads:
            raise config.error(
                "num_key_value_heads", f"{spec.kv_heads} heads don't split over {tp} GPUs", remedy
            )
        if spec.heads % spec.kv_heads:
            problem = f"{spec.kv_heads} doesn't divide {spec.heads} query heads"
            raise config.error("num_key_value_heads", problem, "download the checkpoint again")
        for key, width in self._split_widths().items():
            if width % tp:
                raise config.error(key, f"{width} columns don't split over {tp} GPUs", remedy)
        if self.rank.layers != spec.layers:
            problem = f"is {spec.layers}, the placement has {self.rank.layers} layers"
            raise config.error("num_hidden_layers", problem, "search a placement for this model")

    def _split_widths(self) -> dict[str, int]:
        """The widths of feed-forwards that the ranks divide, by their key in config.json."""
        return {"intermediate_size": self.spec.ffn}

    def _rows(self, outputs: int, inputs: int, *names: str) -> tuple[Rows, torch.dtype]:
        """What takes the rows of matrices, and the type in which it keeps them."""
        kept = self.checkpoint.kept(*names)
        return Rows(outputs, inputs, partial(self.checkpoint.empty, dtype=kept), self.dtype), kept

    def _vocabulary(self, name: str) -> torch.Tensor:
        """This rank's rows of a [vocab, hidden] table, padded with zeros to equal size on all ranks."""
        vocab, first, end = self.cut(self.spec.vocab)
        height = even_share(0, self.rank.tp, vocab)[1]
        table = self.checkpoint.empty(height, self.spec.hidden, dtype=self.checkpoint.kept(name))
        self.checkpoint.read_into(table[: end - first], name, (vocab, self.spec.hidden), rows=(first, end))
        table[end - first :].zero_()
        return table

    def _load_head(self) -> Linear:
        if self.quantised.holds("lm_head"):
            vocab, hidden = self.spec.vocab, self.spec.hidden
            padded = even_share(0, self.rank.tp, vocab)[1]
            return self.quantised.linear([("lm_head", self.cut(vocab))], (hidden, 0, hidden), None, padded)
        if self.spec.tied and self._embedding is not None:
            return Linear(self._embedding, computed=self.dtype)
        name = self._embedding_name if self.spec.tied else "lm_head.weight"
        vocab, first, end = self.cut(self.spec.vocab)
        padded = even_share(0, self.rank.tp, vocab)[1]
        weight, kept = self._rows(padded, self.spec.hidden, name)
        for start, chunk in self.checkpoint.chunks(name, (vocab, self.spec.hidden), (first, end), None, kept):
            weight.put(start, chunk)
        weight.put(end - first, torch.zeros(padded - (end - first), self.spec.hidden))
        return weight.linear(None)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self._embedding
        assert table is not None
        if self.rank.tp == 1:
            return F.embedding(tokens, table).to(self.dtype)
        local = tokens - self.rank.tp_rank * len(table)
        mine = (local >= 0) & (local < len(table))
        rows = F.embedding(local.clamp(0, len(table) - 1), table) * mine.unsqueeze(1)
        return self.collectives.all_reduce(rows.to(self.dtype))
