"""What a node says of itself, signed with its key: whoever has the peer id can check every word's origin.

A signature proves who said it, not that it is true: a load is a hint for people and dashboards, and routing
rests only on what this side counted or measured itself.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from libp2p.peer.id import ID
from msgspec import Meta

from runtime.p2p.membership.identity import Identity

MAX_RECORD_BYTES = 16 * 1024
CLOCK_BOUND_S = 120.0  # how far two nodes' clocks, and a record's way, may differ

Role = Literal["head", "worker"]
Status = Literal["joining", "ready", "draining", "left"]
Name = Annotated[str, Meta(max_length=128)]
MAX_NAME = 128
NodeName = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[^/\s\x00-\x1f\x7f]+\Z")]
CardName = Annotated[str, Meta(max_length=128, pattern=r"\A[^\x00-\x1f\x7f]+\Z")]
Address = Annotated[str, Meta(max_length=256)]
PeerId = Annotated[str, Meta(min_length=1, max_length=128)]


def is_node_name(name: str) -> bool:
    """Whether a node may be called this: printable, without slash or space. Names are shown to operators, so
    nothing in them may move a terminal's cursor or turn the order of letters."""
    return 0 < len(name) <= MAX_NAME and name.isprintable() and not set(name) & set("/ ")


class BadRecord(ValueError):
    """A record that no honest node sends; `reason` is one of a few words, to be counted by."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class Device(msgspec.Struct, frozen=True, array_like=True):
    """One GPU, or what stands for it, and its memory (0: not known)."""

    name: CardName
    memory_bytes: Annotated[int, Meta(ge=0)]


class NodeRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """A node as it describes itself.

    load : busy share, 0 to 1; latency_ms : milliseconds to other peers by their id, as it measured them;
    sequence : grows with each record of a node, over restarts too; issued_at : its clock, Unix seconds
    """

    peer_id: PeerId
    name: NodeName
    addresses: Annotated[tuple[Address, ...], Meta(max_length=32)] = ()
    services: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    hardware: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()
    role: Role = "worker"
    status: Status = "joining"
    load: Annotated[float, Meta(ge=0, le=1)] = 0.0
    latency_ms: Annotated[dict[PeerId, Annotated[float, Meta(ge=0)]], Meta(max_length=256)] = {}
    sequence: Annotated[int, Meta(ge=0, le=2**62)] = 0
    issued_at: float = 0.0

    def says_the_same(self, other: NodeRecord) -> bool:
        """Whether all but the figures that change all the time is equal."""
        facts = {"load": 0.0, "latency_ms": {}, "sequence": 0, "issued_at": 0.0}
        return msgspec.structs.replace(self, **facts) == msgspec.structs.replace(other, **facts)


class SignedRecord(msgspec.Struct, frozen=True, array_like=True):
    """The msgpack of a NodeRecord, and its node's Ed25519 signature of these bytes after CONTEXT."""

    content: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
    signature: Annotated[bytes, Meta(max_length=64)]


CONTEXT = b"hexgen2 node record 1\n"  # no signature made for another purpose is one of a record
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeRecord)


def sign(record: NodeRecord, identity: Identity) -> SignedRecord:
    """The record as it travels.

    Raises
    ------
    BadRecord : it is larger than any node takes
    """
    content = _encoder.encode(record)
    if len(content) > MAX_RECORD_BYTES:
        raise BadRecord("size", f"{len(content)} bytes")
    return SignedRecord(content, identity.sign(CONTEXT + content))


def verify(signed: SignedRecord, now_s: float) -> NodeRecord:
    """What the record says, if its node said it, about itself, and not long ago (now_s: Unix seconds).

    Raises
    ------
    BadRecord : size, malformed, signature, clock
    """
    if len(signed.content) > MAX_RECORD_BYTES:
        raise BadRecord("size", f"{len(signed.content)} bytes")
    try:
        record = _decoder.decode(signed.content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord("malformed", str(error)) from error
    if not all(map(math.isfinite, (record.load, record.issued_at, *record.latency_ms.values()))):
        raise BadRecord("malformed", "a figure is not finite")
    shown = (
        *record.addresses,
        *record.services,
        *(each.name for each in record.hardware),
        *record.latency_ms,
    )
    if not is_node_name(record.name) or not all(map(str.isprintable, shown)):
        raise BadRecord("malformed", "a text that does not print")
    if not _is_signature(record.peer_id, CONTEXT + signed.content, signed.signature):
        raise BadRecord("signature", f"not of {record.peer_id}")
    if abs(now_s - record.issued_at) > CLOCK_BOUND_S:
        raise BadRecord("clock", f"issued {now_s - record.issued_at:.0f} s ago")
    return record


def _is_signature(peer_id: str, content: bytes, signature: bytes) -> bool:
    try:
        key = ID.from_string(peer_id).extract_public_key()
        return key is not None and key.verify(content, signature)
    except Exception:  # whatever libp2p raises for what is no peer id, no key or no signature
        return False
