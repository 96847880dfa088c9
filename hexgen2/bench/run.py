"""Sends requests to a server at their arrival times and measures the answers."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hexgen2.bench.completions import Dialect, complete, find_dialect, find_model, request_body
from hexgen2.bench.figures import figures
from hexgen2.bench.http import Address, HttpError, Server
from hexgen2.bench.measurements import Measurements
from hexgen2.results import BenchResult
from hexgen2.workload.requests import Requests

_PROGRESS_S = 2.0


@dataclass(frozen=True)
class Load:
    """Which server to load, and how.

    Attributes
    ----------
    model : None: the server's first model
    max_concurrency : most requests in flight; None: no limit
    seed : of the random prompts
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    max_concurrency: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """The measurements of a run, with the model and dialect used; `placement` is the one that `hexgen2
    launch` serves, empty for other servers."""

    seen: Measurements
    model: str
    dialect: Dialect
    placement: dict[str, Any]


def bench(
    load: Load,
    requests: Requests,
    targets_ms: dict[str, float],
    progress: Callable[[Measurements], None] | None = None,
) -> BenchResult:
    """Load the server as `measure` does, and sum up what was seen.

    Parameters
    ----------
    targets_ms : targets of ttft and tpot; see summarise
    """
    run = measure(load, requests, progress)
    return figures(load.url, run.model, run.seen, targets_ms, run.dialect, run.placement)


def measure(load: Load, requests: Requests, progress: Callable[[Measurements], None] | None = None) -> Run:
    """Send the requests and measure the answers. Ctrl-C ends the run and keeps what was measured.

    Parameters
    ----------
    progress : called every two seconds

    Raises
    ------
    InputError : the server cannot be reached, or answers no completion request
    """
    return asyncio.run(_measure(load, requests, progress))


async def _measure(load: Load, requests: Requests, progress: Callable[[Measurements], None] | None) -> Run:
    server = Server(Address.parse(load.url), load.api_key)
    model = await find_model(server, load.model)
    dialect = await find_dialect(server, model)
    placement = await _placement(server)
    seen = Measurements(requests)
    sending = asyncio.create_task(_send(server, model, dialect, load, seen))
    showing = asyncio.create_task(_show(seen, progress)) if progress else None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, sending.cancel)
    try:
        await sending
    except asyncio.CancelledError:
        seen.interrupted = True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if showing is not None:
            showing.cancel()
    return Run(seen, model, dialect, placement)


async def _send(server: Server, model: str, dialect: Dialect, load: Load, seen: Measurements) -> None:
    """Send each request at its time, or as soon as the concurrency allows; wait until all have ended."""
    requests, rng = seen.requests, random.Random(load.seed)
    places = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    begun = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - begun

    async with asyncio.TaskGroup() as group:
        for index, arrival_s in enumerate(requests.arrival_s.tolist()):
            body = request_body(model, dialect, int(requests.isl[index]), int(requests.osl[index]), rng)
            await asyncio.sleep(max(0.0, arrival_s - clock()))
            if places is None:
                seen.late_s = max(seen.late_s, clock() - arrival_s)
            else:
                await places.acquire()
            task = group.create_task(complete(server, body, index, seen, clock))
            if places is not None:
                task.add_done_callback(lambda _: places.release())


async def _show(seen: Measurements, progress: Callable[[Measurements], None]) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        progress(seen)


async def _placement(server: Server) -> dict[str, Any]:
    """The placement that `hexgen2 launch` serves; empty for other servers."""
    try:
        response = await server.get("/placement")
        found = json.loads(await response.read()) if response.status == 200 else {}
    except (HttpError, ValueError):
        return {}
    return found if isinstance(found, dict) and "replicas" in found else {}
