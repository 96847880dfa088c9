"""A minimal HTTP/1.1 client that reads streams as they arrive, at little cost per token.

Connections are reused; there are as many as requests in flight.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from cost_model.errors import InputError

CONNECT_S = 10.0
_PORTS = {"http": 80, "https": 443}
_LONGEST_LINE = 1 << 20


class HttpError(Exception):
    """The server cannot be reached, closed the connection, or does not speak HTTP; the message says which."""


@dataclass(frozen=True)
class Address:
    """The address of a server; `path` is the prefix of all its paths."""

    url: str
    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL. The scheme is optional, and a trailing /v1 is ignored.

        Raises
        ------
        InputError : not the URL of a server
        """
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in _PORTS or not text.isascii() or any(c.isspace() for c in text):
            raise InputError(url[:100], "", "is not the URL of a server", "write http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(url, host, port or _PORTS[parts.scheme], parts.scheme == "https", path)


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Server:
    """Sends requests to one server.

    Parameters
    ----------
    api_key : sent as bearer token; None if the server needs none
    """

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self.address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [f"host: {host}:{address.port}", "accept: */*"]
        if api_key is not None:
            lines.append(f"authorization: Bearer {api_key}")
        self._headers = "\r\n".join(lines).encode()
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """Send a GET request. Raises HttpError."""
        return await self._ask(f"GET {self.address.path}{path} HTTP/1.1\r\n".encode(), b"")

    async def post(self, path: str, body: bytes) -> Response:
        """Send a POST request with a JSON body. Raises HttpError."""
        head = f"POST {self.address.path}{path} HTTP/1.1\r\ncontent-type: application/json\r\n"
        return await self._ask(head.encode(), body)

    async def _ask(self, head: bytes, body: bytes) -> Response:
        message = b"%b%b\r\ncontent-length: %d\r\n\r\n%b" % (head, self._headers, len(body), body)
        while True:
            kept = self._kept()
            connection = kept or await self._open()
            try:
                connection.writer.write(message)
                response = await _response(connection, self._idle)
            except (OSError, EOFError, ValueError, HttpError) as error:
                connection.writer.close()
                # The server may have closed a reused connection meanwhile; a new one shows the real error.
                if kept is None:
                    raise HttpError(reason(error)) from error
            except BaseException:
                connection.writer.close()
                raise
            else:
                return response

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.close()
        return None

    async def _open(self) -> _Connection:
        address = self.address
        try:
            opening = asyncio.open_connection(address.host, address.port, ssl=self._tls, limit=_LONGEST_LINE)
            return _Connection(*await asyncio.wait_for(opening, CONNECT_S))
        except TimeoutError as error:
            raise HttpError(f"no answer within {CONNECT_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise HttpError(reason(error)) from error


@dataclass(slots=True)
class Response:
    """A response whose body is read as it arrives, once: with `lines` or with `read`."""

    status: int
    headers: dict[str, str]
    _connection: _Connection = field(repr=False)
    _idle: list[_Connection] = field(repr=False)

    async def read(self) -> bytes:
        """The whole body. Raises HttpError."""
        return b"".join([piece async for piece in self._pieces()])

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of the body without line ends. Raises HttpError."""
        rest = b""
        async for piece in self._pieces():
            rest += piece
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest

    def close(self) -> None:
        """Drop the rest of the response."""
        self._connection.writer.close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        reader, length = self._connection.reader, self.headers.get("content-length", "")
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := await _chunk_size(reader):
                    yield (await reader.readexactly(size + 2))[:-2]
                while (await reader.readline()).strip():
                    pass
            elif length:
                yield await reader.readexactly(int(length))
            else:
                while piece := await reader.read(1 << 16):
                    yield piece
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise HttpError(reason(error)) from error
        if self.headers.get("connection", "").lower() == "close":
            self.close()
        else:
            self._idle.append(self._connection)


async def _response(connection: _Connection, idle: list[_Connection]) -> Response:
    reader = connection.reader
    status = (await reader.readline()).split(None, 2)
    if not status:
        raise EOFError
    if len(status) < 2 or not status[0].startswith(b"HTTP/1.") or not status[1].isdigit():
        raise HttpError("the answer is not HTTP")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return Response(int(status[1]), headers, connection, idle)


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line:
        raise EOFError
    return int(line.partition(b";")[0], 16)


def reason(error: Exception) -> str:
    """A connection error in a few words; the same cause always gives the same words."""
    if isinstance(error, EOFError):
        return "the connection was closed before the answer was complete"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    if isinstance(error, OSError):
        known = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        return (known or str(error) or type(error).__name__).lower()
    if isinstance(error, ValueError):
        return "the answer is not HTTP"
    return str(error)
