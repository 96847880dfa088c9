"""A side of benchmarks/engine/engine_speed.py: vLLM's offline engine, in an environment that has it.

PYTHONPATH=. python benchmarks/engine/sides/vllm_offline.py CHECKPOINT DTYPE MODE
"""

from __future__ import annotations

import sys
import time
from itertools import count

from benchmarks.engine.sides.protocol import Channel

BATCH, CONTEXT_TOKENS = 32, 1024


def main(checkpoint: str, dtype: str, mode: str) -> None:
    """Answer cases; `mode` is "compiled" or "eager"."""
    channel = Channel()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(
        checkpoint,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=mode == "eager",
        enable_prefix_caching=False,
        max_num_seqs=BATCH,
        max_model_len=CONTEXT_TOKENS,
    ).llm_engine
    numbers = count()
    channel.ready()
    for case in channel:
        sampling = SamplingParams(
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=case["new_tokens"],
            output_kind=RequestOutputKind.DELTA,
        )
        begun = time.perf_counter()
        times_s: dict[str, list[float]] = {}
        for prompt in case["prompts"]:
            name = str(next(numbers))
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            times_s[name] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begun
            for output in outputs:
                times_s[output.request_id] += [now] * len(output.outputs[0].token_ids)
        channel.send({"times_s": list(times_s.values())})


if __name__ == "__main__":
    main(*sys.argv[1:])
