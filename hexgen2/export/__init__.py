"""Placements as files for other systems, one module per format."""
