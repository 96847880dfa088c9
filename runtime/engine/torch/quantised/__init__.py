"""Quantised checkpoints: how each method stores matrices, how they are kept in memory, products with them."""
