"""KV heads of requests on a replica's own GPUs and on attention workers: who holds what, and what moves."""
