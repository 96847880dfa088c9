"""Predicts how many tokens a request will generate, for schedulers that weigh requests by their work.

'High-throughput LLM inference on heterogeneous clusters', section 4.1, leaves the predictor open. Another one
is a subclass of OutputLengths, given to `hexgen2.simulate` as an object, or with a line in PREDICTORS and in
hexgen2/schedulers.py. The front end and
the simulator share this file.
"""

from __future__ import annotations

import difflib
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

from cost_model.errors import InputError
from hexgen2.schedulers import BUCKETS, DISTRIBUTION
from hexgen2.workload.lengths import Workload

WINDOW = 300
"""Finished requests of a bucket over which its mean is taken, the latest counting most."""
FEWEST = 12
"""Finished requests that a bucket needs before it predicts; until then, a coarser one does."""


class Asked(Protocol):
    """A request to predict."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_limit(self) -> int | None:
        """Most output tokens that the client lets it have; None: unknown."""


class OutputLengths(ABC):
    """A predictor of output lengths."""

    @abstractmethod
    def predict(self, request: Asked) -> float:
        """The output tokens that a request is expected to have, at least 1."""

    @abstractmethod
    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        """A request has ended by itself with so many output tokens."""


def within_limit(tokens: float, request: Asked) -> float:
    """A prediction, within what the client allows and at least 1."""
    limit = request.output_limit
    return max(1.0, tokens if limit is None else min(tokens, limit))


class Distribution(OutputLengths):
    """Draws from the output lengths of the planned workload, as the paper's experiments do."""

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self._lengths = [request_class.osl for request_class in workload.classes]
        self._ends = list(accumulate(request_class.weight for request_class in workload.classes))
        self._random = random.Random(seed)

    def predict(self, request: Asked) -> float:
        drawn = bisect_right(self._ends, self._random.random() * self._ends[-1])
        return within_limit(self._lengths[min(drawn, len(self._lengths) - 1)], request)

    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        """Nothing: the workload is as planned."""


class Buckets(OutputLengths):
    """Classifies requests by the length of their prompt and by the client's limit, each to a power of two.
    The prediction is the mean output of the latest requests of the bucket that have finished; of all, while
    the bucket has had few; and the planned workload's, before that."""

    def __init__(self, workload: Workload) -> None:
        self._planned, self._all = workload.osl, _Mean()
        self._buckets: dict[tuple[int, int], _Mean] = {}

    def predict(self, request: Asked) -> float:
        bucket = self._buckets.get(_bucket(request.prompt_tokens, request.output_limit))
        for known in (bucket, self._all):
            if known is not None and known.seen >= FEWEST:
                return within_limit(known.mean, request)
        return within_limit(self._planned, request)

    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        for mean in (self._all, self._buckets.setdefault(_bucket(prompt_tokens, output_limit), _Mean())):
            mean.add(output_tokens)


class _Mean:
    """Of about the latest WINDOW values, exponentially weighted."""

    __slots__ = ("mean", "seen")

    def __init__(self) -> None:
        self.seen, self.mean = 0, 0.0

    def add(self, value: float) -> None:
        self.seen += 1
        self.mean += (value - self.mean) * max(1 / self.seen, 2 / (WINDOW + 1))


def _bucket(prompt_tokens: int, output_limit: int | None) -> tuple[int, int]:
    return prompt_tokens.bit_length(), (output_limit or 0).bit_length()


PREDICTORS: dict[str, Callable[[Workload], OutputLengths]] = {
    BUCKETS: Buckets,
    DISTRIBUTION: Distribution,
}
"""What makes the predictor of each name; the first one is the default."""


def make_predictor(name: str | None, workload: Workload) -> OutputLengths:
    """The predictor of that name for a placement's workload; None: the default.

    Raises
    ------
    InputError : unknown name
    """
    name = name or next(iter(PREDICTORS))
    if name in PREDICTORS:
        return PREDICTORS[name](workload)
    near = difflib.get_close_matches(name, PREDICTORS, n=1)
    remedy = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(PREDICTORS)}"
    raise InputError("--output-lengths", "", f"unknown predictor '{name}'", remedy)
