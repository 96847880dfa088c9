"""The greetings that two nodes exchange as soon as Noise has proved who they are.

Each says whether it admits the other and which version it runs, so that both can log why a connection fails.

A greeting is one line of multistream-select (a length, then text up to a newline), because nodes of versions
without greetings expect such a line here: they refuse and log it, and this end recognises their header.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Annotated

import msgspec
import trio
from libp2p.abc import ISecureConn
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException, MessageTooLarge
from libp2p.utils import encode_delim
from libp2p.utils.varint import read_varint_prefixed_bytes_limited
from msgspec import Meta

from runtime.p2p.transport.gate import Cause, Gate, Refused, not_allowed_here, not_allowed_there
from runtime.p2p.transport.opening import HEADER

NETWORK_PROTOCOL = 2  # version of connections and the node table
PREFIX = b"/hexgen2/greeting/1 "
MAX_GREETING_BYTES = 1024
FAREWELL_S = 1.0
SAME_VERSION = "install the same version of hexgen2 on both"

Number = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9A-Za-z.+!-]*\Z")]


class Greeting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether the other end is admitted, the protocol version of this node, and its version of hexgen2.

    A stranger who is not admitted learns neither version.
    """

    allowed: bool = True
    protocol: Number = ""
    version: Number = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Greeting)


@cache
def version() -> str:
    """The version of hexgen2 that runs here."""
    try:
        return importlib.metadata.version("hexgen2")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def greet(secured: ISecureConn, own_id: str, gate: Gate) -> None:
    """Exchange greetings over a connection whose other end Noise has identified.

    Raises
    ------
    Refused : one of the two does not admit the other, or their protocols differ
    """
    peer_id = str(secured.get_remote_peer())
    if not gate.allows(peer_id):
        await _send_away(secured)
        raise not_allowed_here(peer_id)
    protocol = f"{NETWORK_PROTOCOL}.{gate.protocol}"
    await _say(secured, Greeting(protocol=protocol, version=version()))
    theirs = await _heard(secured)
    if not theirs.allowed:
        raise not_allowed_there(own_id)
    if theirs.protocol != protocol:
        there, here = f"{theirs.protocol} (hexgen2 {theirs.version})", f"{protocol} (hexgen2 {version()})"
        problem = f"its version differs: it speaks protocol {there}, and this node speaks {here}"
        raise Refused(Cause.VERSION, problem, SAME_VERSION)
    if theirs.version != version():
        both = f"runs hexgen2 {theirs.version} and this node runs {version()}"
        gate.note(peer_id, "version", f"peer {peer_id} {both}; their protocol is the same")


async def _send_away(secured: ISecureConn) -> None:
    """Tell a stranger that it is refused. Reads its greeting too, or it might see a reset instead of ours."""
    with trio.move_on_after(FAREWELL_S):
        try:
            await _say(secured, Greeting(allowed=False))
            await _heard(secured)
        except (Refused, IOException):
            pass  # it is refused in any case


async def _say(secured: ISecureConn, greeting: Greeting) -> None:
    await secured.write(encode_delim(PREFIX + _encoder.encode(greeting)))


async def _heard(secured: ISecureConn) -> Greeting:
    """Read the other end's greeting.

    Raises
    ------
    Refused : it does not send one
    """
    try:
        line = await read_varint_prefixed_bytes_limited(secured, MAX_GREETING_BYTES)
        if line == HEADER[1:]:
            raise Refused(
                Cause.VERSION, "it runs an older version of hexgen2, without greetings", SAME_VERSION
            )
        if not line.startswith(PREFIX):
            raise ValueError("no greeting")
        return _decoder.decode(line.removeprefix(PREFIX))
    except (ParseError, MessageTooLarge, ValueError, msgspec.MsgspecError, RecursionError) as error:
        problem = "its version differs: it does not send a greeting that this node understands"
        raise Refused(Cause.VERSION, problem, SAME_VERSION) from error
    except IOException as error:
        problem = "it closed the connection once it saw who this node is"
        raise Refused(Cause.UNCLEAR, problem, "see its log for the reason") from error
