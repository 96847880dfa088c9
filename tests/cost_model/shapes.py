"""Random models, tensor-parallel groups and workload shapes for the tests of the cost models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel, TensorGroup
from cost_model.calibrated import Calibrated
from cost_model.coefficients import fitted
from cost_model.hardware import CATALOGUE, INTERCONNECT_CLASSES, NO_LINK, find_accelerator, interconnect_link
from cost_model.lengths import RequestLengths
from cost_model.models import SHIPPED, find_model
from cost_model.registry import COST_MODELS, make_cost_model

LLAMA_70B = find_model("llama-2-70b")
fixed = RequestLengths.fixed


def like(model: ModelArchitecture, **changes: Any) -> ModelArchitecture:
    """The model with some fields changed and all counts recomputed (model_copy keeps counts that are
    cached)."""
    return ModelArchitecture(**{**model.model_dump(), **changes})


WINDOWED = like(find_model("llama-3-8b"), name="windowed", sliding_window=1024)
FP32 = like(find_model("opt-13b"), name="fp32", weight_bytes=4.0, activation_bytes=4.0, kv_value_bytes=4.0)

MODELS: list[ModelArchitecture] = [*map(find_model, SHIPPED), WINDOWED, FP32]
DEGREES_TO = 16
"""More than the 8 KV heads of grouped-query models, so that some groups hold copies of a head."""

phases = st.sampled_from(["prefill", "decode"])
batches = st.integers(1, 512) | st.floats(0.25, 512)


def group_of(card: str, degree: int, interconnect: str = "nvlink") -> TensorGroup:
    """A number of cards of one type from the catalogue, on one interconnect."""
    accelerator = find_accelerator(card)
    return TensorGroup(accelerator, degree, interconnect_link(interconnect, accelerator)[0])


def alone(group: TensorGroup) -> TensorGroup:
    """One device of the group, without any link."""
    return TensorGroup(group.accelerator, 1, NO_LINK)


@st.composite
def priced_groups(draw: st.DrawFn) -> tuple[CostModel, TensorGroup]:
    """Any cost model with any model and workload shape, and a group of any card that can split the model."""
    model = draw(st.sampled_from(MODELS))
    isl, osl = draw(st.integers(1, 8192)), draw(st.integers(1, 2048))
    kind = draw(st.sampled_from([*sorted(COST_MODELS), *fitted().engines]))
    if kind in COST_MODELS:
        costs = make_cost_model(kind, model, fixed(isl, osl))
    else:
        costs = Calibrated(model, fixed(isl, osl), engine=kind)
    degree = draw(st.sampled_from(model.tensor_degrees(DEGREES_TO)))
    card, interconnect = draw(st.sampled_from(sorted(CATALOGUE))), draw(st.sampled_from(INTERCONNECT_CLASSES))
    group = group_of(card, degree, interconnect)
    if costs.times_expert_parallel and draw(st.booleans()):
        divisors = [n for n in (1, 2, 4, 8) if degree % n == 0]
        experts = [n for n in divisors if model.experts % n == 0]
        dp, ep = draw(st.sampled_from(divisors)), draw(st.sampled_from(experts))
        group = replace(group, attention_dp=dp, expert_parallel=ep)
    return costs, group
