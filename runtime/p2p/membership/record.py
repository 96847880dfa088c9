"""A node's description of itself, signed with its key, so that anybody can check where it comes from.

A signature proves who made a record, not that it is true. The load, for example, is a hint for people and
dashboards; routing uses only what the head itself counts and measures.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from libp2p.peer.id import ID
from msgspec import Meta

from runtime.p2p.membership.identity import Identity

MAX_RECORD_BYTES = 16 * 1024
CLOCK_BOUND_S = 120.0  # limit on a record's age: the difference of two clocks plus the time under way

Role = Literal["head", "worker"]
Status = Literal["joining", "ready", "draining", "left"]
Name = Annotated[str, Meta(max_length=128)]
MAX_NAME = 128
NodeName = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"\A[^/\s\x00-\x1f\x7f]+\Z")]
CardName = Annotated[str, Meta(max_length=128, pattern=r"\A[^\x00-\x1f\x7f]+\Z")]
Address = Annotated[str, Meta(max_length=256)]
PeerId = Annotated[str, Meta(min_length=1, max_length=128)]


def is_node_name(name: str) -> bool:
    """Whether this is a valid node name: printable, without slashes or spaces.

    Operators see names in terminals, so a name must not move the cursor or reverse the order of letters.
    """
    return 0 < len(name) <= MAX_NAME and name.isprintable() and not set(name) & set("/ ")


class BadRecord(ValueError):
    """An invalid record; `reason` is one of a few fixed words, by which refusals are counted."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"{reason}: {detail}" if detail else reason)


class Device(msgspec.Struct, frozen=True, array_like=True):
    """A GPU, or the CPU of a node without GPUs, and its memory (0: not known)."""

    name: CardName
    memory_bytes: Annotated[int, Meta(ge=0)]


class NodeRecord(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """A node's description of itself.

    load : busy share, 0 to 1; latency_ms : measured latency to other peers, by peer id; sequence : grows with
    each record of the node, also across restarts; issued_at : Unix seconds by the node's clock
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
        """Whether two records agree in everything but the fields that change all the time."""
        facts = {"load": 0.0, "latency_ms": {}, "sequence": 0, "issued_at": 0.0}
        return msgspec.structs.replace(self, **facts) == msgspec.structs.replace(other, **facts)


class SignedRecord(msgspec.Struct, frozen=True, array_like=True):
    """The msgpack of a NodeRecord, and its node's Ed25519 signature of these bytes after CONTEXT."""

    content: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
    signature: Annotated[bytes, Meta(max_length=64)]


CONTEXT = b"hexgen2 node record 1\n"  # so that no signature made for another purpose is valid for a record
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NodeRecord)


def sign(record: NodeRecord, identity: Identity) -> SignedRecord:
    """Sign a record with its node's key.

    Raises
    ------
    BadRecord : the record is larger than MAX_RECORD_BYTES
    """
    content = _encoder.encode(record)
    if len(content) > MAX_RECORD_BYTES:
        raise BadRecord("size", f"{len(content)} bytes")
    return SignedRecord(content, identity.sign(CONTEXT + content))


def verify(signed: SignedRecord, now_s: float) -> NodeRecord:
    """Decode a record after checking that its node signed it, recently (now_s: Unix seconds).

    Raises
    ------
    BadRecord : with the reason "size", "malformed", "signature" or "clock"
    """
    if len(signed.content) > MAX_RECORD_BYTES:
        raise BadRecord("size", f"{len(signed.content)} bytes")
    try:
        record = _decoder.decode(signed.content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord("malformed", str(error)) from error
    if not all(map(math.isfinite, (record.load, record.issued_at, *record.latency_ms.values()))):
        raise BadRecord("malformed", "a number is not finite")
    devices = (each.name for each in record.hardware)
    shown = (*record.addresses, *record.services, *devices, *record.latency_ms)
    if not is_node_name(record.name) or not all(map(str.isprintable, shown)):
        raise BadRecord("malformed", "a text is not printable")
    if not _is_signature(record.peer_id, CONTEXT + signed.content, signed.signature):
        raise BadRecord("signature", f"not by {record.peer_id}")
    if abs(now_s - record.issued_at) > CLOCK_BOUND_S:
        raise BadRecord("clock", f"issued {now_s - record.issued_at:.0f} s ago")
    return record


def _is_signature(peer_id: str, content: bytes, signature: bytes) -> bool:
    try:
        key = ID.from_string(peer_id).extract_public_key()
        return key is not None and key.verify(content, signature)
    except Exception:  # libp2p raises many kinds for a bad peer id, key or signature
        return False
