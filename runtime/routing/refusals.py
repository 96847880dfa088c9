"""Why a request is not served: what clients see as a 4xx or a 503."""

from __future__ import annotations

from cost_model.errors import HexGen2Error


class Overloaded(HexGen2Error):
    """Too many requests wait for it to start in time; the client should try again after `retry_after_s`."""

    retry_after_s = 1


class TooMany(Overloaded):
    """Too many requests of this one client wait."""


class Unavailable(HexGen2Error):
    """No replica can serve the request: those it was on, or all, are gone, or the server stops."""


class Broken(HexGen2Error):
    """The request itself fails, wherever it is served, or its replicas died of it. The log says more."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the server failed at request {request_id}; its log has the details")


class TimedOut(HexGen2Error):
    """The client's own time for the request is over."""


class TooLong(HexGen2Error):
    """No replica's KV cache can ever hold the request."""
