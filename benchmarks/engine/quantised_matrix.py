"""Which quantised checkpoints the torch engine runs, by family and kind of replica: tokens against
transformers.

    python -m benchmarks.engine.quantised_matrix [--formats WORDS] [--families llama mixtral]

Tiny random checkpoints in every format (tests/support/quantised.py) of every family
(tests/support/checkpoints.py), and 24 greedy tokens after prompts of 1 to 40 tokens by real worker processes:
colocated; a prefill and a decode replica, between which KV caches move (P/D); the same where one has a stage
of two tensor-parallel ranks before one of a single rank, and the other two stages, in both directions
(uneven). transformers runs the same weights in float32. `equal`: all tokens of all three are; otherwise, the
kinds whose tokens differ. Below are formats that are refused, with what the engine says.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
PROMPTS = [[3, 17, 99, 250, 42, 7], [8], [120] * 40]
TOKENS = 24
ROUTES = {
    "colocated": (("one", "one"),),
    "P/D": (("one", "other"),),
    "uneven": (("tp2-tp1", "pp2"), ("pp2", "tp2-tp1")),
}
REFUSED: dict[str, dict[str, Any]] = {
    "GPTQ 3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 128},
    "GPTQ, Marlin's layout": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "AWQ, GEMV's layout": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


def main() -> None:
    """Print one row after the other."""
    # Worker processes import this module again, so it imports what is slow only here.
    sys.path.append(str(SUPPORT))
    from checkpoints import WRITERS
    from quantised import FORMATS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--formats", default="", help="only those with these words in their name")
    parser.add_argument("--families", nargs="*", default=sorted(WRITERS))
    options = parser.parse_args()
    names = [name for name in FORMATS if options.formats in name]
    width = max(map(len, [*names, *REFUSED])) + 2
    print(f"{'format':{width}}" + "".join(f"{family:11}" for family in options.families))
    with tempfile.TemporaryDirectory() as folder:
        originals = {family: WRITERS[family](Path(folder, family)) for family in options.families}
        for number, name in enumerate(names):
            cells = [cell(original, name, Path(folder, f"{number}")) for original in originals.values()]
            print(f"{name:{width}}" + "".join(f"{found:11}" for found in cells), flush=True)
        for name, config in REFUSED.items():
            print(f"{name:{width}}{refusal(next(iter(originals.values())), config)}")


def cell(original: Path, name: str, work: Path) -> str:
    """What a family's model gives in a format."""
    from checkpoints import greedy
    from engine_harness import Cluster
    from quantised import quantise

    from runtime.protocol.message import Sampling

    quantised, plain = work / original.name / "quantised", work / original.name / "plain"
    quantise(original, name, quantised, plain)
    expected = greedy(plain, PROMPTS, TOKENS)
    layers = json.loads((plain / "config.json").read_text())["num_hidden_layers"]
    one, two = [(1, 0, layers)], [(1, 0, layers // 2), (1, layers // 2, layers)]
    shapes = {"one": one, "other": one, "tp2-tp1": [(2, *two[0][1:]), two[1]], "pp2": two}
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    wrong = list[str]()
    with Cluster(quantised, shapes) as cluster:
        for kind, routes in ROUTES.items():
            found = [tokens(cluster, kind, source, target, sampling) for source, target in routes]
            if any(answers != expected for answers in found):
                wrong.append(kind)
    return ", ".join(wrong) or "equal"


def tokens(cluster: Any, kind: str, source: str, target: str, sampling: Any) -> Sequence[list[int]]:
    """The tokens after each prompt, from a prefill replica and a decode replica (or the same)."""
    requests = [f"{kind} {source} {target} {number}" for number in range(len(PROMPTS))]
    for request, prompt in zip(requests, PROMPTS, strict=True):
        cluster.submit(request, prompt, sampling, source, target)
    return [cluster.finish(request).tokens for request in requests]


def refusal(folder: Path, config: dict[str, Any]) -> str:
    """What the engine says of a model in such a format."""
    import torch

    from cost_model.errors import InputError
    from runtime.engine.torch.loader import Checkpoint
    from runtime.engine.torch.quantised.linear import Quantised

    described = folder / "config.json"
    plain = described.read_text()
    described.write_text(json.dumps({**json.loads(plain), "quantization_config": config}))
    try:
        Quantised(Checkpoint(str(folder), "auto", torch.device("cpu"), ()))
    except InputError as error:
        return f"refused: {error.key} {error.problem}; {error.remedy}"
    finally:
        described.write_text(plain)
    return "runs"


if __name__ == "__main__":
    main()
