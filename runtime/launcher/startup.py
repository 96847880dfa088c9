"""From connected processes to workers that are ready: Configure, Listening, Connect, Ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from cost_model.errors import HexGen2Error, InputError
from runtime.launcher.worker_link import WorkerLink
from runtime.protocol.from_workers import Failed, Listening, Pong, Ready
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Configure, Connect

REMEDY = "give a --model-path that fits the placement, or search a new placement"
MessageType = TypeVar("MessageType", bound=Message)


async def bring_to_ready(
    links: Mapping[str, WorkerLink],
    configurations: Mapping[str, Configure],
    listening: dict[str, Listening],
    report: Callable[[str], None],
) -> None:
    """Bring new workers to Ready, all together; `report` gets one line for each that is ready.

    Parameters
    ----------
    links : to the new workers
    configurations : of all workers
    listening : where the others listen; the new ones are added

    Raises
    ------
    InputError : a worker refused what the user gave it (a bad checkpoint)
    HexGen2Error : a worker ended or failed
    """
    for worker, link in links.items():
        link.send(configurations[worker])
    listening.update(await _from_all(links, Listening))
    for worker, link in links.items():
        link.send(connect_message(configurations, listening, worker))

    ready = 0

    def on_ready(_: Ready) -> None:
        nonlocal ready
        ready += 1
        report(f"{ready}/{len(links)} workers ready")

    await _from_all(links, Ready, on_ready)


async def until_ready(links: Mapping[str, WorkerLink]) -> None:
    """Wait until workers that were told to take another role are Ready.

    Raises
    ------
    HexGen2Error : a worker ended or failed
    """
    await _from_all(links, Ready)


def connect_message(
    configurations: Mapping[str, Configure], listening: Mapping[str, Listening], worker: str
) -> Connect:
    """The Connect for one worker: where all workers listen."""
    driver = configurations[worker].stages[0].workers[0]
    return Connect(
        peers={worker: (configurations[worker].host, news.port) for worker, news in listening.items()},
        replicas={each.replica: each.stages for each in configurations.values()},
        store_port=listening[driver].store_port,
    )


async def _from_all(
    links: Mapping[str, WorkerLink],
    expected: type[MessageType],
    arrived: Callable[[MessageType], None] = lambda _: None,
) -> dict[str, MessageType]:
    """The next message of each worker; the first failure ends the wait for the others."""

    async def one(worker: str, link: WorkerLink) -> MessageType:
        message = await _next(worker, link, expected)
        arrived(message)
        return message

    tasks = {worker: asyncio.create_task(one(worker, link)) for worker, link in links.items()}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
    return {worker: task.result() for worker, task in tasks.items()}


async def _next(worker: str, link: WorkerLink, expected: type[MessageType]) -> MessageType:
    while isinstance(message := await link.receive(), Pong):
        pass  # the answer to a Ping of before
    if isinstance(message, expected):
        return message
    if message is None:
        raise HexGen2Error(f"worker {worker} ended before it was ready")
    if isinstance(message, Failed):
        if message.kind == "input":
            problem, _, remedy = message.text.rpartition("; ")
            raise InputError(f"worker {worker}", "", problem or remedy, remedy if problem else REMEDY)
        raise HexGen2Error(f"worker {worker} failed: {message.text}")
    raise HexGen2Error(f"worker {worker} sent {type(message).__name__} instead of {expected.__name__}")
