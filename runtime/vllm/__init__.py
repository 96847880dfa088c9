"""The vLLM engine: one `vllm serve` per replica, behind links that translate the runtime's messages."""
