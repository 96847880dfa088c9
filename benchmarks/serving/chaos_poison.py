"""Poisonous requests for a fleet: requests that no client should send, and faults planted in its workers.

poison/ plants the faults; the fleet's processes import it when they start. Requests with certain seeds then
fail in a worker, and requests with one other seed kill it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving.poison.seeds import AT_START, IN_SAMPLING

PLANTED = Path(__file__).resolve().parent / "poison"

LIMIT_S = 120.0
MIB = 1024 * 1024


@dataclass
class Poison:
    """Sends poison, and records what came of it.

    Attributes
    ----------
    ended : counts by kind of poison and status
    wrong : statuses that must not occur
    """

    port: int
    model: str
    rng: random.Random
    ended: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def draw(self) -> tuple[str, bytes, set[int]]:
        """A kind of poison, the bytes of such a request, and the statuses that may answer it."""
        refused = {400}
        fields: dict[str, tuple[dict[str, object], set[int]]] = {
            "top_k of 2**64": ({"top_k": 2**64}, refused),
            "seed of 10**400": ({"seed": 10**400}, refused),
            "100,000 stops": ({"stop": [f"s{number}" for number in range(100_000)]}, refused),
            "long stop": ({"stop": "x" * MIB}, refused),
            "unknown field": ({"guided_json": {}}, refused),
            "many prompts": ({"prompt": [[5]] * 5000}, refused),
            "long prompt": ({"prompt": "lo " * MIB}, refused),
            "million tokens": ({"prompt": [7] * MIB}, refused),
            "strange token": ({"prompt": [2**31 - 1]}, refused),
            "fault at the start": ({"seed": AT_START, "temperature": 1}, {500}),
            "fault in sampling": ({"seed": IN_SAMPLING, "temperature": 1}, {500}),
        }
        raw = {
            "CONNECT": (b"CONNECT http://here/ HTTP/1.1\r\n\r\n", {405}),
            "TLS": (bytes.fromhex("16030100c8010000c40303") + bytes(200), refused),
            "garbage": (self.rng.randbytes(500), {400, 431}),
            "deep JSON": (self._ask(b"[" * MIB), refused),
            "half a character": (self._ask(b'{"model": "%b", "prompt": "\\ud800"}' % self.name), refused),
        }
        kind = self.rng.choice([*fields, *raw])
        if kind in raw:
            return kind, *raw[kind]
        more, allowed = fields[kind]
        body = {"model": self.model, "prompt": [5, 6, 7], "max_tokens": 20, **more}
        return kind, self._ask(json.dumps(body).encode()), allowed

    @property
    def name(self) -> bytes:
        return self.model.encode()

    def _ask(self, body: bytes) -> bytes:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        return head + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def send(self) -> None:
        """Send one random poisonous request; send it again if the front end is down."""
        kind, data, allowed = self.draw()
        while True:
            status = await self._status(data)
            if status not in (0, 429, 503):
                break
            await asyncio.sleep(0.5)
        self.ended[f"{kind} {status}"] += 1
        if status not in allowed:
            self.wrong[f"{kind} got {status}"] += 1

    async def _status(self, data: bytes) -> int:
        """The status that answers these bytes, or 0 without an answer."""
        try:
            async with asyncio.timeout(LIMIT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(data)
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return 0
        return int(head.split()[1])
