"""A tiny byte-level BPE tokenizer in Hugging Face's format, and a Llama checkpoint that fits it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 400
CONTEXT = 256
SENTENCES = [
    "The prefill replica reads the prompt and the decode replica writes the answer.",
    "Every route carries the KV cache of a request from one group of GPUs to another.",
    "Ein schöner Tag in Zürich: ça va très bien, merci – 你好，世界！ 🙂🚀",
    "the quick brown fox jumps over the lazy dog 0123456789",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Train the tokenizer (all 256 bytes are in its alphabet) and save it in a folder."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_model(
    folder: Path, chat_template: str | None = CHAT_TEMPLATE, head_dim: int = 8
) -> PreTrainedTokenizerFast:
    """A random Llama (4 layers, hidden 64, 8 heads, 4 KV heads) with the tokenizer; float32."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder, chat_template)
