"""The coefficients that an estimate is asked to use."""

from __future__ import annotations

from pathlib import Path

from cost_model.coefficients import ZERO_FIT, CoefficientSet, fitted, load_coefficients
from cost_model.errors import InputError


def named_coefficients(name: str | Path | None, engine: str | None) -> CoefficientSet:
    """The coefficients that ship (None), the priors ("zero-fit") or those of a file; they know the engine.

    Raises
    ------
    InputError : unusable file, or an engine that the coefficients lack
    """
    if name is None:
        found = fitted()
    else:
        found = ZERO_FIT if str(name) == ZERO_FIT.name else load_coefficients(Path(name))
    if engine is not None and engine not in found.engines:
        known = ", ".join(found.engines) or "none"
        raise InputError("--engine", "", f"{engine[:60]!r} is not in the coefficients", f"known: {known}")
    return found
