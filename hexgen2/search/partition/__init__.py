"""The graph partition: GPUs into groups, and groups into prefill and decode replicas (HexGen-2, 3.2)."""
