"""What an engine is to its worker: the part that computes steps. All else is the same whatever the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from runtime.kv_cache.pages import Pages
from runtime.protocol.between_workers import Hello, Step, StepResult
from runtime.protocol.framing import Connection
from runtime.protocol.to_workers import Connect

if TYPE_CHECKING:
    import torch

    from runtime.kv_transfer.memory import SharedPool

OnLayer = Callable[[int, "torch.cuda.Event | None"], None]
"""Called with each global layer number once its keys and values are in the cache, or are after the event."""


class Spec(Protocol):
    """Sizes of the whole model. position_limit is None where positions may go on for ever."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def position_limit(self) -> int | None: ...


class Engine(ABC):
    """One worker's share of the model. It is made, `load`ed, `join`ed with the others, and runs steps.

    Steps and `forget` belong to the main thread; `welcome` is called from others.

    Attributes
    ----------
    store_port : where the replica's others find what they join by; 0 for nowhere
    spec, cache, shared, weight_bytes : of the model, once it is loaded; shared is the memory of the cache,
        if other processes can read it
    """

    store_port: int = 0
    spec: Spec
    cache: Pages
    shared: SharedPool | None = None
    weight_bytes: int = 0

    @abstractmethod
    def load(self) -> None:
        """Load this worker's share and make its KV cache.

        Raises
        ------
        InputError : the model is not what the user said
        """

    @abstractmethod
    def join(self, addresses: Connect) -> None:
        """Connect to the replica's other workers, who have loaded, or will soon."""

    def welcome(self, connection: Connection, introduced: Hello) -> bool:
        """Serve a connection of another worker until it ends; False if it is not for this engine."""
        return False

    @abstractmethod
    def begin(self, step: Step) -> None:
        """Take note of the requests that begin with a step."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """A request has ended, or was preempted."""

    @abstractmethod
    def run(self, step: Step, tables: Mapping[str, list[int]], on_layer: OnLayer | None) -> StepResult | None:
        """Run this worker's share of a step whose requests have their blocks.

        Returns
        -------
        the tokens, on the worker that samples; None elsewhere
        """
