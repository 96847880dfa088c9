"""The network of a cluster: what traffic shares, and what a KV transfer occupies of it."""
