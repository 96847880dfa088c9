"""Serve mixed requests for an hour, some of whose clients leave: memory must stay flat and no KV block may
leak.

    python -m benchmarks.serving.soak [--fleet pair|colocated] [--seconds 3600] [--load 0.6]
        [--memory-gib 0.36]

A random Llama of 55 million parameters is launched with so little KV-cache memory that requests are preempted
now and then. Prompts and outputs are short and long, many prompts share a prefix, half of the answers are
streamed, and some of the streaming clients hang up early, or before the first token. Requests arrive at
random, at --load times the rate that the fleet serves when it gets many at once.

Every few seconds the script reads the memory (RSS), threads and open files of all processes of the fleet, and
the fleet's own metrics. The exit code is 1 unless all of this holds at the end:

- RSS and threads: the trend after the first fifth of the time (the median of all slopes between two samples,
  Theil-Sen) adds up to less than 1 % of each process's RSS, and less than one thread;
- at rest, without clients, at most two more files are open than before;
- at rest every block of every replica is free, and the front end accounts for no tokens;
- every request got all of its tokens, unless its client left or it was refused for lack of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from scipy.stats import theilslopes

from benchmarks.serving.fleet import launched, make_model, make_placement
from cost_model.lengths import BLOCK_TOKENS
from hexgen2.bench.completions import find_model
from hexgen2.bench.http import Address, HttpError, Server

PLANNED_ISL, PLANNED_OSL = 60, 16  # shorter than the real requests, so that too many are admitted
PROMPTS, OUTPUTS = (16, 500), (1, 250)  # with the shared prefix, within the model's 1024 positions
SHARED_TOKENS, SHARED_COUNT, SHARES = 256, 4, 0.4
STREAMS, LEAVES, LEAVES_AT_ONCE = 0.5, 0.25, 0.1
TOKEN_IDS = range(16, 240)
AT_ONCE = 40
EVERY_S, ROWS, REST_S = 3.0, 30, 60.0
KEPT_S = 10.0
"""Longer than the server keeps an idle connection."""
WARM_UP, RSS_GROWTH, THREADS_GROWTH, FILES_GROWTH = 0.2, 0.01, 1.0, 2
TITLES = (
    "seconds",
    "ended",
    "left",
    "waiting",
    "threads",
    "files",
    "preempted",
    "free",
)
Metrics = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Sample:
    """The fleet at one moment: memory of its processes (front end, its two helpers, workers), threads and
    open files of all processes, and `metrics` by name and replica."""

    at_s: float
    rss_bytes: tuple[int, ...]
    threads: int
    files: int
    metrics: Metrics


@dataclass
class Clients:
    """Sends random requests that fit the fleet's memory, and records how they ended."""

    server: Server
    model: str
    rng: random.Random
    longest_tokens: int
    ended: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._shared = [self.rng.choices(TOKEN_IDS, k=SHARED_TOKENS) for _ in range(SHARED_COUNT)]

    async def ask(self) -> None:
        """Follow one request to its end, or until its client leaves."""
        rng = self.rng
        shared = rng.choice(self._shared) if rng.random() < SHARES else []
        prompt = [*shared, *rng.choices(TOKEN_IDS, k=_skewed(rng, PROMPTS))]
        wanted, streamed = _skewed(rng, OUTPUTS), rng.random() < STREAMS
        prompt = prompt[: self.longest_tokens - wanted]
        body = {"model": self.model, "prompt": prompt, "max_tokens": wanted, "ignore_eos": True}
        body |= {"temperature": rng.choice((0, 1)), "stream": streamed}
        if streamed:
            body["stream_options"] = {"include_usage": True}
        leaves = streamed and rng.random() < LEAVES
        patience_s = rng.random() if leaves and rng.random() < LEAVES_AT_ONCE / LEAVES else None
        try:
            async with asyncio.timeout(patience_s):
                response = await self.server.post("/v1/completions", json.dumps(body).encode())
        except TimeoutError:
            self.ended["left"] += 1
            return
        except HttpError as error:
            self.wrong[str(error)] += 1
            return
        if response.status != 200:
            await response.read()
            kind = self.ended if response.status in (429, 503) else self.wrong
            kind[f"status {response.status}"] += 1
            return
        tokens, events, last = 0, 0, rng.randrange(wanted) if leaves else math.inf
        try:
            async for line in response.lines():
                tokens = max(tokens, _counted(line))
                events += line.startswith(b"data:")
                if events > last:
                    response.close()
                    self.ended["left"] += 1
                    return
        except HttpError as error:
            self.wrong[str(error)] += 1
            return
        if tokens == wanted:
            self.ended["whole"] += 1
        else:
            self.wrong[f"{tokens} of {wanted} tokens"] += 1


def _skewed(rng: random.Random, bounds: tuple[int, int]) -> int:
    """A random number between bounds, uniform in its logarithm: many are short, few are long."""
    least, most = bounds
    return round(least * (most / least) ** rng.random())


def _counted(line: bytes) -> int:
    """The output tokens that an answer or event reports, or 0."""
    text = line.removeprefix(b"data:").strip()
    usage = json.loads(text).get("usage") if text.startswith(b"{") else None
    return usage["completion_tokens"] if usage else 0


async def read_metrics(server: Server) -> Metrics:
    """Values of `/metrics` for a replica, or for the whole fleet (replica "")."""
    response = await server.get("/metrics")
    found: Metrics = {}
    for family in text_string_to_metric_families((await response.read()).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels.get("replica", "")] = sample.value
    return found


async def sample(server: Server, processes: list[psutil.Process], begun: float) -> Sample:
    """Read memory, threads, files and metrics."""
    rss = tuple(process.memory_info().rss for process in processes)
    threads = sum(process.num_threads() for process in processes)
    files = sum(process.num_fds() for process in processes)
    return Sample(time.monotonic() - begun, rss, threads, files, await read_metrics(server))


async def soak(url: str, fleet: psutil.Process, options: argparse.Namespace) -> bool:
    """Load a fleet; return whether it is as healthy at the end as at the beginning."""
    server = Server(Address.parse(url))
    room = min((await read_metrics(server))["hexgen2_kv_tokens_budget"].values())
    clients = Clients(server, await find_model(server, None), random.Random(options.seed), int(room))
    rate = options.load * await capacity(clients)
    await rest(server)
    print(f"{options.fleet}: {rate:.3g} requests/s")
    print("".join(f"{title:>10}" for title in TITLES) + "  free blocks, RSS MB of processes", flush=True)
    begun, samples = time.monotonic(), list[Sample]()
    processes = [fleet, *fleet.children(recursive=True)]
    files = await files_without_clients(processes)
    sending = asyncio.create_task(send(clients, rate, options.seconds))
    while not sending.done():
        await asyncio.wait([sending], timeout=EVERY_S)
        samples.append(await sample(server, processes, begun))
        if len(samples) % max(1, round(options.seconds / EVERY_S / ROWS)) == 0:
            print_sample(samples[-1], clients)
    await sending
    good = judge(samples, await rest(server), clients)
    more = await files_without_clients(processes) - files
    return good & verdict("open files at rest, more than before", more, more <= FILES_GROWTH)


async def files_without_clients(processes: list[psutil.Process]) -> int:
    """Open files after the connections of clients have closed."""
    await asyncio.sleep(KEPT_S)
    return sum(process.num_fds() for process in processes)


async def capacity(clients: Clients) -> float:
    """Requests/s with many requests at once; this also warms up the fleet."""
    begun = time.monotonic()
    await asyncio.gather(*(clients.ask() for _ in range(AT_ONCE)))
    return AT_ONCE / (time.monotonic() - begun)


async def send(clients: Clients, rate: float, seconds: float) -> None:
    """Send requests at random times, `rate` per second on average, and wait until all have ended."""
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < end:
            await asyncio.sleep(clients.rng.expovariate(rate))
            group.create_task(clients.ask())


async def rest(server: Server) -> Metrics:
    """The metrics once nothing is in flight, or after a time limit."""
    deadline = time.monotonic() + REST_S
    while True:
        found = await read_metrics(server)
        held = found["hexgen2_requests_waiting"][""] + sum(found["hexgen2_requests_running"].values())
        if not held or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def print_sample(now: Sample, clients: Clients) -> None:
    metrics = now.metrics
    figures = (
        now.at_s,
        sum(clients.ended.values()),
        clients.ended["left"],
        metrics["hexgen2_requests_waiting"][""],
        now.threads,
        now.files,
        sum(metrics["hexgen2_preemptions_total"].values()),
    )
    free = "/".join(f"{value:.0f}" for value in metrics["hexgen2_kv_blocks_free"].values())
    rss = "/".join(f"{each / 1e6:.0f}" for each in now.rss_bytes)
    print("".join(f"{figure:>10.0f}" for figure in figures) + f"  {free}  {rss}", flush=True)


def judge(samples: list[Sample], at_rest: Metrics, clients: Clients) -> bool:
    """Print the findings; return whether all of them are good."""
    ended = ", ".join(f"{count} {name}" for name, count in clients.ended.items())
    preempted = sum(at_rest["hexgen2_preemptions_total"].values())
    print(f"\nrequests: {ended}; {preempted:.0f} preemptions")
    verdicts = [verdict("requests that went wrong", dict(clients.wrong) or "none", not clients.wrong)]
    late = [each for each in samples if each.at_s >= WARM_UP * samples[-1].at_s]
    trends = [("threads", [each.threads for each in late], THREADS_GROWTH, 1.0)]
    for k, rss in enumerate(zip(*(each.rss_bytes for each in late), strict=True)):
        trends.append((f"RSS of process {k}, MB", list(rss), RSS_GROWTH * statistics.mean(rss), 1e6))
    at_s = [each.at_s for each in late]
    for name, values, limit, unit in trends:
        slope = float(theilslopes(values, at_s).slope)
        grown = slope * (at_s[-1] - at_s[0])
        what = f"{grown / unit:+.2f}, {3600 * slope / unit:+.1f} per hour (at most {limit / unit:.1f} grown)"
        verdicts.append(verdict(f"trend of {name}", what, grown <= limit))
    for replica, budget in at_rest["hexgen2_kv_tokens_budget"].items():
        free, blocks = at_rest["hexgen2_kv_blocks_free"][replica], budget // BLOCK_TOKENS
        held = at_rest["hexgen2_kv_tokens"][replica]
        what = f"{free:.0f} of {blocks:.0f}, {held:.0f} tokens accounted for"
        verdicts.append(verdict(f"blocks of {replica} free at rest", what, free == blocks and held == 0))
    return all(verdicts)


def verdict(name: str, found: object, good: bool) -> bool:
    print(f"{name}: {found}: {'good' if good else 'BAD'}")
    return good


def main() -> None:
    """Soak one fleet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fleet", choices=("pair", "colocated"), default="pair")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument(
        "--memory-gib", type=float, default=0.36, help="memory of each worker, weights included"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), Path(folder) / "model"
        make_model(model)
        colocated = options.fleet == "colocated"
        path = make_placement(work, model, colocated, PLANNED_ISL, PLANNED_OSL, options.memory_gib)
        with launched(path, model) as (url, fleet):
            good = asyncio.run(soak(url, fleet, options))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
