"""Compare KV caches in fp8 and int8 with the same in float32: what they cost in quality and gain in speed.

    python -m benchmarks.engine.kv_formats [--steps 1000] [--rounds 5] [--batch 8] [--contexts 512,2048]

Quality, by a small Llama that is trained on the text of docs/ byte by byte (1.8 million parameters, heads of
64, AdamW, --steps steps of 4 x 256 bytes), on text that it has not seen: every tenth stretch of 2,000 bytes.
Prints the perplexity of a byte, how often the most likely byte is the same as with float32, and, of greedy
answers of 64 bytes to 64 prompts of 192, how many of their bytes come before the first difference, and how
many answers have none.

Speed, by a random Llama of 82 million parameters (that of engine_speed): milliseconds of a decode step of
--batch requests with each context, one thread, formats in turns; the median of --rounds, and how many times
as fast as float32 that is.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine.engine_speed import make_model
from cost_model.config import architecture_from_folder
from cost_model.lengths import BLOCK_TOKENS
from runtime.engine.rank import Rank
from runtime.engine.torch.attention import make_attention
from runtime.engine.torch.attention.base import Batch, LayerAttention
from runtime.engine.torch.collectives import Collectives
from runtime.engine.torch.models import load_stage
from runtime.engine.torch.models.base import DecoderStage
from runtime.kv_cache.formats import KV_FORMATS, kv_format
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.message import StageShape

DOCS = Path(__file__).parents[2] / "docs"
VOCABULARY, WINDOW, ROWS = 256, 256, 4
STRETCH, HELD_OUT = 2000, 10
PROMPTS, PROMPT, ANSWER = 64, 192, 64
EVALUATED = 64
REPEATS = 5


def main() -> None:
    """Train, then print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--contexts", default="512,2048")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    contexts = [int(context) for context in options.contexts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "trained", Path(folder) / "random"
        loss = train(small, options.steps, options.seed)
        print(f"trained for {options.steps} steps, to a perplexity of {loss:.3f} on what it was trained on\n")
        print_quality(whole_model(small), options.seed)
        make_model(large)
        torch.set_num_threads(1)
        print_speed(whole_model(large), options.batch, contexts, options.rounds)


# -- the trained model


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of docs/ to train on, and those held out."""
    whole = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    parts = [whole[first : first + STRETCH] for first in range(0, len(whole), STRETCH)]
    seen = b"".join(part for n, part in enumerate(parts) if n % HELD_OUT)
    unseen = b"".join(part for n, part in enumerate(parts) if n % HELD_OUT == 0)
    return torch.tensor(list(seen)), torch.tensor(list(unseen))


def train(folder: Path, steps: int, seed: int) -> float:
    """Train the model and write it to a folder; its perplexity on the last tenth of the steps."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    model, (text, _) = LlamaForCausalLM(config), texts()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=3e-3, total_steps=steps + 1, pct_start=0.1
    )
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - WINDOW, (ROWS, 1))
        rows = text[starts + torch.arange(WINDOW)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    last = losses[-max(1, steps // 10) :]
    return float(torch.tensor(last).mean().exp())


# -- the engine, in this process


def whole_model(folder: Path) -> DecoderStage:
    """A checkpoint on one CPU worker."""
    layers, cpu = architecture_from_folder(folder).layers, torch.device("cpu")
    stages = (StageShape(workers=("one",), first_layer=0, end_layer=layers),)
    return load_stage(str(folder), "float32", cpu, Collectives(Rank.find(stages, "one"), cpu))


@dataclass
class Sequences:
    """Sequences of equal length with a KV cache in some format.

    Parameters
    ----------
    kv : the format's name
    """

    stage: DecoderStage
    kv: str
    count: int
    longest: int
    length: int = 0

    def __post_init__(self) -> None:
        blocks = -(-self.longest // BLOCK_TOKENS)
        shape = replace(self.stage.cache_shape, format=kv_format(self.kv))
        self.cache = PagedCache(shape, blocks * self.count, BLOCK_TOKENS)
        self.attention: LayerAttention = make_attention(self.cache)
        self._tables = [list(range(n * blocks, (n + 1) * blocks)) for n in range(self.count)]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after each of the next tokens, [sequences, tokens, vocab]."""
        offsets = [self.length] * self.count
        batch = Batch.make(self.attention, tokens.tolist(), offsets, self._tables, [True] * self.count)
        batch = replace(batch, sampled=torch.arange(tokens.numel()))
        self.length += tokens.shape[1]
        logits = self.stage.logits(self.stage.forward(batch, None), batch)
        assert logits is not None
        return logits.view(*tokens.shape, -1)


# -- quality


@torch.inference_mode()
def print_quality(stage: DecoderStage, seed: int) -> None:
    """Print a line for each format."""
    _, text = texts()
    rng = random.Random(seed)
    starts = [rng.randrange(len(text) - WINDOW) for _ in range(EVALUATED)]
    rows = torch.stack([text[start : start + WINDOW] for start in starts])
    prompts = torch.stack([text[start : start + PROMPT] for start in starts[:PROMPTS]])
    print(
        "| KV cache | bytes per token | perplexity | same most likely byte | answers' bytes, whole answers |"
    )
    print("| --- | --- | --- | --- | --- |")
    exact = exact_answers = None
    for name in KV_FORMATS:
        logits = torch.cat([Sequences(stage, name, len(part), WINDOW).step(part) for part in rows.split(16)])
        answers = answered(stage, name, prompts)
        if exact is None or exact_answers is None:
            exact, exact_answers = logits, answers
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        alike = (answers == exact_answers).cumprod(dim=1)
        shape = replace(stage.cache_shape, format=kv_format(name))
        size = shape.part.cells * shape.bytes_per_token_cell
        print(
            f"| {titled(name)} | {size} | {loss.exp():.4f} | {same:.2%} "
            f"| {alike.float().mean():.1%}, {alike[:, -1].sum()} of {PROMPTS} |",
            flush=True,
        )


def answered(stage: DecoderStage, kv: str, prompts: torch.Tensor) -> torch.Tensor:
    """Greedy answers, [prompts, tokens]."""
    sequences = Sequences(stage, kv, len(prompts), PROMPT + ANSWER)
    found = [sequences.step(prompts)[:, -1].argmax(-1)]
    while len(found) < ANSWER:
        found.append(sequences.step(found[-1].unsqueeze(1))[:, -1].argmax(-1))
    return torch.stack(found, dim=1)


# -- speed


@torch.inference_mode()
def print_speed(stage: DecoderStage, batch: int, contexts: list[int], rounds: int) -> None:
    """Print a line for each format: a step's milliseconds with each context, and how many times as fast."""
    found = {(kv, context): list[float]() for kv in KV_FORMATS for context in contexts}
    for context in contexts:
        sides = {kv: filled(stage, kv, batch, context) for kv in KV_FORMATS}
        for number in range(rounds + 1):  # the first round warms up
            for kv, side in random.sample(sorted(sides.items(), key=lambda each: each[0]), len(sides)):
                took_ms = statistics.median(steps_ms(side, context))
                if number:
                    found[kv, context].append(took_ms)
    titles = [f"decode step of {batch} with {context} tokens each" for context in contexts]
    print("\n| KV cache | " + " | ".join(titles) + " |")
    print("| --- " * (1 + len(titles)) + "|")
    for kv in KV_FORMATS:
        cells = []
        for context in contexts:
            ours, base = (statistics.median(found[name, context]) for name in (kv, next(iter(KV_FORMATS))))
            cells.append(f"{ours:.1f} ms ({base / ours:.2f})")
        print(f"| {titled(kv)} | " + " | ".join(cells) + " |")


def filled(stage: DecoderStage, kv: str, batch: int, context: int) -> Sequences:
    """Sequences whose KV caches hold noise."""
    sequences = Sequences(stage, kv, batch, context + 1)
    pool, shape = sequences.cache.pool, sequences.cache.shape
    for layer in pool:
        layer.copy_(shape.format.pack(torch.randn(*layer.shape[:-1], shape.head_dim)))
    return sequences


def steps_ms(sequences: Sequences, context: int) -> Iterator[float]:
    """Milliseconds of decode steps with that context."""
    tokens = torch.zeros(sequences.count, 1, dtype=torch.int64)
    for _ in range(REPEATS):
        sequences.length = context
        begun = time.perf_counter()
        sequences.step(tokens)
        yield 1e3 * (time.perf_counter() - begun)


def titled(kv: str) -> str:
    """The heading of a format's line."""
    return kv if kv_format(kv).is_packed else "float32"


if __name__ == "__main__":
    main()
