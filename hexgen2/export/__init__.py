"""A placement as files for other systems to run: one module per format, text in memory until all of it is
right."""
