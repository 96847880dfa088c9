"""Predicted times of single steps and of whole runs."""
