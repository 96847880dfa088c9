"""vLLM as the engine: a `vllm serve` for each replica, behind links that speak this project's messages."""
