"""With any file content, a command does its work or explains the error in one line: no traceback, and no
control characters on the terminal. Runs whole commands on mutations of valid files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from commands import hexgen2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_bytes

from cost_model.coefficients import fitted
from cost_model.printable import printable
from hexgen2.comparison import run as comparison

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
"""Examples per test; tests that run whole searches have fewer."""

FEW = settings(max_examples=EXAMPLES // 2, suppress_health_check=list(HealthCheck))
SOME = settings(FEW, max_examples=EXAMPLES)

CLUSTER = {
    "name": "two",
    "description": "for tests",
    "assumptions": ["none"],
    "nodes": [
        {"name": "a", "accelerators": "Mine:2", "interconnect": "pcie4", "region": "r", "network_gbit_s": 20},
        {
            "name": "b",
            "accelerators": "L4:1",
            "interconnect": {"bandwidth_gbyte_s": 9.5, "latency_us": 1},
            "price_per_gpu_hour": 0.5,
        },
    ],
    "network": {
        "default": {"bandwidth_gbit_s": 10, "latency_us": 50},
        "links": [{"from": "a", "to": "b", "bandwidth_gbit_s": 25, "latency_us": 30}],
        "uplinks": [{"name": "rack", "nodes": ["a"], "bandwidth_gbit_s": 15}],
    },
    "accelerators": {
        "Mine": {
            "memory_gib": 4,
            "bf16_dense_tflops": 10,
            "memory_bandwidth_gbyte_s": 200,
            "price_per_gpu_hour": 0.25,
        }
    },
    "offers": [{"accelerators": "L4", "price_per_gpu_hour": 1.69, "max_count": 2, "gpus_per_node": 2}],
}
MEASURED = "0,10,20\n10,0,20\n# ours\n20,20,0\n"
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "sliding_window": None,
    "rope_theta": 1e4,
}
STEPS = (
    "gpu,model,tp,phase,batch,input_len_or_context,measured_ms,engine,interconnect\n"
    "L4,llama-2-7b,1,prefill,1,512,120,ours,none\n"
    "L4,llama-2-7b,1,decode,4,512,60,ours,none\n"
    "A100-80GB,llama-2-7b,2,decode,8,1024,12,ours,nvlink\n"
)
TRACES = {
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    b"2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,96,9\n",
    "mooncake": b'{"timestamp": 1, "input_length": 10, "output_length": 5}\n'
    b'{"timestamp": 2000, "input_length": 100, "output_length": 7}\n',
    "sharegpt": b'[{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}]',
}
KEYS = b"# of ours\nalice: secret-1\nsecret-2\n"
BRIEFLY = ("--workload", "LPLD", "--time-limit", "0.05")
SIMULATED = ("--request-rate", "2", "--num-requests", "5")


class Files:
    """Valid files in a folder, and the commands that read each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = self.write("tiny/config.json", json.dumps(CONFIG)).parent
        self.cluster = self.write("cluster.yaml", yaml.safe_dump(CLUSTER))
        self.placement = folder / "placement.json"
        asked = ("--cluster", str(self.cluster), "--model", str(self.model), "--workload", "LPLD")
        made = hexgen2("search", *asked, "-o", str(self.placement))
        assert made.returncode == 0, made.stderr

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path

    def search(self, cluster: Path, *options: str, model: Path | None = None) -> CompletedProcess[str]:
        asked = ("--cluster", str(cluster), "--model", str(model or self.model), *BRIEFLY)
        return hexgen2("search", *asked, *options)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


def sound(ended: CompletedProcess[str]) -> CompletedProcess[str]:
    """Check what holds for every command, whatever its files contain."""
    assert ended.returncode in (0, 2, 3), ended
    assert "Traceback" not in ended.stderr
    for text in (ended.stdout, ended.stderr):
        assert printable(text) == text, ended
    if ended.returncode == 2:
        *progress, line = ended.stderr.splitlines()
        assert line.startswith("hexgen2: "), ended
        assert not [other for other in progress if other.startswith("hexgen2")], ended
    return ended


PLACED = {
    "show": ("show",),
    "simulate": ("simulate", *SIMULATED),
    "offline": ("simulate", "--offline", "--num-requests", "3", "--json"),
    "vllm": ("export", "--format", "vllm", "--force"),
    "kubernetes": ("export", "--format", "kubernetes", "--force"),
    "ray": ("export", "--format", "ray", "--force"),
    "launch": ("launch", "--model-path", "/nonexistent"),
    "replan": ("search", "--time-limit", "0.05", "--lost", "b/0", "--from"),
}


def with_placement(files: Files, name: str, path: Path) -> CompletedProcess[str]:
    """Run one of the commands above on a placement."""
    output = ("-o", str(files.folder / "exported")) if name in ("vllm", "kubernetes", "ray") else ()
    return sound(hexgen2(*PLACED[name], str(path), *output))


@SOME
@given(tree=mutated(CLUSTER), strategy=st.sampled_from(["hexgen2", "hexgen", "splitwise", "vllm"]))
def test_search_of_a_mutated_cluster(files, tree, strategy):
    sound(files.search(files.write("c.yaml", json.dumps(tree)), "--strategy", strategy))


@SOME
@given(raw=mutated_bytes(yaml.safe_dump(CLUSTER).encode()), options=st.sampled_from([(), ("--json",)]))
def test_search_of_mutated_cluster_text(files, raw, options):
    sound(files.search(files.write("c.yaml", raw), *options))


@FEW
@given(tree=mutated(CLUSTER))
def test_renting_in_a_mutated_cluster(files, tree):
    sound(files.search(files.write("c.yaml", json.dumps(tree)), "--budget", "3"))


@FEW
@given(raw=mutated_bytes(MEASURED.encode()))
def test_search_of_a_mutated_matrix(files, raw):
    tree = {**CLUSTER, "network": {**CLUSTER["network"], "measured": "m.csv"}}
    files.write("m.csv", raw)
    sound(files.search(files.write("c.yaml", json.dumps(tree))))


@FEW
@given(tree=mutated(CLUSTER, most=1))
def test_comparison_on_a_mutated_cluster(files, tree):
    path, asked = files.write("c.yaml", json.dumps(tree)), ("--model", str(files.model), *BRIEFLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "FEWEST", 30)
        patch.setattr(comparison, "MOST", 30)
        sound(
            hexgen2(
                "compare", "--cluster", str(path), "--strategies", "hexgen2,vllm", "--seconds", "1", *asked
            )
        )


@pytest.mark.parametrize("name", PLACED)
@SOME
@given(data=st.data())
def test_a_mutated_placement(files, name, data):
    tree = data.draw(mutated(json.loads(files.placement.read_text())))
    with_placement(files, name, files.write("p.json", json.dumps(tree)))


@pytest.mark.parametrize("name", ["show", "simulate", "launch"])
@FEW
@given(data=st.data())
def test_mutated_placement_text(files, name, data):
    with_placement(files, name, files.write("p.json", data.draw(mutated_bytes(files.placement.read_bytes()))))


@SOME
@given(tree=mutated(CONFIG) | mutated_bytes(json.dumps(CONFIG).encode()))
def test_a_mutated_model(files, tree):
    model = files.write("m/config.json", tree if isinstance(tree, bytes) else json.dumps(tree)).parent
    sound(hexgen2("estimate", "--gpu", "L4:2", "--model", str(model), "--isl", "100", "--osl", "10"))
    sound(files.search(files.cluster, model=model))


@pytest.mark.parametrize("kind", TRACES)
@FEW
@given(data=st.data())
def test_a_mutated_trace(files, kind, data):
    path = files.write("trace", data.draw(mutated_bytes(TRACES[kind])))
    sound(hexgen2("simulate", str(files.placement), "--workload", str(path), *SIMULATED))
    asked = ("--cluster", str(files.cluster), "--model", str(files.model), "--time-limit", "0.05")
    sound(hexgen2("search", *asked, "--workload", str(path)))


@SOME
@given(tree=mutated(json.loads(fitted().to_json())) | mutated_bytes(fitted().to_json().encode()))
def test_mutated_coefficients(files, tree):
    path = files.write("k.json", tree if isinstance(tree, bytes) else json.dumps(tree))
    asked = ("--gpu", "A100-80GB:2", "--model", "llama-2-7b", "--isl", "100", "--osl", "10")
    sound(hexgen2("estimate", *asked, "--cost-model", str(path)))
    sound(hexgen2("estimate", *asked, "--cost-model", str(path), "--json"))


@FEW
@given(raw=mutated_bytes(STEPS.encode()))
def test_mutated_steps(files, raw):
    path = files.write("steps.csv", raw)
    sound(hexgen2("estimate", "--csv", str(path)))


@settings(FEW, max_examples=EXAMPLES // 10)
@given(raw=mutated_bytes(STEPS.encode()))
def test_calibration_to_mutated_steps(files, raw):
    sound(hexgen2("calibrate", str(files.write("steps.csv", raw))))


@FEW
@given(raw=mutated_bytes(KEYS))
def test_mutated_keys(files, raw):
    keys = files.write("keys", raw)
    ended = hexgen2("launch", str(files.placement), "--model-path", "/nonexistent", "--api-keys", str(keys))
    assert sound(ended).returncode == 2
