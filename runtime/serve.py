"""From a placement on disk to a served one, and back to a quiet machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from cost_model.config import architecture_from_folder
from cost_model.errors import InputError
from hexgen2.placement import Placement
from runtime.api.app import create_app
from runtime.api.metrics import Metrics
from runtime.api.service import Service
from runtime.api.tokenizer import ModelTokenizer, check_tokenizer_files
from runtime.coordinator import Coordinator
from runtime.launcher.base import Launcher, make_launcher
from runtime.launcher.configure import configurations
from runtime.launcher.link import Link
from runtime.messages import Configure
from runtime.options import DEFAULTS, EngineOptions
from runtime.replica import Replica
from runtime.room import growth_tokens
from runtime.router import Router, routes_of

ENGINES = ("torch",)
MATCHED = ("layers", "hidden", "heads", "kv_heads", "vocab")
GPU_DTYPES = ("bfloat16", "float16")
DRAIN_S = 5
KILLED = 130
Result = TypeVar("Result")


def serve(
    placement: Placement,
    model_path: Path | None,
    host: str,
    port: int,
    api_key: str | None,
    launcher: str = "local",
    engine: str = "torch",
    source: str = "placement",
    options: EngineOptions = DEFAULTS,
) -> int:
    """Launch a placement and serve it until SIGINT or SIGTERM.

    Parameters
    ----------
    model_path : folder of the model's checkpoint; None means that the placement's model names it
    port : 0 takes a free one; the line that says "serving" names it
    source : what error messages call the placement; the name of its file

    Returns
    -------
    0 after a stop by signal, with no process left

    Raises
    ------
    InputError : the placement, the model, the address or an option is wrong; nothing was left running
    HexGen2Error : a worker failed at the start
    """
    from hexgen2.checks import verify

    verify(placement, source)
    if engine not in ENGINES:
        raise InputError("--engine", engine, "does not exist", f"choose from: {', '.join(ENGINES)}")
    if placement.attention_workers:
        remedy = "choose a placement of another strategy"
        raise InputError(source, "attention_workers", f"the {engine} engine cannot run them", remedy)
    starter = make_launcher(launcher)
    starter.check(placement, source)
    folder = _model_folder(placement, model_path, source)
    with _bound(host, port) as listener:
        return asyncio.run(_serve(placement, folder, listener, api_key, starter, options))


def _model_folder(placement: Placement, model_path: Path | None, source: str) -> Path:
    """The checkpoint's folder, which must have the placement's shape and a tokenizer."""
    folder = model_path or Path(placement.model.name)
    if not folder.is_dir():
        where = ("--model-path", "") if model_path else (source, "model.name")
        remedy = "name the folder of the checkpoint with --model-path"
        raise InputError(*where, f"{folder} is not a folder", remedy)
    found = architecture_from_folder(folder)
    for key in MATCHED:
        planned, there = getattr(placement.model, key), getattr(found, key)
        if planned != there:
            problem = f"is {there}, and the placement was made for {planned}"
            remedy = "give the model that the placement was made for, or search a new placement"
            raise InputError(str(folder / "config.json"), key, problem, remedy)
    check_tokenizer_files(folder)
    return folder


def _gpu_dtype(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    named = config.get("dtype") or config.get("torch_dtype")
    return named if named in GPU_DTYPES else GPU_DTYPES[0]


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """The server's own port, taken before any worker is started."""
    where = f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise InputError(
            "--port", str(port), "is not a port", "give a number from 1 to 65535, or 0 for a free one"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InputError(
            "--host", host, f"is not an address ({error})", "give 127.0.0.1 or your own"
        ) from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                problem, remedy = "is in use by another program", "stop that, or choose another --port"
            else:
                problem = f"cannot be served on ({error.strerror})"
                remedy = "choose an address of this machine with --host, and a free --port from 1024"
            raise InputError("--port", where, problem, remedy) from error
        yield listener


async def _serve(
    placement: Placement,
    folder: Path,
    listener: socket.socket,
    api_key: str | None,
    launcher: Launcher,
    options: EngineOptions,
) -> int:
    stopping = _stop_signals(launcher)
    told = configurations(placement, folder, _gpu_dtype(folder), options)
    try:
        started = await _unless(stopping, _start(launcher, told, folder))
        if started is not None:
            links, tokenizer = started
            metrics = Metrics()
            coordinator = Coordinator(
                Router(routes_of(placement)), make_replicas(placement, told, links), metrics
            )
            metrics.watch(coordinator)
            app = create_app(Service(placement, coordinator, tokenizer, metrics), api_key)
            coordinator.start()
            _freeze_what_stays()
            await _serve_http(app, listener, coordinator, stopping, _banner(placement, listener))
    finally:
        await launcher.stop()
    _report("stopped")
    return 0


def _freeze_what_stays() -> None:
    """Keep what was loaded out of later collections: one over all of it stops every stream for 0.2 s."""
    gc.collect()
    gc.freeze()


def _stop_signals(launcher: Launcher) -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; the second ends everything at once."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            launcher.kill()
            os._exit(KILLED)
        _report("stopping; once more to kill")
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stopping


async def _start(
    launcher: Launcher, told: dict[str, Configure], folder: Path
) -> tuple[dict[str, Link], ModelTokenizer]:
    """Workers and tokenizer, loaded side by side."""
    tokenizer = asyncio.create_task(asyncio.to_thread(ModelTokenizer.load, folder))
    links = asyncio.create_task(launcher.start(told, _report))
    try:
        await asyncio.gather(links, tokenizer)
    finally:
        links.cancel()
        await asyncio.wait([links])
    return links.result(), tokenizer.result()


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None, and the work cancelled, once `stopping` is set."""
    working = asyncio.create_task(work)
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if working.done():
        return working.result()
    working.cancel()
    await asyncio.wait({working})
    return None


def make_replicas(
    placement: Placement, told: dict[str, Configure], links: dict[str, Link]
) -> dict[str, Replica]:
    """Every replica with the links to its workers; the first GPU of the first stage leads."""
    return {
        replica.id: Replica(
            replica_id=replica.id,
            role=replica.role,
            lead=replica.gpus[0],
            links={gpu: links[gpu] for gpu in replica.gpus},
            kv_budget_tokens=told[replica.gpus[0]].kv_budget_tokens,
            max_batch=replica.max_batch,
            growth_tokens=growth_tokens(placement),
        )
        for replica in placement.replicas
    }


class _HttpServer(uvicorn.Server):
    """Leaves the signals to this module."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_http(
    app: Any, listener: socket.socket, coordinator: Coordinator, stopping: asyncio.Event, banner: str
) -> None:
    """Serve until `stopping`; then end every request, and with them the connections."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = _HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stop = asyncio.create_task(stopping.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    _report(banner)
    await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    server.should_exit = True
    await coordinator.stop()
    await serving


def _banner(placement: Placement, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    roles = Counter(replica.role for replica in placement.replicas)
    counts = ", ".join(f"{roles[role]} {role}" for role in ("prefill", "decode", "colocated") if roles[role])
    shown = f"[{host}]" if ":" in host else host
    return f"serving {placement.model.name} on http://{shown}:{port}  ({counts} replicas)"


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
