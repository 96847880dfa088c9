"""Print the tokens of seeded requests from a small fleet that runs in this process's environment.

    python instruction_tokens.py CHECKPOINT < requests.json

Reads a JSON list of [prompt, temperature, seed]. Prints the CPU capability and, for each request, its tokens
and, for each token, the log probabilities of the whole vocabulary.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from checkpoints import LAYERS, VOCAB
from engine_harness import Cluster
from torch.backends.cpu import get_cpu_capability

from runtime.protocol.message import Sampling

TOKENS = 48
SHAPES = {"prefill": [(2, 0, LAYERS)], "decode": [(1, 0, 3), (1, 3, LAYERS)]}


def main() -> None:
    requests, found = json.load(sys.stdin), []
    with Cluster(Path(sys.argv[1]), SHAPES) as fleet:
        for number, (prompt, temperature, seed) in enumerate(requests):
            sampling = Sampling(
                temperature=temperature, seed=seed, max_tokens=TOKENS, ignore_eos=True, logprobs=VOCAB
            )
            fleet.submit(str(number), prompt, sampling, "prefill", "decode")
        for number in range(len(requests)):
            outcome = fleet.finish(str(number))
            values = [[value for _, value in sorted(each.top)] for each in outcome.logprobs]
            found.append({"tokens": outcome.tokens, "logprobs": values})
    json.dump({"capability": get_cpu_capability(), "answers": found}, sys.stdout)


if __name__ == "__main__":
    main()
