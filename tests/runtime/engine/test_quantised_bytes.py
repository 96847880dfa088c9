"""The planner, the launch and the engine agree on the bytes of quantised weights and KV caches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from placements import placement_of, replica_of
from quantised import quantise
from transformers import LlamaConfig, LlamaForCausalLM

from cluster_specs.schema import AcceleratorSpec, ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from cost_model.dtypes import in_formats
from cost_model.errors import InputError
from hexgen2.placement import Placement
from hexgen2.workload.lengths import RequestClass, Workload
from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives
from runtime.engine.torch.models import load_stage
from runtime.kv_cache.formats import kv_format
from runtime.kv_cache.layout import held
from runtime.kv_cache.pool import CacheShape
from runtime.launcher.configure import as_computed, configurations
from runtime.options import EngineOptions
from runtime.protocol.message import StageShape

CPU = torch.device("cpu")
WORKLOAD = Workload(name="short", classes=(RequestClass(name="short", isl=32, osl=16),))
SHAPES = {
    "one": (StageShape(workers=("a",), first_layer=0, end_layer=2),),
    "tp2-tp1": (
        StageShape(workers=("a", "b"), first_layer=0, end_layer=1),
        StageShape(workers=("c",), first_layer=1, end_layer=2),
    ),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of matrices that are much larger than their scales per channel, in bfloat16."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    folder = tmp_path_factory.mktemp("original") / "model"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def planned(folder: Path, memory_gib: float = 2.0, kv: str | None = None) -> Placement:
    """One CPU worker for the model of a folder, with KV caches in another format if one is given."""
    core = AcceleratorSpec(
        memory_gib=memory_gib, bf16_dense_tflops=0.2, memory_bandwidth_gbyte_s=10, kind="cpu"
    )
    box = NodeSpec(name="box", accelerators="Core:1", interconnect="shared-memory")
    cluster = ClusterSpec(name="box", nodes=[box], accelerators={"Core": core})
    replica = replica_of("colocated-0", [("box/0", 2)], max_batch=4096, utilisation=0.5)
    return placement_of(cluster, in_formats(architecture_from_folder(folder), kv=kv), WORKLOAD, [replica], [])


def loaded_bytes(folder: Path, dtype: str, shape: str) -> int:
    """Bytes of the weights that the workers of a replica hold."""
    stages = SHAPES[shape]
    ranks = [Rank.find(stages, worker) for stage in stages for worker in stage.workers]
    parts = [load_stage(str(folder), dtype, CPU, Collectives(rank, CPU)) for rank in ranks]
    return sum(part.checkpoint.bytes_read for part in parts)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("AWQ", list(SHAPES)),
        ("GPTQ 4 bits, groups of 128", list(SHAPES)),
        ("GPTQ 4 bits, desc_act, zeros", ["one"]),  # each rank needs the scales of all groups
        ("GPTQ 8 bits", ["one"]),
        ("compressed-tensors int8", list(SHAPES)),
        ("W8A8", list(SHAPES)),
        ("W8A8, static", ["one"]),
        ("compressed-tensors fp8", ["one"]),
        ("fp8 by blocks of 128", list(SHAPES)),
    ],
)
def test_planned_and_loaded_bytes_agree(original: Path, tmp_path: Path, name: str, shapes: list[str]) -> None:
    folder = tmp_path / "model"
    quantise(original, name, folder)
    plan = planned(folder)
    for shape in shapes:
        found = loaded_bytes(folder, "bfloat16", shape)
        assert found == pytest.approx(plan.model.total_bytes, rel=0.01)
    wide = as_computed(plan, "float32", stored_bytes=2).model
    assert loaded_bytes(folder, "float32", "one") == pytest.approx(wide.total_bytes, rel=0.01)
    assert wide.total_bytes == plan.model.total_bytes, "what is stored in 16 bits stays so"
    assert wide.kv_bytes_per_token == 2 * plan.model.kv_bytes_per_token


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_planned_and_loaded_bytes_agree_where_nothing_is_quantised(
    original: Path, tmp_path: Path, stored: str, shape: str
) -> None:
    """A worker that computes in float32 keeps what is stored in 16 bits as it is, and none keeps more than it
    computes in."""
    folder = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(original, dtype=stored).save_pretrained(folder)
    plan = planned(folder)
    assert plan.model.activation_bytes == getattr(torch, stored).itemsize
    for computed in ("float32", "bfloat16"):
        counted = as_computed(plan, computed, plan.model.activation_bytes).model
        assert loaded_bytes(folder, computed, shape) == pytest.approx(counted.total_bytes, rel=0.01)
        smaller = min(getattr(torch, each).itemsize for each in (stored, computed))
        assert counted.total_bytes == smaller * counted.total_params


def test_gpus_keep_weights_in_the_type_that_they_compute_in(original: Path) -> None:
    plan = planned(original)
    gpu = AcceleratorSpec(memory_gib=2, bf16_dense_tflops=1, memory_bandwidth_gbyte_s=100)
    cluster = plan.cluster.model_copy(update={"accelerators": {"Core": gpu}})
    counted = as_computed(plan.model_copy(update={"cluster": cluster}), "float32", stored_bytes=2).model
    assert counted.total_bytes == 2 * plan.model.total_bytes


def test_kv_caches_get_what_the_weights_leave_in_the_type_of_the_workers(original: Path) -> None:
    """On CPUs, workers compute in float32 unless told otherwise."""
    plan = planned(original, memory_gib=0.5)

    def tokens(dtype: str) -> int:
        options = EngineOptions(dtype=dtype)
        return configurations(plan, original, "bfloat16", options)["box/0"].kv_budget_tokens

    memory, model = 0.5 * 2**30, plan.model
    assert tokens("auto") == tokens("float32") == pytest.approx(tokens("bfloat16") / 2, rel=0.05)
    assert tokens("bfloat16") * model.kv_bytes_per_token + model.total_bytes < memory


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("plan", "asked", "runs"),
    [
        (None, "auto", "plain"),
        ("fp8", "auto", "fp8"),
        ("int8", "auto", "int8"),
        ("int8", "plain", "plain"),
        (None, "int8", "int8"),
        ("fp8", "int8", "int8"),
    ],
)
def test_planned_and_stored_bytes_of_kv_caches_agree(
    original: Path, plan: str | None, asked: str, runs: str, dtype: str, shape: str
) -> None:
    """Of the tokens that the launch lets workers hold, in the format that it tells them."""
    placement = planned(original, kv=plan)
    options = EngineOptions(dtype=dtype, kv_cache_dtype=asked)
    told = configurations(placement, original, "bfloat16", options)["box/0"]
    assert told.kv_format == runs
    counted = as_computed(placement, dtype, 2, runs).model
    stages, stored, slots = SHAPES[shape], 0, told.kv_budget_tokens
    for stage in stages:
        for worker in stage.workers:
            part = held(stages, worker, counted.kv_heads)
            form, kind = kv_format(told.kv_format), getattr(torch, told.dtype)
            held_there = CacheShape(part, counted.head_dim, kind, CPU, format=form)
            stored += math.prod(held_there.pool_size(slots)) * held_there.stored_dtype.itemsize
    assert stored == pytest.approx(slots * counted.kv_bytes_per_token, rel=0.01)
    if runs == (plan or "plain"):
        planned_bytes = placement.model.kv_bytes_per_token * (
            2 if runs == "plain" and dtype == "float32" else 1
        )
        assert counted.kv_bytes_per_token == planned_bytes


def test_kv_caches_in_8_bits_hold_more_tokens_in_the_same_memory(original: Path) -> None:
    def tokens(kv: str) -> int:
        options = EngineOptions(kv_cache_dtype=kv)
        return configurations(planned(original, 0.5), original, "bfloat16", options)["box/0"].kv_budget_tokens

    assert tokens("plain") * 3.7 < tokens("int8") < tokens("fp8") < tokens("plain") * 4.01


def test_weights_that_do_not_fit_in_this_type_are_refused(original: Path) -> None:
    weights = planned(original).model.total_bytes / 2**30
    plan = planned(original, memory_gib=0.95 * weights)
    with pytest.raises(InputError, match=r"--dtype.* float32.*do not fit.*replica colocated-0.*bfloat16"):
        configurations(plan, original, "bfloat16")
