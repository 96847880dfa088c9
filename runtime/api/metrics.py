"""Prometheus metrics of the front end, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.frontend.coordinator import Coordinator
from runtime.frontend.request import RequestRecord
from runtime.routing.replica_state import ReplicaState

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
ROUTE = ["prefill_replica", "decode_replica"]


class Metrics:
    """Counts every request once, when it ends; the coordinator notifies it (see Observer).

    Parameters
    ----------
    clients : names of the clients with a key; only these are counted by client
    """

    def __init__(self, clients: Iterable[str] = ()) -> None:
        self._clients = frozenset(clients)
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter("hexgen2_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._refused = Counter(
            "hexgen2_requests_refused", "Requests rejected before queueing", ["reason"], registry=registry
        )
        self._resumes = Counter(
            "hexgen2_requests_resumed",
            "Requests resumed on another replica after a failure",
            registry=registry,
        )
        self._replans = Counter(
            "hexgen2_replans", "Switches to another placement while serving", registry=registry
        )
        self._prompt = Counter("hexgen2_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached = Counter(
            "hexgen2_prompt_tokens_cached", "Prompt tokens found in the KV cache", registry=registry
        )
        self._output = Counter("hexgen2_output_tokens", "Output tokens", registry=registry)
        self._route_requests = Counter(
            "hexgen2_route_requests",
            "Requests by route; through ranges of layers, by every pair of replicas along the path",
            ROUTE,
            registry=registry,
        )
        self._route_bytes = Counter(
            "hexgen2_route_kv_bytes", "Bytes of KV cache transferred", ROUTE, registry=registry
        )
        self._route_seconds = Counter(
            "hexgen2_route_kv_seconds", "Total time of KV transfers", ROUTE, registry=registry
        )
        self._client_requests = Counter(
            "hexgen2_client_requests", "Requests by key", ["client", "outcome"], registry=registry
        )
        self._client_tokens = Counter(
            "hexgen2_client_tokens", "Prompt and output tokens by key", ["client"], registry=registry
        )
        self._ttft = _histogram(registry, "time_to_first_token", "TTFT", SECONDS)
        self._tpot = _histogram(registry, "time_per_output_token", "TPOT, mean per request", TOKEN_SECONDS)
        self._itl = _histogram(registry, "inter_token_latency", "ITL", TOKEN_SECONDS)
        self._e2e = _histogram(registry, "e2e_request_latency", "From arrival to the last token", SECONDS)
        self._queue = _histogram(registry, "queue_time", "From arrival to the start on a route", SECONDS)
        self._transfer = _histogram(registry, "kv_transfer", "First to last byte of a KV transfer", SECONDS)

    def token_gap(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was rejected before it was queued."""
        self._refused.labels(reason).inc()

    def replanned(self) -> None:
        """Count a switch to another placement."""
        self._replans.inc()

    def ended(self, record: RequestRecord) -> None:
        self._requests.labels(record.outcome).inc()
        self._output.inc(record.output_tokens)
        self._resumes.inc(record.resumes)
        if record.client in self._clients:
            self._client_requests.labels(record.client, record.outcome).inc()
            self._client_tokens.labels(record.client).inc(record.prompt_tokens + record.output_tokens)
        if not record.routed_s:
            return
        route = (record.prefill_replica, record.decode_replica)
        self._prompt.inc(record.prompt_tokens)
        self._cached.inc(record.cached_tokens)
        for pair in pairwise(record.path) if len(record.path) > 1 else (route,):
            self._route_requests.labels(*pair).inc()
        self._queue.observe(record.routed_s - record.arrived_s)
        if record.kv_bytes:
            self._route_bytes.labels(*route).inc(record.kv_bytes)
            self._route_seconds.labels(*route).inc(record.kv_s)
            self._transfer.observe(record.kv_s)
        if not record.first_token_s:
            return
        self._ttft.observe(record.first_token_s - record.arrived_s)
        if record.output_tokens > 1:
            self._tpot.observe((record.last_token_s - record.first_token_s) / (record.output_tokens - 1))
        if record.outcome in ("stop", "length"):
            self._e2e.observe(record.ended_s - record.arrived_s)

    def watch(self, coordinator: Coordinator) -> None:
        """Also export the coordinator's queue and replicas."""
        self.registry.register(_Gauges(coordinator))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


ENGINE = {
    "running": ("hexgen2_engine_requests_running", "In-flight requests, as the engine reports"),
    "waiting": ("hexgen2_engine_requests_waiting", "Requests waiting inside the engine, as it reports"),
    "kv_use": ("hexgen2_engine_kv_use_ratio", "Share of the KV cache in use, as the engine reports"),
}
"""Gauges that engines with a scheduler of their own (vLLM) report, by field of the Load message."""


HEADS = {
    "redispatches": ("requests_redispatched", "Requests whose KV heads were dispatched anew"),
    "hauled_bytes": ("hauled_bytes", "Bytes of KV cache copied because heads moved"),
    "recomputed": ("requests_recomputed", "Requests computed again after an attention worker was lost"),
}
"""Counters of replicas with attention workers, by field of the HeadCounts message."""


class _Gauges(Collector):
    """The coordinator's state at the moment of the scrape."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        coordinator = self._coordinator
        yield GaugeMetricFamily("hexgen2_requests_waiting", "Requests in the queue", coordinator.waiting)
        yield CounterMetricFamily(
            "hexgen2_share_moves",
            "How often shares of routes moved with the lengths of requests",
            coordinator.share_moves,
        )
        running = GaugeMetricFamily("hexgen2_requests_running", "Requests on a replica", labels=["replica"])
        used = GaugeMetricFamily("hexgen2_kv_tokens", "KV cache tokens accounted for", labels=["replica"])
        budget = GaugeMetricFamily(
            "hexgen2_kv_tokens_budget", "KV cache tokens available", labels=["replica"]
        )
        free = GaugeMetricFamily("hexgen2_kv_blocks_free", "Free KV cache blocks", labels=["replica"])
        preempted = CounterMetricFamily(
            "hexgen2_preemptions", "Requests preempted and recomputed", labels=["replica"]
        )
        up = GaugeMetricFamily("hexgen2_replica_up", "1 while the replica serves", labels=["replica"])
        restarts = CounterMetricFamily(
            "hexgen2_replica_restarts", "Times the replica was restarted", labels=["replica"]
        )
        unavailable = coordinator.lost.keys() | coordinator.states.which_are(ReplicaState.STARTING)
        for replica_id, replica in coordinator.replicas.items():
            running.add_metric([replica_id], len(replica.held))
            used.add_metric([replica_id], replica.held_tokens)
            budget.add_metric([replica_id], replica.kv_budget_tokens)
            up.add_metric([replica_id], replica_id not in unavailable)
            preempted.add_metric([replica_id], replica.preemptions)
            restarts.add_metric([replica_id], replica.restarts)
            if replica.free_blocks is not None:
                free.add_metric([replica_id], replica.free_blocks)
        yield from (running, used, budget, free, preempted, up, restarts)
        if coordinator.weighs:
            work = GaugeMetricFamily(
                "hexgen2_replica_work",
                "Work of the requests on a replica, as the scheduler weighs them",
                labels=["replica"],
            )
            for replica_id, replica in coordinator.replicas.items():
                work.add_metric([replica_id], replica.backlog.work)
            yield work
        yield from self._of_engines()
        yield from self._of_attention_workers()

    def _of_attention_workers(self) -> Iterator[Metric]:
        found = {
            name: own.attention_workers
            for name, own in self._coordinator.replicas.items()
            if own.attention_workers is not None
        }
        if not found:
            return
        labels = ["replica", "worker"]
        up = GaugeMetricFamily("hexgen2_attention_worker_up", "1 while it serves", labels=labels)
        restarts = CounterMetricFamily(
            "hexgen2_attention_worker_restarts", "Times the attention worker was restarted", labels=labels
        )
        by_worker: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            "heads": GaugeMetricFamily("hexgen2_kv_heads", "KV heads on an attention worker", labels=labels),
            "free_blocks": GaugeMetricFamily(
                "hexgen2_kv_head_blocks_free", "Free blocks of single KV heads", labels=labels
            ),
            "dispatched": CounterMetricFamily(
                "hexgen2_kv_heads_dispatched", "KV heads dispatched to an attention worker", labels=labels
            ),
        }
        by_replica = {
            key: CounterMetricFamily(f"hexgen2_{name}", what, labels=["replica"])
            for key, (name, what) in HEADS.items()
        }
        for replica_id, workers in found.items():
            for worker in workers.links:
                up.add_metric([replica_id, worker], worker not in workers.away)
                restarts.add_metric([replica_id, worker], workers.restarts.get(worker, 0))
                for key, family in by_worker.items() if workers.counts else ():
                    family.add_metric([replica_id, worker], getattr(workers.counts, key).get(worker, 0))
            for key, counter in by_replica.items() if workers.counts else ():
                counter.add_metric([replica_id], getattr(workers.counts, key))
        yield from (up, restarts, *by_worker.values(), *by_replica.values())

    def _of_engines(self) -> Iterator[Metric]:
        loads = {name: own.load for name, own in self._coordinator.replicas.items() if own.load is not None}
        for key, (metric, what) in ENGINE.items() if loads else ():
            family = GaugeMetricFamily(metric, what, labels=["replica"])
            for replica_id, load in loads.items():
                family.add_metric([replica_id], getattr(load, key))
            yield family


def _histogram(
    registry: CollectorRegistry, name: str, help_text: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(f"hexgen2_{name}_seconds", help_text, buckets=buckets, registry=registry)
