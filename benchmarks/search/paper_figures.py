"""HexGen-2's Figures 6 to 9 and Tables 3 and 4, simulated: how much more each system serves than the others.

    python -m benchmarks.search.paper_figures [--parts table3,table4,settings,assumptions]
        [--seconds 300] [-o DIR]

Each system plans by its own rules, and all are simulated under the same requests (see `hexgen2 compare`), on
the clusters that the paper gives them: HexGen-2 and HexGen on the heterogeneous settings, DistServe and vLLM
on 8 H100 for the same money, and for Table 4 all three on 4 H100. vLLM runs with chunked prefill (its default
today) and without. "online" has the request lengths of the Azure conversation trace, by class, arriving at 75
% of the peak rate.

Prints Markdown tables with the simulated output tokens/s, and ratios beside those that the paper prints. For
Figures 6 to 9 the paper prints only means and extremes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster_specs.loader import load_cluster
from cluster_specs.schema import ClusterSpec
from cost_model.calibrated import Calibrated
from hexgen2.cluster import Cluster
from hexgen2.comparison.contenders import parse_contenders
from hexgen2.comparison.report import write_comparison
from hexgen2.comparison.run import Entry, Settings, compare
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

OFFLINE = ("HPLD", "HPHD", "LPHD", "LPLD")
WORKLOADS = (*OFFLINE, "online")
HOMOGENEOUS = "hexgen2-homogeneous"
PAPER = "hexgen2:disaggregated"
"""What the paper calls HexGen-2."""
OWN_BASELINES = "hexgen2:colocated,hexgen2"
"""Beside the baselines of the paper: the best colocated replicas that this search finds, and its default."""
MODELS = ("llama-2-70b", "opt-30b")
TABLE_3 = {
    "hexgen2": (157, 448, 689, 570, 350),
    "hexgen": (123, 375, 492, 407, 259),
    "distserve": (128, 368, 553, 291, 251),
    "vllm": (97, 437, 563, 270, 256),
}
TABLE_4 = {
    "hexgen2": (365, 683, 758, 730),
    "distserve": (302, 692, 774, 553),
    "hexgen": (277, 505, 533, 545),
}
LATENCIES = [(name, kind) for name in ("TTFT", "TPOT", "E2EL") for kind in ("mean", "p90", "p99")]
FOUR_H100 = "name: four-h100\nnodes:\n  - {name: h100-1, accelerators: 'H100:4', interconnect: nvlink}\n"


def tok_s(entry: Entry) -> float:
    """Output tokens/s: at peak for offline workloads, or at 75 % of the peak rate for "online"."""
    if not entry.offline:
        return 0.0
    if entry.workload == "online" and entry.online:
        return entry.online.steady_request_throughput * entry.peak_tok_s / entry.peak_req_s
    return entry.peak_tok_s


class Grid:
    """Results by (cluster's contender, workload); each comparison runs once."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    def run(
        self, name: str, model: str, cluster: str, strategies: str, workloads: Sequence[str]
    ) -> list[Entry]:
        """Run a comparison, and keep its files if a folder is given."""
        settings = Settings(model, seconds=self.arguments.seconds, cost_model=Calibrated.name)
        contenders = parse_contenders(strategies, cluster)

        def progress(text: str) -> None:
            print(f"{name}: {text}", file=sys.stderr)

        comparison = compare(contenders, workloads, settings, progress)
        if self.arguments.output:
            write_comparison(comparison, self.arguments.output / name)
        return comparison.entries


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table."""
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def beside_the_paper(title: str, entries: list[Entry], paper: Mapping[str, Sequence[int]]) -> None:
    """Tokens/s, then HexGen-2's advantage over each of the others, with the paper's value in brackets."""
    workloads = list(dict.fromkeys(entry.workload for entry in entries))
    names = list(dict.fromkeys(entry.contender.name.partition("@")[0] for entry in entries))
    found = {(e.contender.name.partition("@")[0], e.workload): tok_s(e) for e in entries}
    rows = [[name, *(f"{found[name, w]:.0f}" for w in workloads)] for name in names]
    for name in names[1:]:
        printed = None if name.startswith("hexgen2") else paper.get(name.partition(":")[0])
        cells = []
        for k, workload in enumerate(workloads):
            ratio = found[PAPER, workload] / found[name, workload] if found[name, workload] else float("nan")
            cells.append(f"{ratio:.2f}" + (f" ({paper['hexgen2'][k] / printed[k]:.2f})" if printed else ""))
        rows.append([f"{PAPER} / {name}", *cells])
    table(title, ["output tokens/s", *workloads], rows)


def table_3(grid: Grid) -> None:
    strategies = f"{PAPER},{OWN_BASELINES},hexgen," + ",".join(
        f"{name}@{HOMOGENEOUS}" for name in ("distserve", "vllm", "vllm:prefill-first")
    )
    entries = grid.run("table-3", "llama-2-70b", "hexgen2-setting-1", strategies, WORKLOADS)
    beside_the_paper("Table 3: Llama-2 70B, setting 1 against 8 H100", entries, TABLE_3)
    latency_table("Figure 8 (Llama-2 70B, setting 1): online latency", entries)


def table_4(grid: Grid) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "four-h100.yaml"
        cluster.write_text(FOUR_H100)
        entries = grid.run(
            "table-4", "opt-30b", str(cluster), f"{PAPER},{OWN_BASELINES},distserve,hexgen", OFFLINE
        )
    beside_the_paper("Table 4: OPT 30B on 4 H100", entries, TABLE_4)


def all_settings(grid: Grid) -> None:
    """Figures 6, 7 and 9: HexGen-2 against HexGen on each setting, and against DistServe on 8 H100."""
    for model in MODELS:
        strategies = "distserve,vllm,vllm:prefill-first"
        base = grid.run(f"homogeneous-{model}", model, HOMOGENEOUS, strategies, WORKLOADS)
        against = {(e.contender.name.partition("@")[0], e.workload): tok_s(e) for e in base}
        ratios: dict[str, list[float]] = {
            name: [] for name in ("hexgen", *OWN_BASELINES.split(","), *strategies.split(","))
        }
        rows, deadlines = [], []
        for number in range(1, 6):
            cluster = f"hexgen2-setting-{number}"
            contenders = f"{PAPER},{OWN_BASELINES},hexgen"
            entries = grid.run(f"{cluster}-{model}", model, cluster, contenders, WORKLOADS)
            own = {(e.contender.name.partition("@")[0], e.workload): e for e in entries}
            for workload in WORKLOADS:
                ours, theirs = own[PAPER, workload], own["hexgen", workload]
                other = against | {key: tok_s(entry) for key, entry in own.items()}
                cells = {
                    name: tok_s(ours) / other[name, workload] for name in ratios if other[name, workload]
                }
                if number < 5:
                    for name, ratio in cells.items():
                        ratios[name].append(ratio)
                if ours.scale_needed and theirs.scale_needed and workload == "online":
                    deadlines.append(theirs.scale_needed / ours.scale_needed)
                scales = [f"{e.scale_needed:.2f}" if e.scale_needed else "-" for e in (ours, theirs)]
                ratio_cells = [f"{cells[name]:.2f}" if name in cells else "-" for name in ratios]
                rows.append([str(number), workload, f"{tok_s(ours):.0f}", *ratio_cells, *scales])
        columns = ["setting", "workload", f"{PAPER} tok/s", *(f"/ {name}" for name in ratios)]
        columns += ["SLO scale hexgen2", "SLO scale hexgen"]
        figure = "Figures 6, 8 and 9" if model == MODELS[0] else "Figures 7, 8 and 9"
        table(f"{figure}: {model}, all settings", columns, rows)
        for name, values in ratios.items():
            print(
                f"\nSettings 1 to 4, over {name}: mean {statistics.mean(values):.2f}, most {max(values):.2f}"
            )
        if deadlines:
            mean = statistics.mean(deadlines)
            print(f"\nDeadlines of hexgen over hexgen2's, online, settings 1 to 5: mean {mean:.2f}")
    print("\nThe paper: over HexGen 1.4, up to 1.5; over DistServe 1.3, up to 2; deadlines 1.5 times lower.")


def assumptions(grid: Grid) -> None:
    """How the predicted advantage of HexGen-2 on setting 1 depends on each assumption: change one at a time,
    without simulation."""
    spec = load_cluster("hexgen2-setting-1")
    cases: dict[str, dict[str, Any]] = {
        "as above": {},
        "routes do not share links": {"links": "pairwise"},
        "all links 4 times as fast": {"spec": faster(spec, 4)},
        "all links a quarter as fast": {"spec": faster(spec, 0.25)},
        "one stage at a time (Appendix A)": {"pipeline": "literal"},
        "a full batch in each stage (Appendix E.2)": {"pipeline": "paper_optimistic"},
        "at most 64 requests in a batch": {"batch_cap": 64},
        "at most 16 requests in a batch": {"batch_cap": 16},
        "Table 1 as printed": {"cost_model": "table1"},
    }
    rows = []
    for name, changes in cases.items():
        print(f"assumptions: {name}", file=sys.stderr)
        cells = []
        for rival, on in (("hexgen", None), ("distserve", HOMOGENEOUS), ("vllm", HOMOGENEOUS)):
            ratios = [
                predicted("hexgen2", workload, None, **changes) / predicted(rival, workload, on, **changes)
                for workload in OFFLINE
            ]
            cells.append(" ".join(f"{ratio:.2f}" for ratio in ratios))
        rows.append([name, *cells])
    columns = ["assumption", *(f"/ {name} ({' '.join(OFFLINE)})" for name in ("hexgen", "distserve", "vllm"))]
    table("Llama-2 70B, setting 1: predicted throughput of hexgen2 over that of others", columns, rows)


def faster(spec: ClusterSpec, factor: float) -> ClusterSpec:
    """The same cluster with other links between its nodes."""
    network = spec.network
    default = network.default.model_copy(
        update={"bandwidth_gbit_s": network.default.bandwidth_gbit_s * factor}
    )
    links = [
        link.model_copy(update={"bandwidth_gbit_s": link.bandwidth_gbit_s * factor}) for link in network.links
    ]
    return spec.model_copy(
        update={"network": network.model_copy(update={"default": default, "links": links})}
    )


def predicted(
    strategy: str,
    workload: str,
    cluster: str | None,
    spec: ClusterSpec | None = None,
    batch_cap: int | None = None,
    **options: str,
) -> float:
    """Requests/s of a strategy's placement of Llama-2 70B, on setting 1 by default."""
    asked: dict[str, Any] = {"cost_model": Calibrated.name, **options}
    problem = make_problem(cluster or "hexgen2-setting-1", MODELS[0], workload, **asked)
    if spec is not None and cluster is None:
        problem = replace(problem, spec=spec, cluster=Cluster.from_spec(spec))
    if batch_cap is not None:
        problem = replace(problem, costs=Calibrated(problem.model, problem.workload.lengths, batch_cap))
    return find_strategy(strategy)(problem, SearchOptions()).throughput.req_s


def latency_table(title: str, entries: list[Entry]) -> None:
    rows = []
    for entry in entries:
        if entry.workload == "online" and entry.same_rate:
            at = entry.same_rate.to_dict()
            scale = f"{entry.scale_needed:.2f}" if entry.scale_needed else "-"
            rows.append(
                [
                    entry.contender.name,
                    f"{at['request_throughput']:.2f}",
                    *(
                        f"{at[f'{k}_{n}_ms']:.0f}"
                        for n in ("ttft", "tpot", "e2el")
                        for k in ("mean", "p90", "p99")
                    ),
                    scale,
                ]
            )
    names = [f"{name} {kind}" for name in ("TTFT", "TPOT", "E2EL") for kind in ("mean", "p90", "p99")]
    table(f"{title}, in ms, all at the same rate", ["system", "requests/s", *names, "SLO scale"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default="table3,table4,settings,assumptions")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of simulated load")
    parser.add_argument("-o", "--output", type=Path, help="write CSV, JSON and plots to this folder")
    arguments = parser.parse_args()
    parts = {"table3": table_3, "table4": table_4, "settings": all_settings, "assumptions": assumptions}
    for part in arguments.parts.split(","):
        parts[part](Grid(arguments))


if __name__ == "__main__":
    main()
