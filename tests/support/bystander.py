"""An ordinary client that runs during attacks, in a separate process. It streams one answer after the other
and polls /health. It ends when standard input ends, and prints what it saw.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

EVERY_S = 0.05


@dataclass
class Seen:
    """The longest wait for /health and between two tokens of a stream, in seconds, and all answers."""

    health_s: float = 0.0
    gap_s: float = 0.0
    texts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def stream(http: httpx.AsyncClient, seen: Seen, body: dict[str, object]) -> None:
    """Stream answers to the same request, one after the other."""
    while True:
        text, last_s = "", 0.0
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                seen.wrong.append((await answer.aread()).decode())
                await asyncio.sleep(EVERY_S)
                continue
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line[6:]), time.monotonic()
                if "error" in event:
                    seen.wrong.append(line)
                    break
                seen.gap_s, last_s = max(seen.gap_s, now - last_s if last_s else 0.0), now
                text += event["choices"][0]["text"]
        seen.texts.append(text)


async def ask_for_health(http: httpx.AsyncClient, seen: Seen) -> None:
    """Ask for /health, alternating between one kept connection and new ones."""
    while True:
        for headers in ({}, {"Connection": "close"}):
            begun = time.monotonic()
            answer = await http.get("/health", headers=headers)
            seen.health_s = max(seen.health_s, time.monotonic() - begun)
            if answer.status_code != 200:
                seen.wrong.append(answer.text)
            await asyncio.sleep(EVERY_S)


async def main(url: str, key: str, body: str) -> None:
    """Run the client until standard input ends."""
    seen = Seen()
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
        tasks = [asyncio.create_task(stream(http, seen, json.loads(body)))]
        tasks.append(asyncio.create_task(ask_for_health(http, seen)))
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        print("here", flush=True)
        await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        while not (seen.texts or tasks[0].done()):
            await asyncio.sleep(EVERY_S)
        for task in tasks:
            if task.done():
                seen.wrong.append(repr(task.exception()))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(vars(seen)), flush=True)


@contextmanager
def bystander(url: str, key: str, body: dict[str, object]) -> Iterator[Seen]:
    """Run a bystander during the block; what it saw is available afterwards."""
    seen = Seen()
    command = [sys.executable, __file__, url, key, json.dumps(body)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        time.sleep(0.3)
        try:
            yield seen
        finally:
            said, _ = process.communicate(timeout=60)
            vars(seen).update(json.loads(said.splitlines()[-1]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
