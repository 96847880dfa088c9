"""The resources that the routes of a flow network share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hexgen2.search.flow.routes import RouteUse

FULL = 1 - 1e-6
NOTHING_LEFT = 1e-7
"""The share of its time that a link has at least: less would be no number for a linear program."""


@dataclass(frozen=True, eq=False)
class SharedUse:
    """The use of R resources by P x D routes as k triples: one request of route[k] (p * D + d) occupies
    resource[k] for busy_s[k] seconds. No resource can be occupied for more than a second per second."""

    shape: tuple[int, int]
    count: int
    resource: np.ndarray
    route: np.ndarray
    busy_s: np.ndarray

    def loads(self, flow: np.ndarray) -> np.ndarray:
        """[R] the share of time for which each resource is occupied under a flow [P, D] in requests/s."""
        return np.bincount(self.resource, self.busy_s * flow.ravel()[self.route], self.count)

    def carries(self, flow: np.ndarray) -> bool:
        """Whether no resource is occupied for more than all of the time."""
        return bool(self.loads(flow).max(initial=0.0) <= 1 + 1e-9)

    def beside(self, loads: np.ndarray) -> SharedUse:
        """The same if others already occupy the first resources for these shares of the time."""
        left = np.ones(self.count)
        left[: len(loads)] = np.maximum(1 - loads, NOTHING_LEFT)
        return replace(self, busy_s=self.busy_s / left[self.resource])

    def full_routes(self, flow: np.ndarray) -> np.ndarray:
        """[P, D] whether a route carries a part of the flow across a resource that the flow fills."""
        crosses = np.zeros(self.shape, dtype=bool)
        crosses.flat[self.route[(self.loads(flow) >= FULL)[self.resource]]] = True
        return crosses & (flow > 0)

    def limiting(self, prefill: np.ndarray, decode: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The resources that replicas of these capacities [P] and [D] (requests/s) can fill, as rows of a
        sparse matrix: busy_s [n], route [n], entries of each row [r]. The others limit nothing."""
        used, row = np.unique(self.resource, return_inverse=True)
        most_sent, most_received = np.zeros((len(used), len(prefill))), np.zeros((len(used), len(decode)))
        np.maximum.at(most_sent, (row, self.route // self.shape[1]), self.busy_s)
        np.maximum.at(most_received, (row, self.route % self.shape[1]), self.busy_s)
        fillable = np.minimum((most_sent * prefill).sum(axis=1), (most_received * decode).sum(axis=1)) > 1
        kept = np.flatnonzero(fillable[row])
        kept = kept[np.argsort(row[kept], kind="stable")]
        return self.busy_s[kept], self.route[kept], np.bincount(row, minlength=len(used))[fillable]


def shared_use(uses: Sequence[Sequence[RouteUse]], links: int, layers: int) -> SharedUse:
    """The shared use of routes [P][D].

    Resources are numbered thus: `links` of SharedLinks, then `layers` for the sending stages of each
    prefill replica in turn, then `layers` for the receiving stages of each decode replica.
    """
    p, d = len(uses), len(uses[0]) if uses else 0
    flat = [use for row in uses for use in row]
    if not flat:
        return SharedUse((p, d), links, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
    route = np.repeat(np.arange(p * d), [len(use.resources) for use in flat])
    local = np.concatenate([use.resources for use in flat])
    sends, receives = (local >= links) & (local < links + layers), local >= links + layers
    resource = local + sends * (route // d) * layers + receives * (p - 1 + route % d) * layers
    count = links + (p + d) * layers
    return SharedUse((p, d), count, resource, route, np.concatenate([use.busy_s for use in flat]))
