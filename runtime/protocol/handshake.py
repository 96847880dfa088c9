"""The handshake between two processes of one launch: each proves that it knows the launch's secret.

The secret never travels. The connecting side sends a Hello with a random nonce. The listener answers with a
nonce of its own and an HMAC-SHA256, keyed with the secret, over everything both have said; the connecting
side checks it and answers with its own. Each side signs a different word, so no answer can be reflected,
and nonces never repeat, so a recorded handshake cannot be replayed (as in SKID3, Handbook of Applied
Cryptography, section 10.3).

What follows on the connection is neither encrypted nor signed: anybody on the path can read and change it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import threading
from dataclasses import dataclass, field

from runtime.protocol.between_workers import NONCE_BYTES, Challenge, Hello, Proof
from runtime.protocol.codec import encode
from runtime.protocol.framing import Connection
from runtime.protocol.message import PROTOCOL_VERSION

LIMIT_BYTES = 4096
TIMEOUT_S = 5.0
MOST_PENDING = 64
_CONTEXT = b"hexgen2 handshake 1\n"
_CONNECTS, _LISTENS = b"connects\n", b"listens\n"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who a worker is and what it connects for (see Hello), with the secret that proves it."""

    worker: str
    purpose: str
    secret: str = field(repr=False)


def connect(address: tuple[str, int], credentials: Credentials, timeout_s: float) -> Connection:
    """Connect to a worker and complete the handshake; the stream keeps `timeout_s` as its timeout.

    Raises
    ------
    OSError : nobody answers in time, or (ConnectionError) the other end does not know the secret or refuses
    """
    connection = Connection(socket.create_connection(address, timeout=timeout_s))
    try:
        _initiate(connection, credentials)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(stream: socket.socket, secret: str) -> tuple[Connection, Hello] | None:
    """Complete the handshake on an accepted stream.

    Returns None, with the stream closed, unless the other end speaks this protocol and proves that it knows
    the secret, and never is silent for more than TIMEOUT_S.
    """
    stream.settimeout(TIMEOUT_S)
    connection = Connection(stream)
    with contextlib.suppress(OSError):
        if (hello := _respond(connection, secret)) is not None:
            stream.settimeout(None)
            return connection, hello
    connection.close()
    return None


class PendingHandshakes:
    """Handshakes under way, at most MOST_PENDING: one more closes the oldest, since a worker of this launch
    completes its handshake at once."""

    def __init__(self) -> None:
        self._here: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def accept(self, stream: socket.socket, secret: str) -> tuple[Connection, Hello] | None:
        """As the function `accept`; may be called from many threads."""
        with self._lock:
            oldest = next(iter(self._here)) if len(self._here) >= MOST_PENDING else None
            if oldest is not None:
                del self._here[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._here[stream] = None
        try:
            return accept(stream, secret)
        finally:
            with self._lock:
                self._here.pop(stream, None)


def _initiate(connection: Connection, credentials: Credentials) -> None:
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        worker=credentials.worker,
        purpose=credentials.purpose,
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    connection.send(hello)
    answer = connection.receive(LIMIT_BYTES)
    if not isinstance(answer, Challenge):
        raise ConnectionError("the listener did not let this worker in")
    if not _is_proof(answer.proof, credentials.secret, _LISTENS, hello, answer.nonce):
        raise ConnectionError("the listener does not know the secret of this launch")
    connection.send(Proof(proof=_proof(credentials.secret, _CONNECTS, hello, answer.nonce)))


def _respond(connection: Connection, secret: str) -> Hello | None:
    hello = connection.receive(LIMIT_BYTES)
    if not isinstance(hello, Hello) or hello.protocol != PROTOCOL_VERSION:
        return None
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(Challenge(nonce=nonce, proof=_proof(secret, _LISTENS, hello, nonce)))
    answer = connection.receive(LIMIT_BYTES)
    if isinstance(answer, Proof) and _is_proof(answer.proof, secret, _CONNECTS, hello, nonce):
        return hello
    return None


def _proof(secret: str, side: bytes, hello: Hello, nonce: bytes) -> bytes:
    """The HMAC of one side over the Hello and both nonces. Frames begin with their length and nonces have a
    fixed one, so no two conversations give the same bytes."""
    return hmac.digest(secret.encode(), _CONTEXT + side + encode(hello) + nonce, hashlib.sha256)


def _is_proof(proof: bytes, secret: str, side: bytes, hello: Hello, nonce: bytes) -> bool:
    return hmac.compare_digest(proof, _proof(secret, side, hello, nonce))
