"""From one placement to the next while requests run: replicas drain, others load and join.

Replicas that have the same role and stages in both go on untouched. The others take no new requests any more;
once all those whose GPUs a new replica takes are empty, it loads, for as long as its move says, and joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hexgen2.placement import Placement, Replica
from runtime.routing.router import Route, routes_of


@dataclass
class _Coming:
    """A new replica, and the old ones that it waits for."""

    replica: Replica
    name: str
    load_s: float
    waits_for: set[str] = field(default_factory=set)


class Changeover:
    """The way to a placement.

    Parameters
    ----------
    running : replicas that stand, by their names in the simulation
    used : names that are taken for good
    drained : whether a replica of that name has nothing to do any more

    Attributes
    ----------
    names : of the new placement's replicas in the simulation
    retired : names of those that go
    """

    def __init__(
        self,
        placement: Placement,
        running: Mapping[str, Replica],
        used: Iterable[str],
        drained: Callable[[str], bool],
    ) -> None:
        self.placement, self._drained = placement, drained
        standing = {_shape(replica): name for name, replica in running.items()}
        loads = {move.replica: move.load_s for move in placement.moves if move.action != "stop"}
        kept = {r.id: standing[_shape(r)] for r in placement.replicas if _shape(r) in standing}
        self.retired = set(running) - set(kept.values())
        taken = set(used) | set(running)
        self.names, self._coming = dict(kept), list[_Coming]()
        for replica in placement.replicas:
            if replica.id in kept:
                continue
            name = replica.id
            while name in taken:
                name += "'"
            taken.add(name)
            self.names[replica.id] = name
            blockers = {old for old in self.retired if set(running[old].gpus) & set(replica.gpus)}
            self._coming.append(_Coming(replica, name, loads.get(replica.id, 0.0), blockers))
        self._up = set(kept.values())

    @property
    def done(self) -> bool:
        """Whether all have joined."""
        return self._up >= set(self.names.values())

    def ready(self) -> list[tuple[Replica, str, float]]:
        """Replicas that can begin to load now: with name and seconds to load; each is told once."""
        found = [one for one in self._coming if all(self._drained(name) for name in one.waits_for)]
        self._coming = [one for one in self._coming if one not in found]
        return [(one.replica, one.name, one.load_s) for one in found]

    def join(self, name: str) -> None:
        """A replica has loaded."""
        self._up.add(name)

    def routes(self) -> list[Route]:
        """The routes of the new placement between those that stand."""
        named = (
            Route(self.names[route.prefill], self.names[route.decode], route.weight)
            for route in routes_of(self.placement)
        )
        return [route for route in named if route.prefill in self._up and route.decode in self._up]


def _shape(replica: Replica) -> tuple:
    return replica.role, tuple((tuple(stage.gpus), stage.layers) for stage in replica.stages)
