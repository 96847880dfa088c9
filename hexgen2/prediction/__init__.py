"""What the cost model predicts for the replicas of a placement: step times, KV capacity, latency, limits."""
