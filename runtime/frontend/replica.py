"""A replica as the front end sees it: the links to its workers, and its KV cache budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hexgen2.placement import Placement
from hexgen2.placement import Replica as PlacedReplica
from runtime.frontend.attention_workers import AttentionWorkers
from runtime.launcher.worker_link import WorkerLink
from runtime.protocol.from_workers import Load
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Configure
from runtime.routing.instances import instances
from runtime.routing.kv_budget import KvBudget, growth_tokens, outgoing_tokens
from runtime.routing.kv_division import windowed_account
from runtime.routing.schedulers import needs_instances
from runtime.routing.windowed_room import WindowedAccount, WindowedRoom

FULL = 0.9
"""An engine that has requests waiting and uses this share of its KV cache gets no more requests."""


class Replica(KvBudget):
    """The links to the workers, one of which is the driver, and the KV cache that requests hold here.

    free_blocks and preemptions are what the driver reported last (None: nothing yet), and so is load, which
    only engines with a scheduler of their own report. attention_workers are there without `links`, since the
    replica serves without them too; it is None in most replicas.
    """

    __slots__ = (
        *("attention_workers", "driver", "free_blocks", "links", "load"),
        *("preemptions", "replica_id", "restarts", "role"),
    )

    def __init__(
        self,
        replica_id: str,
        role: str,
        driver: str,
        links: Mapping[str, WorkerLink],
        kv_budget_tokens: int,
        max_batch: int,
        growth_tokens: int = 0,
        high_water: float = 1.0,
        groups: int = 1,
        outgoing_tokens: int | None = None,
        rounding_tokens: int = 0,
        attention_workers: AttentionWorkers | None = None,
        windowed: WindowedAccount | None = None,
    ) -> None:
        super().__init__(
            *(kv_budget_tokens, max_batch, growth_tokens, high_water),
            groups=groups,
            outgoing_tokens=outgoing_tokens,
            rounding_tokens=rounding_tokens,
            largest_tokens=attention_workers.largest_tokens if attention_workers else None,
            windowed=windowed,
        )
        self.attention_workers = attention_workers
        self.replica_id, self.role, self.driver, self.links = replica_id, role, driver, links
        self.free_blocks: int | None = None
        self.load: Load | None = None
        self.preemptions = self.restarts = 0

    def begin_again(self, links: Mapping[str, WorkerLink]) -> None:
        """Replace lost workers by new ones, which hold no KV cache."""
        self.links, self.free_blocks, self.preemptions = links, None, 0
        self.load, self.crowded = None, False
        self.restarts += 1
        for request_id in list(self.held):
            self.release(request_id)

    def change_attention_workers(self, change: Callable[[AttentionWorkers], None]) -> None:
        """Lose an attention worker, or use one again: the KV budget follows."""
        assert self.attention_workers is not None
        change(self.attention_workers)
        self.kv_budget_tokens = self.attention_workers.budget_tokens
        self.largest_tokens = self.attention_workers.largest_tokens

    def take(self, load: Load) -> None:
        """Take over the load that the engine reports."""
        self.load, self.free_blocks, self.preemptions = load, load.free_blocks, load.preemptions
        self.crowded = load.waiting > 0 and load.kv_use >= FULL * self.high_water

    @property
    def heard(self) -> int:
        """Number of messages from the driver so far."""
        return self.links[self.driver].heard if self.driver in self.links else 0

    def send(self, message: Message) -> None:
        """Send to the driver."""
        self.links[self.driver].send(message)


def make_replicas(
    placement: Placement,
    configurations: Mapping[str, Configure],
    links: Mapping[str, WorkerLink],
    high_water: float | None = None,
    scheduler: str | None = None,
) -> dict[str, Replica]:
    """The replicas of a placement by id, with the links to those of their workers that have started.

    Parameters
    ----------
    configurations, links : by worker id, which is the id of its GPU
    high_water : see KvBudget; None: all
    scheduler : the replicas know what it needs
    """

    def make(replica: PlacedReplica) -> Replica:
        configured = configurations[replica.gpus[0]]
        room = windowed_room(configured)
        in_blocks = replica.role == "mixed" or placement.workers_of(replica.id)
        return Replica(
            replica_id=replica.id,
            role=replica.role,
            driver=replica.gpus[0],
            links={gpu: links[gpu] for gpu in replica.gpus if gpu in links},
            kv_budget_tokens=configured.kv_budget_tokens,
            max_batch=replica.max_batch,
            growth_tokens=growth_tokens(placement) if replica.decodes else 0,
            high_water=1.0 if high_water is None else high_water,
            groups=replica.attention_data_parallel,
            outgoing_tokens=outgoing_tokens(replica, placement),
            rounding_tokens=configured.block_tokens - 1 if in_blocks else 0,
            attention_workers=AttentionWorkers.of(placement, replica.id, configurations, links),
            windowed=windowed_account(placement, replica, room) if room else None,
        )

    made = {replica.id: make(replica) for replica in placement.replicas}
    if needs_instances(scheduler):
        for name, instance in instances(placement).items():
            made[name].know(instance)
    return made


def windowed_room(configured: Configure) -> WindowedRoom | None:
    """What a replica's layers with a window hold, if workers keep these apart."""
    if (layers := configured.windowed) is None:
        return None
    size, running = configured.block_tokens, configured.tokens_running
    return WindowedRoom(layers.kv_budget_tokens, layers.window, running, size)
