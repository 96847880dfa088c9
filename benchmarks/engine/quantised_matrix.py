"""Which quantised checkpoints the torch engine runs, by family and kind of replica: tokens against
transformers.

    python -m benchmarks.engine.quantised_matrix [--formats WORDS] [--families llama mixtral]

Tiny random checkpoints in every format (tests/support/quantised.py) of every family
(tests/support/checkpoints.py) on the replicas of benchmarks.engine.model_matrix: colocated, P/D and uneven.
transformers runs the same weights in float32. `equal`: all tokens of all three are; otherwise, the kinds of
replicas whose tokens differ. Below are formats that are refused, with what the engine says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

OWN_FORMATS = ("gpt_oss",)
"""Families that are quantised in a way of their own (benchmarks/engine/model_matrix.py)."""
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
    from benchmarks.engine.model_cells import QUANTISED, checkpoints, in_format

    writers = {name: write for name, write in checkpoints.WRITERS.items() if name not in OWN_FORMATS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--formats", default="", help="only those with these words in their name")
    parser.add_argument("--families", nargs="*", default=sorted(writers))
    options = parser.parse_args()
    names = [name for name in QUANTISED if options.formats in name]
    width = max(map(len, [*names, *REFUSED])) + 2
    print(f"{'format':{width}}" + "".join(f"{family:13}" for family in options.families))
    with tempfile.TemporaryDirectory() as folder:
        originals = {family: writers[family](Path(folder, family)) for family in options.families}
        for number, name in enumerate(names):
            cells = [in_format(original, name, Path(folder, f"{number}")) for original in originals.values()]
            print(f"{name:{width}}" + "".join(f"{found:13}" for found in cells), flush=True)
        for name, config in REFUSED.items():
            print(f"{name:{width}}{refusal(next(iter(originals.values())), config)}")


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
