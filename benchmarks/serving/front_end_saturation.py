"""Measure how many requests/s the front end serves on one core before it saturates, beside the bare web
stack.

    python -m benchmarks.serving.front_end_saturation [--repeats 3] [--seconds 3] [--cases stream-16 ...]

The replicas cost the front end nothing but their messages (scripted_fleet.py). Clients in this process send
the next request as soon as the last one is answered; their number doubles until that gives no more
requests/s. A case is a kind of answer, streamed or whole, of 1, 16 or 128 tokens after a prompt of 32 token
ids. The sides of a case take turns:

  socket  workers on socket pairs, as with `--launcher local`
  libp2p  workers behind libp2p, as with `--launcher p2p`
  bare    web_stack.py: the same web framework and server, which send as many events from a loop
  before  socket, with the front end of another checkout (`--before FOLDER`), whose scripted fleet is
          --before-script

CPU time is that of the front end's process, all threads, kernel included. Every answer is checked, including
its text.

With `--overload`, requests then arrive at random times, at half, all and twice the saturation rate. The
script shows how many are answered, and how many are refused with a 503 and a Retry-After; nothing else may
happen.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import psutil

from benchmarks.serving.fleet import CLUSTER, COMMAND, make_model
from benchmarks.serving.scripted_fleet import token_at
from benchmarks.serving.web_stack import TEXT
from hexgen2.bench.http import Address, HttpError, Server
from runtime.api.tokenizer import ModelTokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPTED, WEB_STACK = (Path("benchmarks/serving") / name for name in ("scripted_fleet.py", "web_stack.py"))
SIDES = ("socket", "libp2p", "bare", "before")
CASES = {
    f"{kind}-{tokens}": (kind == "stream", tokens) for kind in ("stream", "whole") for tokens in (1, 16, 128)
}
PROMPT_TOKENS = 32
FIRST_CLIENTS, MOST_CLIENTS = 16, 512
GAIN = 1.04
"""The front end is saturated when doubling the clients multiplies requests/s by less than this."""
STEP_S = 0.01
OPEN_WARM_S = 20.0  # longer than any answer takes once all connections are taken
START_S, HANGS_S = 180.0, 60.0


class _Choice(msgspec.Struct):
    text: str


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_read_answer = msgspec.json.Decoder(_Answer).decode


@dataclass
class Seen:
    """What clients saw during the measurement.

    Attributes
    ----------
    ended : answers by kind: "whole", "503", or what must not happen
    first_s : seconds from the request to the first token of a stream, or to the whole answer
    busy : share of a core that the server used; client_busy is that of this process
    """

    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    busy: float = 0.0
    client_busy: float = 0.0

    @property
    def requests_s(self) -> float:
        return self.ended["whole"] / self.seconds

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU time of the server per answer."""
        return 1e3 * self.busy / self.requests_s

    def first_ms(self, percent: int) -> float:
        ordered = sorted(self.first_s)
        return 1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

    def wrong(self) -> dict[str, int]:
        """Outcomes that must not happen."""
        return {what: count for what, count in self.ended.items() if what not in ("whole", "503")}


class Clients:
    """Ask one server for one kind of answer."""

    def __init__(self, url: str, process: psutil.Process, streamed: bool, tokens: int, text: str) -> None:
        self._server, self._process = Server(Address.parse(url)), process
        self._streamed, self._text = streamed, text
        self._tokens = tokens
        self._seen: Seen | None = None
        body = {"model": "model", "prompt": list(range(20, 20 + PROMPT_TOKENS)), "max_tokens": tokens}
        self._body = json.dumps(body | {"temperature": 0, "ignore_eos": True, "stream": streamed}).encode()

    async def closed(self, clients: int, seconds: float) -> Seen:
        """A fixed number of clients, each of which sends the next request at once."""
        stopping, warm_s = asyncio.Event(), 0.5 + 2 * STEP_S * self._tokens

        async def one() -> None:
            await asyncio.sleep(random.random() * warm_s / 2)
            while not stopping.is_set():
                await self._ask()

        asking = [asyncio.create_task(one()) for _ in range(clients)]
        seen = await self._watch(warm_s, seconds)
        stopping.set()
        await asyncio.gather(*asking)
        return seen

    async def open(self, requests_s: float, seconds: float) -> Seen:
        """Requests at random times at a fixed rate, regardless of the answers."""
        warm_s = OPEN_WARM_S + 2 * STEP_S * self._tokens

        async def send() -> None:
            due = time.monotonic()
            async with asyncio.TaskGroup() as group:
                while not watching.done():
                    due += random.expovariate(requests_s)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    group.create_task(self._ask())

        watching = asyncio.create_task(self._watch(warm_s, seconds))
        await send()
        return await watching

    async def _watch(self, warm_s: float, seconds: float) -> Seen:
        """Warm up, then measure for a while."""
        await asyncio.sleep(warm_s)
        seen = self._seen = Seen()
        begun, busy, client_busy = time.monotonic(), _cpu_s(self._process), time.process_time()
        await asyncio.sleep(seconds)
        self._seen = None
        seen.seconds = time.monotonic() - begun
        seen.busy = (_cpu_s(self._process) - busy) / seen.seconds
        seen.client_busy = (time.process_time() - client_busy) / seen.seconds
        return seen

    async def _ask(self) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(HANGS_S):
                what, first_s = await self._answer(begun)
        except TimeoutError:
            what, first_s = "hung", 0.0
        except HttpError as error:
            what, first_s = str(error), 0.0
        if self._seen is not None:
            self._seen.ended[what] += 1
            if what == "whole":
                self._seen.first_s.append(first_s)

    async def _answer(self, begun: float) -> tuple[str, float]:
        """Read one answer: its outcome, and the seconds to its first token."""
        response = await self._server.post("/v1/completions", self._body)
        if response.status != 200:
            await response.read()
            told = "retry-after" in response.headers
            return f"{response.status}" if told else f"{response.status} without Retry-After", 0.0
        if not self._streamed:
            text = _read_answer(await response.read()).choices[0].text
            self._count(self._tokens)
            return "whole" if text == self._text else "a wrong text", time.monotonic() - begun
        text, first_s, done = "", 0.0, False
        async for line in response.lines():
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic() - begun
                text += _read_answer(line[6:]).choices[0].text
                self._count(1)
            done = done or line == b"data: [DONE]"
        return "whole" if done and text == self._text else "a wrong text", first_s

    def _count(self, tokens: int) -> None:
        if self._seen is not None:
            self._seen.tokens += tokens


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass
class Saturation:
    """The load beyond which a side serves no more, and how many clients that took."""

    clients: int
    seen: Seen


async def saturate(clients: Clients, seconds: float, count: int | None = None) -> Saturation:
    """Double the number of clients until that gives no more requests/s, unless it is given."""
    if count is not None:
        seen = await clients.closed(count, seconds)
        _check(seen)
        return Saturation(count, seen)
    best: Saturation | None = None
    count = FIRST_CLIENTS
    while count <= MOST_CLIENTS:
        seen = await clients.closed(count, seconds)
        _check(seen)
        if best is not None and seen.requests_s < GAIN * best.seen.requests_s:
            return best if seen.requests_s < best.seen.requests_s else Saturation(count, seen)
        best = Saturation(count, seen)
        count *= 2
    assert best is not None
    return best


def _check(seen: Seen) -> None:
    if seen.wrong():
        raise SystemExit(f"went wrong: {seen.wrong()}")


@contextmanager
def serving(
    side: str, placement: Path, model: Path, options: argparse.Namespace
) -> Iterator[tuple[str, psutil.Process]]:
    """The URL of a side, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    root = options.before if side == "before" else ROOT
    script = root / (options.before_script if side == "before" else SCRIPTED)
    command = [sys.executable, str(script), str(placement), str(model), str(port)]
    command += ["--link", "libp2p" if side == "libp2p" else "socket", "--step-ms", str(1e3 * STEP_S)]
    if side == "bare":
        command = [sys.executable, str(ROOT / WEB_STACK), str(port)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = psutil.Popen(command, stderr=subprocess.DEVNULL, env=environment, cwd=root)
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def make_fleet(work: Path) -> tuple[Path, Path]:
    """Write a model's tokenizer (its weights are not read), and a placement with four replicas of it."""
    model, cluster, placement = work / "model", work / "cluster.yaml", work / "placement.json"
    make_model(model)
    cluster.write_text(CLUSTER.format(cores=4, memory_gib=2))
    lengths = ["--isl", str(PROMPT_TOKENS), "--osl", "64"]
    asked = ["--cluster", str(cluster), "--model", str(model), "--phases", "disaggregated", *lengths]
    search = [COMMAND, "search", *asked]
    subprocess.run([*search, "-o", str(placement)], check=True, capture_output=True)
    return placement, model


def text_of(model: Path, tokens: int) -> str:
    """The text of every answer of this many tokens."""
    return ModelTokenizer.load(model).decode([token_at(index) for index in range(tokens)])


Servers = dict[str, tuple[str, psutil.Process]]


def measure(options: argparse.Namespace, servers: Servers, model: Path) -> list[dict]:
    """Measure the saturation of each case and side, and print a table."""
    results = []
    print(
        "case        side    clients  requests/s  tokens/s  busy  client  ms/request  us/token  p50, p99 ms"
    )
    for case in options.cases:
        found: dict[str, list[Saturation]] = {side: [] for side in options.sides}
        for _ in range(options.repeats):
            for side in options.sides:
                clients = clients_of(case, side, servers, model)
                found[side].append(asyncio.run(saturate(clients, options.seconds, options.clients)))
        for side, runs in found.items():
            figures = _medians(runs)
            results.append({"case": case, "side": side, **figures})
            print(_line(case, side, figures), flush=True)
    return results


def clients_of(case: str, side: str, servers: Servers, model: Path) -> Clients:
    """The clients of one side for one case."""
    streamed, tokens = CASES[case]
    text = TEXT * tokens if side == "bare" else text_of(model, tokens)
    return Clients(*servers[side], streamed, tokens, text)


def _medians(runs: list[Saturation]) -> dict[str, float]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "clients": median([each.clients for each in runs]),
        "requests_s": median([each.seen.requests_s for each in runs]),
        "tokens_s": median([each.seen.tokens_s for each in runs]),
        "busy": median([each.seen.busy for each in runs]),
        "client_busy": median([each.seen.client_busy for each in runs]),
        "cpu_ms": median([each.seen.cpu_ms for each in runs]),
        "cpu_us_token": median([1e6 * each.seen.busy / each.seen.tokens_s for each in runs]),
        "p50_ms": median([each.seen.first_ms(50) for each in runs]),
        "p99_ms": median([each.seen.first_ms(99) for each in runs]),
    }


def _line(case: str, side: str, each: dict[str, float]) -> str:
    return (
        f"{case:11} {side:7} {each['clients']:7.0f} {each['requests_s']:11.1f} {each['tokens_s']:9.0f}"
        f" {each['busy']:5.2f} {each['client_busy']:7.2f} {each['cpu_ms']:11.2f} {each['cpu_us_token']:9.1f}"
        f"  {each['p50_ms']:.1f}, {each['p99_ms']:.1f}"
    )


def overload(options: argparse.Namespace, servers: Servers, model: Path) -> list[dict]:
    """Send half, all and twice the saturation rate at random times; the front ends take turns."""
    results = []
    titles = "offered  requests/s  answered/s  503/s  busy  client  p50, p99 ms of those answered"
    print(f"\ncase        side    {titles}")
    sides = [side for side in ("socket", "before") if side in servers]
    for case in options.overload:
        most = asyncio.run(saturate(clients_of(case, "socket", servers, model), options.seconds))
        for factor, side in itertools.product((0.5, 1.0, 2.0), sides):
            offered = factor * most.seen.requests_s
            clients = clients_of(case, side, servers, model)
            seen = asyncio.run(clients.open(offered, 2 * options.seconds))
            _check(seen)
            refused, first = seen.ended["503"] / seen.seconds, (seen.first_ms(50), seen.first_ms(99))
            print(
                f"{case:11} {side:7} {factor:7.1f} {offered:11.1f} {seen.requests_s:11.1f} {refused:6.1f}"
                f" {seen.busy:5.2f} {seen.client_busy:7.2f}  {first[0]:.1f}, {first[1]:.1f}",
                flush=True,
            )
            results.append({"case": case, "side": side, "factor": factor, **asdict(seen)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each load")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--clients", type=int, help="number of clients; default: doubled until the front end saturates"
    )
    parser.add_argument("--sides", nargs="*", choices=SIDES[:3], default=SIDES[:3])
    parser.add_argument("--before", type=Path, help="another checkout to compare as well")
    parser.add_argument("--before-script", type=Path, default=SCRIPTED)
    parser.add_argument("--overload", nargs="*", choices=CASES, default=["stream-16"])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    options.before = options.before and options.before.resolve()  # the sides run there
    options.sides = [*options.sides, *(["before"] if options.before else [])]
    with tempfile.TemporaryDirectory() as folder:
        print(f"load average {os.getloadavg()[0]:.1f}")
        placement, model = make_fleet(Path(folder))
        with ExitStack() as stack:
            servers = {
                side: stack.enter_context(serving(side, placement, model, options)) for side in options.sides
            }
            found = {"saturation": measure(options, servers, model)} if options.cases else {}
            if options.overload:
                found["overload"] = overload(options, servers, model)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
