"""Placements, results and moves as text and tables for people."""
