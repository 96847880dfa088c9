"""Starts waiting requests on paths through ranges of layers."""

from __future__ import annotations

from runtime.routing.admission_base import AdmissionBase, Request
from runtime.routing.fair_queue import Queue
from runtime.routing.output_lengths import OutputLengths
from runtime.routing.paths.path_router import PathRouter
from runtime.routing.paths.range_graph import RangePath


class PathAdmission(AdmissionBase[Request]):
    """Starts the first request in the queue as soon as there is a path with room for it.

    Parameters
    ----------
    router : chooses paths; a request that starts is on its account until it is released there
    queue : see AdmissionBase
    lengths : says how long an answer will be
    """

    def __init__(self, router: PathRouter, queue: Queue[Request], lengths: OutputLengths) -> None:
        super().__init__(queue)
        self.router, self._lengths = router, lengths
        self._in_sight = router.graph
        self._longest = router.longest()

    @property
    def context_tokens(self) -> int:
        return self._longest

    @property
    def weighs(self) -> bool:
        return False

    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        self._lengths.learn(prompt_tokens, output_limit, output_tokens)

    def next(self) -> tuple[Request, RangePath] | None:
        if not self._queue:
            return None
        request = self._queue.first()
        tokens, output = request.prompt_tokens, self._lengths.predict(request)
        path = self.router.pick(tokens, request.capacity_tokens, output)
        if path is None:
            return None
        self.router.start(request.request_id, path, tokens, output)
        return self._queue.popleft(), path

    def can_ever_start(self, request: Request) -> bool:
        return request.capacity_tokens <= self._longest

    def _can_serve(self) -> bool:
        return self._in_sight.connected

    def _follow_states(self) -> None:
        absent, unexpected = self.states.absent, self.states.unexpected
        for name in absent.difference(self.router.lost):
            self.router.lose(name)
        for name in set(self.router.lost).difference(absent):
            self.router.regain(name)
        self._in_sight = self.router.graph if absent == unexpected else self.router.without(unexpected)
        self._longest = self.router.longest(self._in_sight)
