"""Exports to plain vLLM: the scripts, run by a shell and by vLLM's own parser; and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from by_hand import by_hand

from cost_model.errors import InputError
from hexgen2.export.folder import write_folder
from hexgen2.export.vllm import vllm_files

NODES = {"a": "H100:8", "b": "A100-80GB:4", "c": "A100-80GB:4"}
SHAPES = {
    "prefill-0": [("a/2 a/3", 32)],
    "decode-0": [("a/6 a/7", 32)],
    "colocated-0": [("b/0 b/2", 20), ("c/1 c/0", 12)],
}
STUB = '#!/bin/sh\nprintf "%s\\0" "$@" > "$CALLED"\nenv -0 > "$CALLED.env"\n'


def run(folder: Path, script: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment with which a script calls vllm."""
    tools, called = folder / "tools", folder / "called"
    tools.mkdir(exist_ok=True)
    (tools / "vllm").write_text(STUB)
    (tools / "vllm").chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "CALLED": str(called)}
    done = subprocess.run([folder / script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pairs = called.with_suffix(".env").read_text().split("\0")[:-1]
    return called.read_text().split("\0")[:-1], dict(pair.split("=", 1) for pair in pairs)


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.fixture
def folder(tmp_path):
    placement = by_hand(
        NODES,
        SHAPES,
        (("prefill-0", "decode-0"),),
        addresses={"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"},
    )
    write_folder(tmp_path / "out", vllm_files(placement, "/models/it's here", "test"), force=False)
    return tmp_path / "out"


def test_scripts_run_what_the_placement_says(folder):
    words, environment = run(folder, "prefill-0.sh")
    assert words[:2] == ["serve", "/models/it's here"]
    assert value(words, "--tensor-parallel-size") == "2" and value(words, "--max-num-seqs") == "8"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert json.loads(value(words, "--kv-transfer-config"))["kv_role"] == "kv_producer"
    other, others = run(folder, "decode-0.sh")
    assert json.loads(value(other, "--kv-transfer-config"))["kv_role"] == "kv_consumer"
    assert others["CUDA_VISIBLE_DEVICES"] == "6,7" and value(other, "--host") == "10.0.0.1"
    for port in ("--port",):
        assert value(words, port) != value(other, port)
    side = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert environment[side] != others[side] and others["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("chunk", "requests", "tokens"), [(192, 48, 192 + 24), (128, 400, 400), (1024, 1, 1025)]
)
def test_steps_of_both_phases_have_as_many_prompt_tokens_as_planned(chunk, requests, tokens, tmp_path):
    placement = by_hand(NODES, {"colocated-0": [("a/0", 16), ("a/1", 16)]}, addresses={"a": "10.0.0.1"})
    replica = placement.replicas[0]
    replica.max_batch, replica.engine = requests, replica.engine.model_copy(update={"chunk_tokens": chunk})
    write_folder(tmp_path / "out", vllm_files(placement, "m", "test"), force=False)
    words, _ = run(tmp_path / "out", "colocated-0.sh")
    assert value(words, "--max-num-batched-tokens") == str(tokens)


def test_a_mixed_replica_sends_and_takes_kv_caches(tmp_path):
    shapes = {"mixed-0": [("a/0 a/1", 32)], "decode-0": [("a/2", 32)]}
    routes = (("mixed-0", "decode-0"), ("mixed-0", "mixed-0"))
    placement = by_hand(NODES, shapes, routes, addresses={"a": "10.0.0.1"})
    write_folder(tmp_path / "out", vllm_files(placement, "m", "test"), force=False)
    words, environment = run(tmp_path / "out", "mixed-0.sh")
    assert json.loads(value(words, "--kv-transfer-config"))["kv_role"] == "kv_both"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in environment
    shares = json.loads((tmp_path / "out" / "routes.json").read_text())["routes"]
    assert [(each["prefill"], each["decode"]) for each in shares] == list(routes)


def test_a_replica_on_two_nodes_is_two_processes_with_ranks_in_order(folder):
    first, environment = run(folder, "colocated-0-rank-0.sh")
    second, others = run(folder, "colocated-0-rank-1.sh")
    assert [environment["CUDA_VISIBLE_DEVICES"], others["CUDA_VISIBLE_DEVICES"]] == ["0,2", "1,0"]
    assert environment["VLLM_PP_LAYER_PARTITION"] == others["VLLM_PP_LAYER_PARTITION"] == "20,12"
    assert value(first, "--master-addr") == value(second, "--master-addr") == "10.0.0.2"
    assert [value(first, "--node-rank"), value(second, "--node-rank")] == ["0", "1"]
    assert "--headless" in second and "--headless" not in first and "--kv-transfer-config" not in first


def test_vllms_own_parser_takes_every_command(folder):
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    utils = pytest.importorskip("vllm.utils.argparse_utils")
    parser = cli_args.make_arg_parser(utils.FlexibleArgumentParser())
    for script in folder.glob("*.sh"):
        words, _ = run(folder, script.name)
        taken = parser.parse_args(["--model", *words[1:]])
        assert taken.pipeline_parallel_size == (2 if "colocated" in script.name else 1)
        assert taken.max_num_seqs == 8


def test_a_missing_address_is_asked_for(tmp_path):
    files = vllm_files(by_hand({"a": "H100:1"}, {"colocated-0": [("a/0", 32)]}), "m", "test")
    write_folder(tmp_path / "out", files, force=False)
    done = subprocess.run([tmp_path / "out" / "colocated-0.sh"], capture_output=True, text=True)
    assert done.returncode != 0 and "ADDRESS_A" in done.stderr and "cluster.env" in done.stderr


def test_routes_say_who_serves_where_and_how_much(folder):
    routes = json.loads((folder / "routes.json").read_text())
    shares = {(each["prefill"], each["decode"]): each["flow_req_s"] for each in routes["routes"]}
    assert shares == {("prefill-0", "decode-0"): 1.0, ("colocated-0", "colocated-0"): 1.0}
    words, _ = run(folder, "decode-0.sh")
    assert str(routes["replicas"]["decode-0"]["port"]) == value(words, "--port")


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"colocated-0": [("a/0 a/1", 20), ("b/0", 12)]}, "tp2,tp1"),
        ({"prefill-0": [("a/0", 32)], "decode-0": [("a/1", 16), ("a/2", 16)]}, "decode-0"),
        ({"mixed-0": [("a/1", 16), ("a/2", 16)]}, "writes to one only"),
        ({"colocated-0": [("a/0 a/1", 16), ("a/2 b/0", 16)]}, "unequal"),
    ],
)
def test_what_vllm_cannot_run_is_refused_with_the_replica_and_the_reason(shapes, says):
    routes = (("prefill-0", "decode-0"),) if "prefill-0" in shapes else ()
    with pytest.raises(InputError, match=says) as refusal:
        vllm_files(by_hand(NODES, shapes, routes), "m", "test")
    text = str(refusal.value)
    assert "replicas[" in text and "--engine torch" in text and "\n" not in text


@pytest.mark.parametrize(("kv", "says"), [(None, []), ("fp8", ["fp8"]), ("int8", ["int8_per_token_head"])])
def test_vllm_is_told_the_format_of_kv_caches(kv, says, tmp_path):
    placement = by_hand({"a": "H100:1"}, {"colocated-0": [("a/0", 32)]}, kv=kv, addresses={"a": "10.0.0.1"})
    write_folder(tmp_path / "out", vllm_files(placement, "m", "test"), force=False)
    words, _ = run(tmp_path / "out", "colocated-0.sh")
    assert [after for word, after in pairwise(words) if word == "--kv-cache-dtype"] == says


@pytest.mark.parametrize(
    ("nodes", "kv", "says"),
    [
        ({"a": "H100:2"}, "int4", "vLLM's KV caches in 4 bits are not those that were planned"),
        ({"a": "H100:2"}, "int8", "KV caches in int8 are not known to move with vLLM 0.32"),
        ({"a": "Core:2"}, "int8", "vLLM has no KV caches in int8 on CPUs"),
    ],
)
def test_formats_of_kv_caches_that_vllm_does_not_run_are_refused(nodes, kv, says):
    shapes = {"prefill-0": [("a/0", 32)], "decode-0": [("a/1", 32)]}
    with pytest.raises(InputError, match=f"model.kv_type: {says}; search with --kv fp8"):
        vllm_files(by_hand(nodes, shapes, (("prefill-0", "decode-0"),), kv=kv), "m", "test")


MIXTURE = {"prefill-0": [("a/0 a/1 a/2 a/3", 48)], "decode-0": [("a/4 a/5 a/6 a/7", 48)]}


def test_attention_groups_are_data_parallel_ranks(tmp_path):
    degrees = {"prefill-0": (4, 4), "decode-0": (2, 1)}
    placement = by_hand(
        NODES, MIXTURE, (("prefill-0", "decode-0"),), "qwen3-30b-a3b", {"a": "10.0.0.1"}, degrees
    )
    write_folder(tmp_path / "out", vllm_files(placement, "m", "test"), force=False)
    words, environment = run(tmp_path / "out", "prefill-0.sh")
    other, others = run(tmp_path / "out", "decode-0.sh")
    assert [value(each, "--data-parallel-size") for each in (words, other)] == ["4", "2"]
    assert [value(each, "--tensor-parallel-size") for each in (words, other)] == ["1", "2"]
    assert [value(each, "--max-num-seqs") for each in (words, other)] == ["2", "4"]  # of 8, on each rank
    assert "--enable-expert-parallel" in words and "--enable-expert-parallel" not in other
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    ports = [int(each["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for each in (environment, others)]
    assert ports[1] - ports[0] == 4  # each rank takes the next port


def test_devices_are_in_the_order_of_data_parallel_ranks(tmp_path):
    shapes = {"colocated-0": [("a/0 a/1", 24), ("a/2 a/3", 24)]}
    placement = by_hand(NODES, shapes, (), "qwen3-30b-a3b", {"a": "10.0.0.1"}, {"colocated-0": (2, 2)})
    write_folder(tmp_path / "out", vllm_files(placement, "m", "test"), force=False)
    words, environment = run(tmp_path / "out", "colocated-0.sh")
    assert value(words, "--pipeline-parallel-size") == value(words, "--data-parallel-size") == "2"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,2,1,3"


@pytest.mark.parametrize(
    ("shapes", "degrees", "model", "says"),
    [
        (MIXTURE, (1, 2), "qwen3-30b-a3b", "all GPUs of a stage"),
        (MIXTURE, (2, 1), "llama-2-7b", "mixtures of experts only"),
        ({"colocated-0": [("b/0 b/1", 24), ("c/0 c/1", 24)]}, (2, 2), "qwen3-30b-a3b", "single node"),
    ],
)
def test_degrees_that_vllm_cannot_run_are_refused(shapes, degrees, model, says):
    placement = by_hand(NODES, shapes, (), model, degrees=dict.fromkeys(shapes, degrees))
    with pytest.raises(InputError, match=says) as refusal:
        vllm_files(placement, "m", "test")
    assert "change the degrees" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_producer_that_repeats_heads_cannot_feed_a_narrower_consumer():
    shapes = {"prefill-0": [("a/0 a/1 a/2 a/3 a/4 a/5 a/6 a/7", 80)], "decode-0": [("b/0 b/1 b/2 b/3", 80)]}
    routes = (("prefill-0", "decode-0"),)
    assert vllm_files(by_hand(NODES, shapes, routes, "llama-2-70b"), "m", "test")  # 8 KV heads, one per GPU
    placement = by_hand(NODES, shapes, routes, "llama-2-70b")
    few = placement.model_copy(update={"model": placement.model.model_copy(update={"kv_heads": 4})})
    with pytest.raises(InputError, match="KV heads several times"):
        vllm_files(few, "m", "test")
