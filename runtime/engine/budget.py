"""How many tokens of KV cache a replica has room for, and who has them."""

from __future__ import annotations

import threading


class TokenBudget:
    """A replica's KV cache room in tokens, taken whole by each request; safe between threads."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._taken: dict[str, int] = {}
        self._free = tokens
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        with self._lock:
            return self._free

    def take(self, request_id: str, tokens: int) -> bool:
        """Take room for a request; False, and nothing taken, if there is none or it has some already."""
        with self._lock:
            if tokens > self._free or request_id in self._taken:
                return False
            self._taken[request_id] = tokens
            self._free -= tokens
            return True

    def give_back(self, request_id: str) -> None:
        """Return what a request took, if anything."""
        with self._lock:
            self._free += self._taken.pop(request_id, 0)
