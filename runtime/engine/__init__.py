"""The inference engine of one worker: a pipeline stage's tensor-parallel rank and its KV cache."""
