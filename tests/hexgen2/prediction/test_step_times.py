"""Step times of a replica, compared with the cost model."""

from __future__ import annotations

import pytest
from problems import problem_from

from cost_model.base import Work
from cost_model.registry import COST_MODELS
from hexgen2.prediction.step_times import StepTimes
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

NODES = [
    {"name": name, "accelerators": f"{card}:2", "interconnect": "nvlink"}
    for name, card in (("a", "H100"), ("b", "A100-80GB"), ("c", "L40"))
]


@pytest.mark.parametrize("cost_model", COST_MODELS)
@pytest.mark.parametrize("model", ["llama-2-70b", "mixtral-8x7b"])
def test_a_turn_of_decodes_is_linear_in_their_context(cost_model, model):
    """For any number of requests, the lines give what the micro-batches take, each with its share of the
    context."""
    problem = problem_from({"name": "three", "nodes": NODES}, model, "HPHD", cost_model)
    placement = find_strategy("hexgen2")(problem, SearchOptions())
    for replica in placement.replicas:
        times = StepTimes(replica, problem.cluster, problem.costs, "pipelined")
        for requests in (1, 2, 3, 17, 250):
            parts = min(times.in_flight, requests)
            size = requests / parts
            for context in (1.0, 700.0, 3e5):
                works = [Work(0.0, 0.0, size, context / parts, size)] * parts
                lines = times.decode_turn(requests)
                predicted = max(constant + slope * context for constant, slope in lines)
                assert predicted == pytest.approx(times.turn_s(works), rel=1e-9)
