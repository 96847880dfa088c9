"""A simulation of replicas that hold overlapping ranges of layers, with a path for each request (Helix)."""
