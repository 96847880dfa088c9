"""What hostile clients send: raw requests that are malformed in every way, and bodies that are expensive to
read.

The malformed requests follow RFC 9112 clause by clause, as tests of HTTP parsers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterable, Sequence

LIMIT_S = 60.0
MIB = 1024 * 1024
GOOD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)
BODY = b'{"model": "tiny-llama", "prompt": "the", "max_tokens": 3}'
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

MALFORMED: list[bytes] = [
    b"",
    b"\r\n" * 5000,
    b"\n",
    b" ",
    b"GET",
    b"GET ",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/0.9\r\n\r\n",
    b"GET /health HTTP/1.2\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: a\r\n\r\n",
    b"GET /health HTTP/1.1.1\r\nHost: a\r\n\r\n",
    b"GET /health http/1.1\r\nHost: a\r\n\r\n",
    b"GET  /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /health  HTTP/1.1\r\nHost: a\r\n\r\n",
    b" GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /hea\x00lth HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /hea\xfflth HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%00%ff%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://elsewhere.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health?" + b"a=b&" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"A" * 100_000,
    b"G\xc9T /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"BREW /pot HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"TRACE /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT http://localhost/ HTTP/1.1\r\n\r\n" + b"\x16\x03" * 5000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    bytes.fromhex("16030100c8010000c40303") + bytes(400),
    b"SSH-2.0-OpenSSH_9.7\r\n",
    b"\x05\x01\x00",
    b"*1\r\n$4\r\nPING\r\n",
    HEAD + b"\r\n" + b"junk" * 100,
    HEAD + b"X: \x00\r\n\r\n",
    HEAD + b"X: a\rb\r\n\r\n",
    HEAD + b"X: a\nY: b\n\n",
    HEAD + b"X : a\r\n\r\n",
    HEAD + b": empty\r\n\r\n",
    HEAD + b"X\r\n\r\n",
    HEAD + b"X: a\r\n folded\r\n\r\n",
    HEAD + b"\x80\xff: a\r\n\r\n",
    HEAD + b"Host: another\r\n\r\n",
    HEAD.replace(b"localhost", b"evil.example") + b"\r\n",
    HEAD.replace(b"localhost", b"") + b"\r\n",
    HEAD.replace(b"localhost", b"[::1") + b"\r\n",
    HEAD.replace(b"localhost", b"localhost:99999999999") + b"\r\n",
    HEAD + b"Connection: " + b"close, " * 4000 + b"\r\n\r\n",
    HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
    HEAD + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n" * 3,
    HEAD + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    HEAD + b"Expect: 200-maybe\r\n\r\n",
    HEAD + b"Authorization: Bearer " + b"x" * 30_000 + b"\r\n\r\n",
    HEAD + b"Authorization: \xff\xfe\r\n\r\n",
    HEAD + b"X-Request-Id: \x1b[2J\r\n\r\n",
    HEAD + b"traceparent: 00-zz-zz-01\r\n\r\n",
    HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(5000)) + b"\r\n",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: +5\r\n\r\nabcde",
    POST + b"Content-Length: 5, 5\r\n\r\nabcde",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    POST + b"Content-Length: 0x5\r\n\r\nabcde",
    POST + b"Content-Length: 99999999999999999999999999\r\n\r\nabc",
    POST + b"Content-Length: 4194304\r\n\r\nabc",
    POST + b"Content-Length: 4\xb2\r\n\r\nabc",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: gzip\r\n\r\nabc",
    POST + b"Transfer-Encoding: chunked, gzip\r\n\r\nabc",
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\nabc",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5;" + b"x=" * 60_000 + b"\r\nabcde\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000 + b"0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    POST + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
]


def asked(body: bytes, key: str, path: bytes = b"completions") -> bytes:
    """A valid request with a body."""
    return GOOD.replace(b"completions", path, 1) % (key.encode(), len(body), body)


def mutated(rng: random.Random, key: str) -> bytes:
    """A valid request with some bytes changed, cut, repeated or inserted."""
    data = bytearray(rng.choice([asked(BODY, key), *MALFORMED])[:4000])
    for _ in range(rng.randint(1, 8)):
        at = rng.randint(0, len(data))
        match rng.randint(0, 4):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 200)] * rng.randint(1, 20)
            case 3:
                data[at:at] = rng.choice(
                    [b"\r\n", b"\r\n\r\n", b"\x00", b": ", b" ", b"\xff", b"0", b"chunked"]
                )
            case 4:
                data[at:at] = rng.randbytes(rng.randint(1, 60))
    return bytes(data)


def heavy(key: str) -> list[bytes]:
    """Requests that are expensive for a server that looks at everything in them."""
    start = b'{"model": "tiny-llama", '
    prompts = [
        b'"prompt": "%b"' % (b"hello world " * (4 * MIB // 13)),
        b'"prompt": "%b"' % (b"a" * (4 * MIB - 100)),
        b'"prompt": "%b"' % ("é".encode() * (2 * MIB - 100)),
        b'"prompt": [%b]' % b",".join([b"7"] * (2 * MIB - 100)),
        b'"prompt": [%b]' % b",".join([b'"a"'] * MIB)[: 4 * MIB - 200].rpartition(b",")[0],
        b'"prompt": [%b]' % b",".join([b"[]"] * (MIB * 4 // 3 - 100)),
        b'"prompt": [%b]' % b",".join([b"[7]"] * (MIB - 100)),
        b'"prompt": "a", "stop": [%b]' % b",".join([b'"x%d"' % k for k in range(100_000)]),
        b'"prompt": "a", "stop": "%b"' % (b"x" * (4 * MIB - 200)),
        b'"prompt": "a", "logit_bias": {%b}' % b",".join(b'"%d":1' % k for k in range(300_000)),
        b'"prompt": "a", "stop_token_ids": [%b]' % b",".join([b"7"] * (2 * MIB - 100)),
        b'"prompt": "a", "n": 128, "max_tokens": 1',
        b'"prompt": "a", "top_k": %d' % 2**64,
        b'"prompt": "a", "seed": %b' % (b"9" * 4000),
        b'"prompt": "a", %b' % b",".join(b'"k%d":0' % k for k in range(250_000)),
        b'"prompt": "a", "metadata": %b' % (b"[" * 100_000),
        b'"prompt": "a", "metadata": [%b]' % b",".join([b"1e5"] * (MIB - 100)),
    ]
    bodies = [start + each + b"}" for each in prompts]
    bodies += [b"[" * (4 * MIB - 1), b'{"a":' * (MIB // 2), b'"' * (4 * MIB - 1), b"1" * (4 * MIB - 1)]
    message = b'{"role":"user","content":"x"}'
    chats = [
        b'"messages": [%b]' % b",".join([message] * 100_000),
        b'"messages": [%b]' % b",".join([message] * 2000),
        b'"messages": [{"role":"user","content":[%b]}]' % b",".join([b'{"type":"text","text":""}'] * 100_000),
        b'"messages": [{"role":"user","content":"%b"}]' % (b"{% for %}" * 100_000),
    ]
    chat = [asked(start + each + b"}", key, b"chat/completions") for each in chats]
    return [*(asked(body, key) for body in bodies), *chat]


def petty(key: str) -> list[bytes]:
    """Requests of thousands of tiny parts, each of which a server handles separately."""
    chunks = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 200_000
    trailers = b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 200_000
    start = POST + b"Authorization: Bearer %b\r\n" % key.encode()
    return [start + chunks, start + trailers, start + b"x: y\r\n" * 200_000, (HEAD + b"\r\n") * 20_000]


async def exchange(port: int, data: bytes) -> bytes:
    """Send data and nothing more; return all that comes back until the server closes. Silence is an error."""
    async with asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = asyncio.create_task(reader.read())
        with contextlib.suppress(OSError):  # the server may have closed the connection already
            writer.write(data)
            await writer.drain()
            writer.write_eof()
        try:
            return await received
        except ConnectionError:
            return b""
        finally:
            writer.close()


def statuses(answer: bytes) -> list[int]:
    """The status of each answer in what came back, except interim ones."""
    found = []
    while answer.startswith(b"HTTP/1.1 "):
        head, _, answer = answer.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        status, headers = int(lines[0].split()[1]), {}
        for line in lines[1:]:
            name, _, value = line.partition(b": ")
            headers[name.lower()] = value
        if status >= 200:
            found.append(status)
        if b"content-length" in headers:
            body, answer = (
                answer[: int(headers[b"content-length"])],
                answer[int(headers[b"content-length"]) :],
            )
            if status >= 400:
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        elif status >= 200:
            return found
    assert not answer, answer[:200]
    return found


async def send_all(port: int, requests: Iterable[bytes], at_once: int = 8) -> list[list[int]]:
    """Send each request on its own connection; return the statuses of the answers to each."""
    few = asyncio.Semaphore(at_once)

    async def one(data: bytes) -> list[int]:
        async with few:
            return statuses(await exchange(port, data))

    return await asyncio.gather(*map(one, requests))


async def hold(port: int, beginnings: Sequence[bytes], seconds: float) -> None:
    """Open connections that begin a request and then trickle or stay silent for some time."""
    writers = []
    for beginning in beginnings:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(beginning)
            writers.append(writer)
    for _ in range(int(seconds / 0.1)):
        await asyncio.sleep(0.1)
        for writer in writers[::2]:
            writer.write(b"x")
    for writer in writers:
        writer.close()
