"""Why a request is not served: what clients see as a 4xx or a 503."""

from __future__ import annotations

from cost_model.errors import HexGen2Error


class Overloaded(HexGen2Error):
    """The waiting queue is full; the client should try again after a moment."""


class Unavailable(HexGen2Error):
    """No replica can serve the request: those it was on, or all, are gone, or the server stops."""


class TooLong(HexGen2Error):
    """No replica's KV cache can ever hold the request."""
