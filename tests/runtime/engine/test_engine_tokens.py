"""Real worker processes give the same tokens as transformers, for replicas of any shape."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    LAYERS,
    VOCAB,
    WRITERS,
    greedy,
    write_gpt_oss_mxfp4,
    write_llama,
    write_mixtral,
    write_opt,
)
from engine_harness import Cluster, Shape
from stage_shapes import replica_cells

from runtime.protocol.message import Sampling

SHAPES: dict[str, Shape] = {
    "tp1": [(1, 0, LAYERS)],
    "tp2": [(2, 0, LAYERS)],
    "pp2": [(1, 0, 3), (1, 3, LAYERS)],
    "tp2-tp1": [(2, 0, 2), (1, 2, LAYERS)],
}
ROUTES = {
    "llama": list(product(SHAPES, SHAPES)),
    "opt": list(zip(SHAPES, [*list(SHAPES)[1:], "tp1"], strict=True)),
}
"""Every pair of shapes; the second family only has each shape once as source and once as destination."""
LENGTHS = [1, 2, 3, 7, 12, 20, 31, 45, 59, 60]
SHARED = [8, 16, 40, 50, 57, 60]  # tokens that further prompts share with the last one
TOKENS = 48
HEAD_DIM = {"llama": 16, "opt": 8}  # one size that compiled attention supports, and one that it does not
KV_HEADS = {"llama": 4, "opt": 8}
CRAMPED: dict[str, Any] = {
    "block_tokens": 4,
    "max_prefill_tokens": 24,
    "max_mixed_tokens": 8,
    "steps_in_flight": 3,
    "kv_budget_tokens": 480,
    "patient": True,
}


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    texts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    return texts + [texts[-1][:length] + [rng.randrange(3, VOCAB) for _ in range(5)] for length in SHARED]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {"llama": write_llama(root / "llama", head_dim=HEAD_DIM["llama"]), "opt": write_opt(root / "opt")}


@pytest.fixture(scope="module", params=["llama", "opt"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(family: str, folders: dict[str, Path]) -> list[list[int]]:
    return greedy(folders[family], prompts(), TOKENS)


@pytest.fixture(scope="module")
def cluster(family: str, folders: dict[str, Path]) -> Iterator[Cluster]:
    replicas = {f"{role}-{name}": shape for role in ("p", "d") for name, shape in SHAPES.items()}
    with Cluster(folders[family], replicas) as running:
        yield running


def test_pairs_of_shapes_give_the_reference_tokens(
    family: str, cluster: Cluster, reference: list[list[int]]
) -> None:
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    for prefill, decode in ROUTES[family]:
        for number, prompt in enumerate(prompts()):
            cluster.submit(f"{prefill}>{decode}#{number}", prompt, sampling, f"p-{prefill}", f"d-{decode}")
    for prefill, decode in ROUTES[family]:
        cells = replica_cells(cluster.stages[f"d-{decode}"], KV_HEADS[family])
        assert cells == LAYERS * KV_HEADS[family]
        for number, prompt in enumerate(prompts()):
            outcome = cluster.finish(f"{prefill}>{decode}#{number}")
            assert outcome.tokens == reference[number], (prefill, decode, number)
            assert outcome.indices == list(range(TOKENS))
            assert outcome.finish_reason == "length"
            assert outcome.moved is not None
            sent = len(prompt) - outcome.already_there
            assert outcome.moved.bytes_received == cells * 2 * HEAD_DIM[family] * 4 * sent
            assert not outcome.failures


def test_one_request_at_a_time_gives_the_reference_tokens(
    family: str, cluster: Cluster, reference: list[list[int]]
) -> None:
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    for number, (prefill, decode) in enumerate(ROUTES[family]):
        name = f"alone {prefill}>{decode}"
        cluster.submit(name, prompts()[number], sampling, f"p-{prefill}", f"d-{decode}")
        assert cluster.finish(name).tokens == reference[number]


def test_chunks_preemptions_and_shared_beginnings_change_no_token(
    family: str, folders: dict[str, Path], reference: list[list[int]]
) -> None:
    """Memory is scarce: prompts are split into chunks, requests are preempted and recomputed, and blocks are
    shared, by replicas of all these shapes at once and by colocated ones."""
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    replicas = {f"{role}-{name}": shape for role in ("p", "d") for name, shape in SHAPES.items()}
    with Cluster(folders[family], replicas, **CRAMPED) as cramped:
        for prefill, decode in ROUTES[family]:
            for number, prompt in enumerate(prompts()):
                name = f"{prefill}>{decode}#{number}"
                cramped.submit(name, prompt, sampling, f"p-{prefill}", f"d-{decode}")
        for shape in SHAPES:
            for number, prompt in enumerate(prompts()):
                cramped.submit(f"{shape}#{number}", prompt, sampling, f"d-{shape}", f"d-{shape}")
        wanted = [f"{prefill}>{decode}" for prefill, decode in ROUTES[family]] + list(SHAPES)
        for name, number in product(wanted, range(len(reference))):
            outcome = cramped.finish(f"{name}#{number}")
            assert outcome.tokens == reference[number], (name, number)
            assert outcome.indices == list(range(TOKENS))
            assert not outcome.failures
        for shape in SHAPES:
            own = [cramped.outcomes[f"{shape}#{number}"] for number in range(len(reference))]
            assert max(outcome.preemptions[f"d-{shape}"] for outcome in own) > 0
        prefill, decode = ROUTES[family][0]
        for time in ("first", "second"):  # alone, so nobody evicts what the first leaves for the second
            for name, source in ((f"{time} moved", f"p-{prefill}"), (f"{time} local", f"d-{decode}")):
                cramped.submit(name, prompts()[-1], sampling, source, f"d-{decode}")
                assert cramped.finish(name).tokens == reference[-1]
        assert cramped.outcomes["second moved"].already_there > 0
        assert cramped.outcomes["second local"].cached > 0
        free = CRAMPED["kv_budget_tokens"] // CRAMPED["block_tokens"]
        for replica in replicas:
            last = [o.free_blocks[replica] for o in cramped.outcomes.values() if replica in o.free_blocks]
            assert max(last) == free  # all blocks are free again


@pytest.mark.parametrize("shape", SHAPES)
def test_a_colocated_replica_gives_the_reference_tokens(
    cluster: Cluster, reference: list[list[int]], shape: str
) -> None:
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts()):
        cluster.submit(f"colocated {shape} {number}", prompt, sampling, f"d-{shape}", f"d-{shape}")
    for number, expected in enumerate(reference):
        assert cluster.finish(f"colocated {shape} {number}").tokens == expected


FURTHER = [
    "mistral",
    "mixtral",
    "mixtral, 3 experts",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_oss",
    "gpt_oss, mxfp4",
    "deepseek_v2",
    "deepseek_v3",
]
EVERY_SHAPE = pytest.param(tuple(SHAPES), marks=pytest.mark.slow)


@pytest.mark.parametrize("shapes", [("tp2-tp1", "pp2"), EVERY_SHAPE], ids="-".join)
@pytest.mark.parametrize("family", FURTHER)
def test_further_families_give_the_reference_tokens(
    tmp_path: Path, family: str, shapes: tuple[str, ...]
) -> None:
    """Of experts, two ranks hold whole ones each if their number is even; otherwise columns of all."""
    folder = tmp_path / "model"
    if family in WRITERS:
        WRITERS[family](folder)
    elif family == "gpt_oss, mxfp4":
        write_gpt_oss_mxfp4(folder)
    else:
        write_mixtral(folder, num_local_experts=3)
    expected = greedy(folder, prompts(), TOKENS)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    replicas = {name: SHAPES[name] for name in shapes}
    with Cluster(folder, replicas, **{**CRAMPED, "kv_budget_tokens": 20_000}) as cluster:
        for source, target in product(shapes, shapes):
            for number, prompt in enumerate(prompts()):
                cluster.submit(f"{source}>{target}#{number}", prompt, sampling, source, target)
        for source, target in product(shapes, shapes):
            for number, tokens in enumerate(expected):
                outcome = cluster.finish(f"{source}>{target}#{number}")
                assert outcome.tokens == tokens, (source, target, number)


def test_a_seeded_request_is_the_same_on_every_shape_and_in_any_company(cluster: Cluster) -> None:
    prompt = prompts()[4]
    base = {"temperature": 0.9, "max_tokens": 24, "ignore_eos": True, "logprobs": 3}
    rules = {
        "plain": Sampling(seed=11, **base),
        "other seed": Sampling(seed=12, **base),
        "top": Sampling(seed=11, top_k=20, top_p=0.8, **base),
    }
    shapes = [("tp1", "tp1"), ("tp2-tp1", "tp2"), ("tp2", "pp2")]
    for (prefill, decode), (name, rule) in product(shapes, rules.items()):
        cluster.submit(f"{name} {prefill}>{decode}", prompt, rule, f"p-{prefill}", f"d-{decode}")
    drawn = {
        name: [cluster.finish(f"{name} {prefill}>{decode}") for prefill, decode in shapes] for name in rules
    }
    for outcomes in drawn.values():
        assert all(outcome.tokens == outcomes[0].tokens for outcome in outcomes)
        for outcome in outcomes:
            assert all(len(detail.top) == 3 for detail in outcome.logprobs)
            assert all(detail.chosen <= detail.top[0][1] <= 0 for detail in outcome.logprobs)
    assert len({tuple(outcomes[0].tokens) for outcomes in drawn.values()}) == 3


def test_a_stop_token_ends_a_request_at_once(cluster: Cluster, reference: list[list[int]]) -> None:
    prompt, answer = prompts()[5], reference[5]
    first, later = answer[0], next(token for token in answer[3:] if token not in answer[:3])
    for name, stop in (("first", first), ("later", later)):
        rule = Sampling(max_tokens=TOKENS, stop_token_ids=(stop,))
        cluster.submit(f"stop {name}", prompt, rule, "p-tp2-tp1", "d-pp2")
        outcome = cluster.finish(f"stop {name}")
        assert outcome.finish_reason == "stop"
        assert outcome.tokens == answer[: answer.index(stop) + 1]


def test_a_request_resumes_elsewhere_with_the_same_tokens(cluster: Cluster) -> None:
    prompt, rule = prompts()[2], Sampling(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    cluster.submit("whole", prompt, rule, "d-tp1", "d-tp1")
    whole = cluster.finish("whole").tokens
    cluster.submit("resumed", prompt + whole[:9], rule, "d-tp2", "d-tp2", index=9)
    resumed = cluster.finish("resumed")
    assert resumed.tokens == whole[9:]
    assert resumed.indices == list(range(9, 20))
