"""Strategies side by side: each plans by its own rules, and all are simulated with the same requests."""
