"""The sizes of chunks that a planner tries, against plans with all of them."""

import itertools
from unittest.mock import patch

import pytest

from cost_model.pipeline import CHUNKS
from hexgen2.goal import Goal
from hexgen2.search.planning import plan
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Problem, counts_of, make_problem


def every_chunk(problem: Problem) -> Planner:
    with patch.object(plan, "chunks_worth_trying", lambda *_: tuple(range(len(CHUNKS)))):
        return Planner(problem)


def few_chunks(planner: Planner) -> list[int]:
    return [round(chunk * planner.problem.costs.isl) for chunk in planner._pipelines.chunks]


@pytest.mark.parametrize("workload", ["HPLD", "HPHD", "LPHD", "LPLD", "online"])
@pytest.mark.parametrize(
    ("cluster", "model"), [("hexgen2-setting-4", "opt-30b"), ("hexgen2-setting-3", "llama-2-70b")]
)
def test_plans_are_nearly_as_good_as_with_all_sizes(cluster, model, workload):
    problem = make_problem(cluster, model, workload, phases="colocated")
    few, every = Planner(problem), every_chunk(problem)
    assert set(few_chunks(few)) < set(few_chunks(every)) and few_chunks(every) == list(CHUNKS)
    sizes = {node: len(gpus) for node, gpus in enumerate(problem.node_gpus)}
    groups = [counts_of({node: count}) for node, size in sizes.items() for count in {size, size // 2} - {0}]
    groups += [counts_of({a: sizes[a], b: sizes[b]}) for a, b in itertools.combinations(sizes, 2)]
    shares = []
    for counts in groups:
        best = every.plan("colocated", counts)
        if best is not None:
            found = few.plan("colocated", counts)
            assert found is not None and found.capacity_req_s <= best.capacity_req_s * (1 + 1e-6)
            shares.append(found.capacity_req_s / best.capacity_req_s)
    assert min(shares) > 0.93 and sum(shares) / len(shares) > 0.985


def test_tight_targets_have_smaller_chunks_and_the_usual_one():
    problem = make_problem("hexgen2-homogeneous", "llama-2-70b", "HPLD", phases="colocated")
    within = make_problem(
        "hexgen2-homogeneous",
        "llama-2-70b",
        "HPLD",
        phases="colocated",
        goal=Goal(objective="goodput", ttft_ms=2000.0, tpot_ms=50.0),
    )
    plain, tight = few_chunks(Planner(problem)), few_chunks(Planner(within))
    assert set(plain) < set(tight) and min(tight) < min(plain) and 512 in tight
    assert few_chunks(Planner(within, alike=Planner(problem))) == tight


def test_the_choice_does_not_depend_on_who_plans_first():
    problem = make_problem("hexgen2-setting-1", "opt-30b", "LPLD", phases="flexible")
    planner = Planner(problem)
    assert few_chunks(planner.counting_anew()) == few_chunks(planner) == few_chunks(Planner(problem))
