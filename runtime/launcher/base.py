"""The interface of launchers, which turn configurations into connected, ready workers."""

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
    can_change : whether the launcher implements `change`, which a switch to another placement needs
    """

    can_change: ClassVar[bool] = False

    @abstractmethod
    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        """Refuse a placement whose machines or devices this launcher cannot reach, before anything starts.

        Parameters
        ----------
        source : name of the placement in error messages
        emulated : the devices need not exist

        Raises
        ------
        InputError : a machine or device is out of reach
        """

    @abstractmethod
    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        """Start every worker and wait until all are ready; returns the links by worker.

        `report` receives lines of progress. After an error, call `stop`.

        Raises
        ------
        InputError : a worker refused something that the user gave
        HexGen2Error : a worker failed or was not ready in time
        """

    @abstractmethod
    async def restart(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, WorkerLink]:
        """Kill what is left of a replica's workers and restart them; returns the links once all are ready.

        The other workers learn the new addresses.

        Raises
        ------
        HexGen2Error : a worker failed or was not ready in time; none of them is left running
        """

    async def change(
        self, ended: Sequence[str], started: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        """End some workers for good and start others; returns the links of the new ones once they are ready.

        The workers that stay learn the addresses of the new ones.

        Parameters
        ----------
        ended : workers of replicas that no longer serve requests; they may have ended already
        started : configurations of new workers, which may use the GPUs of those that ended

        Raises
        ------
        HexGen2Error : a worker failed or was not ready in time; none of the new ones is left running
        """
        raise HexGen2Error("this launcher cannot change workers while serving")

    async def turn(self, roles: Mapping[str, Configure]) -> dict[str, WorkerLink]:
        """Give all workers of some replicas, which hold no requests, other roles; they keep their processes
        and weights.

        The other workers learn the new names of the replicas. Nobody else may read the links meanwhile.

        Parameters
        ----------
        roles : configurations of the workers, with the stages that they have

        Returns
        -------
        the links of these workers once they are ready

        Raises
        ------
        HexGen2Error : a worker failed, was not ready in time, or has no such way; `change` can then end it
            and start another
        """
        raise HexGen2Error("this launcher cannot change the role of workers")

    def unreachable(self, workers: Collection[str]) -> list[str]:
        """The workers among these (or GPUs that could have one) whose machine is gone or never joined."""
        return []

    async def until_reachable(self, workers: Collection[str]) -> None:
        """Wait until the machines of these workers are reachable; never returns if one is gone for good."""
        return None

    @abstractmethod
    async def stop(self) -> None:
        """Stop every worker, gracefully if possible, and leave no process behind. May be called twice."""

    @abstractmethod
    def kill(self) -> None:
        """Kill every worker, without waiting."""

    def views(self) -> dict[str, Callable[[], Any]]:
        """Extra paths for the API while the fleet serves, each with a function that returns a JSON value."""
        return {}
