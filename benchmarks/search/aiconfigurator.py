"""`hexgen2 search` beside AIConfigurator on homogeneous clusters: seconds, and what each one's plan is worth.

    python -m benchmarks.search.aiconfigurator --command AICONFIGURATOR [--cases N] [--seed S] [--draws N]

AICONFIGURATOR is NVIDIA's command (PyPI: aiconfigurator, 0.12 tried), best in an environment of its own. It
plans for like GPUs: pools of like replicas, tensor-parallel inside a node, colocated or disaggregated. Each
case is drawn at random: GPUs of one type in nodes of 8 with 400 Gbit/s between them, a model, lengths, and
targets for TTFT and TPOT. Both commands run whole, one after the other, and both plan for vLLM. A row has:

    s          seconds of the whole command, of AIConfigurator and of `hexgen2 search --objective goodput`
    goodput    of both plans: the greatest rate at which 90 % of the requests are within both targets, by our
               simulator with requests that neither has seen; a mean of --draws
    by theirs  tokens/s per GPU that AIConfigurator's estimator gives both plans, means within the targets in
               a closed loop; "-" where it can't express ours (uneven stages, mixed replicas, unlike shapes)

At the end: how often and by how much ours is ahead by our simulator, and the worst case.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from cluster_specs.schema import ClusterSpec
from cost_model.errors import InfeasibleError
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.promise.keep import with_promise
from hexgen2.replica import Replica
from hexgen2.search.problem import Group, Solution, counts_of, make_problem
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.huawei import OneStagePlanner

COMMAND = str(Path(sys.executable).with_name("hexgen2"))
NODE = 8
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "A100-80GB": "a100_sxm", "B200": "b200_sxm"}
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
SIZES, LENGTHS = (8, 16, 32), ((512, 128), (1024, 128), (1024, 512), (2048, 256), (4000, 500))
TTFTS, TPOTS = (500, 1000, 2000), (20, 30, 50, 80)


@dataclass(frozen=True)
class Case:
    gpu: str
    gpus: int
    model: str
    isl: int
    osl: int
    ttft_ms: int
    tpot_ms: int

    @property
    def goal(self) -> Goal:
        return Goal(objective="goodput", ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)

    def cluster(self) -> dict:
        """As `hexgen2 search --cluster` reads it."""
        nodes = [
            {"name": f"n{i}", "accelerators": f"{self.gpu}:{NODE}", "interconnect": "nvlink"}
            for i in range(self.gpus // NODE)
        ]
        network = {"default": {"bandwidth_gbit_s": 400, "latency_us": 10}}
        return {"name": f"{self.gpus}x{self.gpu}", "nodes": nodes, "network": network}

    def __str__(self) -> str:
        lengths, targets = f"{self.isl}/{self.osl}", f"{self.ttft_ms}/{self.tpot_ms}"
        return f"{self.gpus:3} {self.gpu:10}{self.model:14}{lengths:>9}{targets:>9}"


@dataclass(frozen=True)
class Pool:
    """Like replicas of one role, each of one stage and this tensor degree."""

    role: str
    tensor: int
    replicas: int


@dataclass(frozen=True)
class Theirs:
    """AIConfigurator's plan, and the tokens/s per GPU that it expects."""

    pools: tuple[Pool, ...]
    per_gpu: float


def drawn(seed: int) -> Case:
    """A case, the same for the same seed."""
    dice = random.Random(seed)
    gpu, size, model = dice.choice(list(SYSTEMS)), dice.choice(SIZES), dice.choice(list(MODELS))
    isl, osl = dice.choice(LENGTHS)
    return Case(gpu, size, model, isl, osl, dice.choice(TTFTS), dice.choice(TPOTS))


def their_search(command: str, case: Case, folder: Path) -> tuple[Theirs | None, float]:
    """AIConfigurator's best plan, if it finds one, and the seconds of its command."""
    asked = f"cli default --backend vllm --no-color --save-dir {folder} --model-path {MODELS[case.model]}"
    asked += f" --total-gpus {case.gpus} --system {SYSTEMS[case.gpu]} --isl {case.isl} --osl {case.osl}"
    asked += f" --ttft {case.ttft_ms} --tpot {case.tpot_ms}"
    started = time.perf_counter()
    subprocess.run([command, *asked.split()], capture_output=True, text=True)
    return best_of(case, folder), time.perf_counter() - started


def best_of(case: Case, folder: Path) -> Theirs | None:
    """The best plan that AIConfigurator wrote under this folder, by tokens/s per GPU of the cluster."""
    found = []
    for file in folder.rglob("best_config_topn.csv"):
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        found += [_plan(case, row) for row in rows[:1]]
    return max(found, key=lambda plan: plan.per_gpu, default=None)


def _plan(case: Case, row: dict[str, str]) -> Theirs:
    per_gpu = float(row["tokens/s/gpu_cluster"])
    copies = case.gpus // int(row["num_total_gpus"])
    if "(p)tp" not in row:
        return Theirs((Pool("colocated", int(row["tp"]), copies),), per_gpu)
    pools = (
        Pool("prefill", int(row["(p)tp"]), int(row["(p)workers"]) * copies),
        Pool("decode", int(row["(d)tp"]), int(row["(d)workers"]) * copies),
    )
    return Theirs(pools, per_gpu)


def our_search(case: Case, folder: Path) -> tuple[Placement | None, float]:
    """Our placement, if there is one, and the seconds of the command."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(case.cluster()))
    asked = f"search --quiet --json --objective goodput --cluster {cluster} --model {case.model}"
    asked += f" --isl {case.isl} --osl {case.osl} --ttft {case.ttft_ms} --tpot {case.tpot_ms}"
    started = time.perf_counter()
    done = subprocess.run([COMMAND, *asked.split()], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    return (Placement(**json.loads(done.stdout)) if done.returncode == 0 else None), seconds


def as_placement(case: Case, theirs: Theirs) -> Placement | None:
    """Their plan in our format, with batches and steps as we choose them; None if it can't carry a request
    within the targets by our formulas."""
    problem = make_problem(
        ClusterSpec(**case.cluster()), case.model, None, case.isl, case.osl, goal=case.goal, phases="flexible"
    )
    free = {node: len(gpus) for node, gpus in enumerate(problem.node_gpus)}
    groups = []
    for pool in sorted(theirs.pools, key=lambda pool: -pool.tensor):
        for _ in range(pool.replicas):
            node = max(free, key=lambda each: (free[each] >= pool.tensor, -free[each]))
            free[node] -= pool.tensor
            groups.append(Group(pool.role, counts_of({node: pool.tensor})))

    def explore(state: SearchState) -> None:
        state.offer(state.evaluator.evaluate(Solution(tuple(groups))), "as planned by AIConfigurator")

    try:
        return run_search(
            "aiconfigurator",
            problem,
            SearchOptions(),
            explore,
            fewest_gpus=1,
            evaluator=OneStagePlanner.evaluator,
        )
    except InfeasibleError:
        return None


def goodput(placement: Placement | None, seeds: Sequence[int]) -> float:
    """Requests/s within the targets in the long run, a mean over requests drawn by these seeds."""
    if placement is None:
        return 0.0
    cluster = Cluster.from_spec(placement.cluster)
    found = [with_promise([placement], cluster, seed, lambda: False).goodput for seed in seeds]
    return statistics.mean(each.goodput_req_s or 0.0 if each else 0.0 for each in found)


def valued_by_theirs(command: str, case: Case, placement: Placement, folder: Path) -> float | None:
    """Tokens/s per GPU of the cluster that AIConfigurator expects of our placement, 0 where the targets are
    not met; None if it can't express the placement."""
    shapes: dict[str, set[tuple[int, int]]] = {}
    for replica in placement.replicas:
        shapes.setdefault(replica.role, set()).add(_shape(replica))
    if any(len(found) > 1 or (0, 0) in found for found in shapes.values()):
        return None
    task: dict[str, object] = {"isl": case.isl, "osl": case.osl, "ttft": case.ttft_ms, "tpot": case.tpot_ms}
    count = {role: sum(replica.role == role for replica in placement.replicas) for role in shapes}
    used = {role: tensor * stages * count[role] for role, ((tensor, stages),) in shapes.items()}
    if set(shapes) == {"colocated"}:
        ((tensor, stages),) = shapes["colocated"]
        task |= {"serving_mode": "agg", **_models(case, ""), **_only("agg", tensor, stages)}
    elif set(shapes) == {"prefill", "decode"}:
        task["serving_mode"] = "disagg"
        for role, ((tensor, stages),) in shapes.items():
            task |= {
                **_models(case, f"{role}_"),
                **_only(role, tensor, stages),
                f"max_{role}_workers": count[role],
            }
        task |= {"num_gpu_per_replica": [sum(used.values())], "max_gpu_per_replica": sum(used.values())}
    else:
        return None
    task["total_gpus"] = sum(used.values())
    file = folder / "task.yaml"
    file.write_text(yaml.safe_dump({"ours": task}))
    asked = ["cli", "exp", "--no-color", "--yaml-path", str(file), "--save-dir", str(folder / "valued")]
    subprocess.run([command, *asked], capture_output=True, text=True)
    found = best_of(case, folder / "valued")
    return found.per_gpu * sum(used.values()) / case.gpus if found else 0.0


def _models(case: Case, role: str) -> dict[str, str]:
    return {
        f"{role}model_path": MODELS[case.model],
        f"{role}system_name": SYSTEMS[case.gpu],
        f"{role}backend_name": "vllm",
    }


def _only(role: str, tensor: int, stages: int) -> dict[str, list[int]]:
    sizes = {"num_gpu": tensor * stages, "tp": tensor, "pp": stages, "dp": 1}
    return {f"{role}_{name}_candidates": [size] for name, size in sizes.items()}


def _shape(replica: Replica) -> tuple[int, int]:
    """Tensor degree and number of stages; zeros where stages are unlike."""
    degrees = {len(stage.gpus) for stage in replica.stages}
    return (degrees.pop(), len(replica.stages)) if len(degrees) == 1 else (0, 0)


def text_of_pools(theirs: Theirs | None) -> str:
    """As "2 prefill tp2, 1 decode tp4"."""
    pools = theirs.pools if theirs else ()
    return ", ".join(f"{pool.replicas} {pool.role} tp{pool.tensor}" for pool in pools) or "none"


def text_of_replicas(ours: Placement | None) -> str:
    """As "1 decode tp2|tp1", stage by stage."""
    replicas = ours.replicas if ours else []
    found = Counter(f"{r.role} {'|'.join(f'tp{len(s.gpus)}' for s in r.stages)}" for r in replicas)
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "none"


def main() -> None:
    """Print a row for each case, and how ours compares in all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--command", required=True, help="path of the command aiconfigurator")
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--draws", type=int, default=1, help="goodputs of each plan")
    options = parser.parse_args()
    if shutil.which(options.command) is None:
        parser.error(f"--command {options.command} cannot be run; pip install aiconfigurator somewhere")
    print(f"seed {options.seed}")
    print(
        f"{'GPUs, model, isl/osl, TTFT/TPOT':46}{'s':>12}{'goodput':>18}{'ratio':>7}{'by theirs':>16}  plans"
    )
    ratios, quicker = [], []
    for seed in range(options.seed, options.seed + options.cases):
        case = drawn(seed)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            theirs, their_s = their_search(options.command, case, folder / "theirs")
            ours, our_s = our_search(case, folder)
            valued = valued_by_theirs(options.command, case, ours, folder) if ours else 0.0
        seeds = range(seed * 100 + 1, seed * 100 + 1 + options.draws)
        their_req_s = goodput(as_placement(case, theirs), seeds) if theirs else 0.0
        our_req_s = goodput(ours, seeds)
        ratio = our_req_s / their_req_s if their_req_s else math.nan if not our_req_s else math.inf
        quicker.append(their_s / our_s)
        ratios += [] if math.isnan(ratio) else [ratio]
        plans = text_of_pools(theirs), text_of_replicas(ours)
        theirs_value = theirs.per_gpu if theirs else 0.0
        value = "-" if valued is None else f"{valued:.0f}"
        print(
            f"{case!s:46}{their_s:6.1f}{our_s:6.1f}{their_req_s:9.2f}{our_req_s:9.2f}{ratio:7.2f}"
            f"{theirs_value:9.0f}{value:>7}  {plans[0]}; ours: {plans[1]}",
            flush=True,
        )
    if ratios:
        print(
            f"goodput over theirs: median {statistics.median(ratios):.2f}, worst {min(ratios):.2f}, ahead in "
            f"{sum(ratio >= 1 for ratio in ratios)} of {len(ratios)}"
        )
    print(f"their seconds over ours: median {statistics.median(quicker):.1f}, least {min(quicker):.1f}")


if __name__ == "__main__":
    main()
