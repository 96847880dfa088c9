"""The eight constants: against numpy's least squares, and against the step times that they are fitted to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.base import Work
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.batch_times import BatchTimes, fit, profiles
from hexgen2.prediction.step_times import StepTimes
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

COUNTS = st.lists(st.integers(1, 256), min_size=2, max_size=5, unique=True)
SECONDS = st.floats(1e-4, 1e3)


@settings(max_examples=60, deadline=None)
@given(COUNTS, COUNTS, st.data())
def test_the_fit_is_that_of_numpy(batches, tokens, data):
    rows = [(float(b), float(s), data.draw(SECONDS)) for b in batches for s in tokens]
    table = np.array([(b * s, b, s, 1.0) for b, s, _ in rows])
    seconds = np.array([row[2] for row in rows])
    best = np.linalg.lstsq(table, seconds, rcond=None)[0]
    own = np.array(fit(rows))
    assert np.linalg.norm(table @ own - seconds) <= np.linalg.norm(table @ best - seconds) * (1 + 1e-6) + 1e-9
    assert fit(rows) == fit(list(reversed(rows)))


def test_rows_that_leave_constants_open_are_still_met():
    assert fit([]) == (0.0, 0.0, 0.0, 0.0)
    a, b, c, d = fit([(4.0, 100.0, 2.0), (4.0, 200.0, 3.0)])
    for tokens, seconds in ((100.0, 2.0), (200.0, 3.0)):
        assert a * 4 * tokens + b * 4 + c * tokens + d == pytest.approx(seconds)


def test_decode_time_is_the_sum_over_its_steps():
    times = BatchTimes((0.0, 0.0, 0.0, 0.0), (2e-6, 1e-4, 3e-6, 0.02), 1e5, 64)
    steps = [2e-6 * 8 * c + 1e-4 * 8 + 3e-6 * c + 0.02 for c in range(301, 350)]
    assert times.decode_s(8, 300, 50) == pytest.approx(math.fsum(steps))
    assert times.decode_s(8, 300, 1) == 0


def test_the_largest_batch_fits_and_one_more_does_not():
    times = BatchTimes((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), 1000, 64)
    assert [times.largest_batch(*lengths) for lengths in ((60, 40), (61, 40), (900, 500), (1, 1))] == [
        *(10, 9),
        *(1, 64),
    ]


def placed(strategy: str, cluster: str, model: str, **options: object) -> Placement:
    problem = make_problem(cluster, model, "online", **options)  # type: ignore[arg-type]
    return find_strategy(strategy)(problem, SearchOptions(simulated=False))


@pytest.mark.parametrize(
    ("strategy", "cluster", "model"),
    [
        ("huawei", "huawei-v100-a800", "llama-3-8b"),
        ("hexgen2", "hexgen2-setting-1", "llama-2-70b"),
        ("distserve", "hexgen2-homogeneous", "llama-2-70b"),
    ],
)
def test_profiles_predict_step_times(strategy, cluster, model):
    """Within a quarter, for batches and lengths that were not profiled, in every role and with pipelines."""
    placement = placed(strategy, cluster, model)
    arrays, costs = Cluster.from_spec(placement.cluster), placement.costs()
    found = profiles(placement, arrays)
    assert found.keys() == {replica.id for replica in placement.replicas}
    for replica in placement.replicas:
        own, times = found[replica.id], StepTimes(replica, arrays, costs, "pipelined")
        for batch in {3, own.places // 3} - {0}:
            if replica.role != "decode":
                steps = min(times.in_flight, batch)
                tokens = batch * 600 / steps
                step = Work(tokens, tokens * 300, 0.0, 0.0, batch / steps)
                assert own.prefill_s(batch, 600) == pytest.approx(times.turn_s([step] * steps), rel=0.25)
            if replica.role != "prefill":
                step_s = max(a + b * batch * 700 for a, b in times.decode_turn(batch))
                assert own.decode_s(batch, 699, 2) == pytest.approx(step_s, rel=0.25)


def test_other_costs_give_other_profiles():
    placement = placed("huawei", "huawei-v100-a800", "llama-3-8b")
    arrays = Cluster.from_spec(placement.cluster)
    costs = make_problem(placement.cluster, placement.model, "online", cost_model="table1").costs
    mine, others = profiles(placement, arrays), profiles(placement, arrays, costs)
    assert all(mine[name].request_s(700, 200) != others[name].request_s(700, 200) for name in mine)
