"""Predictors: the planned distribution, and means that are learned from finished requests."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model.errors import InputError
from hexgen2.schedulers import OUTPUT_LENGTHS
from hexgen2.workload.classes import load_workload
from runtime.routing.output_lengths import FEWEST, PREDICTORS, Buckets, Distribution, make_predictor

ONLINE = load_workload("online")


@dataclass
class Asked:
    prompt_tokens: int
    output_limit: int | None = None


def test_names_are_those_of_the_command_line():
    assert list(PREDICTORS) == list(OUTPUT_LENGTHS)
    with pytest.raises(InputError, match="did you mean 'buckets'"):
        make_predictor("bucket", ONLINE)
    with pytest.raises(InputError, match="use one of buckets, distribution"):
        make_predictor("s3", ONLINE)


def test_the_distribution_is_that_of_the_workload():
    predictor = Distribution(ONLINE)
    drawn = Counter(predictor.predict(Asked(100)) for _ in range(20_000))
    total = sum(c.weight for c in ONLINE.classes)
    assert drawn.keys() == {c.osl for c in ONLINE.classes}
    for c in ONLINE.classes:
        assert drawn[c.osl] / 20_000 == pytest.approx(c.weight / total, abs=0.015)
    again = Distribution(ONLINE)
    assert [again.predict(Asked(1)) for _ in range(50)] == [
        each.predict(Asked(9)) for each in [Distribution(ONLINE)] for _ in range(50)
    ]


def test_buckets_learn_which_prompts_have_long_answers():
    predictor, rng = Buckets(ONLINE), np.random.default_rng(3)
    assert predictor.predict(Asked(50)) == ONLINE.osl
    for _ in range(2000):
        short = rng.random() < 0.5
        prompt = rng.integers(33, 60) if short else rng.integers(1100, 1900)
        predictor.learn(int(prompt), None, int(rng.poisson(40 if short else 400)))
    assert predictor.predict(Asked(40)) == pytest.approx(40, rel=0.15)
    assert predictor.predict(Asked(1500)) == pytest.approx(400, rel=0.1)
    unknown = predictor.predict(Asked(10))
    assert unknown == pytest.approx(220, rel=0.25)  # the mean of all


def test_a_clients_limit_is_a_bucket_of_its_own():
    predictor = Buckets(ONLINE)
    for _ in range(FEWEST):
        predictor.learn(100, 16, 16)
        predictor.learn(100, 1000, 300)
    assert predictor.predict(Asked(100, 16)) == 16
    assert predictor.predict(Asked(100, 1000)) == 300


def test_buckets_follow_a_change():
    predictor = Buckets(ONLINE)
    for tokens in (100, 500):
        for _ in range(1500):
            predictor.learn(100, None, tokens)
    assert predictor.predict(Asked(100)) == pytest.approx(500, rel=0.01)


@given(
    st.sampled_from(sorted(PREDICTORS)),
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 2000)), max_size=60),
    st.integers(1, 4000),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_predictions_are_within_the_limit(name, finished, prompt, limit):
    predictor = make_predictor(name, ONLINE)
    for prompt_tokens, output in finished:
        predictor.learn(prompt_tokens, limit, output)
    found = predictor.predict(Asked(prompt, limit))
    assert found >= 1 and (limit is None or found <= limit)
