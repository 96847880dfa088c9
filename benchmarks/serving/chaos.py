"""Break a fleet while clients stream from it, and check that every request still gets its answer.

    python -m benchmarks.serving.chaos [--fleet torch|mixed|emulated] [--kind llama|qwen3_moe|deepseek_v3]
        [--requests N] [--seconds S] [--every 4] [--front-end-deaths 2] [--poison 0.05] [--seed 0]

The torch fleet has two prefill and two decode replicas of a small random model (--kind): one with one rank,
one with two pipeline stages, one with two tensor-parallel ranks and one with one rank. The mixed fleet is the
same model on three mixed replicas (two tensor-parallel ranks; two uneven stages; one rank), a prefill and a
decode replica, with routes between all that can form one. Its links are slow, so that faults hit KV caches on
their way in both directions, its memory holds a few requests, and half of its prompts share their beginning
with others. The emulated fleet is the placement of llama-2-70b that the search finds for hexgen2-setting-1:
20 GPUs.

Requests arrive at random within --seconds. About every --every seconds the script kills a random rank (kill
-9), stops one (SIGSTOP), or cuts a TCP connection between two workers, in random order: of five faults, two
kill, one stops and two cut. --front-end-deaths is how often it kills the front end and launches it again on
its port. A replica is spared while no other replica of its role could take its requests, or while another one
is down, so that every request can finish. Clients know the right answers in advance: from an undisturbed run
(torch), or by the formula of the emulated engine. Clients ask again when the front end's death cuts off their
request, or when the request lost two replicas, which ends it (docs/security.md).

--poison is the share of poisonous requests (chaos_poison.py): they are refused, or fail in a worker. Without
faults (--every 0), no replica may be lost to them.

The exit code is 1 unless all of this holds: every request ended with exactly its tokens, none lost, repeated
or wrong; no stream hung; at rest every block of every replica is free and no tokens are accounted for; no
process, port or shared memory is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks.serving.chaos_clients import Clients, Question
from benchmarks.serving.chaos_fleet import Fleet
from benchmarks.serving.chaos_placements import MAKERS
from benchmarks.serving.chaos_poison import PLANTED, Poison
from benchmarks.serving.fleet import KINDS
from benchmarks.serving.soak import read_metrics, rest, verdict
from hexgen2.bench.completions import find_model
from hexgen2.bench.http import Address, HttpError, Server
from hexgen2.placement import Placement
from runtime.engine.emulated.tokens import answer
from runtime.options import BLOCK_TOKENS

REQUESTS = {"torch": 300, "mixed": 300, "emulated": 2000}
SECONDS = {"torch": 120.0, "mixed": 120.0, "emulated": 240.0}
LENGTHS = {"torch": ((8, 200), (30, 250)), "mixed": ((8, 200), (30, 250)), "emulated": ((32, 512), (16, 96))}
SHARED_TOKENS, SHARED_BEGINNINGS = 96, 4
FAULTS = ("kill", "cut", "kill", "cut", "stop")
RECOVERY_S = 120.0
PROBES = 16


async def questions(options: argparse.Namespace, placement: Placement, clients: Clients) -> list[Question]:
    """Random prompts with their answers."""
    rng, ids = random.Random(options.seed), range(16, 240)
    (shortest, longest), (least, most) = LENGTHS[options.fleet]
    asked = [
        (tuple(rng.choices(ids, k=rng.randint(shortest, longest))), rng.randint(least, most))
        for _ in range(options.requests)
    ]
    if options.fleet == "mixed":
        shared = [tuple(rng.choices(ids, k=SHARED_TOKENS)) for _ in range(SHARED_BEGINNINGS)]
        asked = [
            ((rng.choice(shared) + prompt)[:longest] if number % 2 else prompt, tokens)
            for number, (prompt, tokens) in enumerate(asked)
        ]
    if options.fleet == "emulated":
        vocabulary = placement.model.vocab
        answers = [answer(prompt, tokens, vocabulary) for prompt, tokens in asked]
        texts = ["".join(f"t{token} " for token in tokens) for tokens in answers]
    else:
        few = asyncio.Semaphore(16)
        texts = await asyncio.gather(*(undisturbed(clients, few, *each) for each in asked))
    return [Question(*each, text) for each, text in zip(asked, texts, strict=True)]


async def undisturbed(clients: Clients, few: asyncio.Semaphore, prompt: tuple[int, ...], tokens: int) -> str:
    """The text that the fleet answers while nothing is wrong."""
    body = {"model": clients.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    async with few:
        request = json.dumps(body | {"ignore_eos": True}).encode()
        response = await clients.server.post("/v1/completions", request)
        return str(json.loads(await response.read())["choices"][0]["text"])


async def ask_all(
    clients: Clients, asked: list[Question], poison: Poison, poisons: int, seconds: float, rng: random.Random
) -> None:
    """Send all questions, and the poisonous requests, at random times."""
    begun = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for at, number in sorted((rng.random() * seconds, k) for k in range(len(asked) + poisons)):
            await asyncio.sleep(begun + at - time.monotonic())
            group.create_task(clients.ask(asked[number]) if number < len(asked) else poison.send())


async def break_things(
    fleet: Fleet, options: argparse.Namespace, done: Counter[str], until: asyncio.Task[None]
) -> None:
    """Cause one fault after the other while a task runs."""
    begun, rng, every_s, count = time.monotonic(), fleet.rng, options.every, options.front_end_deaths
    deaths = [begun + options.seconds * (k + 1) / (count + 1) for k in range(count)]
    kinds: list[str] = []
    due = begun + (every_s or math.inf)
    while not until.done():
        await asyncio.sleep(0.05)
        fleet.watch()
        now = time.monotonic()
        if deaths and now > deaths[0]:
            deaths.pop(0)
            what = "front end"
            await asyncio.to_thread(fleet.restart_front_end)
            done[what] += 1
        elif now < due:
            continue
        else:
            kinds = kinds or rng.sample(FAULTS, len(FAULTS))
            what = fleet.cut() if kinds[0] == "cut" else fleet.strike(_SIGNALS[kinds[0]])
            if not what:
                continue
            done[kinds.pop(0)] += 1
        print(f"{now - begun:6.1f} s  {what}", flush=True)
        due = time.monotonic() + every_s * (0.5 + rng.random())


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


async def until_whole(fleet: Fleet, server: Server) -> bool:
    """Wait until every replica serves; return whether that happened in time."""
    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        fleet.watch()
        try:
            response = await server.get("/health")
            await response.read()
            if response.status == 200 and not fleet.struck:
                return True
        except HttpError:
            pass
        await asyncio.sleep(0.1)
    return False


async def run(fleet: Fleet, options: argparse.Namespace) -> bool:
    """The whole run; returns whether everything was as it should be."""
    server = Server(Address.parse(fleet.url))
    clients = Clients(server, await find_model(server, None), lambda: fleet.turns)
    poisons = round(options.requests * options.poison)
    poison = Poison(fleet.port, clients.model, random.Random(options.seed))
    asked = (await questions(options, fleet.placement, clients))[poisons:]
    faults: Counter[str] = Counter()
    begun = time.monotonic()
    asking = asyncio.create_task(
        ask_all(clients, asked, poison, poisons, options.seconds, random.Random(options.seed))
    )
    await break_things(fleet, options, faults, asking)
    await asking
    seconds = time.monotonic() - begun
    whole = await until_whole(fleet, server)
    for question in asked[:PROBES]:  # makes every replica report its free blocks
        await clients.ask(question)
    at_rest = await rest(server)
    print(f"\n{options.requests} requests in {seconds:.0f} s; faults: {_listed(faults)}")
    print(f"requests: {_listed(clients.ended)}; asked again: {_listed(clients.retried)}")
    if poisons:
        print(f"poison: {_listed(poison.ended)}")
    print(f"resumed since the last launch: {sum(at_rest['hexgen2_requests_resumed_total'].values()):.0f}")
    print(f"replicas lost without a fault: {fleet.unprovoked}")
    print(f"recovery of a replica, s: {_quantiles(fleet.recovered_s)}")
    print(f"restart of the front end, s: {_quantiles(fleet.restarted_s)}")
    print(f"longest gap of a stream, s: {_quantiles(clients.gaps_s)}")
    good = [
        verdict("wrong", _listed(clients.wrong), not clients.wrong),
        verdict("poison answered otherwise", _listed(poison.wrong), not poison.wrong),
        *([] if faults else [verdict("replicas lost", fleet.unprovoked, not fleet.unprovoked)]),
        verdict("whole answers", clients.ended["whole"], clients.ended["whole"] == len(asked) + PROBES),
        verdict("all replicas serve at the end", whole, whole),
    ]
    return all([*good, *blocks_are_free(await read_metrics(server))])


def blocks_are_free(metrics: dict[str, dict[str, float]]) -> list[bool]:
    """Whether the blocks of every replica that has reported are free."""
    good = []
    for replica, budget in metrics["hexgen2_kv_tokens_budget"].items():
        free = metrics["hexgen2_kv_blocks_free"].get(replica)
        held = metrics["hexgen2_kv_tokens"][replica]
        what = f"{free} of {budget // BLOCK_TOKENS:.0f}, {held:.0f} tokens accounted for"
        good.append(verdict(f"free blocks of {replica}", what, free == budget // BLOCK_TOKENS and not held))
    return good


def nothing_is_left(fleet: Fleet, code: int, shared_before: set[str]) -> list[bool]:
    """Whether no process, port or shared memory is left."""
    left = [f"{each.pid} {each.status()}" for each in fleet.family()]
    with socket.socket() as probe:
        listening = probe.connect_ex(("127.0.0.1", fleet.port)) == 0
    shared = {each for each in shared_memory() - shared_before if not _in_use(each)}
    return [
        verdict("exit code", code, code == 0),
        verdict("processes that outlived their front end for 5 s", fleet.left_behind, not fleet.left_behind),
        verdict("processes left", left or "none", not left),
        verdict("port in use", listening, not listening),
        verdict("shared memory left", shared or "none", not shared),
    ]


def shared_memory() -> set[str]:
    """Shared memory segments, without semaphores: a fleet has none, so those belong to other programs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def _in_use(name: str) -> bool:
    """Whether any process maps a shared memory segment, which may belong to another program."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in maps.read_text():
                return True
        except OSError:
            continue
    return False


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def _quantiles(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p99 = np.percentile(values, [50, 99])
    return f"p50 {p50:.2f}, p99 {p99:.2f}, most {max(values):.2f} ({len(values)})"


def main() -> None:
    """Run one fleet under faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fleet", choices=tuple(MAKERS), default="torch")
    parser.add_argument("--kind", choices=tuple(KINDS), default="llama", help="model_type of the small model")
    parser.add_argument("--requests", type=int, help="default: 300, 2000 (emulated)")
    parser.add_argument("--seconds", type=float, help="default: 120, 240 (emulated)")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults; 0: none")
    parser.add_argument("--poison", type=float, default=0.0, help="share of poisonous requests")
    parser.add_argument("--front-end-deaths", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-logs", type=Path, help="keep the logs of the launches in this folder")
    options = parser.parse_args()
    options.requests = options.requests or REQUESTS[options.fleet]
    options.seconds = options.seconds or SECONDS[options.fleet]
    if options.poison:
        path = filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if options.keep_logs:
        options.keep_logs.mkdir(parents=True, exist_ok=True)
    shared_before = shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        placement, command = MAKERS[options.fleet](work, options.kind)
        command += ["--restarts", "1000000"]
        fleet = Fleet(command, placement, options.keep_logs or work, random.Random(options.seed))
        try:
            fleet.launch()
            good = asyncio.run(run(fleet, options))
            good = all([good, *nothing_is_left(fleet, fleet.stop(), shared_before)])
        finally:
            fleet.close()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
