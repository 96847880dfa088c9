"""The cost models by name, or with the numbers of a calibration's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel
from cost_model.calibrated import Calibrated, ZeroFit
from cost_model.coefficients import CoefficientSet
from cost_model.engines.model import ENGINES, EngineSteps, VllmSteps
from cost_model.engines.numbers import EngineFits, shipped
from cost_model.errors import InputError
from cost_model.fields import schema_error
from cost_model.files import read_text
from cost_model.lengths import RequestLengths
from cost_model.table1 import Table1

_KINDS: tuple[type[CostModel], ...] = (*ENGINES.values(), Calibrated, ZeroFit, Table1)
COST_MODELS: dict[str, type[CostModel]] = {kind.name: kind for kind in _KINDS}

DEFAULT = VllmSteps.name
"""The cost model where none is asked for."""

_MAX_BYTES = 1 << 20
_REMEDY = "make one with `hexgen2 calibrate ... -o FILE`"


@dataclass(frozen=True, eq=False)
class CostSource:
    """Which cost model, and the calibration whose numbers it has instead of those that ship.

    name : a key of COST_MODELS
    coefficients : of "calibrated"; engine : one that they, or those that ship, know (None: a mean one)
    engines : of an engine's cost model, that engine's only
    """

    name: str
    coefficients: CoefficientSet | None = None
    engine: str | None = None
    engines: EngineFits | None = None

    def costs(self, model: ModelArchitecture, lengths: RequestLengths) -> CostModel:
        """The cost model for this model and requests of these lengths.

        Raises
        ------
        InputError : unknown name
        """
        if self.name not in COST_MODELS:
            known = f"use one of {', '.join(COST_MODELS)}"
            raise InputError("cost_model", "name", f"unknown '{self.name}'", known)
        made = self._made(COST_MODELS[self.name], model, lengths)
        made.source = self
        return made

    def _made(self, kind: type[CostModel], model: ModelArchitecture, lengths: RequestLengths) -> CostModel:
        if self.engines is not None and issubclass(kind, EngineSteps):
            return kind.of(model, lengths, self.engines)
        if kind is Calibrated:
            return Calibrated(model, lengths, coefficients=self.coefficients, engine=self.engine)
        return kind(model, lengths)


def make_cost_model(name: str, model: ModelArchitecture, lengths: RequestLengths) -> CostModel:
    """The cost model of that name, with the numbers that ship.

    Raises
    ------
    InputError : unknown name
    """
    return CostSource(name).costs(model, lengths)


def find_cost_model(asked: str | Path | CostSource | None, engine: str | None = None) -> CostSource:
    """The cost model that NAME, FILE or FILE:ENGINE stands for; None: that of the engine, or the default.

    A file is one that `hexgen2 calibrate` wrote: coefficients, or engines. Of engines, it is the one that is
    named; else vllm, or the only one.

    Parameters
    ----------
    engine : as ENGINE of FILE:ENGINE; also one that the coefficients of "calibrated" know

    Raises
    ------
    InputError : no such name or file, a wrong file, an engine that it lacks, or none named among several
    """
    if isinstance(asked, CostSource):
        return asked
    if asked is None:
        return _of_today(engine)
    if str(asked) in COST_MODELS:
        return _named(str(asked), engine)
    path, also = _split(str(asked))
    if also is not None and engine is not None:
        raise InputError("--engine", "", f"does not go with {asked}", "leave one of the two engines out")
    found, named = load_calibration(path), also or engine
    if isinstance(found, CoefficientSet):
        _check_engine(found, str(path), named)
        return CostSource(Calibrated.name, coefficients=found, engine=named)
    return _of_engine(found, str(path), named)


def cost_models_of_engines(asked: str | Path | None, engine: str | None = None) -> dict[str, CostSource]:
    """The cost models that NAME, FILE or FILE:ENGINE has for engines by name, if no engine was asked for.

    Raises
    ------
    InputError : as `find_cost_model`
    """
    text = str(asked)
    if engine is not None:
        return {}
    if asked is None:
        of_2023 = {name: CostSource(Calibrated.name, engine=name) for name in Calibrated.default().engines}
        return of_2023 | {name: CostSource(name) for name in ENGINES}
    if text in COST_MODELS:
        kind = COST_MODELS[text]
        found: CoefficientSet | EngineFits | None = None
        if issubclass(kind, Calibrated) and not issubclass(kind, EngineSteps):
            found = kind.default()
    else:
        path, named = _split(text)
        found = load_calibration(path) if named is None else None
    if isinstance(found, EngineFits):
        return {name: _of_engine(found, text, name) for name in found.engines}
    known = () if found is None else found.engines
    return {name: CostSource(Calibrated.name, found, name) for name in known}


def cost_models_of_runs(asked: str | Path | None) -> dict[str, CostSource]:
    """The cost models that predict runs of each engine: the engine's own, or that which NAME, FILE or
    FILE:ENGINE stands for; of a file of engines, only those that it has.

    Raises
    ------
    InputError : as `find_cost_model`
    """
    if asked is None:
        return {engine: CostSource(engine) for engine in ENGINES}
    known = cost_models_of_engines(asked)
    if any(source.engines is not None for source in known.values()):
        return known
    return dict.fromkeys(ENGINES, find_cost_model(asked)) | known


def load_calibration(path: Path) -> CoefficientSet | EngineFits:
    """What is in a file that `hexgen2 calibrate` wrote. Engines that only bring numbers of operators become
    those that ship, with these operators.

    Raises
    ------
    InputError : unreadable, not such a file, or with an engine that there is no cost model of
    """
    source, text = str(path), read_text(path, _MAX_BYTES)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(source, "", f"is not JSON ({error})", _REMEDY) from None
    keys = set(tree) if isinstance(tree, dict) else set()
    try:
        if keys & {"base", "gpus", "held_out"} or keys == {"name", "source"}:
            return CoefficientSet.model_validate_json(text)
        if keys & {"engines", "operators"}:
            return _with_engines(EngineFits.model_validate_json(text), source)
    except ValidationError as error:
        raise schema_error(error, source, _REMEDY) from None
    kinds = "coefficients (with name, source, base, gpus) nor engines (with source, engines, operators)"
    raise InputError(source, "", f"is no calibration: neither {kinds}", _REMEDY)


def _with_engines(found: EngineFits, source: str) -> EngineFits:
    for name in found.engines:
        if name not in ENGINES:
            raise InputError(source, f"engines.{name[:60]}", "is not known", f"use {', '.join(ENGINES)}")
    return found if found.engines else found.model_copy(update={"engines": shipped().engines})


def _of_today(engine: str | None) -> CostSource:
    if engine is not None and engine not in ENGINES:
        remedy = f"use {', '.join(ENGINES)}; or name a --cost-model whose coefficients know it"
        raise InputError("--engine", "", f"{engine[:60]!r} is not known", remedy)
    return CostSource(DEFAULT if engine is None else engine)


def _named(name: str, engine: str | None) -> CostSource:
    if engine is not None:
        if name in ENGINES:
            raise InputError("--engine", "", f"does not go with the cost model {name}", "leave it out")
        known = CostSource(name, engine=engine)
        kind = COST_MODELS[name]
        coefficients = kind.default() if issubclass(kind, Calibrated) else None
        _check_engine(coefficients, f"the cost model {name}", engine)
        return known
    return CostSource(name)


def _split(text: str) -> tuple[Path, str | None]:
    """The path and the engine of FILE or FILE:ENGINE. A word that is no file is an unknown name."""
    path, colon, engine = text.rpartition(":")
    named = None
    if not _is_file(text) and colon and path and engine.isalnum():
        text, named = path, engine
    if not _is_file(text) and not set(text) & {"/", "\\", "."}:
        known = f"use {', '.join(COST_MODELS)}, or a file that `hexgen2 calibrate` wrote"
        raise InputError("--cost-model", "", f"there is no {text[:60]!r}", known)
    return Path(text), named


def _is_file(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _check_engine(found: CoefficientSet | None, source: str, engine: str | None) -> None:
    engines = {} if found is None else found.engines
    if engine is not None and engine not in engines:
        known = ", ".join(engines) or "none"
        raise InputError("--engine", "", f"{engine[:60]!r} is not in {source}", f"known: {known}")


def _of_engine(found: EngineFits, source: str, engine: str | None) -> CostSource:
    """One engine of a file."""
    known = list(found.engines)
    if engine is None:
        if VllmSteps.name not in known and len(known) > 1:
            problem, remedy = f"has {' and '.join(known)}", f"name one: {source}:{known[0]}"
            raise InputError(source, "engines", problem, remedy)
        engine = VllmSteps.name if VllmSteps.name in known else known[0]
    elif engine not in known:
        raise InputError("--engine", "", f"{engine[:60]!r} is not in {source}", f"known: {', '.join(known)}")
    only = found.model_copy(update={"engines": {engine: found.engines[engine]}})
    return CostSource(engine, engines=only)
