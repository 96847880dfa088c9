"""When a replica that decodes turns to the prompts that wait there."""

from __future__ import annotations

import math

from hexgen2.simulator.batching import PATIENCE_STEPS, Batching
from hexgen2.simulator.prompt_queue import PromptQueue


class PromptGate:
    """Keeps prompts waiting for others to start with, or until the engine looks for new ones (`gathered` and
    `look_steps` of Batching).

    Attributes
    ----------
    counts : whether it ever does, so that it has to know of steps and arrivals
    """

    def __init__(self, batching: Batching, prompts: PromptQueue) -> None:
        self._gathered, self._look_steps = batching.gathered, batching.look_steps
        self._prompts = prompts
        self.counts = batching.gathered > 1 or batching.look_steps > 1
        # Steps with decodes only since the last look, and since the oldest prompt has come.
        self._since_look = self._waited = 0
        # Whether the engine has seen a prompt that waits.
        self._seen = False

    def arrived(self) -> None:
        """A prompt has come, and none was waiting."""
        self._waited, self._seen = 0, self._look_steps == 1

    def decoded(self, steps: int) -> None:
        """So many steps had decodes only."""
        self._waited += steps
        self._since_look += steps
        if not self._prompts.queue:
            self._since_look %= self._look_steps

    def ran_prompts(self) -> None:
        """A step had prompts: after it, the engine looks at once."""
        self._waited, self._since_look = 0, self._look_steps

    def open(self, decodes: int) -> bool:
        """Whether the prompts that wait may run beside so many decodes."""
        if not self.counts or not decodes:
            return True
        queue = self._prompts.queue
        if not self._seen and self._since_look >= self._look_steps:
            self._seen, self._since_look = True, 0
        enough = len(queue) >= self._gathered or queue[0].begun or self._waited >= PATIENCE_STEPS
        return self._seen and enough

    def steps_left(self) -> float:
        """Steps with decodes only until it opens by itself, at least one; infinity if it is open."""
        if not self._seen:
            return max(1, self._look_steps - self._since_look)
        return PATIENCE_STEPS - self._waited if self._waited < PATIENCE_STEPS else math.inf
