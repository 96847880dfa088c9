"""A side of quantised_speed.py: llama.cpp, in an environment that has llama-cpp-python, gguf and safetensors.

PYTHONPATH=. python benchmarks/engine/sides/llama_cpp_batches.py CHECKPOINT TYPE

The checkpoint, a Llama in float32, is rewritten as GGUF and quantised by llama.cpp itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp as llama
import numpy as np
from safetensors.numpy import load_file

from benchmarks.engine.sides.protocol import Channel

TYPES = {
    "F32": llama.LLAMA_FTYPE_ALL_F32,
    "BF16": llama.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SEQUENCES, TOKENS = 32, 8192
"""That a context has room for, in all."""


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Write a Llama's weights, all in float32, without a tokenizer."""
    config = json.loads((checkpoint / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            turned = {"attn_q": heads, "attn_k": kv_heads}.get(_short(name))
            if turned:  # GGUF has the two halves that rotate together side by side.
                rows = weight.reshape(turned, 2, -1, weight.shape[1])
                weight = rows.swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(_named(name), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _short(name: str) -> str:
    """GGUF's name of a layer's weight, without the layer; "" for one that is in no layer."""
    return NAMES[name.split(".", 3)[3].removesuffix(".weight")] if ".layers." in name else ""


def _named(name: str) -> str:
    """GGUF's name of a weight."""
    if ".layers." in name:
        return f"blk.{name.split('.')[2]}.{_short(name)}.weight"
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return others[name.removesuffix(".weight")] + ".weight"


class Batches:
    """A context that continues several requests at a time, each a sequence of its own."""

    def __init__(self, file: Path) -> None:
        settings = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(str(file).encode(), settings)
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = TOKENS
        settings.n_seq_max = SEQUENCES
        settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
        settings.kv_unified = True
        self._context = llama.llama_init_from_model(self._model, settings)
        vocabulary = llama.llama_model_get_vocab(self._model)
        self._tokens = llama.llama_vocab_n_tokens(vocabulary)
        self._batch = llama.llama_batch_init(settings.n_batch, 0, 1)

    def clear(self) -> None:
        """Forget all sequences."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)

    def next_tokens(self, parts: list[list[int]], at: list[int]) -> list[int]:
        """The most likely next token of each sequence after more tokens of it, the first at position `at`."""
        batch, count, last = self._batch, 0, []
        for sequence, (tokens, first) in enumerate(zip(parts, at, strict=True)):
            for position, token in enumerate(tokens, first):
                batch.token[count], batch.pos[count] = token, position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = position == first + len(tokens) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not compute a step")
        found = []
        for index in last:
            logits = llama.llama_get_logits_ith(self._context, index)
            found.append(int(np.ctypeslib.as_array(logits, (self._tokens,)).argmax()))
        return found


def main(checkpoint: str, kind: str) -> None:
    """Answer cases with the checkpoint in one of TYPES."""
    channel = Channel()
    llama.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        file = whole = Path(folder) / "F32.gguf"
        write_gguf(Path(checkpoint), whole)
        if kind != "F32":
            file = Path(folder) / f"{kind}.gguf"
            settings = llama.llama_model_quantize_default_params()
            settings.ftype = TYPES[kind]
            if llama.llama_model_quantize(str(whole).encode(), str(file).encode(), ctypes.byref(settings)):
                raise RuntimeError(f"llama.cpp could not write {kind}")
        batches = Batches(file)
    channel.ready()
    for case in channel:
        parts, at = case["prompts"], [0] * len(case["prompts"])
        batches.clear()
        begun, times_s, made = time.perf_counter(), [], []
        for _ in range(case["new_tokens"]):
            found = batches.next_tokens(parts, at)
            times_s.append(time.perf_counter() - begun)
            made.append(found)
            at = [first + len(tokens) for tokens, first in zip(parts, at, strict=True)]
            parts = [[token] for token in found]
        tokens = [list(each) for each in zip(*made, strict=True)]
        channel.send({"times_s": [times_s] * len(parts), "tokens": tokens})


if __name__ == "__main__":
    main(*sys.argv[1:])
