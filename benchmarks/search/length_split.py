"""Goodput where remote prefill takes the long prompts only, and where it takes prompts of all lengths.

    python -m benchmarks.search.length_split [--clusters NAME,...] [--models NAME,...] [--workload NAME|FILE]
                                             [--targets TTFT:TPOT,...] [--draws N] [--seed S] [--requests N]

For each cluster, model and targets (ms), `hexgen2 search --phases flexible --objective goodput` finds a
placement without limits for prompts. Where it has mixed replicas that prefill for themselves while others
prefill for them, its remote routes are limited to long prompts, and the goodput of both is found by
simulation, several times, with the same requests for both, which the search has not seen. Rows show the
replicas, the limits, goodput in requests/s without and with them, the mean gain and the least and greatest.
"""

from __future__ import annotations

import argparse
import random
from unittest.mock import patch

import hexgen2
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise import finalists
from hexgen2.promise.goodput import find_goodput
from hexgen2.promise.length_split import split_by_length
from hexgen2.promise.trial import Trials

CLUSTERS = ("hexgen2-case-study", *(f"hexgen2-setting-{n}" for n in range(1, 6)))
TARGETS = "2000:100,4000:150"
RUNS = 6


def main() -> None:
    """Print a row for each cluster, model and targets, and the mean and the least gain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="separated by commas")
    parser.add_argument("--models", default="llama-2-70b,opt-30b", help="separated by commas")
    parser.add_argument("--workload", default="online")
    parser.add_argument("--targets", default=TARGETS, help="TTFT:TPOT in ms, separated by commas")
    parser.add_argument("--draws", type=int, default=3, help="goodputs of each placement")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--requests", type=int, default=6000, help="of a run")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    columns = f"{'goodput':>18}{'gain':>8}{'least':>8}{'most':>8}  limits"
    print(f"{'cluster, model, targets':42}{'replicas':9}{columns}")
    gains = []
    for cluster in options.clusters.split(","):
        for model in options.models.split(","):
            for targets in options.targets.split(","):
                gains += row(cluster, model, targets, options)
    if gains:
        print(f"{len(gains)} with limits: mean gain {sum(gains) / len(gains):+.2%}, least {min(gains):+.2%}")


def row(cluster: str, model: str, targets: str, options: argparse.Namespace) -> list[float]:
    """Print a row; the mean gain, if there are limits."""
    ttft_ms, tpot_ms = map(float, targets.split(":"))
    name = f"{cluster.removeprefix('hexgen2-')}, {model}, {ttft_ms:g}:{tpot_ms:g}"
    try:
        with patch.object(finalists, "split_by_length", lambda _: None):
            whole = hexgen2.search(
                cluster=cluster,
                model=model,
                workload=options.workload,
                objective="goodput",
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
                phases="flexible",
                seed=options.seed,
            )
    except hexgen2.InfeasibleError:
        print(f"{name:42}no placement", flush=True)
        return []
    replicas = "".join(sorted(replica.role[0] for replica in whole.replicas))
    promised = whole.goodput.goodput_req_s if whole.goodput else None
    divided = split_by_length(whole) if promised else None
    if divided is None or not promised:
        print(f"{name:42}{replicas:9}{promised or 0:9.4g}   nothing to limit", flush=True)
        return []
    found = [
        (goodput(whole, promised, seed, options), goodput(divided, promised, seed, options))
        for seed in range(options.seed + 1, options.seed + 1 + options.draws)
    ]
    gains = [after / before - 1 for before, after in found]
    before, after = (sum(side) / len(found) for side in zip(*found, strict=True))
    limits = ", ".join(
        f"{r.from_} -> {r.to} from {r.min_prompt_tokens}" for r in divided.routes if r.min_prompt_tokens
    )
    mean = sum(gains) / len(gains)
    print(
        f"{name:42}{replicas:9}{before:9.4g}{after:9.4g}{mean:+8.2%}{min(gains):+8.2%}{max(gains):+8.2%}"
        f"  {limits}",
        flush=True,
    )
    return [mean]


def goodput(placement: Placement, start_req_s: float, seed: int, options: argparse.Namespace) -> float:
    """Requests/s within the targets, by a few runs."""
    trials = Trials(placement, Cluster.from_spec(placement.cluster), placement.goal, seed)
    attainment = placement.goal.attainment
    return find_goodput(trials, attainment, start_req_s, lambda _: options.requests, RUNS).req_s


if __name__ == "__main__":
    main()
