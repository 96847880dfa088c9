"""DistServe's own step times as a cost model, so that two simulators differ only in scheduling.

DistServe's simulator (simdistserve, Zhong et al., OSDI 2024) fits, per model and tensor-parallel degree, in
milliseconds:

    prefill = a + b * tokens + c * sum of squared prompt lengths
    decode  = a + b * context tokens + c * requests     (one fit for few requests, another for many)

and adds the cost of a Ray call to every step. The coefficients come from its profile
(simdistserve/estimators/profile_data); the added costs are written in its code and repeated below. Memory and
transfers follow the project's default cost model. The decode fit for many requests gives the constant terms,
but the cost per context token is that of the fit for few, because our simulator asks for it only once.
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
    fits : the fits of one model by tensor-parallel degree, as in DistServe's profile
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
            # A prompt of n tokens attends to n^2 / 2 tokens in our cost model.
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
    """Read the fits of a model, by tensor-parallel degree, from a checkout of DistServe.

    Raises
    ------
    InputError : the profile is missing, or lacks the model
    """
    path = distserve / f"simdistserve/estimators/profile_data/profiler-a100-80g.{backend}.json"
    try:
        return json.loads(path.read_text())[model]
    except (OSError, ValueError, KeyError) as error:
        remedy = "give --distserve a checkout of https://github.com/LLMServe/DistServe"
        raise InputError(str(path), model, "is not a DistServe profile with that model", remedy) from error
