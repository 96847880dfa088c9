"""The question: which range of layers each node should hold, given what it then passes and what links carry.

Unlike `hexgen2.search.problem.Problem` this knows no cards, models or bytes: everything is tokens per
second, so that measured tables can take the place of a cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Range = tuple[int, int]
"""The layers [first, end) of a node; (0, 0) if it holds none."""
Ranges = tuple[Range, ...]
"""One range per node."""
NOTHING: Range = (0, 0)


@dataclass(frozen=True, eq=False)
class Instance:
    """Nodes that hold layers, and the links between them.

    Tokens are those of prompts and answers together: a token passes every layer once.

    Attributes
    ----------
    layers : L, of the model
    kind : [n] which table a node has; nodes of a kind are alike but for their links
    tables : per kind [4, most + 1]: tokens/s of a node that holds j layers (Helix, section 4.4: T_j), 0 where
        they do not fit. The row is 1 if the range begins with the first layer, plus 2 if it ends with the
        last: what stands outside the layers needs memory and time there
    link_tok_s : [n, n] tokens/s whose activations the link from row to column carries
    source_tok_s, sink_tok_s : [n] tokens/s between the coordinator and each node
    partial : whether a token may enter a node after the node's first layer (partial inference)
    """

    layers: int
    kind: tuple[int, ...]
    tables: tuple[np.ndarray, ...]
    link_tok_s: np.ndarray
    source_tok_s: np.ndarray
    sink_tok_s: np.ndarray
    partial: bool = True

    def __post_init__(self) -> None:
        n = len(self.kind)
        assert self.link_tok_s.shape == (n, n) and len(self.source_tok_s) == len(self.sink_tok_s) == n
        assert all(table.shape[0] == 4 and table.shape[1] > 1 for table in self.tables)

    @property
    def nodes(self) -> int:
        """n."""
        return len(self.kind)

    @cached_property
    def most_layers(self) -> tuple[int, ...]:
        """[n] layers that each node can hold at most, but no more than the model has."""
        most = [min(self.layers, int(np.flatnonzero(t.max(axis=0) > 0).max(initial=0))) for t in self.tables]
        return tuple(most[k] for k in self.kind)

    @cached_property
    def passes(self) -> tuple[dict[Range, float], ...]:
        """Per node, tokens/s by range, for each that it can hold, and 0 for none. Nodes of a kind share
        it."""
        by_kind = [self._passes_of(table) for table in self.tables]
        return tuple(by_kind[k] for k in self.kind)

    def _passes_of(self, table: np.ndarray) -> dict[Range, float]:
        rows, found = table.tolist(), {NOTHING: 0.0}
        for count in range(1, min(self.layers + 1, len(rows[0]))):
            for first in range(self.layers - count + 1):
                tok_s = rows[(first == 0) + 2 * (first + count == self.layers)][count]
                if tok_s > 0:
                    found[first, first + count] = tok_s
        return found

    def tok_s(self, node: int, held: Range) -> float:
        """Tokens/s of a node that holds these layers; 0 if they do not fit."""
        return self.passes[node].get(held, 0.0)

    @cached_property
    def best_tables(self) -> tuple[np.ndarray, ...]:
        """Per kind [most + 1]: tokens/s of a node with j layers wherever it stands, for upper bounds."""
        return tuple(table.max(axis=0)[: self.layers + 1] for table in self.tables)

    @cached_property
    def kind_counts(self) -> tuple[int, ...]:
        """Nodes of each kind."""
        return tuple(self.kind.count(k) for k in range(len(self.tables)))

    @cached_property
    def links_never_limit(self) -> bool:
        """Whether every link carries whatever the nodes at its ends could pass."""
        most = np.array([float(self.tables[k].max()) for k in self.kind])
        pairs = np.minimum(most[:, None], most[None, :])
        np.fill_diagonal(pairs, 0.0)
        ends = min(self.source_tok_s.min() - most.max(), self.sink_tok_s.min() - most.max())
        return bool((self.link_tok_s >= pairs).all() and ends >= 0)

    @cached_property
    def entered_at_first_layers(self) -> Instance:
        """The same nodes without partial inference."""
        return replace(self, partial=False) if self.partial else self

    def fits(self, ranges: Sequence[Range]) -> bool:
        """Whether every node can hold its range."""
        return all(held in passes for held, passes in zip(ranges, self.passes, strict=True))

    def follows(self, before: Range, after: Range) -> bool:
        """Whether a node with range `after` may go on where one with `before` ends (Helix, section 4.3)."""
        end = before[1]
        return after[0] <= end < after[1] if self.partial else after[0] == end
