"""Plan Helix's cases, and reproduce the flows of placements that are stored with them.

    python -m benchmarks.search.helix_cases helix_cases.json [--cases NAME ...] [--shuffles N]

The file is one that you bring (docs/strategies.md says what it holds). For each case: our tokens/s, the bound
and seconds, beside what the file records of Gurobi and of rules; then which stored flows differ from ours.
With --shuffles each case is planned again with its nodes in random order and its tables and links times a
random factor, where nothing that is stored can be of use: figures are divided by that factor.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import hexgen2
from hexgen2.search.layer_ranges.case import load_case
from hexgen2.search.layer_ranges.from_case import problem_of_case
from hexgen2.search.layer_ranges.max_flow import FlowValue

TOLERANCE = 1e-6


def stored_flows(path: str, case: dict[str, Any]) -> tuple[int, list[str]]:
    """How many stored flows there are, and which differ from ours by more than TOLERANCE."""
    count, differ = 0, []
    for partial, key in ((False, "max_flow"), (True, "max_flow_partial")):
        nodes = problem_of_case(load_case(f"{path}#{case['name']}"), partial).range_nodes
        assert nodes is not None
        for name, stored in case.get("placements", {}).items():
            if stored.get("partial") and not partial:
                continue
            ranges = tuple((first, end) for first, end in stored["start_end"])
            ours, theirs = FlowValue(nodes.instance).flow(ranges).tok_s, stored[key]
            count += 1
            if abs(ours - theirs) > TOLERANCE * theirs:
                differ.append(f"{name}: {ours:.6f} instead of {theirs:.6f}")
    return count, differ


def shuffled(case: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], float]:
    """The case without its results, nodes in another order, all rates times a factor; and the factor."""
    keys = ("name", "model", "layers", "token_bytes", "activation_bytes", "layer_param_bytes")
    found = json.loads(json.dumps({key: case[key] for key in (*keys, "gpu", "types", "links")}))
    order, factor = list(range(len(case["types"]))), rng.uniform(0.3, 3)
    rng.shuffle(order)
    renamed = {name: f"T{k}" for k, name in enumerate(sorted(case["gpu"], key=lambda _: rng.random()))}
    found["types"] = [renamed[case["types"][v]] for v in order]
    found["gpu"] = {renamed[name]: found["gpu"][name] for name in sorted(renamed)}
    for node in found["gpu"].values():
        node["T_tokens_per_s"] = [tok_s * factor for tok_s in node["T_tokens_per_s"]]
        node["nic_Bps"] *= factor
    links = found["links"]
    if links["uniform"]:
        links["bandwidth_Bps"] *= factor
        return found, factor
    for key, scale in (("source_MBps", factor), ("sink_MBps", factor), ("source_ms", 1), ("sink_ms", 1)):
        links[key] = [links[key][v] * scale for v in order]
    for key, scale in (("upper_MBps", factor), ("upper_ms", 1)):
        old = links[key]
        links[key] = [
            [old[min(a, b)][abs(a - b) - 1] * scale for b in order[i + 1 :]] for i, a in enumerate(order[:-1])
        ]
    links["region_of_node"] = [links["region_of_node"][v] for v in order]
    return found, factor


def plan(path: str, name: str, strategy: str, limit_s: float | None, seed: int, partial: bool):
    """(tokens/s, bound, seconds) of a strategy; (nan, nan, seconds) where it finds nothing."""
    began = time.monotonic()
    asked: dict[str, Any] = {"strategy": strategy, "seed": seed, "time_limit_s": limit_s}
    try:
        found = hexgen2.search(case=f"{path}#{name}", partial_inference=partial, **asked)
    except hexgen2.InfeasibleError:
        return float("nan"), float("nan"), time.monotonic() - began
    assert found.throughput.total_tok_s is not None and found.bound.total_tok_s is not None
    return found.throughput.total_tok_s, found.bound.total_tok_s, time.monotonic() - began


def main() -> None:
    """Print a line per case, and per shuffle of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--cases", nargs="+", help="all if not given")
    parser.add_argument("--time-limit", type=float, metavar="S")
    parser.add_argument("--shuffles", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-partial-inference", action="store_true")
    arguments = parser.parse_args()
    partial, limit_s = not arguments.no_partial_inference, arguments.time_limit
    cases = json.loads(Path(arguments.file).read_text())["cases"]
    columns = ("case", "ours", "bound", "seconds", "Gurobi", "its seconds", "petals", "swarm", "separate")
    print(*columns, "stored flows", sep="\t")
    rng = random.Random(arguments.seed)
    for case in cases:
        name = case["name"]
        if arguments.cases and name not in arguments.cases:
            continue
        ours, bound, seconds = plan(arguments.file, name, "helix", limit_s, arguments.seed, partial)
        gurobi = case.get("placements", {}).get("ilp_gurobi", {}).get("max_flow", float("nan"))
        took = case.get("gurobi", {}).get("seconds", float("nan"))
        rules = [
            plan(arguments.file, name, rule, None, 0, True)[0]
            for rule in ("petals", "swarm", "separate-pipelines")
        ]
        count, differ = stored_flows(arguments.file, case)
        shown = [f"{value:.2f}" for value in (ours, bound, seconds, gurobi, took, *rules)]
        print(name, *shown, f"{count - len(differ)} of {count} reproduced", *differ, sep="\t", flush=True)
        for number in range(arguments.shuffles):
            other, factor = shuffled(case, rng)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "case.json"
                path.write_text(json.dumps(other))
                ours, bound, seconds = plan(str(path), name, "helix", limit_s, number, partial)
            shown = [f"{value:.2f}" for value in (ours / factor, bound / factor, seconds)]
            print(f"{name} shuffled {number}", *shown, sep="\t", flush=True)


if __name__ == "__main__":
    main()
