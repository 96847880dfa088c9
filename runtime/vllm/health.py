"""Whether a vLLM answers and computes, and what it has to do, by its own /health and /metrics.

/health speaks for the process of the API, which may live while that of the engine hangs. The engine is known
to work by what comes out of it: tokens, or figures of /metrics that change. Where nothing does, because it is
idle or because all its requests wait for KV caches, it is asked for a token of another prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable

import httpx

from runtime.protocol.from_workers import Load
from runtime.vllm.requests import probe

HEALTH_TIMEOUT_S = 5.0
SILENCE_S = 30.0
"""An API on a busy machine may be silent for so long; a process that ends is seen at once."""
PROBE_AFTER_S, PROBE_IDLE_AFTER_S = 10.0, 60.0
"""An engine, with work and without, of which nothing has come for so long is asked for a token, ..."""
STALL_S = 110.0
"""... and hangs if it shows no sign of work for so long: it may compile something in a step."""
LOAD_EVERY_S = 1.0
END_S = 10.0
"""A vLLM whose engine has died ends within this time, or is ended."""
_SAMPLE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_MOVES = ("generation_tokens", "prompt_tokens", "request_success", "num_preemptions")


class Health:
    """Asks one vLLM, as often as `ask` is called.

    Parameters
    ----------
    http : to its API
    model : what it calls the model
    busy : whether requests are in flight there
    on_load, on_death : told of its load whenever that changes, and once that it can compute no more, and why
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        busy: Callable[[], bool],
        on_load: Callable[[Load], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._http, self._model, self._busy = http, model, busy
        self._on_load, self._on_death = on_load, on_death
        self._answered_s = self._moved_s = self._probed_s = time.monotonic()
        self._asked_load_s = 0.0
        self._load: Load | None = None
        self._figures: tuple[float, ...] = ()
        self._asking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def good(self) -> bool:
        """Whether it has answered lately, and computes."""
        hangs = self._owes_a_token and self._still_s > STALL_S
        return time.monotonic() - self._answered_s < SILENCE_S and not hangs

    def moved(self) -> None:
        """Something came out of the engine."""
        self._moved_s = time.monotonic()

    def ask(self) -> None:
        """Ask whether it is there, and now and then for its load, unless it still owes an answer."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        after_s = PROBE_AFTER_S if self._busy() else PROBE_IDLE_AFTER_S
        if not self._owes_a_token and self._still_s > after_s:
            self._probing = asyncio.create_task(self._probe())

    @property
    def _owes_a_token(self) -> bool:
        return self._probing is not None and not self._probing.done()

    @property
    def _still_s(self) -> float:
        """Since something came out of the engine, or it was asked for it."""
        return time.monotonic() - max(self._moved_s, self._probed_s)

    async def ends(self, ended: asyncio.Event) -> bool:
        """After a fault: whether this vLLM is no more, rather than one request of it. If so, this returns
        when its process has ended, or `on_death` was told."""
        problem = ""
        try:
            response = await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
            if response.status_code == 200:
                return False
            problem = f"its /health says {response.status_code}"
        except httpx.TimeoutException:
            return False  # `good` decides
        except httpx.HTTPError as error:
            problem = f"its API is gone ({type(error).__name__})"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), END_S)
            return True
        self._on_death(problem)
        return True

    def close(self) -> None:
        """Ask nothing any more."""
        for task in (self._asking, self._probing):
            if task is not None:
                task.cancel()

    async def _ask(self) -> None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            response = await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
            if response.status_code == 503:  # the engine is dead; anything else may pass
                self._on_death("its engine is dead")
                return
            if response.status_code != 200:
                return
            now = self._answered_s = time.monotonic()
            if now - self._asked_load_s >= LOAD_EVERY_S:
                self._asked_load_s = now
                self._read((await self._http.get("/metrics", timeout=HEALTH_TIMEOUT_S)).text)

    def _read(self, text: str) -> None:
        load, figures = load_of(text)
        if figures != self._figures:
            self._figures = figures
            self.moved()
        if load != self._load:
            self._load = load
            self._on_load(load)

    async def _probe(self) -> None:
        self._probed_s = time.monotonic()
        with contextlib.suppress(httpx.HTTPError):
            if (await self._http.post("/v1/completions", json=probe(self._model))).status_code == 200:
                self.moved()


def load_of(text: str) -> tuple[Load, tuple[float, ...]]:
    """What /metrics says (vLLM 0.32), and figures that change whenever the engine does something."""
    sums: dict[str, float] = {}
    blocks = 0
    for name, labels, value in _SAMPLE.findall(text):
        if name == "cache_config_info" and (found := re.search(r'num_gpu_blocks="(\d+)"', labels)):
            blocks = int(found[1])
        sums[name] = sums.get(name, 0.0) + float(value)
    use = sums.get("kv_cache_usage_perc", 0.0)
    load = Load(
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_use=use,
        free_blocks=round(blocks * (1 - use)),
        preemptions=int(sums.get("num_preemptions", 0)),
    )
    moves = tuple(sums.get(name, 0.0) for name in _MOVES)
    return load, (load.running, load.waiting, use, *moves)
