"""The max flow through replicas and KV routes, which is the throughput (HexGen-2, section 3.3)."""
