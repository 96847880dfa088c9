"""Paths through replicas that hold ranges of layers (Helix): each request takes one of its own."""
