"""Launches a placement and serves it until a signal stops it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from cost_model.errors import InputError
from hexgen2.placement import Placement
from hexgen2.replica import Role
from hexgen2.schedulers import FLOW
from runtime import logs
from runtime.api.access import hosts_of, is_loopback
from runtime.api.app import add_views, create_app
from runtime.api.http_server import bound, serve_http
from runtime.api.metrics import Metrics
from runtime.api.numbers import NumberTokenizer
from runtime.api.operations import operations_router
from runtime.api.service import Service
from runtime.api.tokenizer import ModelTokenizer, Tokenizer
from runtime.checkpoint import check_family, check_formats, check_kv_format, checkpoint_folder, gpu_dtype
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replanner import Configured, Replanner
from runtime.frontend.replica import Replica, make_replicas, windowed_room
from runtime.frontend.supervisor import Supervisor
from runtime.frontend.traces import Tracer
from runtime.launcher.base import Launcher
from runtime.launcher.configure import configurations
from runtime.launcher.registry import make_launcher
from runtime.launcher.worker_link import WorkerLink
from runtime.operator import report, stop_signals
from runtime.options import (
    DEFAULTS,
    EMULATED,
    ENGINES,
    FRONT_DEFAULTS,
    PLAIN_KV,
    RESTARTS,
    TORCH,
    VLLM,
    EngineOptions,
    FrontOptions,
)
from runtime.protocol.to_workers import Configure
from runtime.routing.load_shift import LoadShift
from runtime.routing.output_lengths import OutputLengths, make_predictor
from runtime.routing.paths.path_router import HIGH_WATER, PathRouter
from runtime.routing.paths.range_plan import RangePlan
from runtime.routing.reflow import Reflow
from runtime.routing.router import Router, routes_of
from runtime.routing.schedulers import make_router

if TYPE_CHECKING:
    from runtime.p2p.membership.membership import Membership

Result = TypeVar("Result")


def serve(
    placement: Placement,
    model_path: Path | None,
    host: str,
    port: int,
    launcher: str | Launcher = "local",
    engine: str = TORCH,
    source: str = "placement",
    options: EngineOptions = DEFAULTS,
    restarts: int = RESTARTS,
    front: FrontOptions = FRONT_DEFAULTS,
    replan_after_s: float | None = None,
    membership: Membership | None = None,
) -> int:
    """Launch a placement and serve it until SIGINT or SIGTERM.

    Parameters
    ----------
    model_path : folder of the model's checkpoint; None means that the placement's model names it (an emulated
        one needs none)
    port : 0 takes a free one; the line that says "serving" names it
    launcher : one, or the name of one
    source : what error messages call the placement; the name of its file
    restarts : how often in a row a lost replica is started again; 0: it stays lost
    replan_after_s : so long after a replica stays lost, another placement is made without its GPUs and taken
        up (see replanner.py); None: never
    membership : in a network of nodes; for the launcher "p2p" only

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
    if placement.layer_ranges is not None:
        _check_ranges(placement, engine, source, replan_after_s is not None)
    check_family(placement, engine, source)
    _check_attention_workers(placement, source, engine, launcher, replan_after_s)
    if isinstance(launcher, Launcher):
        starter = launcher
    else:
        starter = (
            _vllm_launcher(launcher, options)
            if engine == VLLM
            else make_launcher(launcher, membership, options.cuda_devices)
        )
    if replan_after_s is not None and not starter.can_change:
        problem = f"replicas of --engine {engine} cannot be changed while they serve"
        remedy = "leave it out, or use another --engine"
        raise InputError("--replan", "", problem, remedy)
    emulated = engine == EMULATED
    starter.check(placement, source, emulated)
    check_kv_format(placement, engine, options.kv_cache_dtype, source)
    folder = None if emulated and model_path is None else checkpoint_folder(placement, model_path, source)
    if folder is not None:
        check_formats(placement, folder, engine)
    configure = partial(
        configurations,
        checkpoint=folder or Path(),
        gpu_dtype=gpu_dtype(folder),
        options=options,
        engine=engine,
    )
    worker_configs = configure(placement)
    stored = next(iter(worker_configs.values())).kv_format
    if stored != PLAIN_KV:
        report(f"KV caches are stored in {stored}")
    if emulated:
        report(
            f"emulating: the {placement.cost_model.name} cost model times the steps, "
            f"1/{options.kv_scale:g} of the KV caches' bytes move, tokens mean nothing"
        )
    logs.set_up("front end")
    front = replace(front, allowed_hosts=hosts_of(front, host))
    lengths = make_predictor(front.output_lengths, placement.workload)
    router = router_of(placement, worker_configs, front, lengths)
    successors = _successors(worker_configs, configure, front)
    with bound(host, port) as listener:
        if not front.api_keys and not is_loopback(host):
            report(f"anybody who reaches {host} can use this server: it was started without --api-key")
        return asyncio.run(
            _serve(
                *(placement, folder, worker_configs, router, lengths, successors, listener, starter),
                *(restarts, replan_after_s, front),
            )
        )


def _check_attention_workers(
    placement: Placement, source: str, engine: str, launcher: str | Launcher, replan_after_s: float | None
) -> None:
    """Refuse what cannot be done with attention workers."""
    if not placement.attention_workers:
        return
    problem, remedy = "", ""
    if engine != TORCH:
        problem, remedy = f"the {engine} engine cannot run them", "use --engine torch"
    elif isinstance(launcher, str) and launcher != "local":
        problem, remedy = f"--launcher {launcher} cannot start them", "use --launcher local"
    elif replan_after_s is not None:
        problem, remedy = "--replan cannot change their replicas", "leave out --replan"
    if problem:
        raise InputError(source, "attention_workers", problem, remedy)


def _check_ranges(placement: Placement, engine: str, source: str, replans: bool) -> None:
    """Refuse what cannot be done with ranges of layers."""
    if engine != TORCH:
        problem = f"{placement.strategy} divides the model into ranges of layers, which --engine {engine} "
        remedy = f"use --engine {TORCH}, or search with another --strategy"
        raise InputError(source, "layer_ranges", problem + "cannot run", remedy)
    if replans:
        problem = f"{source} divides the model into ranges of layers, which are not re-planned"
        raise InputError("--replan", "", problem, "leave it out: paths avoid what is lost")


def router_of(
    placement: Placement, worker_configs: Mapping[str, Configure], front: FrontOptions, lengths: OutputLengths
) -> Router | PathRouter:
    """What chooses routes or, with ranges of layers, paths, by the scheduler of the options.

    Raises
    ------
    InputError : the scheduler does not know placements of this kind
    """
    if placement.layer_ranges is None:
        return make_router(front.scheduler, routes_of(placement), lengths)
    drivers = {replica.id: worker_configs[replica.gpus[0]] for replica in placement.replicas}
    return PathRouter(
        placement,
        front.scheduler,
        room={
            replica.id: drivers[replica.id].kv_budget_tokens * replica.stages[0].layer_count
            for replica in placement.replicas
        },
        high_water=HIGH_WATER if front.kv_high_water is None else front.kv_high_water,
        block_tokens=next(iter(drivers.values())).block_tokens,
        windowed={name: room for name, each in drivers.items() if (room := windowed_room(each))},
    )


def _vllm_launcher(launcher: str, options: EngineOptions) -> Launcher:
    from runtime.vllm.launcher import VllmLauncher

    if launcher != "local":
        problem = "starts the workers of --engine torch only"
        raise InputError("--launcher", launcher, problem, "use local, or `hexgen2 export --format vllm`")
    return VllmLauncher(options)


async def _serve(
    placement: Placement,
    folder: Path | None,
    worker_configs: dict[str, Configure],
    router: Router | PathRouter,
    lengths: OutputLengths,
    successors: Configured,
    listener: socket.socket,
    launcher: Launcher,
    restarts: int,
    replan_after_s: float | None,
    front: FrontOptions,
) -> int:
    stopping, metrics = stop_signals(launcher.kill), Metrics(front.api_keys)
    tracer = Tracer(front.otlp_endpoint, metrics) if front.otlp_endpoint else None
    try:
        started = await _unless(
            stopping, _start(launcher, worker_configs, _load_tokenizer(placement, folder))
        )
        if started is not None:
            links, tokenizer = started
            coordinator = Coordinator(
                router,
                make_replicas(placement, worker_configs, links, front.kv_high_water, front.scheduler),
                metrics if tracer is None else tracer,
                queue_limit=front.queue_limit,
                client_queue_limit=front.client_queue_limit,
                queue_timeout_s=front.queue_timeout_s,
                plan=Reflow(placement) if isinstance(router, Router) else RangePlan(placement),
                shifts=LoadShift.of if front.shift_load and front.scheduler == FLOW else None,
                lengths=lengths,
            )
            metrics.watch(coordinator)
            app = create_app(Service(placement, coordinator, tokenizer, metrics, front))
            add_views(app, launcher.views())
            supervisor = Supervisor(coordinator, launcher, restarts, report)
            replanner: Replanner | None = None
            if replan_after_s is not None:
                replanner = Replanner(
                    *(placement, coordinator, launcher, supervisor, successors, replan_after_s, report),
                    metrics.replanned,
                )
                supervisor.on_stays_lost(replanner.stays_lost)
                guarded = bool(front.api_keys or front.operator_key)
                app.include_router(operations_router(replanner.ask, guarded))
                replanner.start()
            coordinator.start(supervisor.lost, supervisor.forgive, supervisor.lost_attention_worker)
            _freeze_what_stays()
            try:
                await serve_http(app, front, listener, coordinator, stopping, _banner(placement, listener))
            finally:
                if replanner is not None:
                    await replanner.stop()
                await supervisor.stop()
                if tracer is not None:
                    await asyncio.to_thread(tracer.stop)
    finally:
        await launcher.stop()
    report("stopped")
    return 0


def _successors(
    worker_configs: dict[str, Configure],
    configure: Callable[[Placement], dict[str, Configure]],
    front: FrontOptions,
) -> Configured:
    """What makes workers of another placement that work with those of this one: they know its secret, hold
    the KV cache in its type and format and have the cores of their GPU."""
    one = next(iter(worker_configs.values()))

    def configured(placement: Placement) -> tuple[dict[str, Configure], dict[str, Replica]]:
        fresh = configure(placement)
        for gpu, own in fresh.items():
            before = worker_configs.get(gpu, own)
            fresh[gpu] = msgspec.structs.replace(
                own,
                secret=one.secret,
                dtype=one.dtype,
                kv_format=one.kv_format,
                threads=before.threads,
                cores=before.cores,
            )
        return fresh, make_replicas(placement, fresh, {}, front.kv_high_water, front.scheduler)

    return configured


def _freeze_what_stays() -> None:
    """Keep what was loaded out of later collections: one over all of it stops every stream for 0.2 s."""
    gc.collect()
    gc.freeze()


async def _load_tokenizer(placement: Placement, folder: Path | None) -> Tokenizer:
    """The model's, or, for an emulated model without files, one of numbers."""
    if folder is None:
        return NumberTokenizer(placement.model.vocab)
    return await _beside(partial(ModelTokenizer.load, folder))


async def _beside(call: Callable[[], Result]) -> Result:
    """What a call returns, from a thread of its own. This process does not wait for it when it ends."""
    result: concurrent.futures.Future[Result] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(result)


async def _start(
    launcher: Launcher, worker_configs: dict[str, Configure], tokenizing: Coroutine[Any, Any, Tokenizer]
) -> tuple[dict[str, WorkerLink], Tokenizer]:
    """Workers and tokenizer, loaded side by side."""
    tokenizer = asyncio.create_task(tokenizing)
    links = asyncio.create_task(launcher.start(worker_configs, report))
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


def _banner(placement: Placement, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    counted = Counter(replica.role for replica in placement.replicas)
    counts = ", ".join(f"{counted[role]} {role}" for role in get_args(Role) if counted[role])
    shown = f"[{host}]" if ":" in host else host
    return f"serving {placement.model.name} on http://{shown}:{port}  ({counts} replicas)"
