"""Many steps at once take exactly as long as one by one: a plan does not depend on how it was timed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.attention import DenseCosts
from cost_model.base import TensorGroup, Work
from cost_model.hardware import CATALOGUE, Link
from cost_model.lengths import RequestLengths
from cost_model.models import find_model
from cost_model.perturbed import PerturbedCosts, PhaseFactors
from cost_model.portable import exp, exps, log, logs, power, powers
from cost_model.registry import make_cost_model

NVLINK, PCIE = Link(450e9, 6e-6, "nvlink"), Link(25e9, 1e-5, "pcie")
STEPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 1.0, 1.7, 4.0]), st.just(0.0) | st.floats(0.01, 300.0)),
    min_size=9,
    max_size=30,
)


@pytest.mark.parametrize("cost_model", ["vllm", "sglang", "calibrated", "table1"])
@pytest.mark.parametrize("model", ["llama-2-70b", "mixtral-8x7b", "deepseek-v3"])
@given(
    STEPS,
    st.sampled_from(["H100", "L40", "A6000", "CPU"]),
    st.sampled_from([(1, 1, 1), (4, 1, 1), (4, 4, 4), (4, 2, 1)]),
    st.booleans(),
)
def test_as_one_by_one(cost_model, model, steps, card, degrees, nvlink):
    steps = [(chunk, decodes) for chunk, decodes in [*steps, (1.0, 8.0)] if chunk + decodes > 0]
    costs = make_cost_model(cost_model, find_model(model), RequestLengths.fixed(900, 120))
    group = TensorGroup(CATALOGUE[card], degrees[0], NVLINK if nvlink else PCIE, *degrees[1:])
    works = [costs.mixed_work(*step) for step in steps]
    together = costs.layers_work_s(group, Work(*np.array(works).T))
    assert together.tolist() == [costs.layer_work_s(group, work) for work in works]
    sampled = np.array([work.sampled for work in works])
    for last in (False, True):
        edges = costs.edges_work_s(group, sampled, last).tolist()
        assert edges == [costs.edge_work_s(group, each, last) for each in sampled.tolist()]


@pytest.mark.parametrize("factors", [(1.3, 1.3), (0.8, 1.4)])
@given(STEPS)
def test_of_wrapped_models(factors, steps):
    nominal = make_cost_model("vllm", find_model("llama-2-70b"), RequestLengths.fixed(900, 120))
    group = TensorGroup(CATALOGUE["H100"], 4, NVLINK)
    for costs in (PerturbedCosts(nominal, {"H100": PhaseFactors(*factors)}), DenseCosts(nominal)):
        works = [costs.mixed_work(*step) for step in [*steps, (1.0, 8.0)] if sum(step) > 0]
        together = costs.layers_work_s(group, Work(*np.array(works).T))
        assert together.tolist() == [costs.layer_work_s(group, work) for work in works]


@given(st.lists(st.floats(-900.0, 700.0), min_size=1))
def test_exponentials(numbers):
    assert exps(np.array(numbers)).tolist() == [exp(each) for each in numbers]
    assert math.isclose(exp(1.0), math.e, rel_tol=1e-15)


@given(st.lists(st.floats(1e-150, 1e150), min_size=1), st.floats(-2.0, 2.0))
def test_logarithms_and_powers(numbers, exponent):
    numbers += [1.0, 0.7071067811865476]
    assert logs(np.array(numbers)).tolist() == [log(each) for each in numbers]
    with_zero = np.array([0.0, *numbers])
    for each in (exponent, 0.0):
        assert powers(with_zero, each).tolist() == [power(n, each) for n in with_zero.tolist()]
    exponents = np.array([exponent, 0.0])
    assert powers(0.3, exponents).tolist() == [power(0.3, each) for each in exponents.tolist()]
