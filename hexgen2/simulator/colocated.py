"""A colocated replica: prompts and decodes take turns on the same GPUs, or share each step.

Policies:

- "alternate": what the runtime does. A batch of prompts goes first, but never twice in a row while some could
  decode; KV cache for prompt and output is taken when a request starts.
- "prefill-first": a prompt that fits always goes first; KV cache is taken token by token, and the youngest
  request starts over when it runs out (vLLM before chunked prefill).
- "chunked": a step takes all decodes and fills up with chunks of prompts; KV cache likewise (vLLM's default;
  Agrawal and others, Sarathi-Serve, OSDI 2024).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cost_model.base import PREFILL_TOKENS, Work
from cost_model.lengths import attended_tokens
from hexgen2.simulator.records import Records, ReplicaRecord
from hexgen2.simulator.running import Running
from hexgen2.simulator.timing import ReplicaTimes

Policy = Literal["alternate", "prefill-first", "chunked"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(slots=True)
class _Prompt:
    """A request that waits: `made` of its tokens are made (it started over), `done` of its prompt's tokens
    are computed."""

    request: int
    since_s: float
    made: int = 0
    done: int = 0


class Colocated:
    """One replica.

    Parameters
    ----------
    isl, osl : prompt and output tokens of each request
    places : requests that decode at once
    kv_tokens : KV cache that fits
    ended : called with (request, now) at its last token
    """

    def __init__(
        self,
        policy: Policy,
        times: ReplicaTimes,
        isl: Sequence[int],
        osl: Sequence[int],
        places: int,
        kv_tokens: int,
        records: Records,
        record: ReplicaRecord,
        schedule: Callable,
        ended: Callable[[int, float], None],
    ) -> None:
        self._policy, self._times, self._isl, self._osl = policy, times, isl, osl
        self._places, self._kv_tokens, self._held_tokens = places, kv_tokens, 0
        self._records, self._record = records, record
        self._schedule, self._ended = schedule, ended
        self._window = times.costs.model.sliding_window
        self.running = Running(times.decode_turn, self._window)
        self._waiting: deque[_Prompt] = deque()
        self._partial: list[_Prompt] = []
        self._held: dict[int, int] = {}
        self._made: dict[int, int] = {}
        self._late: list[list[float]] = []
        self._busy = self._last_was_prefill = False
        self._planned = self._version = 0
        self.alive = True

    def submit(self, request: int, now: float, made: int = 0) -> None:
        """A request arrives; so many of its tokens were made elsewhere."""
        self._waiting.append(_Prompt(request, now, made))
        if self._busy:
            return  # The next step is chosen when the one under way ends.
        if self.running:
            steps = self.running.steps_until(now)
            if steps >= self._planned:
                return
            self._decode(steps)
        self._wake(self.running.time_s if self.running else now)

    def lose(self, now: float) -> list[tuple[int, int]]:
        """The replica is gone: its requests, and how many tokens each has."""
        running = self.running
        if running and not self._busy:
            self._decode(min(running.steps_before(now), self._planned))
        self.alive = False
        self._version += 1
        lost = [(p.request, p.made) for p in (*self._partial, *self._waiting)]
        for request in list(running):
            lost.append((request, running.leave(request) + self._made[request]))
            self._records.last_s[request] = running.time_s
        self._waiting.clear()
        self._partial.clear()
        return lost

    def _wake(self, at_s: float) -> None:
        """Choose what to do at a time, now or as soon as the step under way ends."""
        self._version += 1
        self._busy = True
        self._schedule(at_s, self._choose, self._version)

    def _choose(self, now: float, version: int) -> None:
        if version != self._version or not self.alive:
            return
        running = self.running
        running.time_s = now
        self._busy = False
        self._make_room(now)
        self._record.peak_running = max(self._record.peak_running, len(running))
        decodes_due = self._policy == "alternate" and self._last_was_prefill and len(running) > 0
        prompts = [] if decodes_due else self._admit(now)
        self._last_was_prefill = bool(prompts)
        if prompts:
            self._step_with(prompts, now)
            return
        running.settle()
        if running:
            self._planned = self._steps()
            self._version += 1
            self._schedule(now + running.span_s(self._planned), self._change, self._version)

    def _steps(self) -> int:
        """Decode steps until something changes: by itself, as prompts get their turn, or as room runs out."""
        steps = self.running.regime_steps
        if self._waiting and self._policy == "alternate" and self._could_start(self._waiting[0]):
            return 1
        if self._policy != "alternate":
            steps = min(steps, max(1, (self._kv_tokens - self._held_tokens) // len(self.running)))
        return steps

    def _change(self, now: float, version: int) -> None:
        if version == self._version and self.alive:
            self._decode(self._planned)
            self._wake(self.running.time_s)

    def _decode(self, steps: int) -> None:
        """Run so many decode steps."""
        running = self.running
        if not steps:
            return
        count, span_s = len(running), running.span_s(steps)
        for waited_s, requests in self._late:
            self._records.gap(waited_s + running.step_s, int(requests))
        gaps = count * steps - sum(int(requests) for _, requests in self._late)
        self._late.clear()
        if gaps > 0:
            self._records.gap(span_s / steps, gaps)
        self._record.busy_s += span_s
        self._record.running_s += span_s * count
        self._grow(steps)
        for request in running.advance(steps):
            self._end(request, running.time_s)
        self._last_was_prefill = False

    # -- prompts

    def _admit(self, now: float) -> list[tuple[_Prompt, int]]:
        """Prompts, or chunks of them, for the next step: with the tokens of each."""
        chunked = self._policy == "chunked"
        # As many batches as steps are under way; the decodes take their part of mixed ones.
        budget = PREFILL_TOKENS * self._times.in_flight - (len(self.running) if chunked else 0)
        chosen: list[tuple[_Prompt, int]] = []
        for prompt in self._partial:
            tokens = min(self._length(prompt) - prompt.done, budget)
            if tokens > 0:
                chosen.append((prompt, tokens))
                budget -= tokens
        while self._waiting and budget > 0 and self._could_start(self._waiting[0]):
            length = self._length(self._waiting[0])
            if not chunked and chosen and length > budget:
                break
            prompt = self._waiting.popleft()
            self._take(prompt)
            self._record.waited_s += max(0.0, now - prompt.since_s)
            self._partial.append(prompt)
            tokens = min(length, budget) if chunked else length
            chosen.append((prompt, tokens))
            budget -= tokens
        return chosen

    def _length(self, prompt: _Prompt) -> int:
        return self._isl[prompt.request] + prompt.made

    def _could_start(self, prompt: _Prompt) -> bool:
        if len(self.running) + len(self._partial) >= self._places:
            return False
        growth = 0 if self._policy == "alternate" else len(self.running)
        return self._held_tokens + self._needs(prompt) + growth <= self._kv_tokens or not self._held

    def _needs(self, prompt: _Prompt) -> int:
        """KV tokens to take at the start."""
        if self._policy == "alternate":
            return self._isl[prompt.request] + self._osl[prompt.request]
        return self._length(prompt) + 1

    def _take(self, prompt: _Prompt) -> None:
        self._held[prompt.request] = self._needs(prompt)
        self._held_tokens += self._held[prompt.request]

    def _step_with(self, chosen: list[tuple[_Prompt, int]], now: float) -> None:
        """A step with these prompts and, where steps are mixed, all decodes."""
        mixed = self._policy == "chunked" and len(self.running) > 0
        decodes = len(self.running) if mixed else 0
        parts = min(self._times.in_flight, decodes + len(chosen))
        tokens = sum(count for _, count in chosen)
        attended = sum(attended_tokens(count, self._window, prompt.done) for prompt, count in chosen)
        ends = sum(prompt.done + count == self._length(prompt) for prompt, count in chosen)
        work = Work(
            tokens / parts,
            attended / parts,
            decodes / parts,
            self.running.context / parts if mixed else 0.0,
            (ends + decodes) / parts,
        )
        seconds = self._times.turn_s([work] * parts)
        self._record.busy_s += seconds
        self._busy = True
        self._version += 1
        self._schedule(now + seconds, self._stepped, (chosen, mixed, now, self._version))

    def _stepped(self, now: float, step: tuple[list[tuple[_Prompt, int]], bool, float, int]) -> None:
        chosen, mixed, begun_s, version = step
        if version != self._version or not self.alive:
            return
        running = self.running
        self._record.running_s += (now - begun_s) * len(running)
        if mixed:
            self._records.gap(now - begun_s, len(running))
            self._grow(1)
            for request in running.step_at(now):
                self._end(request, now)
        elif running and not self._late:
            self._late.append([0.0, len(running)])
        before = len(running)
        for group in self._late:
            group[0] += now - begun_s
        for prompt, tokens in chosen:
            prompt.done += tokens
            if prompt.done == self._length(prompt):
                self._partial.remove(prompt)
                self._first(prompt, now)
        if len(running) > before and not mixed:
            self._late.append([0.0, len(running) - before])
        self._wake(now)

    def _first(self, prompt: _Prompt, now: float) -> None:
        """A prompt is computed and its token made."""
        request, made = prompt.request, prompt.made + 1
        self._records.first(request, now)
        self._made[request] = made
        if made >= self._osl[request]:
            self._end(request, now)
        else:
            self.running.join(request, self._isl[request] + made, self._osl[request] - made)

    # -- KV cache

    def _grow(self, steps: int) -> None:
        if self._policy != "alternate":
            for request in self.running:
                self._held[request] += steps
            self._held_tokens += steps * len(self.running)

    def _make_room(self, now: float) -> None:
        """Where the next tokens do not fit, the youngest requests start over."""
        if self._policy == "alternate":
            return
        while len(self.running) > 1 and self._held_tokens + len(self.running) > self._kv_tokens:
            request = next(reversed(list(self.running)))
            made = self._made[request] + self.running.leave(request)
            self._record.preemptions += 1
            if self._late:
                self._late[-1][1] -= 1
            self._records.last_s[request] = now
            self._free(request)
            self._waiting.appendleft(_Prompt(request, now, made))

    def _free(self, request: int) -> None:
        self._held_tokens -= self._held.pop(request)

    def _end(self, request: int, now: float) -> None:
        self._free(request)
        del self._made[request]
        self._record.requests += 1
        self._ended(request, now)
