"""The interface of a launcher: it turns configurations into connected, ready workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from cost_model.errors import InputError
from hexgen2.placement import Placement
from runtime.launcher.link import Link
from runtime.messages import Configure


class Launcher(ABC):
    """Starts one worker per GPU of a placement and stops them all."""

    @abstractmethod
    def check(self, placement: Placement, source: str) -> None:
        """Refuse a placement whose machines or devices it cannot reach, before anything starts.

        Parameters
        ----------
        source : what error messages call the placement

        Raises
        ------
        InputError : with the remedy
        """

    @abstractmethod
    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, Link]:
        """Start every worker and wait until all are ready; the links are by worker.

        report gets lines of progress. After an error, call `stop`.

        Raises
        ------
        InputError : a worker refused what the user gave it
        HexGen2Error : a worker failed, or they were not ready in time
        """

    @abstractmethod
    async def stop(self) -> None:
        """Stop every worker, kindly first, and leave no process behind. May be called twice."""

    @abstractmethod
    def kill(self) -> None:
        """End every worker at once, without waiting."""


def make_launcher(name: str) -> Launcher:
    """The launcher of that name.

    Raises
    ------
    InputError : no such launcher; names those that exist
    """
    from runtime.launcher.local import LocalLauncher

    launchers: dict[str, type[Launcher]] = {"local": LocalLauncher}
    if name not in launchers:
        raise InputError("--launcher", name, "does not exist", f"choose from: {', '.join(launchers)}")
    return launchers[name]()
