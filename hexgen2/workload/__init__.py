"""Workloads: how long requests are and when they arrive, from shipped classes, figures or traces."""
