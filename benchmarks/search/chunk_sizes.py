"""What smaller chunks of prompts are worth in colocated replicas: the search with all sizes of CHUNKS, and
with those of 512 tokens and more.

    python -m benchmarks.search.chunk_sizes [--boxes 4] [--gpus 16] [--seed S] [--settings 1,3]

Each row is a cluster of HexGen-2 or of machines over the internet, drawn by the seed, with a model and a
workload: requests/s of the best colocated fleet with large chunks and with all, as simulated at full load
with requests that neither search has seen; their ratio; and the sizes that the second fleet uses. Prints the
least, mean and greatest ratio.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from unittest.mock import patch

import hexgen2
from benchmarks.search.ordinary import drawn
from cost_model.pipeline import CHUNKS
from hexgen2.cluster import Cluster
from hexgen2.placement import ClusterSpec, Placement
from hexgen2.promise.full_load import simulated_factor

LARGE = (512, 1024, 2048)
MODELS = ("llama-2-70b", "opt-30b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")


def found(cluster: str | ClusterSpec, model: str, workload: str, chunks: tuple[int, ...]) -> Placement:
    """The best colocated fleet with these sizes of chunks."""
    with (
        patch("hexgen2.search.planning.pipelines.CHUNKS", chunks),
        patch("hexgen2.search.planning.chunks.CHUNKS", chunks),
    ):
        return hexgen2.search(cluster=cluster, model=model, workload=workload, phases="colocated")


def served_req_s(placement: Placement, seed: int) -> float:
    """Requests/s at full load."""
    factor = simulated_factor(placement, Cluster.from_spec(placement.cluster), seed)
    return placement.throughput.req_s * (factor or 1.0)


def cases(
    settings: list[str], boxes: int, gpus: int, seed: int
) -> Iterator[tuple[str | ClusterSpec, str, str]]:
    """Clusters with models and workloads."""
    names = [f"hexgen2-setting-{each}" for each in settings if each]
    yield from itertools.product(names, MODELS, WORKLOADS)
    rng = random.Random(seed)
    for k in range(boxes):
        cluster = ClusterSpec.model_validate(drawn("boxes", gpus, seed + k))
        yield cluster, rng.choice(MODELS), rng.choice(WORKLOADS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--boxes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--settings", default="1,3")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    print(f"{'cluster':<20} {'model':<12} {'workload':<8} {'large':>8} {'all':>8} {'ratio':>6}  sizes")
    ratios = []
    for cluster, model, workload in cases(
        options.settings.split(","), options.boxes, options.gpus, options.seed
    ):
        fleets = [found(cluster, model, workload, chunks) for chunks in (LARGE, CHUNKS)]
        large, every = (served_req_s(fleet, options.seed + 1) for fleet in fleets)
        ratios.append(every / large)
        sizes = sorted({replica.engine.chunk_tokens for replica in fleets[1].replicas})
        name = cluster if isinstance(cluster, str) else cluster.name
        row = f"{name:<20} {model:<12} {workload:<8} {large:8.4g} {every:8.4g} {ratios[-1]:6.3f}"
        print(row, " ", ", ".join(map(str, sizes)), flush=True)
    print(f"least {min(ratios):.3f}, mean {statistics.mean(ratios):.3f}, most {max(ratios):.3f}")


if __name__ == "__main__":
    main()
