"""A coordinator that takes the route of each request from the test instead of the router."""

from runtime.frontend.coordinator import Coordinator
from runtime.routing.admission import Admission


class PinningAdmission(Admission):
    """Starts requests on their pinned route, if they have one, or not at all."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pins, self.next_pin = {}, None

    def enqueue(self, request):
        if self.next_pin is not None:
            self.pins[request] = self.next_pin
        return super().enqueue(request)

    def next(self):
        route = self.pins.get(self._queue.first()) if self._queue else None
        if route is None:
            return super().next()
        request = self._queue.first()
        if self.states.absent.isdisjoint({route.prefill, route.decode}) and self._has_room(request)(route):
            return self._queue.popleft(), route
        return None

    def can_ever_start(self, request):
        route = self.pins.get(request)
        if route is None:
            return super().can_ever_start(request)
        gone = not self.states.unexpected.isdisjoint({route.prefill, route.decode})
        return not gone and self._could_hold(request, route)


class PinningCoordinator(Coordinator):
    """A coordinator whose requests can be given a route."""

    def __init__(self, router, replicas, **options):
        super().__init__(router, replicas, **options)
        self._admission = PinningAdmission(router, self.replicas, self._queue)

    def submit(self, prompt, sampling, route=None, **options):
        self._admission.next_pin = route
        try:
            return super().submit(prompt, sampling, **options)
        finally:
            self._admission.next_pin = None
