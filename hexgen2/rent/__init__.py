"""Renting: which GPUs to rent and how to place the model on them, decided jointly."""
