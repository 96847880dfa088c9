"""Layers with a window keep their last tokens alone: tokens are those of transformers, on replicas of all
shapes, in memory for little more than the window; and planner, launch and engine count the same bytes."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import LAYERS, WRITERS, greedy
from engine_harness import Cluster as Fleet
from engine_harness import Shape
from placements import placement_of, replica_of
from stage_shapes import replica_cells, stages
from transformers import MistralConfig, MistralForCausalLM

from cluster_specs.loader import resolve
from cluster_specs.schema import AcceleratorSpec, ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from cost_model.errors import InputError
from cost_model.lengths import BLOCK_TOKENS, first_kept, most_blocks
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Route
from hexgen2.replica import EngineSettings
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.lengths import RequestClass, Workload
from hexgen2.workload.requests import Requests
from runtime.checkpoint import checkpoint_folder
from runtime.kv_cache.layout import held
from runtime.kv_cache.pool import CacheShape
from runtime.kv_cache.windows import numbered
from runtime.launcher.configure import configurations
from runtime.options import EngineOptions
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import WindowedLayers
from runtime.routing.kv_budget import kv_budgets

SIZE, WINDOW, TOKENS, CHUNK = 8, 9, 40, 32
WINDOWED = {"mistral": tuple(range(LAYERS)), "gemma3": (0, 1, 3, 4), "gpt_oss": (0, 2, 4), "qwen2": (2, 3, 4)}
"""Which layers of the tiny models have a window of 9 tokens."""
SHAPES: dict[str, Shape] = {
    "whole": [(1, 0, LAYERS)],
    "uneven": [(2, 0, 2), (1, 2, LAYERS)],
    "stages": [(1, 0, 1), (2, 1, LAYERS)],
}
ROUTES = [("whole", "whole"), ("uneven", "stages"), ("stages", "uneven"), ("stages", "stages")]
LENGTHS = (1, 5, 9, 17, 64, 150)
CPU = torch.device("cpu")


def prompts() -> list[list[int]]:
    """Of several lengths, the last ones with a common beginning."""
    rng = random.Random(1)
    found = [[rng.randrange(3, 250) for _ in range(length)] for length in LENGTHS]
    return found + [[*found[4][:40], *prompt] for prompt in found[:4]]


QUICK = [("mistral", 64), ("gemma3", 24), ("gpt_oss", 64)]
SLOW = sorted({(family, blocks) for family in WINDOWED for blocks in (24, 64)} - {*QUICK})


@pytest.mark.parametrize(
    ("family", "blocks"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str, blocks: int) -> None:
    """With many windowed blocks, beginnings are shared and whole blocks run out; with few, windowed ones
    do. Either way requests are preempted."""
    folder, asked = WRITERS[family](tmp_path / "model"), prompts()
    expected, sampling = greedy(folder, asked, TOKENS), Sampling(max_tokens=TOKENS, ignore_eos=True)
    apart = WindowedLayers(layers=WINDOWED[family], window=WINDOW, kv_budget_tokens=blocks * SIZE)
    settings = {"block_tokens": SIZE, "kv_budget_tokens": 80 * SIZE, "patient": True, "windowed": apart}
    with Fleet(folder, SHAPES, **settings, max_prefill_tokens=CHUNK, max_mixed_tokens=16) as cluster:
        for source, target in ROUTES:
            names = [f"{source}>{target}#{number}" for number in range(len(asked))]
            for name, prompt in zip(names, asked, strict=True):
                cluster.submit(name, prompt, sampling, source, target)
            found = [cluster.finish(name) for name in names]
            assert [each.tokens for each in found] == expected, (source, target)
            assert max(each.cached for each in found) > 0
        free = found[-1].free_blocks["stages"]
        assert free == 80


def test_only_what_is_read_again_moves(tmp_path: Path) -> None:
    """Of layers with a window, the last tokens of a prompt, in whole blocks; of the others, all."""
    folder, layers = WRITERS["gemma3"](tmp_path / "model"), WINDOWED["gemma3"]
    prompt, sampling = prompts()[5], Sampling(max_tokens=TOKENS, ignore_eos=True)
    apart = WindowedLayers(layers=layers, window=WINDOW, kv_budget_tokens=32 * SIZE)
    shapes = {name: SHAPES[name] for name in ("uneven", "stages")}
    with Fleet(folder, shapes, block_tokens=SIZE, max_prefill_tokens=CHUNK, windowed=apart) as cluster:
        cluster.submit("r", prompt, sampling, "uneven", "stages")
        moved = cluster.finish("r").moved
    assert moved is not None
    others = [layer for layer in range(LAYERS) if layer not in layers]
    at, kv_heads = stages("d", SHAPES["stages"]), 4
    last = len(prompt) - first_kept(len(prompt), WINDOW, SIZE)
    assert WINDOW <= last < WINDOW + SIZE
    cells = len(prompt) * replica_cells(numbered(at, others), kv_heads)
    cells += last * replica_cells(numbered(at, layers), kv_heads)
    assert moved.bytes_received == cells * 2 * 16 * 4


def simulated_bytes(folder: Path, isl: int, mean: int) -> float:
    """What the simulator moves for a prompt, in a plan for prompts of another length."""
    core = AcceleratorSpec(memory_gib=2, bf16_dense_tflops=0.2, memory_bandwidth_gbyte_s=10, kind="cpu")
    box = NodeSpec(name="box", accelerators="Core:2", interconnect="shared-memory")
    cluster = ClusterSpec(name="box", nodes=[box], accelerators={"Core": core})
    model = architecture_from_folder(folder)
    workload = Workload(name="planned", classes=(RequestClass(name="planned", isl=mean, osl=8),))
    ends = ("prefill-0", "box/0"), ("decode-0", "box/1")
    replicas = [replica_of(name, [(gpu, LAYERS)]) for name, gpu in ends]
    alone = placement_of(cluster, model, workload, replicas, [])
    rates = {"flow_req_s": 1.0, "capacity_req_s": 2.0}
    route = Route.between(*replicas, alone.costs().kv_bytes_per_layer, **rates)
    placement = alone.model_copy(update={"routes": [route]})
    records = Records(Requests(np.zeros(1), np.array([isl]), np.array([8]), "one"))
    Simulation(placement, Cluster.from_spec(resolve(cluster, "cluster", Path())), records).run()
    return records.routes["prefill-0", "decode-0"].bytes


@pytest.mark.parametrize("family", ["gemma3", "mistral", "llama"])
def test_the_simulator_moves_as_many_bytes_as_workers(tmp_path: Path, family: str) -> None:
    """Whatever the length that was planned with, with windows in all layers, in some, and in none."""
    folder, sampling = WRITERS[family](tmp_path / "model"), Sampling(max_tokens=8, ignore_eos=True)
    settings: dict[str, WindowedLayers] = {}
    if family in WINDOWED:
        budget = 32 * BLOCK_TOKENS
        apart = WindowedLayers(layers=WINDOWED[family], window=WINDOW, kv_budget_tokens=budget)
        settings["windowed"] = apart
    whole, asked = SHAPES["whole"], prompts()[1 : len(LENGTHS)]
    with Fleet(folder, {"p": whole, "d": whole}, block_tokens=BLOCK_TOKENS, **settings) as fleet:
        for number, prompt in enumerate(asked):
            fleet.submit(f"{number}", prompt, sampling, "p", "d")
            moved = fleet.finish(f"{number}").moved
            assert moved is not None
            for mean in (20, 500):
                assert simulated_bytes(folder, len(prompt), mean) == pytest.approx(moved.bytes_received)


# -- bytes

WORKLOAD = Workload(name="long", classes=(RequestClass(name="long", isl=600, osl=200),))
LAYERS_OF_8 = 8


def checkpoint(folder: Path, window: int | None = 64, **more: object) -> Path:
    """A Mistral of 8 layers, of which `more` may say which have the window."""
    config = MistralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS_OF_8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_window=window,
        dtype="float32",
        **more,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


def planned(folder: Path, full: tuple[int, ...], role: str = "colocated") -> Placement:
    """Two CPU workers, a stage of three layers and one of five, with little memory; of the model of a folder,
    these layers have no window."""
    core = AcceleratorSpec(memory_gib=1.25, bf16_dense_tflops=0.2, memory_bandwidth_gbyte_s=10, kind="cpu")
    box = NodeSpec(name="box", accelerators="Core:2", interconnect="shared-memory")
    cluster = ClusterSpec(name="box", nodes=[box], accelerators={"Core": core})
    model = architecture_from_folder(folder).model_copy(update={"full_attention_layers": full})
    replica = replica_of(f"{role}-0", [("box/0", 3), ("box/1", 5)], max_batch=100_000, utilisation=0.5)
    replica = replica.model_copy(update={"engine": EngineSettings(step_tokens=64, chunk_tokens=32)})
    return placement_of(cluster, model, WORKLOAD, [replica], [])


def rooms(placement: Placement) -> list[float]:
    """Bytes that each stage has beside its weights, as the plan counts."""
    costs, (replica,) = placement.costs(), placement.replicas
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    found = []
    for stage in replica.stages:
        group = stage.tensor_group(cluster.accelerators[cluster.index(stage.gpus[0])])
        first, last = stage.layers[0] == 0, stage.layers[1] == LAYERS_OF_8
        memory = costs.stage_memory("decode", group, first=first, last=last)
        found.append(memory.limit - memory.fixed - stage.layer_count * memory.per_layer)
    return found


@pytest.mark.parametrize("full", [(), (3, 7), (0, 2, 4, 6)])
def test_planned_and_stored_bytes_agree(tmp_path: Path, full: tuple[int, ...]) -> None:
    """The pools of each worker fit into the memory that the plan has for KV caches, and fill that of all
    workers together as far as the plan does with so many requests."""
    folder, options = checkpoint(tmp_path / "model"), EngineOptions(dtype="float32")
    placement = planned(folder, full)
    (told, _) = configurations(placement, folder, "bfloat16", options).values()
    apart = told.windowed
    assert apart is not None and apart.window == 64
    assert apart.layers == tuple(sorted(set(range(LAYERS_OF_8)) - set(full)))
    costs = placement.costs()
    (tokens,) = kv_budgets(placement).values()
    requests = tokens / costs.lengths.kv_tokens_decode()
    model, stored = placement.model, list[int]()
    others = [layer for layer in range(LAYERS_OF_8) if layer not in apart.layers]
    for stage in told.stages:
        worker, pools = stage.workers[0], 0
        for layers, tokens in ((others, told.kv_budget_tokens), (apart.layers, apart.kv_budget_tokens)):
            part = held(numbered(told.stages, layers), worker, model.kv_heads)
            shape = CacheShape(part, model.head_dim, torch.float32, CPU)
            pools += math.prod(shape.pool_size(tokens)) * shape.stored_dtype.itemsize
        stored.append(pools)
    of_a_request = costs.lengths.kv_tokens_decode(model.window) * model.kv_bytes_per_token_layer
    assert sum(stored) == pytest.approx(requests * of_a_request * LAYERS_OF_8, rel=0.01)
    whole = placement.model_copy(
        update={"model": model.model_copy(update={"sliding_window": None, "full_attention_layers": ()})}
    )
    (plain, _) = configurations(whole, folder, "bfloat16", options).values()
    assert plain.windowed is None
    assert told.kv_budget_tokens > 1.5 * plain.kv_budget_tokens
    shares = [used / room for used, room in zip(stored, rooms(placement), strict=True)]
    assert max(shares) <= 1
    assert full or max(shares) > 0.99  # where layers differ, a plan counts with their worst division


def test_a_long_prompt_always_has_room(tmp_path: Path) -> None:
    """However few requests the plan has."""
    placement = planned(checkpoint(tmp_path / "model"), ())
    few = placement.replicas[0].model_copy(update={"max_batch": 1})
    options = EngineOptions(dtype="float32", chunk_tokens=500)
    (told, _) = configurations(
        placement.model_copy(update={"replicas": [few]}), tmp_path / "model", "bfloat16", options
    ).values()
    assert told.windowed is not None
    needed = most_blocks(64, told.block_tokens, told.steps_in_flight * 500)
    assert told.windowed.kv_budget_tokens >= needed * told.block_tokens


def test_a_checkpoint_with_another_window_is_refused(tmp_path: Path) -> None:
    placement = planned(checkpoint(tmp_path / "planned"), ())
    other = checkpoint(tmp_path / "other", window=128)
    with pytest.raises(InputError, match=r"other/config.json: sliding_window: is 128.*made for 64; .*search"):
        checkpoint_folder(placement, other, "placement.json")
