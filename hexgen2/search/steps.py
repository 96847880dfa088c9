"""The steps of the search as values: what changes from one solution to the next.

HexGen-2's refinement swaps, moves and flips (section 3.4 and Appendix E.3); the rest goes beyond the paper.
`str(step)` is the step's text in the placement's search.trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hexgen2.search.problem import NodeCounts, Solution


@dataclass(frozen=True, slots=True)
class Step:
    """Base of all steps. `kind` is the verb that its text begins with."""

    kind: ClassVar[str]


Neighbour = tuple[Step, Solution]
"""A step and the solution that it leads to."""


@dataclass(frozen=True, slots=True)
class MoveGpus(Step):
    """`count` GPUs of a node go from a replica of one role to one of another."""

    kind: ClassVar[str] = "move"
    count: int
    node: int
    giver: str
    taker: str

    def __str__(self) -> str:
        return f"move {self.count} of node {self.node}: {self.giver} -> {self.taker}"


@dataclass(frozen=True, slots=True)
class SwapGpus(Step):
    """One GPU of each of two replicas change places."""

    kind: ClassVar[str] = "swap"
    node: int
    role: str
    other_node: int
    other_role: str

    def __str__(self) -> str:
        return f"swap node {self.node} of {self.role} with node {self.other_node} of {self.other_role}"


@dataclass(frozen=True, slots=True)
class ExchangePlaces(Step):
    """Two groups of different roles take each other's place."""

    kind: ClassVar[str] = "exchange"
    role: str
    other_role: str

    def __str__(self) -> str:
        return f"exchange {self.role} and {self.other_role}"


@dataclass(frozen=True, slots=True)
class FlipPhase(Step):
    """A prefill replica decodes from now on, or the other way around."""

    kind: ClassVar[str] = "flip"
    role: str
    new_role: str

    def __str__(self) -> str:
        return f"flip {self.role} to {self.new_role}"


@dataclass(frozen=True, slots=True)
class MergeGroups(Step):
    """Two groups become one."""

    kind: ClassVar[str] = "merge"
    one: str
    other: str
    role: str

    def __str__(self) -> str:
        return f"merge {self.one} and {self.other} into {self.role}"


@dataclass(frozen=True, slots=True)
class SplitGroup(Step):
    """One group becomes two."""

    kind: ClassVar[str] = "split"
    role: str
    one: str
    other: str

    def __str__(self) -> str:
        return f"split {self.role} into {self.one} and {self.other}"


@dataclass(frozen=True, slots=True)
class RecruitGpus(Step):
    """`count` idle GPUs of a node join a group."""

    kind: ClassVar[str] = "recruit"
    count: int
    node: int
    role: str

    def __str__(self) -> str:
        return f"recruit {self.count} of node {self.node} for {self.role}"


@dataclass(frozen=True, slots=True)
class RecruitIdle(Step):
    """All idle GPUs become a group."""

    kind: ClassVar[str] = "recruit"
    role: str

    def __str__(self) -> str:
        return f"recruit idle GPUs as {self.role}"


@dataclass(frozen=True, slots=True)
class ReleaseGpus(Step):
    """Rented GPUs of a group are given back."""

    kind: ClassVar[str] = "release"
    given: NodeCounts
    role: str

    def __str__(self) -> str:
        return f"release {_spelled(self.given)} of {self.role}"


@dataclass(frozen=True, slots=True)
class HireGpus(Step):
    """`count` GPUs of a node are rented, for a new group or for one that exists."""

    kind: ClassVar[str] = "hire"
    count: int
    node: int
    role: str
    new_group: bool

    def __str__(self) -> str:
        target = "as" if self.new_group else "in"
        return f"hire {self.count} of node {self.node} {target} {self.role}"


@dataclass(frozen=True, slots=True)
class TradeGpus(Step):
    """GPUs of a group are given back, and `count` GPUs of a node rented instead."""

    kind: ClassVar[str] = "trade"
    given: NodeCounts
    count: int
    node: int
    role: str
    new_group: bool

    def __str__(self) -> str:
        target = "as" if self.new_group else "in"
        return f"trade {_spelled(self.given)} for {self.count} of node {self.node} {target} {self.role}"


@dataclass(frozen=True, slots=True)
class Perturb(Step):
    """Random steps of these kinds, one after the other."""

    kind: ClassVar[str] = "kick"
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        return f"kick: {', '.join(self.kinds)}"


def _spelled(counts: NodeCounts) -> str:
    return " and ".join(f"{count} of node {node}" for node, count in counts)
