"""Every strategy on the clusters that ship, in one simulator: which wins, and what each idea is worth.

    python -m benchmarks.simulator.strategy_table [--clusters A,B] [--workload online] [--time-limit S]
           [--seconds S] [--seed N]

Each cell is requests/s at full load, between the first and the last tenth of the requests, and in brackets
the mean TPOT in ms at three quarters of that; a dash means that the strategy finds no placement. Each row
ends with the winner and what limits it. The second table has ratios of requests/s on the same cluster:

    phases    hexgen2, which mixes, over the better of all disaggregated and all colocated replicas
    overlap   ranges of layers that overlap (helix) over those that do not (the better of swarm and
              separate-pipelines)
    heads     hetis over the same replicas without their attention workers
    backlog   huawei's instances, routed by work in flight over routed by planned shares
"""

from __future__ import annotations

import argparse
import sys

import hexgen2
from hexgen2.attention_workers import stage_requests
from hexgen2.cluster import Cluster
from hexgen2.comparison.contenders import parse_contenders
from hexgen2.comparison.run import Entry, Settings, compare

MODELS = {
    "hexgen2-case-study": "llama-2-13b",
    "huawei-v100-a800": "llama-3-8b",
    "helix-single-24": "llama-30b",
    "helix-geo-24": "llama-30b",
    "helix-mixed-42": "llama-30b",
}
"""The model of each cluster; llama-2-70b elsewhere."""
CLUSTERS = (
    "hexgen2-homogeneous",
    *(f"hexgen2-setting-{k}" for k in range(1, 6)),
    *("hexgen2-case-study", "hetis-12", "huawei-v100-a800"),
    *("helix-single-24", "helix-geo-24", "helix-mixed-42"),
)
STRATEGIES = (
    *("hexgen2", "hexgen2:disaggregated", "hexgen2:colocated", "hexgen", "vllm", "distserve", "splitwise"),
    *("huawei", "hetis", "helix", "swarm", "separate-pipelines"),
)
Row = dict[str, Entry]


def served(row: Row, *names: str) -> float:
    """The most requests/s of these strategies; 0 if none has a placement."""
    return max(row[name].peak_req_s for name in names)


def ratio(over: float, under: float) -> str:
    """Two rates compared; a dash if either is missing."""
    return f"{over / under:.2f}" if over > 0 and under > 0 else "-"


def without_workers(entry: Entry, seed: int) -> float:
    """Requests/s of hetis's replicas by themselves."""
    placement = entry.placement
    if placement is None or not placement.attention_workers:
        return 0.0
    cluster = Cluster.from_spec(placement.cluster)
    held = {r.id: min(stage_requests(r, [], cluster, placement.costs())) for r in placement.replicas}
    replicas = [
        replica.model_copy(update={"max_batch": min(replica.max_batch, max(1, int(held[replica.id])))})
        for replica in placement.replicas
    ]
    alone = placement.model_copy(update={"attention_workers": [], "replicas": replicas})
    return hexgen2.simulate(alone, offline=True, seed=seed).steady_request_throughput


def by_planned_shares(entry: Entry, seed: int) -> float:
    """Requests/s of huawei's instances, routed by the flow."""
    if entry.placement is None or len(entry.placement.replicas) < 2:
        return 0.0
    found = hexgen2.simulate(entry.placement, offline=True, seed=seed, scheduler="flow", policy="chunked")
    return found.steady_request_throughput


def cell(entry: Entry) -> str:
    """For example "12.18 (82)"."""
    if entry.peak_req_s <= 0 or entry.online is None:
        return "-"
    return f"{entry.peak_req_s:.2f} ({entry.online.mean_tpot_ms:.0f})"


def limit_of(entry: Entry) -> str:
    """What limits a placement, as the search says it."""
    found = entry.placement.bottlenecks if entry.placement else []
    return str(found[0]) if found else ""


def main() -> None:
    """Run every cell and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--workload", default="online")
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--seconds", type=float, default=120.0, help="length of an online run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("| cluster, model |", " | ".join(STRATEGIES), "| most | limited by |")
    print("|" + " --- |" * (len(STRATEGIES) + 3))
    worth = []
    for cluster in given.clusters.split(","):
        model = MODELS.get(cluster, "llama-2-70b")
        settings = Settings(model, given.seed, seconds=given.seconds, time_limit_s=given.time_limit)
        contenders = parse_contenders(",".join(STRATEGIES), cluster)
        found = compare(contenders, [given.workload], settings, lambda text: print(text, file=sys.stderr))
        row = dict(zip(STRATEGIES, found.entries, strict=True))
        best = max(STRATEGIES, key=lambda name: row[name].peak_req_s)
        cells = " | ".join(cell(row[name]) for name in STRATEGIES)
        print(f"| {cluster}, {model} | {cells} | {best} | {limit_of(row[best])} |", flush=True)
        worth.append(
            (
                cluster,
                ratio(served(row, "hexgen2"), served(row, "hexgen2:disaggregated", "hexgen2:colocated")),
                ratio(served(row, "helix"), served(row, "swarm", "separate-pipelines")),
                ratio(served(row, "hetis"), without_workers(row["hetis"], given.seed)),
                ratio(served(row, "huawei"), by_planned_shares(row["huawei"], given.seed)),
            )
        )
    print("\n| cluster | phases | overlap | heads | backlog |\n| --- | --- | --- | --- | --- |")
    for line in worth:
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    main()
