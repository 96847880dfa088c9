"""The cost models by name."""

from __future__ import annotations

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel
from cost_model.calibrated import Calibrated, ZeroFit
from cost_model.engines.model import ENGINES
from cost_model.errors import InputError
from cost_model.lengths import RequestLengths
from cost_model.table1 import Table1

_OTHERS: tuple[type[CostModel], ...] = (Calibrated, ZeroFit, Table1)
COST_MODELS: dict[str, type[CostModel]] = {**ENGINES, **{model.name: model for model in _OTHERS}}


def make_cost_model(name: str, model: ModelArchitecture, lengths: RequestLengths) -> CostModel:
    """The cost model of that name for this model and requests of these lengths.

    Raises
    ------
    InputError : unknown name
    """
    if name not in COST_MODELS:
        raise InputError("cost_model", "name", f"unknown '{name}'", f"use one of {', '.join(COST_MODELS)}")
    return COST_MODELS[name](model, lengths)
