"""The states of a request, from its arrival to its end.

    waiting --reserve--> reserving --prefill--> prefilling --decode--> decoding --end--> ended

A request that decodes where it was prefilled, or that asks for one token, is not reserved for. One that a
replica fails or refuses waits again, to be resumed elsewhere. Every state can end.
"""

from __future__ import annotations

from enum import Enum

from runtime.routing.transitions import Transitions


class RequestState(Enum):
    """What is being done for a request; the value is the word for messages."""

    WAITING = "waiting"  # in the queue, until a route has room for it
    RESERVING = "reserving"  # the decode replica was asked for memory
    PREFILLING = "prefilling"  # no token has come yet since it began on its route
    DECODING = "decoding"
    ENDED = "ended"


class RequestEvent(Enum):
    """What happens to a request; the value is the word for messages."""

    RESERVE = "reserve"
    PREFILL = "prefill"
    DECODE = "decode"
    WAIT_AGAIN = "wait again"
    END = "end"


def _table() -> dict[tuple[RequestState, RequestEvent], RequestState]:
    s, e = RequestState, RequestEvent
    started = (s.RESERVING, s.PREFILLING, s.DECODING)
    return {
        (s.WAITING, e.RESERVE): s.RESERVING,
        (s.WAITING, e.PREFILL): s.PREFILLING,
        (s.RESERVING, e.PREFILL): s.PREFILLING,
        (s.PREFILLING, e.DECODE): s.DECODING,
        **{(state, e.WAIT_AGAIN): s.WAITING for state in started},
        **{(state, e.END): s.ENDED for state in (s.WAITING, *started)},
    }


TRANSITIONS: Transitions[RequestState, RequestEvent] = Transitions("request", _table())
