"""Switching from one placement to the next while requests run: old replicas drain, new ones load and join.

Replicas with the same role and stages in both placements continue untouched. The others take no new requests.
A new replica starts loading once the old replicas on its GPUs have drained; it joins after the loading time
that its move states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hexgen2.placement import Placement, Replica
from runtime.routing.router import Route, routes_of


@dataclass
class _NewReplica:
    """A new replica and the old ones that must drain before it can load."""

    replica: Replica
    name: str
    load_s: float
    waits_for: set[str] = field(default_factory=set)


class Changeover:
    """The progress towards a new placement.

    Parameters
    ----------
    running : the running replicas by their names in the simulation
    used : names that may not be used again
    drained : tells whether the replica of a name has no requests left

    Attributes
    ----------
    names : id in the new placement -> name in the simulation
    retired : names of the replicas that leave
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
        self.names, self._pending = dict(kept), list[_NewReplica]()
        for replica in placement.replicas:
            if replica.id in kept:
                continue
            name = replica.id
            while name in taken:
                name += "'"
            taken.add(name)
            self.names[replica.id] = name
            blockers = {old for old in self.retired if set(running[old].gpus) & set(replica.gpus)}
            self._pending.append(_NewReplica(replica, name, loads.get(replica.id, 0.0), blockers))
        self._up = set(kept.values())

    @property
    def done(self) -> bool:
        """Whether all replicas have joined."""
        return self._up >= set(self.names.values())

    def ready(self) -> list[tuple[Replica, str, float]]:
        """Replicas that can start loading now, with name and loading time in seconds; each is returned
        once."""
        found = [one for one in self._pending if all(self._drained(name) for name in one.waits_for)]
        self._pending = [one for one in self._pending if one not in found]
        return [(one.replica, one.name, one.load_s) for one in found]

    def join(self, name: str) -> None:
        """A replica has finished loading."""
        self._up.add(name)

    def routes(self) -> list[Route]:
        """The routes of the new placement between replicas that have joined."""
        named = (
            replace(route, prefill=self.names[route.prefill], decode=self.names[route.decode])
            for route in routes_of(self.placement)
        )
        return [route for route in named if route.prefill in self._up and route.decode in self._up]


def _shape(replica: Replica) -> tuple:
    return replica.role, tuple((tuple(stage.gpus), stage.layers) for stage in replica.stages)
