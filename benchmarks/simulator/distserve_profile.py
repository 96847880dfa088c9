"""DistServe's own step times as a cost model, so that only the scheduling differs between two simulators.

Its simulator (simdistserve, Zhong et al., OSDI 2024) fits, per model and tensor degree, in milliseconds:

    prefill = a + b * tokens + c * sum of squared prompt lengths
    decode  = a + b * context tokens + c * requests     (one fit below a number of requests, one from there)

and adds the cost of a Ray call to every step. The coefficients are read from its profile
(simdistserve/estimators/profile_data); what it adds stands in its code and is restated below. Memory and
transfers are those of the project's default cost model. Of the decode fit for many requests the constant
terms are taken, but the cost of context is that of the fit for few: the simulator asks for it once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cost_model.architecture import ModelArchitecture
from cost_model.base import TensorGroup, Work
from cost_model.calibrated import Calibrated
from cost_model.errors import InputError
from cost_model.lengths import RequestLengths

PREFILL_MS = 1.0  # simdistserve/estimators/time_estimator.py, pp_const
STEP_MS, STEP_MS_PER_TOKEN = 2.0, 1e-4  # simdistserve/base/worker.py, add_ray_overhead


class DistServeProfile(Calibrated):
    """Times of whole steps on one stage, spread evenly over the layers.

    Parameters
    ----------
    fits : of one model, by tensor degree, as in DistServe's profile
    """

    def __init__(self, model: ModelArchitecture, lengths: RequestLengths, fits: dict[str, Any]) -> None:
        super().__init__(model, lengths)
        self.calibration = "DistServe's profile"
        self.fits = fits

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        fit = self.fits[str(group.degree)]
        milliseconds = 0.0
        if work.prompt_tokens:
            a, b, c = fit["prefill"]
            # The tokens that a prompt of n attends to are counted as n^2 / 2.
            milliseconds += a + b * work.prompt_tokens + c * 2 * work.prompt_attended
            milliseconds += PREFILL_MS + STEP_MS + STEP_MS_PER_TOKEN * work.prompt_tokens
        if work.decodes:
            large = work.decodes >= fit["decoding_large_small_bs_threshold"]
            a, _, c = fit["decoding_largebs" if large else "decoding_smallbs"]
            b = fit["decoding_smallbs"][1]
            milliseconds += a + b * work.context + c * work.decodes
            milliseconds += STEP_MS + STEP_MS_PER_TOKEN * (work.context - work.decodes)
        return milliseconds / 1e3 / self.model.layers

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        return 0.0


def read_fits(distserve: Path, backend: str, model: str) -> dict[str, Any]:
    """The fits of a model, by tensor degree, from a checkout of DistServe.

    Raises
    ------
    InputError : the profile is not there, or lacks the model
    """
    path = distserve / f"simdistserve/estimators/profile_data/profiler-a100-80g.{backend}.json"
    try:
        return json.loads(path.read_text())[model]
    except (OSError, ValueError, KeyError) as error:
        remedy = "give --distserve a checkout of https://github.com/LLMServe/DistServe"
        raise InputError(str(path), model, "is no profile of DistServe's with that model", remedy) from error
