"""Checks that a vLLM server answers and computes, and reads its load, from its /health and /metrics.

/health covers only the API process, which may be alive while the engine process hangs. Signs that the engine
works are tokens, and figures in /metrics that change. When there are none, because the engine is idle or all
its requests wait for KV caches, a probe request asks it for one token.
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
"""For /metrics, and for /health after a fault."""
SILENCE_S = 30.0
"""How long the API may be silent, as on a busy machine; the end of the process is noticed at once."""
PROBE_AFTER_S, PROBE_IDLE_AFTER_S = 10.0, 60.0
"""How long after the engine's last sign of work it is probed, while it is busy and while it is idle."""
STALL_S = 110.0
"""How long after a probe the engine counts as hanging; a step that compiles something may take long."""
LOAD_EVERY_S = 1.0
END_S = 10.0
"""How long a vLLM whose engine has died may take to exit before it is killed."""
_SAMPLE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_MOVES = ("generation_tokens", "prompt_tokens", "request_success", "num_preemptions")


class Health:
    """Watches one vLLM server; it is asked each time `ask` is called. The first time starts its clocks: by
    then the server has started, which may have taken minutes.

    Parameters
    ----------
    http : client of its API
    model : name of the model in its API
    busy : returns whether requests are in flight there
    on_load : called with its load whenever that changes
    on_death : called with the reason once it can no longer compute
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
        self._begun = False
        self._asked_load_s = 0.0
        self._load: Load | None = None
        self._figures: tuple[float, ...] = ()
        self._asking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def good(self) -> bool:
        """Whether the server has answered recently and its engine does not hang."""
        hangs = self._probe_pending and self._quiet_s > STALL_S
        return time.monotonic() - self._answered_s < SILENCE_S and not hangs

    def moved(self) -> None:
        """Note a sign of work from the engine."""
        self._moved_s = time.monotonic()

    def ask(self) -> None:
        """Ask for its health, every LOAD_EVERY_S also for its load, and probe a quiet engine."""
        if not self._begun:
            self._begun = True
            self._answered_s = self._moved_s = self._probed_s = time.monotonic()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        after_s = PROBE_AFTER_S if self._busy() else PROBE_IDLE_AFTER_S
        if not self._probe_pending and self._quiet_s > after_s:
            self._probing = asyncio.create_task(self._probe())

    @property
    def _probe_pending(self) -> bool:
        return self._probing is not None and not self._probing.done()

    @property
    def _quiet_s(self) -> float:
        """Seconds since the engine's last sign of work or the last probe."""
        return time.monotonic() - max(self._moved_s, self._probed_s)

    async def ends(self, ended: asyncio.Event) -> bool:
        """After a fault: whether the whole server is dead, and not just one request.

        If it is dead, this returns after its process has ended or `on_death` has been called.
        """
        problem = ""
        try:
            response = await self._http.get("/health", timeout=HEALTH_TIMEOUT_S)
            if response.status_code == 200:
                return False
            problem = f"its /health answers {response.status_code}"
        except httpx.TimeoutException:
            return False  # it may just be slow: `good` decides
        except httpx.HTTPError as error:
            problem = f"its API is gone ({type(error).__name__})"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), END_S)
            return True
        self._on_death(problem)
        return True

    def close(self) -> None:
        """Stop asking."""
        for task in (self._asking, self._probing):
            if task is not None:
                task.cancel()

    async def _ask(self) -> None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            # A late answer is an answer: a timeout shorter than SILENCE_S would lose those of a slow machine.
            response = await self._http.get("/health", timeout=SILENCE_S)
            if response.status_code == 503:  # means that the engine is dead; any other error may be temporary
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
    """The load in the text of /metrics (vLLM 0.32), and figures that change whenever the engine works."""
    sums: dict[str, float] = {}
    blocks = engines = 0  # one engine per data-parallel rank
    for name, labels, value in _SAMPLE.findall(text):
        if name == "cache_config_info" and (found := re.search(r'num_gpu_blocks="(\d+)"', labels)):
            blocks += int(found[1])
        engines += name == "kv_cache_usage_perc"
        sums[name] = sums.get(name, 0.0) + float(value)
    use = sums.get("kv_cache_usage_perc", 0.0) / max(engines, 1)
    load = Load(
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_use=use,
        free_blocks=round(blocks * (1 - use)),
        preemptions=int(sums.get("num_preemptions", 0)),
    )
    moves = tuple(sums.get(name, 0.0) for name in _MOVES)
    return load, (load.running, load.waiting, use, *moves)
