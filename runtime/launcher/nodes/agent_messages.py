"""What a head and the agents of its nodes say to each other: one small set of typed messages, in msgpack.

Each is one frame of a channel. A head keeps one channel of `NODE_SERVICE` to every node, on which the agent
says who it is, and whose end means that the node is gone. For every replica with workers on a node there is
one channel of `WORKERS_SERVICE`: first `StartWorkers`, then the frames of runtime/protocol between the head
and these workers. The workers live as long as their channel.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cost_model.printable import one_line
from runtime.frames import BadFrame
from runtime.p2p.membership.record import Device, NodeName, is_node_name
from runtime.protocol.message import PROTOCOL_VERSION

AGENT_PROTOCOL = 3
NODE_PROTOCOL = f"{AGENT_PROTOCOL}.{PROTOCOL_VERSION}"
"""Versions of what a head exchanges with agents and with workers; its nodes must have the same."""
NODE_SERVICE, WORKERS_SERVICE = "node", "workers"


class AgentMessage(msgspec.Struct, tag=True, frozen=True, array_like=True, kw_only=True):
    """Base: the struct's name is its tag on the wire."""


class Welcome(AgentMessage, frozen=True):
    """Agent to head, first on a node channel: the node's name, the address on which its workers listen, its
    checkpoint's folder ("": the one that the head names), its CPU cores, and its GPUs, as its workers number
    them."""

    protocol: int
    node: NodeName
    address: str
    model_path: str
    cores: tuple[int, ...]
    gpus: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()


class StartWorkers(AgentMessage, frozen=True):
    """Head to agent, first on a workers channel: start these workers of a replica, if the checkpoint in this
    folder has the digest ("": the engine needs none). Each then gets its Configure as any worker does."""

    protocol: int
    replica: str
    workers: tuple[str, ...]
    engine: str
    checkpoint: str
    digest: str


class WorkerFrame(AgentMessage, frozen=True):
    """Both ways: the body of a frame of runtime.protocol, to or from a worker."""

    worker: str
    body: bytes


class WorkerEnded(AgentMessage, frozen=True):
    """Agent to head: nothing more will come from this worker."""

    worker: str


class StopWorkers(AgentMessage, frozen=True):
    """Head to agent: the workers were told to shut down; kill those that don't. Answered by WorkersEnded."""


class WorkersEnded(AgentMessage, frozen=True):
    """Agent to head: no process of this channel is left."""


class StartFailed(AgentMessage, frozen=True):
    """Agent to head: the workers can't be started. kind "input" is the user's ("problem; remedy"), "fault" is
    ours, "busy": another head has them."""

    kind: str
    text: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Welcome | StartWorkers | WorkerFrame | WorkerEnded | StopWorkers | WorkersEnded | StartFailed
)


def encode(message: AgentMessage) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def decode(frame: bytes) -> AgentMessage:
    """The message of a frame.

    Raises
    ------
    BadFrame : not one of ours
    """
    try:
        message = _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message between head and agent: {error}") from error
    match message:
        case StartFailed():
            return msgspec.structs.replace(message, text=one_line(message.text))
        case Welcome():
            if not is_node_name(message.node):
                raise BadFrame(f"{message.node!r} is not the name of a node")
            shown: tuple[str, ...] = (
                message.address,
                message.model_path,
                *(gpu.name for gpu in message.gpus),
            )
        case StartWorkers():
            shown = (message.replica, *message.workers, message.engine, message.checkpoint, message.digest)
        case _:
            return message
    if not all(map(str.isprintable, shown)):
        raise BadFrame(f"a {type(message).__name__} with a text that does not print")
    return message
