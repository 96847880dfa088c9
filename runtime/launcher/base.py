"""The interface of a launcher: it turns configurations into connected, ready workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from cost_model.errors import HexGen2Error
from hexgen2.placement import Placement
from runtime.launcher.worker_link import WorkerLink
from runtime.protocol.to_workers import Configure


class Launcher(ABC):
    """Starts one worker per GPU of a placement and stops them all.

    Attributes
    ----------
    can_change : whether it implements `change`, which switching to another placement needs
    """

    can_change: ClassVar[bool] = False

    @abstractmethod
    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        """Refuse a placement whose machines or devices this launcher cannot reach, before anything starts.

        Parameters
        ----------
        source : what error messages call the placement
        emulated : the devices need not exist

        Raises
        ------
        InputError : with the remedy
        """

    @abstractmethod
    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        """Start every worker and wait until all are ready; returns the links by worker.

        report gets lines of progress. After an error, call `stop`.

        Raises
        ------
        InputError : a worker refused what the user gave it
        HexGen2Error : a worker failed or was not ready in time
        """

    @abstractmethod
    async def restart(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, WorkerLink]:
        """End what is left of a replica's workers and start them again; returns the links once all are ready.

        The other workers learn where these listen now.

        Raises
        ------
        HexGen2Error : a worker failed or was not ready in time; none of them is left
        """

    async def change(
        self, ended: Sequence[str], started: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        """End some workers for good and start others; returns the links of the new ones once they are ready.

        The workers that stay learn who is there now, and where.

        Parameters
        ----------
        ended : workers whose replicas serve nothing any more; they may be gone already
        started : configurations of new workers, also on the GPUs of those that ended

        Raises
        ------
        HexGen2Error : a worker failed or was not ready in time; none of the new ones is left
        """
        raise HexGen2Error("this launcher cannot change its workers while it serves")

    def unreachable(self, workers: Collection[str]) -> list[str]:
        """Those of these workers (or GPUs that could have one) whose machine is gone or never joined."""
        return []

    async def until_reachable(self, workers: Collection[str]) -> None:
        """Wait until the machines of these workers are there; for ever if one is gone for good."""
        return None

    @abstractmethod
    async def stop(self) -> None:
        """Stop every worker, gracefully first, and leave no process behind. May be called twice."""

    @abstractmethod
    def kill(self) -> None:
        """End every worker at once, without waiting."""

    def views(self) -> dict[str, Callable[[], Any]]:
        """What the API shows of the launcher while it serves: functions that return JSON values, by path."""
        return {}
