"""Measures the step times of a running engine through the OpenAI API, with random prompts."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

from cost_model.errors import InputError

PROMPTS = (32, 128, 512, 2048)
BATCHES = (1, 4, 16)
_DECODE_PROMPTS, _DECODE_TOKENS = (128, 1024), 64
_REPEATS = 3
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Timed:
    """The median seconds of one kind of step; `tokens` counts the prompt (prefill) or the context
    (decode)."""

    phase: str
    batch: int
    tokens: int
    seconds: float


@dataclass
class EngineClient:
    """A client of an engine with one model; prompts are random token ids, so that no prefix repeats."""

    url: str
    api_key: str | None
    vocab: int
    name: str = ""
    context: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        models = json.load(self._open("/v1/models", None)).get("data") or [{}]
        self.name = str(models[0].get("id", ""))
        self.context = int(models[0].get("max_model_len") or PROMPTS[-1])

    def steps(self) -> list[Timed]:
        """Measure prefills of single prompts (time to first token) and decode steps at several batch sizes
        (time between tokens), as far as they fit into the model's context."""
        self.arrivals(1, 2)
        found = []
        for tokens in PROMPTS:
            if tokens < self.context:
                times = [self.arrivals(tokens, 1)[0] for _ in range(_REPEATS)]
                found.append(Timed("prefill", 1, tokens, statistics.median(times)))
        for prompt in _DECODE_PROMPTS:
            for batch in BATCHES if prompt + _DECODE_TOKENS <= self.context else ():
                gap_s = self._gap_s(batch, prompt)
                if gap_s is not None:
                    found.append(Timed("decode", batch, prompt + _DECODE_TOKENS // 2, gap_s))
        return found

    def arrivals(self, prompt: int, outputs: int) -> list[float]:
        """Seconds from the request to each event of its answer."""
        body = {
            "model": self.name,
            "prompt": [self._random.randrange(self.vocab // 8, self.vocab) for _ in range(prompt)],
            "max_tokens": outputs,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        started, times = time.perf_counter(), []
        with self._open("/v1/completions", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise InputError(self.url, "", f"answered {chunk['error']}"[:200], "see its log")
                    if chunk.get("choices"):
                        times.append(time.perf_counter() - started)
        if not times:
            raise InputError(self.url, "", "streamed no tokens", "name an engine that streams completions")
        return times

    def _gap_s(self, batch: int, prompt: int) -> float | None:
        """Mean seconds between tokens while `batch` requests are in flight; None if they hardly overlapped.
        It is a mean because tokens may arrive in bursts."""
        streams: list[list[float]] = []
        failures: list[Exception] = []

        def ask() -> None:
            started = time.perf_counter()
            try:
                streams.append([started + at for at in self.arrivals(prompt, _DECODE_TOKENS)])
            except InputError as error:
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(batch)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
        gaps = [b - a for times in streams for a, b in itertools.pairwise(times) if begin <= a < b <= end]
        return statistics.fmean(gaps) if len(gaps) >= batch * _DECODE_TOKENS // 4 else None

    def _open(self, path: str, body: dict | None):
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data=data, headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            problem = f"answered {error.code} to {path}: {error.read(200).decode(errors='replace')}"
            raise InputError(self.url, "", problem, "check the engine, or --api-key") from None
        except OSError as error:
            raise InputError(self.url, "", f"cannot be reached ({error})", "start the engine first") from None
