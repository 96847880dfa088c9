"""The experts of a mixture: which ones a token uses, and products with many weight matrices at once, each for
some of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from runtime import native
from runtime.engine.torch.linear import Linear, Product

Activation = Callable[[torch.Tensor], torch.Tensor]
"""From gates and ups, [rows, 2 x width], to [rows, width]."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer: how many there are, how many of them a token uses, and the width of each."""

    experts: int
    chosen: int
    width: int


_LEAST = 1e-20  # added to a sum of weights before they are divided by it


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """How logits of experts become the choice of some, and their weights.

    Attributes
    ----------
    chosen : experts of each token
    renormalises : whether their weights add up to `factor`; otherwise they are parts of all experts' scores
    is_sigmoid : whether scores are logistic, each by itself, rather than a softmax
    factor : that weights are multiplied by
    groups, kept_groups, best : experts form so many groups, from so many of which a token's experts are:
        those whose `best` experts rank highest together
    bias : [experts] float32, added to scores where experts are ranked
    """

    chosen: int
    renormalises: bool
    is_sigmoid: bool = False
    factor: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    best: int = 1
    bias: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From [tokens, experts] to the weights of each token's experts, float32, and their numbers, both
        [tokens, chosen]."""
        if native.serves(logits.dtype, logits.device):
            groups = self.groups, self.kept_groups, min(self.best, logits.shape[1] // self.groups)
            how = self.is_sigmoid, self.renormalises, self.factor, groups, self.bias
            return native.choose_experts(logits, self.chosen, *how)
        scores = logits.float().sigmoid() if self.is_sigmoid else logits.float().softmax(-1)
        ranks = scores if self.bias is None else scores + self.bias
        numbers = self._limited(ranks).topk(self.chosen, dim=-1).indices
        weights = scores.gather(1, numbers)
        if self.renormalises:
            weights /= weights.sum(-1, keepdim=True) + _LEAST
        return weights * self.factor, numbers

    def _limited(self, ranks: torch.Tensor) -> torch.Tensor:
        """Ranks [tokens, experts], minus infinity outside the groups that are kept."""
        if self.groups == 1:
            return ranks
        grouped = ranks.unflatten(1, (self.groups, -1))
        best = min(self.best, grouped.shape[2])
        kept = grouped.topk(best, dim=-1).values.sum(-1).topk(self.kept_groups, dim=-1).indices
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)


class GroupedLinear:
    """Row r of x [n, in], sorted by group, times the matrix of its group -> [n, out].

    Where products of this kind can be `grouped`, one call of our own kernel multiplies all groups; otherwise
    there is one product per group that has rows.

    Attributes
    ----------
    repeatable : whether that call can be recorded, and takes rows that another kernel has counted
    """

    def __init__(self, linears: Sequence[Product]) -> None:
        self._products = [each.product if isinstance(each, Linear) else each for each in linears]
        kinds = {type(product) for product in self._products}
        grouped = getattr(kinds.pop(), "grouped", None) if len(kinds) == 1 else None
        self._grouped = grouped(self._products) if grouped else None

        self.repeatable = getattr(self._grouped, "repeatable", False)

    def __call__(self, x: torch.Tensor, counts: Sequence[int] | np.ndarray) -> torch.Tensor:
        """`counts` are the rows of each group: all of x, or, where products are `repeatable`, some."""
        if self._grouped is not None:
            return self._grouped(x.contiguous(), counts)
        parts = zip(self._products, x.split(list(counts)), strict=True)
        return torch.cat([product(part) for product, part in parts if len(part)])


class Experts:
    """The experts of a layer that this rank holds.

    Parameters
    ----------
    first : number of the first one
    gate_up, down : their matrices, or the same part of each one's width
    by_kernels : whether our kernels compute what surrounds these products, `activate` included

    Attributes
    ----------
    repeatable : whether all is computed by kernels that can be recorded
    """

    def __init__(
        self,
        first: int,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        activate: Activation,
        by_kernels: bool,
    ) -> None:
        self._first, self._held, self._activate = first, len(gate_up), activate
        self._gate_up, self._down = GroupedLinear(gate_up), GroupedLinear(down)
        self.repeatable = by_kernels and self._gate_up.repeatable and self._down.repeatable

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What these experts add to the output for x [tokens, hidden].

        Parameters
        ----------
        weights, chosen : of the experts that each token uses, and their numbers, [tokens, chosen]
        """
        if self.repeatable:
            own = native.gather_experts(x.contiguous(), chosen, self._first, self._held)
            rows = self._down(self._activate(self._gate_up(own.rows, own.counts)), own.counts)
            return native.add_experts(rows, own.places, weights)
        flat, end = chosen.flatten(), self._first + self._held
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=end).tolist()
        before, held = sum(counts[: self._first]), counts[self._first : end]
        pairs = order[before : before + sum(held)]
        output = torch.zeros_like(x)
        if not len(pairs):
            return output
        tokens = pairs // chosen.shape[1]
        rows = self._down(self._activate(self._gate_up(x[tokens], held)), held)
        return output.index_add_(0, tokens, rows.mul_(weights.flatten()[pairs, None]).to(x.dtype))
