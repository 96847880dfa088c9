"""Tensors that the workers of one replica exchange: collectives in a stage, activations between stages.

Ranks on CPUs of one host sum through memory that they share (runtime/native/exchange.py), others through
torch's process groups.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime import native
from runtime.engine.rank import Rank

log = logging.getLogger(__name__)

_TIMEOUT = timedelta(seconds=120)
_SIOCGIFADDR = 0x8915
_HANDLE_BYTES = 128


class Collectives:
    """Exchanges tensors inside one replica, after `join`. A replica of one worker needs no groups.

    Collectives and sends run in the order of the steps, which is the same on every worker. They raise
    RuntimeError if another worker is lost or takes more than two minutes.

    Parameters
    ----------
    shares_memory : whether ranks on CPUs of one host sum through shared memory
    """

    def __init__(self, rank: Rank, device: torch.device, shares_memory: bool = True) -> None:
        self.rank = rank
        self.device = device
        self._shares_memory = shares_memory and device.type == "cpu"
        self._tp_group: Any = None
        self._exchange: native.Exchange | None = None
        self._unfinished: deque[tuple[Any, torch.Tensor]] = deque()

    def join(self, host: str, store: dist.Store) -> None:
        """Create the replica's process groups; all its workers must call this at about the same time."""
        rank, device = self.rank, self.device
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_of(host)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank.ranks(rank.stage_index)[rank.tp_rank],
            world_size=len(rank.workers),
            timeout=_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        for index, stage in enumerate(rank.stages):
            if len(stage.workers) > 1:
                group = dist.new_group(rank.ranks(index), timeout=_TIMEOUT)
                if index == rank.stage_index:
                    self._tp_group = group
        if self._tp_group is not None and self._shares_memory:
            self._exchange = self._shared()

    def _shared(self) -> native.Exchange | None:
        """The memory that the stage's ranks share; None where one of them can't open it."""
        rank, root = self.rank, self.rank.ranks(self.rank.stage_index)[0]
        descriptor, handle = -1, ""
        with suppress(OSError):
            if rank.tp_rank == 0:
                descriptor, handle = native.memory_for(rank.tp)
        told = torch.tensor(list(handle.encode().ljust(_HANDLE_BYTES)), dtype=torch.uint8)
        dist.broadcast(told, src=root, group=self._tp_group)
        try:
            handle = bytes(told.tolist()).decode().strip()
            exchange = native.Exchange(handle, rank.tp_rank, rank.tp, _TIMEOUT.total_seconds())
        except (OSError, ValueError) as error:
            log.info("ranks exchange through sockets: %s", error)
            exchange = None
        opened = torch.tensor(exchange is not None, dtype=torch.int32)
        dist.all_reduce(opened, dist.ReduceOp.MIN, group=self._tp_group)
        if descriptor >= 0:
            os.close(descriptor)
        if exchange is not None and not opened:
            exchange.close()
        return exchange if opened else None

    def check(self) -> None:
        """Raise RuntimeError if a rank was missing in a step that was replayed."""
        if self._exchange is not None:
            self._exchange.check()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the stage's tensor-parallel ranks, in place."""
        if self._exchange is not None and self._exchange.takes(tensor):
            return self._exchange.sum(tensor)
        return tensor if self._tp_group is None else native.apart(self._summed, tensor)

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._tp_group)
        return tensor

    def all_reduce_largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of each number over the stage's tensor-parallel ranks, in place."""
        if self._tp_group is not None:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._tp_group)
        return tensor

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Gather [n, columns] of each rank to [n, ranks x columns] on rank 0 of the stage; None elsewhere."""
        if self._exchange is not None and self._exchange.takes(tensor):
            return self._exchange.gather(tensor)
        return tensor if self._tp_group is None else native.apart(self._gathered, tensor)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor | None:
        root = self.rank.ranks(self.rank.stage_index)[0]
        parts = [torch.empty_like(tensor) for _ in range(self.rank.tp)] if self.rank.tp_rank == 0 else None
        dist.gather(tensor.contiguous(), parts, dst=root, group=self._tp_group)
        return None if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor on the stage's other ranks with that of its rank 0."""
        if self._exchange is not None and self._exchange.takes(tensor):
            return self._exchange.sum(tensor if self.rank.tp_rank == 0 else tensor.zero_())
        if self._tp_group is not None:
            dist.broadcast(tensor, src=self.rank.ranks(self.rank.stage_index)[0], group=self._tp_group)
        return tensor

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Receive activations from the previous stage: from its rank (own rank modulo its degree)."""
        sources = self.rank.ranks(self.rank.stage_index - 1)
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(tensor, src=sources[self.rank.tp_rank % len(sources)])
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Send activations to the ranks of the next stage that receive from this one. Returns before they
        arrive, but waits once more than a pipeline's worth of them is in flight."""
        targets = self.rank.ranks(self.rank.stage_index + 1)
        for target in targets[self.rank.tp_rank :: self.rank.tp]:
            self._unfinished.append((dist.isend(tensor, dst=target), tensor))
        while len(self._unfinished) > len(self.rank.stages) * len(targets):
            self._unfinished.popleft()[0].wait()


def open_store(host: str, world_size: int) -> dist.TCPStore:
    """The rendezvous store of a replica, on a free port of this address only; its driver opens it."""
    listener = socket.create_server((host, 0))
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, world_size: int) -> dist.TCPStore:
    """The driver's store, from another worker."""
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)


def interface_of(host: str) -> str:
    """The name of the network interface with an IPv4 address, so that process groups bind to it alone. All of
    127.0.0.0/8 belongs to the loopback interface, which reports only one address.

    Raises
    ------
    OSError : no interface has it
    """
    address = socket.gethostbyname(host)
    wanted = socket.inet_aton("127.0.0.1" if address.startswith("127.") else address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if answer[20:24] == wanted:
                return name
    raise OSError(f"no network interface has the address {host}")
