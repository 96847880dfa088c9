"""Attention by heads: those in a stage's own cache, and those on attention workers."""
