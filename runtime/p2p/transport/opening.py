"""Encrypts a connection with the network key, and detects at once that the other end has a different key.

With a network key, libp2p's private networks send 8 random bytes each way and then encrypt everything with
Salsa20 (`libp2p.security.pnet`; this is the same on the wire). That protocol does not check the key: a wrong
key turns every byte into noise. But libp2p's listeners and diallers both begin with the same 20 bytes (the
header of multistream-select), without waiting for the other end. So the first 28 bytes (20 without a key)
show whether the keys match, and nothing after them is parsed unless they do.
"""

from __future__ import annotations

import os

from Crypto.Cipher import Salsa20
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.multiselect import MULTISELECT_PROTOCOL_ID
from libp2p.utils import encode_delim

from runtime.p2p.transport.gate import Cause, Refused

HEADER = encode_delim(MULTISELECT_PROTOCOL_ID.encode())
NONCE_BYTES = 8
SOCKET_BYTES = 128 * 1024
STRANGER_BYTES = 16 * 1024  # more than any handshake needs, too little to do harm
KEY_REMEDY = "give both the same file with --network-key"
FOREIGN = {
    b"GET ": "HTTP",
    b"HEAD ": "HTTP",
    b"POST ": "HTTP",
    b"HTTP/": "HTTP",
    b"SSH-": "SSH",
    b"\x16\x03\x01": "TLS",
    b"\x16\x03\x03": "TLS",
}


class MemberConnection(RawConnection):
    """A TCP connection encrypted with the network key (None: no encryption).

    It reads all available bytes at once, because libp2p asks for 2 bytes and then for as many as these say.

    written : number of writes so far
    """

    def __init__(self, stream: ReadWriteCloser, initiator: bool, network_key: bytes | None) -> None:
        super().__init__(stream, initiator)
        self.written = 0
        self._key = network_key
        self._incoming: Salsa20.Salsa20Cipher | None = None
        self._outgoing: Salsa20.Salsa20Cipher | None = None
        self._buffer, self._start = b"", 0
        self._opened = False
        self._left_bytes: int | None = STRANGER_BYTES

    def trust(self) -> None:
        """Lift the limit on received bytes, now that the other end has proved who it is."""
        self._left_bytes = None

    async def write(self, data: bytes) -> None:
        if self._key is not None and self._outgoing is None:
            nonce = os.urandom(NONCE_BYTES)
            self._outgoing = Salsa20.new(key=self._key, nonce=nonce)
            data = nonce + self._outgoing.encrypt(data)
        elif self._outgoing is not None:
            data = self._outgoing.encrypt(data)
        self.written += 1
        await super().write(data)

    async def read(self, n: int | None = None) -> bytes:
        """At most n bytes (None: whatever is available); b"" at the end.

        Raises
        ------
        Refused : the other end is not in this network, or sends too much before it has proved who it is
        """
        if not self._opened:
            await self._open()
        if self._start == len(self._buffer):
            self._buffer, self._start = self._decrypted(await self._received()), 0
        end = len(self._buffer) if n is None else self._start + n
        data = self._buffer[self._start : end]
        self._start += len(data)
        return data

    async def _received(self) -> bytes:
        data = await super().read(SOCKET_BYTES)
        if self._left_bytes is not None:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                problem = f"it sent more than {STRANGER_BYTES} bytes before it proved who it is"
                raise Refused(Cause.NO_NODE, problem)
        return data

    def _decrypted(self, data: bytes) -> bytes:
        return data if self._incoming is None else self._incoming.decrypt(data)

    async def _open(self) -> None:
        """Read and check the first bytes, which are the same for all nodes of a network."""
        received = b""
        while not self._is_header(received):
            more = await self._received()
            if not more:
                raise Refused(Cause.UNCLEAR, "it closed the connection before it identified itself")
            received += more
        if self._key is None:
            self._buffer = received
        else:
            self._incoming = Salsa20.new(key=self._key, nonce=received[:NONCE_BYTES])
            self._buffer = self._incoming.decrypt(received[NONCE_BYTES:])
        self._opened = True

    def _is_header(self, received: bytes) -> bool:
        """Whether these are the first bytes of a node in this network; False if more are needed to tell.

        Raises
        ------
        Refused : they are not
        """
        for beginning, protocol in FOREIGN.items():
            if received.startswith(beginning):
                problem = f"it speaks {protocol} and is not a HexGen-2 node"
                raise Refused(Cause.NO_NODE, problem, "correct the address" if self.is_initiator else "")
        if self._key is None:
            if received[: len(HEADER)] != HEADER[: len(received)]:
                problem = (
                    "it probably has a network key, and this node has none (or it is not a HexGen-2 node)"
                )
                raise Refused(Cause.NETWORK_KEY, problem, KEY_REMEDY)
            return len(received) >= len(HEADER)
        if received.startswith(HEADER[:NONCE_BYTES]):  # a random nonce is equal to this once in 2^64 times
            raise Refused(Cause.NETWORK_KEY, "it has no network key, and this node has one", KEY_REMEDY)
        if len(received) < NONCE_BYTES + len(HEADER):
            return False
        cipher = Salsa20.new(key=self._key, nonce=received[:NONCE_BYTES])
        if cipher.decrypt(received[NONCE_BYTES : NONCE_BYTES + len(HEADER)]) != HEADER:
            problem = "its network key probably differs from this node's (or it is not a HexGen-2 node)"
            raise Refused(Cause.NETWORK_KEY, problem, KEY_REMEDY)
        return True
