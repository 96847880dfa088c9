"""The best way on a front is the best of all that were offered, whatever the targets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.queueing import PrefillQueue, ServiceMix
from hexgen2.search.planning.prefill_front import PrefillFront

MIX = ServiceMix((0.6, 0.4), (0.5, 1.75))
WAYS = st.lists(
    st.tuples(st.floats(0.5, 20), st.floats(0.05, 3), st.sampled_from([0.25, 1.0, 3.0])),
    min_size=1,
    max_size=20,
)


@given(ways=WAYS, ttft_s=st.floats(0.02, 20), share=st.floats(0.5, 0.99))
def test_the_best_of_the_front_is_the_best_of_all(
    ways: list[tuple[float, float, float]], ttft_s: float, share: float
) -> None:
    queues = [PrefillQueue(req_s, latency_s, batch, MIX) for req_s, latency_s, batch in ways]
    front: PrefillFront[int] = PrefillFront()
    for i, queue in enumerate(queues):
        front.offer(queue, i)
    most = max(queue.largest_rate(ttft_s, share) for queue in queues)
    best = front.best(ttft_s, share)
    if best is None:
        assert most == 0
    else:
        assert queues[best].largest_rate(ttft_s, share) == pytest.approx(most, rel=1e-7)


def test_a_way_that_another_one_dominates_is_not_kept() -> None:
    front: PrefillFront[str] = PrefillFront()
    front.offer(PrefillQueue(4.0, 0.5, 1.0, MIX), "slow")
    front.offer(PrefillQueue(5.0, 0.4, 1.0, MIX), "fast")
    assert front.dominates(PrefillQueue(4.0, 0.5, 1.0, MIX))
    assert not front.dominates(PrefillQueue(4.0, 0.3, 1.0, MIX))
    assert front.best(5.0, 0.9) == "fast"
