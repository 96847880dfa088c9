"""What it is worth to prefill the first part of each prompt on a weak GPU, the rest on a strong one (Cronus).

    python -m benchmarks.search.partial_prefill [--models A,B] [--prompts 512,2048,8192] [--cost-model NAME]

A second of the weak GPU's time, and a byte of KV cache sent, spare the strong one some time. Per second
and per byte that is the same whether the weak GPU computes all of few prompts or a part of many, but for
attention, whose work per token grows along the prompt: the first part is cheaper, on both. For each pair of
GPU types and length of prompts, this prints the strong GPU's seconds that are spared per second of the weak
one, with whole prompts and with the best part, and the gain; and the largest gain of all.
"""

from __future__ import annotations

import argparse
import itertools

from cluster_specs.loader import load_cluster
from cost_model.base import TensorGroup
from cost_model.hardware import NO_LINK
from cost_model.models import find_model
from cost_model.registry import find_cost_model
from hexgen2.cluster import Cluster
from hexgen2.workload.classes import load_workload

CLUSTER = "hexgen2-setting-1"
"""It has all types of GPU that the paper rents."""
PARTS = tuple(k / 16 for k in range(1, 17))


def main() -> None:
    """Print a row for each pair of GPU types, model and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="llama-2-70b,opt-30b", help="separated by commas")
    parser.add_argument("--prompts", default="512,2048,8192", help="tokens, separated by commas")
    parser.add_argument("--cost-model", default=None)
    options = parser.parse_args()
    cluster = Cluster.from_spec(load_cluster(CLUSTER))
    types = {accelerator.name: accelerator for accelerator in cluster.accelerators}
    print(f"{'model':14}{'tokens':>8}  {'weak':12}{'strong':12}{'whole':>8}{'best':>8}{'part':>7}{'gain':>8}")
    gains = []
    for model, tokens in itertools.product(options.models.split(","), map(int, options.prompts.split(","))):
        seconds = {
            name: [_prefill_s(model, tokens * part, accelerator, options.cost_model) for part in PARTS]
            for name, accelerator in types.items()
        }
        for weak, strong in itertools.permutations(types, 2):
            if seconds[weak][-1] <= seconds[strong][-1]:
                continue
            spared = [s / w for s, w in zip(seconds[strong], seconds[weak], strict=True)]
            best = max(spared)
            gains.append(best / spared[-1] - 1)
            print(
                f"{model:14}{tokens:>8}  {weak:12}{strong:12}{spared[-1]:>8.3f}{best:>8.3f}"
                f"{PARTS[spared.index(best)]:>7.0%}{gains[-1]:>8.1%}"
            )
    print(f"largest gain: {max(gains):.1%} of what the weak GPU adds")


def _prefill_s(model: str, tokens: float, accelerator: object, cost_model: str | None) -> float:
    """Seconds of a layer for so many tokens of one prompt, from its start, where steps are full of such
    parts."""
    costs = find_cost_model(cost_model).costs(find_model(model), load_workload(None, tokens, 1.0).lengths)
    alone = TensorGroup(accelerator, 1, NO_LINK)  # type: ignore[arg-type]
    batch = costs.prefill_batch()
    return costs.layer_s("prefill", alone, batch) / batch


if __name__ == "__main__":
    main()
