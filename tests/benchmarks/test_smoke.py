"""Every benchmark runs from a clean checkout, as small as possible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SMALL = {
    "engine.engine_speed": "--dtypes float32 --rounds 1 --batches 1",
    "engine.engine_start": "--hidden 512 --ffn 512 --layers 2 --vocab 2000 --dtype float32 --repeats 1",
    "engine.kernel_speed": "--rounds 1",
    "engine.attention_workers": "--rounds 1 --head-dim 8",
    "engine.kv_formats": "--steps 2 --rounds 1 --contexts 64",
    "engine.kv_transfer": "shapes --rounds 1",
    "engine.quantised_matrix": "--formats AWQ --families llama",
    "engine.quantised_speed": "--rounds 1 --batches 1 --layers 1",
    "engine.exchange_speed": "--sizes 8 --rounds 1",
    "engine.step_speed": "--rounds 1 --layers 1 --batches 1 --formats int4 --tp 2 --threads 1",
    "engine.model_matrix": "--models llama --formats float32",
    "engine.sampler_speed": "--steps 1",
    "search.against_exact": "--clusters 2 --seed 2",
    "search.budget": "--workloads HPLD",
    "search.cost_models": "--settings 1 --workloads HPLD --requests 100",
    "search.chunk_sizes": "--boxes 1 --gpus 8 --seed 3 --settings=",
    "search.convergence": "--seeds 1 --workloads HPLD",
    "search.helix_cases": "tests/support/helix_case.json --shuffles 1",
    "search.questions": "--count 4 --seed 2 --largest 16 --limits 2",
    "search.ordinary": "--families racks --sizes 16 --first-seed 2 --models llama-3-8b",
    "search.planned_throughput": "--clusters 1 --fixed 0 --requests 300 --strategies distserve --seed 2",
    "search.promises": "--clusters 1 --fixed 0 --requests 200 --draws 1 --seed 2",
    "search.flexible": "--fixed 1 --clusters 0 --seed 2 --requests 300 --few",
    "search.partial_prefill": "--models llama-2-70b --prompts 512",
    "search.length_split": "--clusters hexgen2-case-study --models llama-2-70b --targets 2000:100 --draws 1"
    " --seed 1 --requests 300",
    "search.promise_time": "--cases 1 --runs 1 --seed 2",
    "search.rank_agreement": "--clusters 1 --fixed 0 --placements 4 --requests 200 --seed 2",
    "search.paper_figures": "--parts table4 --seconds 5",
    "search.replan": "--runs 1",
    "search.robustness": "--settings 3 --objectives throughput --exact 2",
    "search.same_answer": "--clusters 1 --disturb 1 --strategies vllm",
    "search.same_placements": f"--before {ROOT} --sample 2 --seed 1",
    "search.scale": "--gpus 64 --workloads HPHD --runs 1",
    "search.settings": "--runs 1 --settings homogeneous --limits 1",
    "search.strategies": "--settings hexgen2-case-study --strategies vllm distserve",
    "serving.chaos": "--fleet emulated --requests 20 --seconds 5 --front-end-deaths 0",
    "serving.coordination_cost": "--repeats 1 --steps 5",
    "serving.disaggregation": "--seconds 3 --rounds 1",
    "serving.front_end_saturation": "--repeats 1 --seconds 0.5 --cases stream-1 --clients 4 --overload",
    "serving.path_schedulers": "--requests 4 --clients 2 --rounds 1 --schedulers flow",
    "serving.phases": "--cluster hexgen2-homogeneous --workload HPLD --requests 40 --seed 2",
    "serving.reflow_speed": "--runs 2",
    "serving.soak": "--seconds 15",
    "serving.three_machines": "--requests 8",
    "serving.workload_aware": "--requests 80 --seeds 1 --seed 1 --clusters 1",
    "simulator.against_fleet": "--seconds 3",
    "simulator.helix_simulated": "tests/support/helix_case.json --requests 40 --placements helix --online",
    "simulator.full_load": "--count 1 --seed 1",
    "simulator.hetis_simulated": "--models llama-2-13b --loads humaneval --seeds 1 --seed 2 --requests 150",
    "simulator.strategy_table": "--clusters hexgen2-case-study --time-limit 2 --seconds 5",
    "simulator.load_shift": "--cells hexgen2-setting-4:online --seeds 1 --seed 2 --requests 1000 --few",
    "simulator.simulator_speed": "--requests 100",
}
"""Options by script. ELSEWHERE has the scripts that need something to be fetched first."""
ELSEWHERE = {
    "docs_figures": "test_docs.py",
    "engine.gpu_operators": "needs a GPU",
    "engine.gpu_speed": "needs a GPU",
    "engine.sides.limits": "engine.engine_speed runs it",
    "engine.sides.llama_cpp_batches": "needs llama-cpp-python: engine.quantised_speed runs it",
    "engine.sides.our_engine": "engine.engine_speed runs it",
    "engine.sides.transformers_generate": "engine.engine_speed runs it",
    "engine.sides.vllm_offline": "needs vLLM: test_engine_speed_beside_vllm",
    "search.aiconfigurator": "needs AIConfigurator: test_aiconfigurator.py",
    "search.answers": "search.same_answer runs it",
    "serving.scripted_fleet": "serving.front_end_saturation runs it",
    "serving.vllm_bench": "needs vLLM: tests/runtime/vllm",
    "serving.web_stack": "serving.front_end_saturation runs it",
    "simulator.accuracy_report": "test_serving_accuracy.py",
    "simulator.cost_model_accuracy": "test_accuracy_benchmark.py",
    "simulator.distserve_cross_check": "test_distserve_cross_check.py",
    "simulator.engine_fit": "test_run_calibration.py",
    "simulator.operator_fit": "test_operator_fit.py",
    "simulator.serving_accuracy": "test_serving_accuracy.py",
}


def scripts() -> set[str]:
    """The module names of all scripts under benchmarks/."""
    files = (path for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text())
    return {".".join(path.relative_to(BENCHMARKS).with_suffix("").parts) for path in files}


def test_every_script_is_run_by_a_test():
    assert scripts() == SMALL.keys() | ELSEWHERE.keys()


def test_the_index_names_every_script():
    index = (BENCHMARKS / "README.md").read_text()
    shown = SMALL.keys() | {
        script for script, why in ELSEWHERE.items() if "runs it" not in why and "sides" not in script
    }
    assert not {script for script in shown if f"`{script}`" not in index}


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALL)
def test_it_runs(script: str, tmp_path: Path):
    command = [sys.executable, "-m", f"benchmarks.{script}", *SMALL[script].split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip() and "Traceback" not in done.stderr


@pytest.mark.slow
def test_engine_speed_beside_vllm():
    """vLLM's interpreter sees the benchmarks, and nothing there shadows a package that vLLM imports."""
    python = ROOT / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip("no environment with vLLM: `make environments`")
    options = f"--dtypes float32 --rounds 1 --batches 1 --vllm-python {python}"
    command = [sys.executable, "-m", "benchmarks.engine.engine_speed", *options.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vllm eager" in done.stdout and "vllm compiled" in done.stdout
