"""Runs of serving engines: from a row to a placement, and what simulating it gives."""

from __future__ import annotations

import csv
import gzip
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexgen2
from cost_model.engines.model import EngineSteps
from cost_model.engines.numbers import shipped
from cost_model.errors import InputError
from cost_model.registry import CostSource
from hexgen2.checks import check_degrees, check_flow, check_gpus, check_layers, check_names
from hexgen2.cluster import Cluster
from hexgen2.estimation import prediction
from hexgen2.estimation.deployment import placement_of, workload_of
from hexgen2.estimation.prediction import SHIPPED, predict
from hexgen2.estimation.run import Run, Shape, run_of
from hexgen2.estimation.runs import ADDED, estimate_runs, predictions
from hexgen2.prediction.step_times import StepTimes

AGG = {
    "backend": "vllm",
    "model_path": "Qwen/Qwen3-32B",
    "system": "h100_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "512",
    "osl": "64",
    "gemm_quant_mode": "fp8",
    "tp_size": "2.0",
    "concurrency": "4.0",
}
DISAGG = {
    "backend": "trtllm",
    "model_path": "deepseek-ai/DeepSeek-V3",
    "system": "b200_sxm",
    "mode": "disagg",
    "isl": "1024",
    "osl": "64",
    "gemm_quant_mode": "nvfp4",
    "moe_quant_mode": "nvfp4",
    "tp_size": "",
    "prefill_batch_size": "1",
    "prefill_num_workers": "2",
    "prefill_tp_size": "1",
    "prefill_attention_dp_size": "4",
    "prefill_moe_ep_size": "4",
    "decode_batch_size": "2",
    "decode_num_workers": "3",
    "decode_tp_size": "8",
    "decode_moe_ep_size": "8",
    "concurrency": "12",
}


def written(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list({name: None for row in rows for name in row}), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def placed(run):
    """The placement that a run is simulated with."""
    return placement_of(run, costs_of(run))


def costs_of(run):
    """The cost model of a run."""
    return SHIPPED[run.engine].costs(run.model, workload_of(run).lengths)


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("shape", [{}, {"pp_size": "2"}])
def test_a_run_is_what_simulate_makes_of_its_placement(backend, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(EngineSteps, "first_token_s", lambda costs, gpu: 0.0)
    run = run_of(AGG | shape | {"backend": backend})
    policy = {"vllm": "chunked", "sglang": "chunked-prefill-first", "trtllm": "inflight"}[backend]
    placed(run).save(tmp_path / "run.json")
    closed_loop = {"length_range": 0.8, "max_concurrency": 4, "num_requests": 40}
    step_tokens = 512 + 4 + 64 if backend == "trtllm" else 8192
    batching = {"policy": policy, "step_tokens": step_tokens, "max_batch": 4}
    found = hexgen2.simulate(tmp_path / "run.json", isl=512, osl=64, **closed_loop, **batching)
    assert predict(run) == (found.mean_ttft_ms, found.mean_tpot_ms, "")


def test_the_first_token_waits_for_the_front_end_and_for_those_sent_with_it(monkeypatch):
    run = run_of(AGG | {"concurrency": "1"})
    plain, grouped = predict(run), predict(run_of(AGG | {"concurrency": "1", "stream_interval": "5"}))
    assert grouped.tpot_ms == plain.tpot_ms
    assert grouped.ttft_ms == pytest.approx(plain.ttft_ms + 4 * plain.tpot_ms)
    options_of = prediction.options_of
    monkeypatch.setattr(
        prediction,
        "options_of",
        lambda *asked: type(options_of(*asked))(**vars(options_of(*asked)) | {"front_end_s": 0.5}),
    )
    later = predict(run)
    costs = prediction._cost_model(
        prediction.SHIPPED[run.engine], run.model, prediction.workload_of(run).lengths
    )
    without_s = costs.first_token_s(run.gpu)
    assert later.ttft_ms == pytest.approx(plain.ttft_ms + 500 - 1e3 * without_s)
    assert later.tpot_ms == pytest.approx(plain.tpot_ms)


def test_more_clients_wait_longer_and_more_gpus_are_faster():
    times = [predict(run_of(AGG | {"concurrency": str(clients)})) for clients in (1, 8, 64)]
    assert times[0].ttft_ms < times[1].ttft_ms < times[2].ttft_ms
    assert times[0].tpot_ms < times[1].tpot_ms < times[2].tpot_ms
    assert predict(run_of(AGG | {"tp_size": "4"})).tpot_ms < predict(run_of(AGG)).tpot_ms


def test_a_disaggregated_run_has_all_its_workers_and_routes():
    run = run_of(DISAGG)
    assert run.prefill.shape == Shape(1, 1, 4, 4) and run.decode.shape == Shape(8, 1, 1, 8)
    placement = placed(run)
    cluster = Cluster.from_spec(hexgen2.load_cluster(placement.cluster))
    roles = [(replica.role, len(replica.gpus), replica.max_batch) for replica in placement.replicas]
    assert roles == 2 * [("prefill", 4, 4)] + 3 * [("decode", 8, 2)]
    assert len(placement.routes) == 6
    for check in (check_gpus(placement, cluster), check_layers(placement), check_names(placement)):
        assert not list(check)
    assert not [*check_flow(placement), *check_degrees(placement)]
    stage = placement.replicas[0].stages[0]
    assert (stage.attention_data_parallel, stage.expert_parallel) == (4, 4)
    found = prediction.simulated(run, costs_of(run), run.osl)
    assert found.completed == 120
    assert {row["requests"] for name, row in found.replicas.items() if "decode" in name} == {40}
    assert all(row["peak_running"] <= 2 for name, row in found.replicas.items() if "decode" in name)


def test_workers_larger_than_a_node_span_nodes():
    placement = placed(
        run_of(
            DISAGG
            | {
                "system": "h100",
                "gemm_quant_mode": "fp8",
                "moe_quant_mode": "fp8",
                "decode_tp_size": "16",
                "decode_moe_ep_size": "16",
            }
        )
    )
    replica = placement.replicas[-1]
    assert len(replica.gpus) == 16 and len({gpu.partition("/")[0] for gpu in replica.gpus}) == 2
    cluster = Cluster.from_spec(hexgen2.load_cluster(placement.cluster))
    costs = placement.costs()
    group = StepTimes(replica, cluster, costs, "pipelined").groups[0]
    assert (group.degree, group.link.fabric, group.link.latency_s) == (16, "", pytest.approx(1e-5))


def test_experts_over_more_gpus_than_attention_mean_attention_data_parallelism():
    row = AGG | {"model_path": "Qwen/Qwen3-235B-A22B-FP8", "tp_size": "2", "moe_tp_size": "4"}
    assert run_of(row).colocated.shape == Shape(2, 1, 2, 1)
    assert run_of(row | {"moe_tp_size": "0", "moe_ep_size": "0.0"}).colocated.shape == Shape(2)


def test_tokens_are_sent_one_at_a_time_unless_a_row_or_a_public_recipe_says_otherwise():
    assert run_of(AGG).stream_interval == 1
    assert run_of(AGG | {"stream_interval": "20"}).stream_interval == 20
    assert run_of(DISAGG).stream_interval == 10
    assert run_of(DISAGG | {"stream_interval": "1"}).stream_interval == 1


def test_engines_look_for_requests_in_every_step_unless_a_row_or_a_public_recipe_says_otherwise():
    column = "scheduler_recv_interval"
    assert run_of(AGG | {"backend": "sglang"}).look_steps == 1
    assert run_of(AGG | {"backend": "sglang", column: "7"}).look_steps == 7
    deepseek = DISAGG | {"backend": "sglang"}
    assert [run_of(deepseek | {"concurrency": clients}).look_steps for clients in ("8", "16")] == [10, 30]
    assert (
        run_of(deepseek | {"system": "h200", "gemm_quant_mode": "fp8", "moe_quant_mode": "fp8"}).look_steps
        == 1
    )


def test_speculative_decoding_divides_the_time_per_token():
    plain, twice = (predict(run_of(AGG | {"tokens_per_step": tokens})) for tokens in ("", "2"))
    assert twice.tpot_ms == pytest.approx(plain.tpot_ms / 2, rel=0.1)
    assert twice.ttft_ms == pytest.approx(plain.ttft_ms, rel=0.2)


def test_versions_of_engines_that_predict_several_tokens_at_a_time():
    engine = shipped().engines["vllm"].model_copy(update={"speculative": {"9.9": {"qwen3-32b": 2.0}}})
    fits = shipped().model_copy(update={"engines": {"vllm": engine}})
    sources = {"vllm": CostSource("vllm", engines=fits)}
    plain, other, new = (
        predict(run_of(AGG | {"backend_version": version}), sources) for version in ("", "9.8", "9.9")
    )
    assert plain == other
    assert new == predict(run_of(AGG | {"tokens_per_step": "2"}), sources)
    assert predict(run_of(AGG | {"backend_version": "9.9", "tokens_per_step": "1"}), sources) == plain


def test_prefill_workers_have_room_for_the_prompts_of_their_batch_and_for_8192_tokens():
    run = run_of(DISAGG)
    assert prediction.options_of(run, costs_of(run)).step_tokens == 4 * 8192
    large = run_of(DISAGG | {"prefill_batch_size": "16"})
    assert prediction.options_of(large, costs_of(large)).step_tokens == 4 * 16 * 1024


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"backend": "tgi"}, "the engine 'tgi' is not known"),
        ({"mode": "both"}, "mode: is 'both'"),
        ({"system": "h500_sxm"}, "unknown accelerator 'h500_sxm'"),
        ({"model_path": "zhipuai/GLM-5"}, "GLM-5 has sparse attention"),
        ({"gemm_quant_mode": "fp2"}, "the format 'fp2' is not known"),
        ({"gemm_quant_mode": "fp8", "system": "v100"}, "V100-16GB has no kernels for fp8 weights"),
        ({"isl": "", "osl": "3"}, "isl: is missing"),
        ({"isl": "nan"}, "isl: is 'nan'"),
        ({"osl": "1e99"}, "osl: is '1e99'"),
        ({"concurrency": "-4"}, "concurrency: is '-4'"),
        ({"concurrency": "1.5"}, "concurrency: is '1.5'"),
        ({"tokens_per_step": "0.5"}, "tokens_per_step: is '0.5'"),
        ({"tokens_per_step": "many"}, "tokens_per_step: is 'many'"),
        ({"scheduler_recv_interval": "-1"}, "scheduler_recv_interval: is '-1'"),
        ({"concurrency": "20000", "isl": "40000"}, "more tokens than can be simulated"),
        ({"isl": "50000"}, "50000 + 64 tokens exceed the 40960 positions of qwen3-32b"),
        ({"tp_size": "3"}, "3 does not split the 64 heads"),
        ({"pp_size": "65"}, "65 stages for 64 layers"),
        ({"mode": "disagg"}, "prefill_num_workers: is missing"),
        ({"system": "l4", "tp_size": "1"}, "the weights of qwen3-32b do not fit into 1 L4"),
        (
            {"model_path": "meta-llama/Llama-3.1-70B", "tp_size": "1", "isl": "100000"},
            "a request of 100064 tokens does not fit into 1 H100 beside the weights",
        ),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(cells, why):
    (found,) = predictions([AGG | cells])
    assert found.ttft_ms is None and found.tpot_ms is None and why in found.why_not


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [*AGG, "pp_size", "attention_dp_size", "moe_ep_size", "stream_interval", "tokens_per_step"]
        ),
        st.one_of(st.text(max_size=8), st.integers(-3, 9).map(str), st.floats().map(str)),
        max_size=4,
    )
)
def test_any_cells_are_a_run_or_refused(cells):
    try:
        assert isinstance(run_of(AGG | {"isl": "64", "osl": "8"} | cells), Run)
    except InputError as error:
        assert "\n" not in str(error)


def test_rows_keep_their_order_and_their_other_columns(tmp_path):
    rows = [
        AGG | {"note": "first, with a comma", "concurrency": "8", "measured_ttft_ms": "1", "why_not": "old"},
        AGG | {"note": "unknown", "model_path": "acme/Frontier-1T"},
        AGG | {"note": "gleich \u201ezitiert\u201c"},
        AGG | {"note": "as the first", "concurrency": "8", "measured_ttft_ms": "99"},
    ]
    text = estimate_runs(written(tmp_path / "runs.csv", rows))
    found = read(text)
    assert [row["note"] for row in found] == [row["note"] for row in rows]
    names = [*AGG, "note", "measured_ttft_ms"]
    assert list(found[0]) == [*names, *ADDED]
    assert [{name: row[name] for name in names} for row in found] == [
        {name: row.get(name, "") for name in names} for row in rows
    ]
    assert [bool(row["why_not"]) for row in found] == [False, True, False, False]
    assert [bool(row["predicted_ttft_ms"]) for row in found] == [True, False, True, True]
    # What was measured does not matter, and what was simulated once is not simulated again.
    assert [found[0][name] for name in ADDED] == [found[3][name] for name in ADDED]
    expected = predict(run_of(rows[0]))
    assert float(found[0]["predicted_tpot_ms"]) == pytest.approx(expected.tpot_ms, rel=1e-5)
    packed = tmp_path / "runs.csv.gz"
    packed.write_bytes(gzip.compress((tmp_path / "runs.csv").read_bytes()))
    assert estimate_runs(packed) == text


def test_several_processes_give_the_same_text_as_one(tmp_path):
    rows = [AGG | {"isl": str(100 + k), "osl": "8", "concurrency": str(1 + k % 5)} for k in range(12)]
    path = written(tmp_path / "runs.csv", [*rows, AGG | {"isl": "none"}, DISAGG])
    seen = []
    text = estimate_runs(path, jobs=2, progress=lambda done, count: seen.append((done, count)))
    assert text == estimate_runs(path, jobs=1)
    assert seen == [(k, 13) for k in range(1, 14)]


def test_short_and_long_lines_are_rows_like_others(tmp_path):
    path = tmp_path / "runs.csv"
    head = ",".join(AGG)
    path.write_text(f"{head}\n\nvllm\n{','.join(AGG.values())},7,8\n")
    found = read(estimate_runs(path))
    assert len(found) == 2 and "system" in found[0]["why_not"]
    assert found[1]["predicted_tpot_ms"] and not found[1]["why_not"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has no rows"),
        (b"backend,model_path\nvllm,x\n", "system: is missing"),
        (",".join([*AGG, "note", "note"]).encode(), "note: is there twice"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b'backend,"model', "is missing"),
    ],
)
def test_a_file_that_is_no_table_of_runs_is_refused(content, why, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=why):
        estimate_runs(path)


def test_a_broken_archive_is_refused(tmp_path):
    whole = gzip.compress(b"backend,model_path\n" * 99)
    for content in (b"not packed", whole[:-9], whole[:20] + b"xxxx" + whole[24:]):
        path = tmp_path / "runs.csv.gz"
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"cannot be read|is missing"):
            estimate_runs(path)
