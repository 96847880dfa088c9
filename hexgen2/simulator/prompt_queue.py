"""PromptQueue that wait at a replica, and how they go into steps: in chunks, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cost_model.lengths import attended_tokens


@dataclass(slots=True, eq=False)
class Prompt:
    """Tokens to compute for a request, its prompt and whatever was made before; the first `done` of them are
    computed or in a step under way. It has begun once there is room for its KV cache."""

    request: Any
    tokens: int
    since_s: float
    done: int = 0
    begun: bool = False


class Chunk(NamedTuple):
    """Tokens of a prompt that run in one step, from `first` on; with the `last` chunk, the step makes a token
    of the request."""

    prompt: Prompt
    first: int
    tokens: int
    last: bool


def attended(chunks: Sequence[Chunk], window: int | None) -> float:
    """Sum over the tokens of some chunks of the tokens that each attends to."""
    total = 0.0
    for chunk in chunks:
        total += attended_tokens(chunk.tokens, window, chunk.first)
    return total


class PromptQueue:
    """The queue of a replica. At most its first prompt has begun.

    Parameters
    ----------
    begin : takes room for the KV cache of a prompt's tokens; False if there is none now

    Attributes
    ----------
    queue : those of which not all is in steps yet
    """

    def __init__(self, begin: Callable[[Prompt], bool]) -> None:
        self._begin = begin
        self.queue: deque[Prompt] = deque()

    def add(self, prompt: Prompt) -> None:
        """To the end of the queue."""
        self.queue.append(prompt)

    def put_first(self, prompt: Prompt) -> None:
        """Before all that have not begun."""
        self.queue.insert(int(bool(self.queue) and self.queue[0].begun), prompt)

    def withdraw(self, request: object) -> Prompt | None:
        """Take a request's prompt out; None if all of it is in steps already."""
        found = next((prompt for prompt in self.queue if prompt.request is request), None)
        if found is not None:
            self.queue.remove(found)
        return found

    def clear(self) -> list[Prompt]:
        """Take all out."""
        prompts = list(self.queue)
        self.queue.clear()
        return prompts

    def take(self, limit: int, whole: bool = False) -> list[Chunk]:
        """What goes into the next steps, of at most `limit` tokens; with `whole`, prompts are not divided,
        and one that is longer goes alone."""
        chunks: list[Chunk] = []
        queue = self.queue
        while queue and limit > 0:
            prompt = queue[0]
            tokens = prompt.tokens - prompt.done
            if tokens > limit:
                if whole and chunks:
                    break
                tokens = tokens if whole else limit
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
