"""Simulate placements of Helix's cases: ours, those stored with them, and rules, by ways to choose paths.

    python -m benchmarks.simulator.helix_simulated helix_cases.json [--cases NAME ...] [--schedulers NAME ...]

The file is one that you bring (docs/strategies.md says what it holds). Offline, all requests arrive at once;
decode tokens/s are those between the first and the last tenth of the requests that end. With --online they
also arrive at 75% of that rate, as in the paper (section 6.2): then TTFT and TPOT count. Beside them stands
what the artifact's simulator says of its placement of the same name.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hexgen2
from hexgen2.layer_ranges import served_req_s
from hexgen2.placement import Placement, SearchRecord
from hexgen2.search.layer_ranges.bounds import upper_bound
from hexgen2.search.layer_ranges.build import build_placement
from hexgen2.search.layer_ranges.case import load_case
from hexgen2.search.layer_ranges.from_case import problem_of_case
from hexgen2.search.layer_ranges.max_flow import FlowValue
from hexgen2.strategies.registry import STRATEGIES

RULES = {"Swarm": "swarm", "Separate": "separate-pipelines", "Petals": "petals"}
"""The artifact's names, and our strategies."""
ONLINE = 0.75
COLUMNS = "case placement scheduler policy flow hops decode_tok_s ttft_s tpot_s artifact seconds"


def stored(path: str, case: dict[str, Any], name: str) -> Placement:
    """A stored placement, with its flow."""
    problem = problem_of_case(load_case(f"{path}#{case['name']}"), partial=True)
    nodes = problem.range_nodes
    assert nodes is not None
    ranges = tuple((first, end) for first, end in case["placements"][name]["start_end"])
    flow, bound = FlowValue(nodes.instance).flow(ranges), upper_bound(nodes.instance)
    record = SearchRecord(seconds=0.0, seed=0, evaluations=0, trace=[])
    return build_placement(problem, nodes, ranges, flow, bound, name, record)


def placements(path: str, case: dict[str, Any], asked: list[str]) -> Iterator[tuple[str, Placement, str]]:
    """Name, placement, and the artifact's name of it."""
    where = f"{path}#{case['name']}"
    for name in asked:
        if name in case.get("placements", {}):
            yield name, stored(path, case, name), "Helix" if name == "ilp_gurobi" else ""
        elif name in STRATEGIES:
            try:
                found = hexgen2.search(case=where, strategy=name)
            except hexgen2.InfeasibleError:
                continue
            yield name, found, {ours: theirs for theirs, ours in RULES.items()}.get(name, "")


def mean_hops(placement: Placement) -> float:
    """Replicas on the path of a request, as a mean over the flow."""
    through = sum(replica.utilisation * replica.capacity_req_s for replica in placement.replicas)
    return through / served_req_s(placement)


def artifact_tok_s(case: dict[str, Any], name: str) -> str:
    """Decode tokens/s that the artifact simulates offline."""
    for each in case.get("artifact_results", []):
        if each.get("name", "").endswith(f"offline simulation results: {name}") and name:
            return f"{each['decode_tps']:.1f}"
    return "-"


def main() -> None:
    """Print a line per case, placement, scheduler and policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--cases", nargs="+", help="all if not given")
    parser.add_argument(
        "--placements", nargs="+", default=["helix", "ilp_gurobi", "swarm", "separate-pipelines", "petals"]
    )
    parser.add_argument("--schedulers", nargs="+", default=["flow"])
    parser.add_argument("--policies", nargs="+", default=["mixed"])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--online", action="store_true", help="TTFT and TPOT at 75%% of the rate")
    parser.add_argument("--workload", help="a trace or a class; lengths of the placement if not given")
    arguments = parser.parse_args()
    print(*COLUMNS.split(), sep="\t")
    for case in json.loads(Path(arguments.file).read_text())["cases"]:
        if arguments.cases and case["name"] not in arguments.cases:
            continue
        for name, placed, theirs in placements(arguments.file, case, arguments.placements):
            for scheduler in arguments.schedulers:
                for policy in arguments.policies:
                    began = time.process_time()
                    asked: dict[str, Any] = {"num_requests": arguments.requests, "scheduler": scheduler}
                    asked |= {"policy": policy, "workload": arguments.workload}
                    offline = hexgen2.simulate(placed, offline=True, **asked)
                    answer = offline.total_output_tokens / offline.completed
                    rate = ONLINE * offline.steady_request_throughput
                    shown = (
                        hexgen2.simulate(placed, request_rate=rate, **asked) if arguments.online else offline
                    )
                    print(
                        *(case["name"], name, scheduler, policy),
                        f"{placed.throughput.total_tok_s:.1f}",
                        f"{mean_hops(placed):.1f}",
                        f"{offline.steady_request_throughput * answer:.1f}",
                        f"{shown.median_ttft_ms / 1e3:.2f}",
                        f"{shown.median_tpot_ms / 1e3:.2f}",
                        artifact_tok_s(case, theirs),
                        f"{time.process_time() - began:.1f}",
                        sep="\t",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
