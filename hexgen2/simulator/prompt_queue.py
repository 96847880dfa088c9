"""The prompts that wait at a replica, and how they are divided into chunks for its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cost_model.lengths import Window, attended_tokens


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens to compute for a request: its prompt and the tokens generated before a restart.

    Attributes
    ----------
    since_s : when it joined the queue
    done : how many of the tokens are computed or part of a step in flight
    begun : whether room for its KV cache has been reserved
    """

    request: Any
    tokens: int
    since_s: float
    done: int = 0
    begun: bool = False


class Chunk(NamedTuple):
    """Tokens of a prompt that run in one step, starting at position `first`. The step with the `last` chunk
    also generates a token."""

    prompt: Prompt
    first: int
    tokens: int
    last: bool


def attended(chunks: Sequence[Chunk], window: Window | None) -> float:
    """Sum of the context lengths of all tokens of the chunks."""
    total = 0.0
    for chunk in chunks:
        total += attended_tokens(chunk.tokens, window, chunk.first)
    return total


class PromptQueue:
    """First come, first served, but prompts for other replicas pass own ones that find no room. Only the
    first prompt of each kind may have begun.

    Parameters
    ----------
    begin : reserves room for the KV cache of a prompt; returns False if there is none now

    Attributes
    ----------
    queue, others : own prompts with tokens that are not yet part of a step, and those for other replicas
    """

    def __init__(self, begin: Callable[[Prompt], bool]) -> None:
        self._begin = begin
        self.queue: deque[Prompt] = deque()
        self.others: deque[Prompt] = deque()

    def __len__(self) -> int:
        return len(self.queue) + len(self.others)

    def add(self, prompt: Prompt) -> None:
        """Append a prompt."""
        self.queue.append(prompt)

    def add_other(self, prompt: Prompt) -> None:
        """Append a prompt for another replica."""
        self.others.append(prompt)

    def put_first(self, prompt: Prompt) -> None:
        """Insert a prompt ahead of all that have not begun."""
        self.queue.insert(int(bool(self.queue) and self.queue[0].begun), prompt)

    def withdraw(self, request: object) -> Prompt | None:
        """Remove and return a request's prompt; None if all of it is part of steps already."""
        for queue in (self.queue, self.others):
            for prompt in queue:
                if prompt.request is request:
                    queue.remove(prompt)
                    return prompt
        return None

    def clear(self) -> list[Prompt]:
        """Remove and return all prompts."""
        prompts = [*self.queue, *self.others]
        self.queue.clear()
        self.others.clear()
        return prompts

    def take(self, limit: int, whole: bool = False, any_length: bool = True) -> list[Chunk]:
        """Chunks for the next step, at most `limit` tokens in total. With `whole`, prompts are not divided;
        one longer than `limit` gets a step of its own with `any_length`, and waits without."""
        chunks: list[Chunk] = []
        queue: deque[Prompt] | None = self.queue
        while limit > 0:
            if self.others:
                queue = self._next_of_both()
            if not queue:
                break
            prompt = queue[0]
            tokens = prompt.tokens - prompt.done
            if tokens > limit:
                if not whole:
                    tokens = limit
                elif chunks or not any_length:
                    break
            if not prompt.begun:
                if not self._begin(prompt):
                    break
                prompt.begun = True
            first = prompt.done
            prompt.done += tokens
            limit -= tokens
            last = prompt.done == prompt.tokens
            chunks.append(Chunk(prompt, first, tokens, last))
            if last:
                queue.popleft()
        return chunks

    def _next_of_both(self) -> deque[Prompt] | None:
        """The queue whose first prompt came first, of those that have begun or find room."""
        queues = [queue for queue in (self.queue, self.others) if queue]
        for queue in sorted(queues, key=lambda queue: queue[0].since_s):
            if queue[0].begun or self._begin(queue[0]):
                queue[0].begun = True
                return queue
        return None
