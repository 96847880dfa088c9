"""Break a fleet while clients stream from it, and check that every request still gets its answer.

    python -m benchmarks.serving.chaos [--fleet torch|unlike|mixed|emulated]
        [--kind llama|qwen3_moe|deepseek_v3|gpt_oss] [--weights AWQ] [--kv fp8] [--requests N] [--seconds S]
        [--every 4] [--front-end-deaths 2] [--poison 0.05] [--seed 0] [--runs 1]

The torch fleet has two prefill and two decode replicas of a small random model (--kind), whose weights
(--weights) and KV caches (--kv) may be quantised: one with one rank, one with two pipeline stages, one with
two tensor-parallel ranks and one with one rank. In the unlike fleet, two tensor-parallel ranks, and two
uneven stages, prefill for two uneven stages, and for a stage of two ranks before one of one. The mixed fleet
is the same model on three mixed replicas (two tensor-parallel ranks; two uneven stages; one rank), a prefill
and a decode replica, with routes between all that can form one. Its links are slow, so that faults hit KV
caches on their way in both directions, its memory holds a few requests, and half of its prompts share their
beginning with others. The emulated fleet is the placement of llama-2-70b that the search finds for
hexgen2-setting-1: 20 GPUs.

Requests arrive at random within --seconds. About every --every seconds the script kills a random rank (kill
-9), stops one (SIGSTOP), or cuts a TCP connection between two workers, in random order: of five faults, two
kill, one stops and two cut. --front-end-deaths is how often it kills the front end and launches it again on
its port. A replica is spared while no other replica of its role could take its requests, or while another one
is down, so that every request can finish. Clients know the right answers in advance: from transformers, with
the same weights in float32 and KV caches rounded likewise, or by the formula of the emulated engine. Where
scores nearly tie, the order of additions decides, which differs between replicas; an answer that parts from
the expected one is right if each of its tokens wins when the last bits of keys and values change. Clients ask
again when the front end's death cuts off their request, or when the request lost two replicas, which ends it
(docs/security.md).

--poison is the share of poisonous requests (chaos_poison.py): they are refused, or fail in a worker. Without
faults (--every 0), no replica may be lost to them. --runs repeats it all with the next seeds, and prints the
worst of all runs.

The exit code is 1 unless all of this holds: every request ended with exactly its tokens, none lost, repeated
or wrong; no stream hung; at rest every block of every replica is free and no tokens are accounted for; no
process, port or shared memory is left.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.serving.chaos_clients import Clients, Question, difference
from benchmarks.serving.chaos_fleet import Fleet
from benchmarks.serving.chaos_models import KV_FORMATS, PLAIN, WEIGHTS, Model, Truth
from benchmarks.serving.chaos_placements import MAKERS, make_emulated
from benchmarks.serving.chaos_poison import PLANTED, Poison
from benchmarks.serving.chaos_rest import blocks_are_free, nothing_is_left, shared_memory
from benchmarks.serving.fleet import KINDS
from benchmarks.serving.soak import read_metrics, rest, verdict
from hexgen2.bench.completions import find_model
from hexgen2.bench.http import Address, HttpError, Server
from hexgen2.placement import Placement
from runtime.engine.emulated.tokens import answer

EMULATED = "emulated"
REQUESTS, EMULATED_REQUESTS = 300, 2000
SECONDS, EMULATED_SECONDS = 120.0, 240.0
LENGTHS, EMULATED_LENGTHS = ((8, 200), (30, 250)), ((32, 512), (16, 96))
"""Least and most tokens of prompts, and of answers."""
SHARED_TOKENS, SHARED_BEGINNINGS = 96, 4
FAULTS = ("kill", "cut", "kill", "cut", "stop")
RECOVERY_S = 120.0
PROBES = 16
TIMES = ("recovery of a replica", "restart of the front end", "longest gap of a stream")


def questions(options: argparse.Namespace, truth: Truth | None, placement: Placement) -> list[Question]:
    """Random prompts with their answers."""
    rng, ids = random.Random(options.seed), range(16, 240)
    (shortest, longest), (least, most) = LENGTHS
    if truth is None:
        (shortest, longest), (least, most) = EMULATED_LENGTHS
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
    if truth is None:
        answers = [answer(prompt, tokens, placement.model.vocab) for prompt, tokens in asked]
        texts = ["".join(f"t{token} " for token in tokens) for tokens in answers]
    else:
        texts = truth.answers(asked)
    return [Question(*each, text) for each, text in zip(asked, texts, strict=True)]


@dataclass
class Run:
    """What came of a run: whether all was as it should be, faults, answers that parted where scores nearly
    tie, and the longest of each of TIMES in seconds."""

    good: bool
    faults: Counter[str]
    parted: int
    most_s: tuple[float, ...]


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


async def run(fleet: Fleet, asked: list[Question], truth: Truth | None, options: argparse.Namespace) -> Run:
    """Requests and faults; the fleet runs on."""
    server = Server(Address.parse(fleet.url))
    parted: list[tuple[Question, str]] | None = None if truth is None else []
    clients = Clients(server, await find_model(server, None), lambda: fleet.turns, parted)
    poisons = round(options.requests * options.poison)
    poison = Poison(fleet.port, clients.model, random.Random(options.seed))
    asked = asked[poisons:]
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
    judge(clients, truth)
    print(f"\n{options.requests} requests in {seconds:.0f} s, seed {options.seed}; faults: {_listed(faults)}")
    print(f"requests: {_listed(clients.ended)}; asked again: {_listed(clients.retried)}")
    if parted is not None:
        print(f"answers that part from transformers' where scores nearly tie: {len(parted)}")
    if poisons:
        print(f"poison: {_listed(poison.ended)}")
    print(f"resumed since the last launch: {sum(at_rest['hexgen2_requests_resumed_total'].values()):.0f}")
    print(f"replicas lost without a fault: {fleet.unprovoked}")
    times = fleet.recovered_s, fleet.restarted_s, clients.gaps_s
    for what, found in zip(TIMES, times, strict=True):
        print(f"{what}, s: {_quantiles(found)}")
    good = [
        verdict("wrong", _listed(clients.wrong), not clients.wrong),
        verdict("poison answered otherwise", _listed(poison.wrong), not poison.wrong),
        *([] if faults else [verdict("replicas lost", fleet.unprovoked, not fleet.unprovoked)]),
        verdict("whole answers", clients.ended["whole"], clients.ended["whole"] == len(asked) + PROBES),
        verdict("all replicas serve at the end", whole, whole),
    ]
    good += blocks_are_free(await read_metrics(server))
    return Run(all(good), faults, len(parted or ()), tuple(max(found, default=0.0) for found in times))


def judge(clients: Clients, truth: Truth | None) -> None:
    """Count the answers that part from what was expected, and where nothing ties, as wrong."""
    if truth is None or clients.parted is None:
        return
    for each in list(clients.parted):
        question, text = each
        if why := truth.refuses(question.prompt, question.tokens, text):
            clients.parted.remove(each)
            clients.ended["whole"] -= 1
            clients.wrong[f"{difference(question.text, text)}; {why}"] += 1


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def _quantiles(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p99 = np.percentile(values, [50, 99])
    return f"p50 {p50:.2f}, p99 {p99:.2f}, most {max(values):.2f} ({len(values)})"


def once(work: Path, options: argparse.Namespace) -> Run:
    """Launch one fleet, break it, and end it."""
    shared_before, truth = shared_memory(), None
    if options.fleet == EMULATED:
        placement, command = make_emulated(work)
    else:
        model = Model.make(work, options.kind, options.weights, options.kv)
        truth = Truth(model)
        placement, command = MAKERS[options.fleet](work, model)
    asked = questions(options, truth, placement)
    command += ["--restarts", "1000000"]
    fleet = Fleet(command, placement, options.keep_logs or work, random.Random(options.seed))
    try:
        fleet.launch()
        found = asyncio.run(run(fleet, asked, truth, options))
        found.good &= all(nothing_is_left(fleet, fleet.stop(), shared_before))
    finally:
        fleet.close()
    return found


def main() -> None:
    """Run one fleet under faults, or one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fleet", choices=(*MAKERS, EMULATED), default="torch")
    parser.add_argument("--kind", choices=tuple(KINDS), default="llama", help="model_type of the small model")
    parser.add_argument("--weights", choices=WEIGHTS, default=PLAIN, help="format of its weights")
    parser.add_argument("--kv", choices=KV_FORMATS, default=PLAIN, help="format of its KV caches")
    parser.add_argument("--requests", type=int, help="default: 300, 2000 (emulated)")
    parser.add_argument("--seconds", type=float, help="default: 120, 240 (emulated)")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults; 0: none")
    parser.add_argument("--poison", type=float, default=0.0, help="share of poisonous requests")
    parser.add_argument("--front-end-deaths", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--keep-logs", type=Path, help="keep the logs of the launches in this folder")
    options = parser.parse_args()
    emulated = options.fleet == EMULATED
    options.requests = options.requests or (EMULATED_REQUESTS if emulated else REQUESTS)
    options.seconds = options.seconds or (EMULATED_SECONDS if emulated else SECONDS)
    if options.poison:
        path = filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
    if options.keep_logs:
        options.keep_logs.mkdir(parents=True, exist_ok=True)
    found = list[Run]()
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            found.append(once(Path(folder), options))
        options.seed += 1
    if options.runs > 1:
        faults = sum((each.faults for each in found), Counter[str]())
        print(f"\n{len(found)} runs, {sum(each.good for each in found)} good; faults: {_listed(faults)}")
        print(f"answers that part where scores nearly tie: {sum(each.parted for each in found)}")
        for what, most in zip(TIMES, zip(*(each.most_s for each in found), strict=True), strict=True):
            print(f"worst {what}, s: {max(most):.2f}")
    sys.exit(0 if all(each.good for each in found) else 1)


if __name__ == "__main__":
    main()
