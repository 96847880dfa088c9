"""Which layers of a model attend to a window of tokens only."""

from __future__ import annotations

from collections.abc import Callable

from runtime.engine.torch.loader import CheckpointConfig

_SLIDING, _FULL = "sliding_attention", "full_attention"


def layer_windows(
    config: CheckpointConfig, layers: int, window: int | None, limited: Callable[[int], bool]
) -> list[int | None]:
    """The attention window of each layer in tokens, None for no limit.

    Parameters
    ----------
    window : of the layers that layer_types names; None: no layer may have one
    limited : whether a layer has a window if config.json has no layer_types

    Raises
    ------
    InputError : layer_types has another length, or kinds that are not known
    """
    kinds = config.get("layer_types")
    if kinds is None:
        return [window if limited(layer) else None for layer in range(layers)]
    allowed = {_FULL} if window is None else {_FULL, _SLIDING}
    if not isinstance(kinds, list) or len(kinds) != layers or not allowed.issuperset(kinds):
        problem = f"must name one of {', '.join(sorted(allowed))} for each of {layers} layers"
        raise config.error("layer_types", problem, "download the checkpoint again")
    return [window if kind == _SLIDING else None for kind in kinds]
