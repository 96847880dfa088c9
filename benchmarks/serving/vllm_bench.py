"""Run `vllm bench serve`, an independent client, against any OpenAI endpoints: ours, vLLM's server, or both.

    python -m benchmarks.serving.vllm_bench --target fleet=http://127.0.0.1:8000 --target vllm=http://127.0.0.1:8001
        --tokenizer CHECKPOINT [--vllm vllm] [--rates 1,2,inf] [--isl 128] [--osl 64] [--prompts 100]

Needs vLLM's command (or its path; it can be in an environment of its own) and running servers: `hexgen2
launch placement.json --model-path CHECKPOINT`, `vllm serve CHECKPOINT`. All targets get the same random
prompts, one rate after the other, and take turns. Prints what vLLM's client measures: output tokens/s, mean
and p90 of TTFT and TPOT, and failed requests.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

KEYS = (
    "completed",
    "failed",
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "p90_ttft_ms",
    "mean_tpot_ms",
    "p90_tpot_ms",
)


def model_of(url: str) -> str:
    """The id of a server's first model."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return json.load(answer)["data"][0]["id"]


def measure(url: str, rate: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run vLLM's client once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [arguments.vllm, "bench", "serve", "--backend", "openai", "--base-url", url]
        command += ["--endpoint", "/v1/completions", "--model", model_of(url)]
        command += ["--tokenizer", str(arguments.tokenizer), "--dataset-name", "random", "--ignore-eos"]
        command += ["--random-input-len", str(arguments.isl), "--random-output-len", str(arguments.osl)]
        command += ["--num-prompts", str(arguments.prompts), "--request-rate", rate, "--seed", "0"]
        command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "90,99"]
        command += ["--disable-tqdm", "--save-result", "--result-dir", folder, "--result-filename", "r.json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return json.loads((Path(folder) / "r.json").read_text())


def main() -> None:
    """Measure every target at every rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--vllm", default="vllm")
    parser.add_argument("--rates", default="1,2,inf")
    parser.add_argument("--isl", type=int, default=128)
    parser.add_argument("--osl", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=100)
    arguments = parser.parse_args()
    if shutil.which(arguments.vllm) is None:
        parser.error(f"{arguments.vllm} is not installed: give the path of vLLM's command with --vllm")
    print("target", "rate", *KEYS, sep="\t")
    for rate in arguments.rates.split(","):
        for target in arguments.target:
            name, _, url = target.partition("=")
            found = measure(url.rstrip("/"), rate, arguments)
            print(name, rate, *(f"{found.get(key, float('nan')):.4g}" for key in KEYS), sep="\t", flush=True)


if __name__ == "__main__":
    main()
