"""The messages between a head and the agents of its nodes, in msgpack.

Each message is one frame of a channel. A head keeps one channel of `NODE_SERVICE` to every node: the agent
introduces itself there, and when the channel ends, the node is gone. For each replica and each node that has
workers of it there is one channel of `WORKERS_SERVICE`: first `StartWorkers`, then the frames of
runtime/protocol between the head and these workers. The workers live as long as their channel.
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
"""Versions of the messages to agents and to workers; a head and its nodes must have the same."""
NODE_SERVICE, WORKERS_SERVICE = "node", "workers"


class AgentMessage(msgspec.Struct, tag=True, frozen=True, array_like=True, kw_only=True):
    """Base of all messages; the name of the struct is its tag on the wire."""


class Welcome(AgentMessage, frozen=True):
    """Agent to head, first message on a node channel: what the node is and has.

    address : where its workers listen; model_path : folder of its checkpoint ("": the folder that the head
    names); cores : CPU cores; gpus : in the order in which its workers number them
    """

    protocol: int
    node: NodeName
    address: str
    model_path: str
    cores: tuple[int, ...]
    gpus: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()


class StartWorkers(AgentMessage, frozen=True):
    """Head to agent, first message on a workers channel: start these workers of a replica.

    The agent refuses unless the checkpoint has this digest ("": the engine needs no checkpoint). Each worker
    then receives its Configure as any other worker does.
    """

    protocol: int
    replica: str
    workers: tuple[str, ...]
    engine: str
    checkpoint: str
    digest: str


class WorkerFrame(AgentMessage, frozen=True):
    """Both directions: the body of a frame of runtime.protocol to or from a worker."""

    worker: str
    body: bytes


class WorkerEnded(AgentMessage, frozen=True):
    """Agent to head: this worker has closed its connection."""

    worker: str


class StopWorkers(AgentMessage, frozen=True):
    """Head to agent: workers were asked to shut down; kill those that don't. Answered by WorkersEnded."""


class WorkersEnded(AgentMessage, frozen=True):
    """Agent to head: all workers of this channel have ended."""


class StartFailed(AgentMessage, frozen=True):
    """Agent to head: the workers were not started.

    kind : "input" if the user must change something (text: "problem; remedy"), "fault" if the software
    failed, "busy" if another head holds the workers
    """

    kind: str
    text: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Welcome | StartWorkers | WorkerFrame | WorkerEnded | StopWorkers | WorkersEnded | StartFailed
)


def encode(message: AgentMessage) -> bytes:
    """A message as a frame."""
    return _encoder.encode(message)


def decode(frame: bytes) -> AgentMessage:
    """The message in a frame.

    Raises
    ------
    BadFrame : the frame is none of these messages, or holds text that is not printable
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
                raise BadFrame(f"{message.node!r} is not a valid node name")
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
        raise BadFrame(f"{type(message).__name__} with text that is not printable")
    return message
