"""The interface of an engine: the part of a worker that computes steps. All else is the same for all
engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runtime.kv_cache.pages import Pages
from runtime.protocol.between_workers import Hello, Step, StepResult
from runtime.protocol.framing import Connection
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Configure, Connect

if TYPE_CHECKING:
    import torch

    from runtime.kv_transfer.memory import SharedPool

OnLayer = Callable[[int, "torch.cuda.Event | None"], None]
"""Called with each global layer number when its keys and values are in the cache, or will be after the
event."""


Rows = memoryview
"""Activations [tokens, hidden] in the type of the launch, as bytes."""


class Spec(Protocol):
    """Sizes of the whole model. position_limit is the longest sequence in tokens; None: no limit."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def position_limit(self) -> int | None: ...


class Engine(ABC):
    """One worker's share of a model. The worker creates it, calls `load`, then `join`, then runs steps.

    The main thread makes all calls except `welcome`. Exceptions that a method does not name are faults: they
    end the worker, unless they concern one request only (`Faults`).

    Attributes
    ----------
    store_port : port of the rendezvous store that this worker opened for its replica; 0 if it has none
    spec, weight_bytes : sizes of the whole model, and bytes of the weights loaded here; set by `load`
    cache : the KV cache of this worker's layers and heads; set by `load`
    shared : the memory of the cache if other processes can map it, else None; set by `load`
    windowed_cache, windowed_shared : the same of layers with a window, where the configuration has these
        apart; else None
    report : called with messages for the driver, from any thread; set by the executor
    """

    store_port: int = 0
    spec: Spec
    cache: Pages
    shared: SharedPool | None = None
    windowed_cache: Pages | None = None
    windowed_shared: SharedPool | None = None
    weight_bytes: int = 0

    def __init__(self) -> None:
        self.report: Callable[[Message], None] = lambda _: None

    @property
    def cache_blocks(self) -> tuple[int, int]:
        """Blocks of the cache, and of that of windowed layers if they have one."""
        return self.cache.blocks, self.windowed_cache.blocks if self.windowed_cache is not None else 0

    @abstractmethod
    def load(self) -> None:
        """Load this worker's share of the weights and create its KV cache.

        Raises
        ------
        InputError : the checkpoint is missing, damaged or not what the configuration says
        """

    @abstractmethod
    def join(self, addresses: Connect) -> None:
        """Connect to the replica's other workers; waits for those that are still loading."""

    def reconnect(self, addresses: Connect) -> None:  # noqa: B027
        """Take new addresses of attention workers; called by another thread."""

    def welcome(self, connection: Connection, introduced: Hello) -> bool:
        """Serve a connection of another worker until it ends; False if it is not for the engine."""
        return False

    @abstractmethod
    def turn(self, config: Configure) -> None:
        """Take another role with the weights and connections that are here, while no request is.

        `cache` and `shared` are new ones, unless the size is the same; the caller holds no reference to the
        old ones any more.
        """

    @abstractmethod
    def begin(self, step: Step) -> None:
        """Take note of the requests that begin with a step; called before `run`."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended or was preempted; unknown ids are ignored."""

    @abstractmethod
    def run(
        self,
        step: Step,
        tables: Mapping[str, list[int]],
        windowed_tables: Mapping[str, list[int]],
        on_layer: OnLayer | None,
    ) -> StepResult | None:
        """Run this worker's share of a step.

        Parameters
        ----------
        tables : the blocks of each request, in the order of its tokens
        windowed_tables : the same in the layers with a window; those of tokens that are no longer read are
            any. Where all layers have one table, that again
        on_layer : called after each layer; None: nobody waits for layers

        Returns
        -------
        the tokens on the worker that samples; None on others
        """


@dataclass(frozen=True, slots=True)
class HopOutcome:
    """What a step comes to in a range of layers, on rank 0 of its stage: the rows of each sequence for the
    next hop, or, with the model's last layer, the tokens."""

    rows: tuple[Rows, ...] = ()
    result: StepResult | None = None


class RangeEngine(Engine):
    """An engine that also computes ranges of layers, which requests enter at layers of their own.

    Attributes
    ----------
    row_bytes : of the activations of one token; set by `load`
    """

    row_bytes: int

    @abstractmethod
    def run_hop(
        self,
        step: Step,
        tables: Mapping[str, list[int]],
        windowed_tables: Mapping[str, list[int]],
        entering: Sequence[Rows | None],
    ) -> HopOutcome:
        """Run this worker's share of a step through a range of layers.

        Parameters
        ----------
        step : its sequences are in order of first_layer
        tables, windowed_tables : as of `run`
        entering : what each sequence comes with, None where it begins with the embedding; () on ranks other
            than 0, which get it from there

        Raises
        ------
        ValueError : rows of another size than the tokens of their sequence have
        """
