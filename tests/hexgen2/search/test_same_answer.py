"""A command with a given seed prints the same bytes, whatever libraries and processor compute it."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.search.machines import answers, machines
from hexgen2.strategies.registry import STRATEGIES

MACHINES = machines()


def search(cluster: str, model: str, workload: str, strategy: str, *more: str) -> list[str]:
    options = ["--cluster", cluster, "--model", model, "--workload", workload, "--strategy", strategy]
    return ["search", *options, "--seed", "0", "--json", *more]


SWAPS = ("hexgen2-paper", "random-swap")
SPLIT = ("--phases", "disaggregated")
TARGETS = ("--objective", "goodput", "--ttft", "900", "--tpot", "90")
QUICK = [
    search("hexgen2-setting-1", "llama-2-70b", "HPLD", "random-swap"),
    search("hexgen2-setting-3", "llama-2-70b", "HPLD", "hexgen2-paper"),
    search("hexgen2-case-study", "opt-30b", "LPHD", "genetic"),
    search("hexgen2-case-study", "opt-30b", "LPLD", "hexgen"),
    search("hexgen2-case-study", "opt-30b", "LPHD", "exact"),
    search("helix-single-24", "llama-30b", "LPLD", "distserve"),
    search("huawei-v100-a800", "opt-30b", "HPLD", "splitwise"),
    search("hetis-12", "llama-2-13b", "HPHD", "vllm"),
    search("huawei-v100-a800", "llama-2-13b", "online", "huawei"),
    search("hetis-12", "llama-2-70b", "HPHD", "hetis"),
    search("hexgen2-case-study", "llama-2-13b", "HPHD", "helix"),
    search("hetis-12", "llama-2-13b", "HPHD", "petals"),
    *(search("helix-geo-24", "llama-30b", "HPLD", strategy) for strategy in ("swarm", "separate-pipelines")),
    search("hexgen2-case-study", "llama-2-13b", "HPHD", "hexgen2", "-o", "placement.json"),
    ["search", "--from", "placement.json", "--lost", "a100-1/0", "--json"],
    ["simulate", "placement.json", "--request-rate", "8", "--num-requests", "400", "--json"],
    ["simulate", "placement.json", "--offline", "--num-requests", "400", "--json"],
    search("hexgen2-offers", "opt-13b", "HPLD", "hexgen2", "--budget", "2", *SPLIT),
    search("hexgen2-case-study", "opt-30b", "LPHD", "hexgen2", *TARGETS, *SPLIT),
]
LONGER = [
    search("hetis-12", "llama-2-13b", "HPHD", "hexgen2", "-o", "placement.json"),
    ["search", "--from", "placement.json", "--lost", "a100-1/0", "--json"],
    search("hexgen2-setting-4", "llama-2-70b", "LPHD", "hexgen2"),
    *(search(f"hexgen2-setting-{k}", "llama-2-70b", "HPLD", strategy) for k in (1, 3) for strategy in SWAPS),
    search("hexgen2-setting-5", "llama-2-70b", "HPLD", "hexgen2-paper"),
    search("hexgen2-setting-4", "opt-30b", "LPHD", "genetic"),
    search("hexgen2-setting-4", "opt-30b", "LPLD", "hexgen"),
    search("hexgen2-setting-1", "llama-2-70b", "HPLD", "hexgen2"),
    search("hexgen2-setting-1", "llama-2-70b", "HPLD", "hexgen2", *SPLIT),
    search("hexgen2-offers", "opt-13b", "HPLD", "hexgen2", "--budget", "2"),
    search("hexgen2-case-study", "opt-30b", "LPHD", "hexgen2", *TARGETS),
    search("hexgen2-setting-2", "opt-30b", "online", "hexgen"),
    search("hexgen2-setting-4", "llama-2-70b", "HPHD", "hexgen2", *TARGETS),
    search("hexgen2-offers", "llama-2-13b", "HPLD", "hexgen2", "--budget", "6"),
    search("hetis-12", "llama-2-13b", "HPHD", "hexgen2", *TARGETS),
]
CLUSTERS = [f"hexgen2-setting-{k}" for k in range(1, 6)] + [
    *("hexgen2-homogeneous", "hexgen2-case-study", "helix-single-24", "helix-geo-24", "helix-mixed-42"),
    *("hetis-12", "huawei-v100-a800"),
]
LOADS = [("llama-2-70b", "HPLD"), ("opt-30b", "LPHD"), ("llama-3-8b", "online")]
ALL = [
    search(c, m, w, s)
    for c, s, (m, w) in itertools.product(CLUSTERS, sorted(set(STRATEGIES) - {"exact"}), LOADS)
]
ALL += QUICK + LONGER
USUAL = ("Prescott",)
"""The machine in the fast suite, besides this one: the oldest, which is the most different."""


@pytest.fixture(scope="module")
def expected() -> list[dict]:
    """The answers of this machine, unmodified."""
    return answers(QUICK, {"PYTHONHASHSEED": "5"})


def test_every_strategy_is_among_the_commands() -> None:
    named = {word for command in QUICK for word in command}
    assert set(STRATEGIES) <= named


def test_the_commands_answer(expected: list[dict]) -> None:
    assert [found["code"] for found in expected] == [0] * len(QUICK), expected


@pytest.mark.parametrize("machine", sorted(set(USUAL) & set(MACHINES)))
def test_the_same_bytes_on_every_machine(machine: str, expected: list[dict]) -> None:
    found = answers(QUICK, MACHINES[machine])
    differ = [command for command, one, other in zip(QUICK, expected, found, strict=True) if one != other]
    assert differ == []


def test_last_bits_decide_nothing(expected: list[dict]) -> None:
    """With other last bits in every cost and other bases of eigenspaces, the answer is the same in six
    digits: the same replicas and routes by the same steps."""
    found = answers(QUICK, {}, disturb=1)
    rough = [(one["roughly"], other["roughly"]) for one, other in zip(expected, found, strict=True)]
    assert [command for command, (one, other) in zip(QUICK, rough, strict=True) if one != other] == []


@pytest.mark.slow
def test_every_cluster_and_strategy_on_every_machine() -> None:
    expected = answers(ALL, {})
    for machine in MACHINES:
        found = answers(ALL, MACHINES[machine])
        differ = [command for command, one, other in zip(ALL, expected, found, strict=True) if one != other]
        assert differ == [], machine
    for seed in (2, 3):
        found = answers(ALL, {}, disturb=seed)
        pairs = zip(ALL, expected, found, strict=True)
        assert [
            command for command, one, other in pairs if one.get("roughly") != other.get("roughly")
        ] == [], seed
