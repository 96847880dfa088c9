"""How two processes of one launch meet: each proves that it knows the launch's secret, which never travels.

Who connects sends a Hello with a random nonce. The listener answers with a nonce of its own and an
HMAC-SHA256, keyed with the secret, over all that both have said; who connects checks that, and answers with
another. Each side has a word of its own in what it signs, so that no answer can be sent back to where it came
from, and no nonce comes twice, so that what was recorded is of no use later (as in SKID3, Handbook of Applied
Cryptography, section 10.3).

What follows on the connection is neither encrypted nor signed: who sits in the way can read and change it.
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
MOST_NEWCOMERS = 64
_CONTEXT = b"hexgen2 introduction 1\n"
_CONNECTS, _LISTENS = b"connects\n", b"listens\n"


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who a worker says it is, and for what it connects (see Hello), with the secret that proves it."""

    worker: str
    purpose: str
    secret: str = field(repr=False)


def connect(address: tuple[str, int], introduction: Introduction, timeout_s: float) -> Connection:
    """Connect to a worker, introduce this one, and see that the other knows the secret, too; the stream keeps
    `timeout_s` as its timeout.

    Raises
    ------
    OSError : nobody answers in time, or (ConnectionError) somebody else does, or does not let this one in
    """
    connection = Connection(socket.create_connection(address, timeout=timeout_s))
    try:
        _introduce(connection, introduction)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(stream: socket.socket, secret: str) -> tuple[Connection, Hello] | None:
    """The introduced connection; None, and the stream closed, unless who connects speaks this protocol and
    proves that it knows the secret, without a silence of more than TIMEOUT_S."""
    stream.settimeout(TIMEOUT_S)
    connection = Connection(stream)
    with contextlib.suppress(OSError):
        if (hello := _admit(connection, secret)) is not None:
            stream.settimeout(None)
            return connection, hello
    connection.close()
    return None


class Newcomers:
    """Connections that have proved nothing yet, MOST_NEWCOMERS at a time: where there are more, the one that
    has been here longest is sent away. A worker of the launch proves itself at once."""

    def __init__(self) -> None:
        self._here: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def accept(self, stream: socket.socket, secret: str) -> tuple[Connection, Hello] | None:
        """See `accept`; this may be called from many threads."""
        with self._lock:
            oldest = next(iter(self._here)) if len(self._here) >= MOST_NEWCOMERS else None
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


def _introduce(connection: Connection, introduction: Introduction) -> None:
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        worker=introduction.worker,
        purpose=introduction.purpose,
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    connection.send(hello)
    answer = connection.receive(LIMIT_BYTES)
    if not isinstance(answer, Challenge):
        raise ConnectionError("the listener has not let this worker in")
    if not _is_proof(answer.proof, introduction.secret, _LISTENS, hello, answer.nonce):
        raise ConnectionError("the listener does not know the secret of this launch")
    connection.send(Proof(proof=_proof(introduction.secret, _CONNECTS, hello, answer.nonce)))


def _admit(connection: Connection, secret: str) -> Hello | None:
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
    """The HMAC of one side over both nonces and all that the Hello says. A frame begins with its length, and
    nonces have one length, so that no two conversations make the same bytes."""
    return hmac.digest(secret.encode(), _CONTEXT + side + encode(hello) + nonce, hashlib.sha256)


def _is_proof(proof: bytes, secret: str, side: bytes, hello: Hello, nonce: bytes) -> bool:
    return hmac.compare_digest(proof, _proof(secret, side, hello, nonce))
