"""Train a tiny Llama and its tokenizer in under a minute, so that the demo has real text to serve.

    python examples/make_checkpoint.py FOLDER

The model (6 million parameters, float32) learns the sentences below by heart: given the start of one, it
writes the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = [
    "A prefill replica reads the whole prompt at once and produces the first token.",
    "A decode replica receives the KV cache and writes the answer one token at a time.",
    "The KV cache moves layer by layer while the prompt is still being computed.",
    "A route leads from a prefill replica to a decode replica and has a capacity of its own.",
    "Tensor parallelism splits every layer over the GPUs of one stage.",
    "Pipeline parallelism gives each stage a range of layers, long or short as the stage is fast or slow.",
    "The router follows the maximum flow, so that no replica waits while another is overrun.",
    "Mixed GPUs are cheaper than equal ones if somebody decides well who does what.",
    "Fast cards like to prefill, for prefill is bound by arithmetic.",
    "Cards with much memory bandwidth like to decode, for decode is bound by reading weights.",
    "Time to first token is what a reader feels first, time per output token is what he feels after.",
    "A placement that cannot be beaten is worth more when somebody has proved it.",
    "The spectral partition cuts the cluster where its links are thin.",
    "The Kernighan and Lin algorithm swaps two cards whenever the cut or the balance improves.",
    "Merging a group of cards into one super node makes a large graph small.",
    "When nothing improves any more, the search stops and says how far the bound is.",
]
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
VOCAB = 512
STEPS = 48
BATCH = 16
WINDOW = 64


def main(folder: Path) -> None:
    """Write the tokenizer and the checkpoint to `folder`."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    model = train_model(tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the sentences."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def train_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Train a Llama of 8 layers to repeat the sentences, each followed by the end token."""
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=end,
        bos_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    rows = torch.full((len(SENTENCES), WINDOW), -100)
    for row, sentence in zip(rows, SENTENCES, strict=True):
        tokens = [*tokenizer(sentence)["input_ids"], end]
        row[: len(tokens)] = torch.tensor(tokens)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=2e-3, total_steps=STEPS)
    for step in range(STEPS):
        labels = rows[torch.randperm(len(rows))[:BATCH]]
        loss = model(input_ids=labels.clamp(min=0), labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if step % 16 == 15:
            print(f"  training: step {step + 1} of {STEPS}, loss {loss:.3f}", file=sys.stderr)
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
