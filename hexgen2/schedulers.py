"""The names of schedulers, which choose the route or path of each request, and of what predicts its output.

What each of them does is in `runtime/routing/`: `schedulers.py`, `paths/next_hop.py` and `output_lengths.py`.
This file imports nothing, so that the command line starts quickly.
"""

from __future__ import annotations

FLOW, WORKLOAD_AWARE, MEMORY = "flow", "workload-aware", "memory"
ROUND_ROBIN, WEIGHTED, SINGLE = "round-robin", "weighted", "single"
SCHEDULERS = {
    FLOW: "shares as planned by the max flow",
    WORKLOAD_AWARE: "where the requests in flight, with this one, are the least work",
    MEMORY: "as workload-aware, by the use of KV caches alone",
    ROUND_ROBIN: "every route in turn",
    WEIGHTED: "in proportion to the GPUs of replicas",
    SINGLE: "all to the strongest replica",
}
"""What each scheduler does; the first one is the default."""

SWARM, RANDOM, SHORTEST_QUEUE = "swarm", "random", "shortest-queue"
PATH_SCHEDULERS = {
    FLOW: "where the max flow leads",
    SWARM: "the quicker a replica was lately, the more often",
    RANDOM: "any replica that holds the next layer",
    SHORTEST_QUEUE: "the one with the fewest requests",
}
"""What each does where replicas hold ranges of layers and every request takes a path of its own."""

BUCKETS, DISTRIBUTION = "buckets", "distribution"
OUTPUT_LENGTHS = {
    BUCKETS: "the mean of like requests that have finished",
    DISTRIBUTION: "drawn from the planned workload",
}
"""What each predictor of output lengths says; the first one is the default."""


def _listed(names: dict[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in names.items()) + "."


SCHEDULER_HELP = f"How the route of a request is chosen. {_listed(SCHEDULERS)}"
LENGTHS_HELP = (
    f"The output that workload-aware, memory and paths expect of a request. {_listed(OUTPUT_LENGTHS)}"
)
PATHS_HELP = f"Of ranges of layers (helix), how its path is chosen. {_listed(PATH_SCHEDULERS)}"
