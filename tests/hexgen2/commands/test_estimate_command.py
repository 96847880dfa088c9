"""`hexgen2 estimate` and `calibrate`."""

from __future__ import annotations

import csv
import json

import pytest
from commands import hexgen2, installed, refused

from cost_model.base import TensorGroup
from cost_model.coefficients import fitted
from cost_model.engines.model import ENGINES
from cost_model.hardware import CATALOGUE, NO_LINK, interconnect_link
from cost_model.lengths import RequestLengths
from cost_model.models import find_model
from cost_model.registry import DEFAULT, make_cost_model

ON_H100 = ["estimate", "--gpu", "H100:8", "--model", "llama-2-70b", "--isl", "1024"]


def estimated(*arguments: str) -> dict:
    result = hexgen2(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_text_names_what_it_predicts_and_how_far_off_it_may_be():
    result = installed(*ON_H100, "--tp", "8", "--batch", "16", "--osl", "256")
    assert result.returncode == 0, result.stderr
    assert "llama-2-70b on 8xH100 (nvlink), bf16 weights, bf16 KV cache" in result.stdout
    for line in ("prefill  ", "decode step  ", "memory  ", "largest batch  ", "cost model  ", "+- "):
        assert line in result.stdout


def test_pipelines_are_stages_one_after_the_other():
    """Two stages of 40 layers on 4 GPUs each take as long as 80 layers on 4 GPUs, plus one hop."""
    one = estimated(*ON_H100, "--tp", "4")
    two = estimated(*ON_H100, "--tp", "4", "--pp", "2")
    costs = make_cost_model(DEFAULT, find_model("llama-2-70b"), RequestLengths.fixed(1024, 256))
    step_s = costs.edge_work_s(TensorGroup(CATALOGUE["H100"], 4, NO_LINK), 1, last=False)
    link, _ = interconnect_link("nvlink", CATALOGUE["H100"])
    hop_s = link.latency_s + 1024 * 8192 * 2 / link.bandwidth_bytes_s
    assert two["prefill_ms"] - one["prefill_ms"] == pytest.approx(1e3 * (hop_s + step_s), rel=1e-6)
    assert two["memory_bytes"] < 0.6 * one["memory_bytes"]
    assert two["largest_batch"] > one["largest_batch"]


def test_memory_is_counted_to_the_byte():
    """As for two cards in the stage memory tests, with 1 GiB for the engine and 8 idle KV tokens."""
    found = estimated(
        "estimate", "--gpu", "A100-80GB:2", "--model", "llama-2-70b", "--isl", "768", "--osl", "256"
    )
    kv = 163_840 * (1024 + 8)
    fixed = 80 * 855_654_400 + 524_288_000 + 184_549_376 + 1024**3
    assert found["memory_bytes"] == fixed + kv and found["kv_bytes"] == kv
    assert found["largest_batch"] == int((0.9 * 80 * 1024**3 - fixed) // kv) and found["fits"]


@pytest.mark.parametrize(("cost_model", "share"), [("calibrated", 0.4), (DEFAULT, 0.6)])
def test_fewer_bits_fit_where_more_do_not(cost_model, share):
    """Reading a quarter of the bytes, a step takes a little more than a quarter of the time; with whole
    tiles, more, since these compute as long for one request as for many."""
    one = ["estimate", "--gpu", "A100-80GB", "--model", "llama-2-70b", "--isl", "512"]
    one += ["--cost-model", cost_model]
    plain, packed = estimated(*one), estimated(*one, "--weights", "int4", "--kv", "fp8")
    assert not plain["fits"] and plain["largest_batch"] == 0
    assert packed["fits"] and packed["largest_batch"] > 30
    assert packed["decode_ms"] < share * plain["decode_ms"]
    assert "does not fit" in hexgen2(*one).stdout


def test_an_engine_that_was_measured_is_surer_than_a_mean_one():
    of_2023 = ["--cost-model", "calibrated"]
    mean, measured = estimated(*ON_H100, *of_2023), estimated(*ON_H100, *of_2023, "--engine", "splitwise")
    assert measured["error"] < mean["error"]
    rtx = ["estimate", "--gpu", "RTX4090:4", "--model", "llama-3-8b", "--isl", "512"]
    unknown = estimated(*rtx, *of_2023)
    assert unknown["error"] >= fitted().held_out.gpu
    assert any("no step of RTX4090 was measured" in assumed for assumed in unknown["assumptions"])
    assert mean["assumptions"] == [] and mean["numbers"] == []


def test_an_estimate_says_what_is_fitted_and_what_is_scaled():
    """Operators were measured on H100; those of an RTX4090 are scaled from a card of its generation."""
    known = estimated(*ON_H100)["numbers"]
    assert known[0].startswith("fitted: matrix products +- ") and "experts" not in known[0]
    assert any("all-reduces" in line for line in known)
    unknown = ["estimate", "--gpu", "RTX4090", "--model", "qwen3-30b-a3b", "--isl", "512"]
    lines = estimated(*unknown)["numbers"]
    assert all(line.startswith("scaled from L40S") for line in lines) and "experts +- " in "".join(lines)
    assert lines[0] in hexgen2(*unknown).stdout
    assert "no server with RTX4090 was measured" in hexgen2(*unknown).stdout


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_chooses_its_cost_model(engine):
    chosen = estimated(*ON_H100, "--engine", engine)
    assert chosen["cost_model"]["engine"] == engine
    named = estimated(*ON_H100, "--cost-model", engine)
    assert chosen == named
    usual = estimated(*ON_H100)
    assert (chosen == usual) == (engine == DEFAULT)
    assert "use vllm, sglang, trtllm" in refused(hexgen2(*ON_H100, "--engine", "splitwise"))


def test_attention_groups_hold_the_latent_cache_once():
    """Tensor parallelism keeps a copy of the latent on each GPU; groups of one GPU divide the requests."""
    eight = ["estimate", "--gpu", "H200:8", "--model", "deepseek-v3", "--isl", "4000", "--osl", "500"]
    copies = estimated(*eight, "--batch", "64")
    groups = estimated(*eight, "--batch", "64", "--attention-dp", "8", "--expert-parallel", "8")
    assert groups["kv_bytes"] == pytest.approx(copies["kv_bytes"] / 8)
    assert groups["memory_bytes"] - groups["kv_bytes"] > copies["memory_bytes"] - copies["kv_bytes"]
    assert (groups["attention_dp"], groups["expert_parallel"]) == (8, 8)
    text = hexgen2(*eight, "--attention-dp", "8", "--expert-parallel", "8").stdout
    assert "8 attention groups, experts in 8 parts" in text


@pytest.mark.parametrize(
    "arguments,named",
    [
        (["--attention-dp", "3"], "--attention-dp"),
        (["--expert-parallel", "3"], "--expert-parallel"),
        (["--expert-parallel", "8"], "--expert-parallel"),
        (["--csv", "steps.csv", "--attention-dp", "2"], "--attention-dp"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(arguments, named):
    on_h100 = [] if "--csv" in arguments else ON_H100[1:]
    assert named in refused(hexgen2("estimate", *on_h100, *arguments))


def test_many_steps_from_a_csv(tmp_path):
    path, out = tmp_path / "steps.csv", tmp_path / "out.csv"
    path.write_text(
        "# a comment\nmine,gpu,model,tp,phase,batch,input_len_or_context\n"
        '"a, b",A100-80G,Llama-2-70b-hf,4,prefill,2,512\nc,h100,opt-13b,1,decode,8,1000\n'
    )
    result = hexgen2("estimate", "--csv", str(path), "-o", str(out))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    rows = list(csv.DictReader(out.open()))
    assert [row["mine"] for row in rows] == ["a, b", "c"]
    costs = make_cost_model(DEFAULT, find_model("opt-13b"), RequestLengths.fixed(1000, 0))
    lone = TensorGroup(CATALOGUE["H100"], 1, NO_LINK)
    expected = 40 * costs.layer_s("decode", lone, 8) + costs.edge_s("decode", lone, 8, True)
    assert float(rows[1]["predicted_ms"]) == pytest.approx(1e3 * expected, rel=1e-4)
    assert hexgen2("estimate", "--csv", str(path)).stdout == out.read_text()


def test_what_is_calibrated_is_used(tmp_path):
    """When steps take 1.5 times as long as usual, the calibrated estimate follows, and says so."""
    steps, measured = tmp_path / "steps.csv", tmp_path / "measured.csv"
    lines = [
        f"L40S,{model},1,{phase},{batch},{tokens}"
        for model in ("llama-3-8b", "opt-13b")
        for phase in ("prefill", "decode")
        for batch, tokens in ((1, 200), (1, 1000), (8, 500), (32, 800))
    ]
    steps.write_text("gpu,model,tp,phase,batch,input_len_or_context\n" + "\n".join(lines) + "\n")
    usual = ["estimate", "--csv", str(steps), "--cost-model", "calibrated"]
    predicted = list(csv.DictReader(hexgen2(*usual).stdout.splitlines()))
    measured.write_text(
        "gpu,model,tp,phase,batch,input_len_or_context,measured_ms\n"
        + "\n".join(
            f"{line},{1.5 * float(row['predicted_ms'])}" for line, row in zip(lines, predicted, strict=True)
        )
    )
    result = hexgen2("calibrate", str(measured), "-o", str(tmp_path / "mine.json"))
    assert result.returncode == 0 and "16 steps; mean error where left out" in result.stderr
    one = ["estimate", "--gpu", "L40S", "--model", "llama-3-8b", "--isl", "600", "--batch", "4"]
    before, after = (estimated(*one, "--cost-model", c) for c in ("calibrated", str(tmp_path / "mine.json")))
    assert after["prefill_ms"] / before["prefill_ms"] == pytest.approx(1.5, rel=0.1)
    assert after["decode_ms"] / before["decode_ms"] == pytest.approx(1.5, rel=0.1)
    assert after["error"] < before["error"] and after["cost_model"]["name"] == "measured"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpu", "H100:8"], "--model: is missing"),
        (["--gpu", "H10", "--model", "opt-13b", "--isl", "9"], "did you mean H100?"),
        (["--gpu", "H100:8", "--model", "opt-13b", "--isl", "9", "--tp", "16"], "--tp: 16 x 1 stages"),
        (["--gpu", "H100:8", "--model", "opt-13b", "--isl", "9", "--tp", "7"], "--tp: 7 does not split"),
        (
            ["--gpu", "H100:99", "--model", "opt-13b", "--isl", "9", "--tp", "1", "--pp", "99"],
            "--pp: 99 stages",
        ),
        (["--gpu", "H100:8", "--model", "opt-13b", "--isl", "9", "--engine", "x"], "--engine: 'x'"),
        (["--csv", "no-such.csv"], "no-such.csv: cannot be read"),
        (["--csv", "no-such.csv", "--gpu", "H100"], "--gpu: is a column"),
    ],
)
def test_wrong_input_is_one_line(arguments, complaint):
    assert complaint in refused(hexgen2("estimate", *arguments))


def test_calibrating_on_nothing_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("gpu,model,tp,phase,batch,input_len_or_context,measured_ms\n")
    assert "has 0 measured steps" in refused(hexgen2("calibrate", str(tmp_path / "rows.csv")))
