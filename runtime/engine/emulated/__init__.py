"""An engine that takes the time a model would take and computes nothing: see engine.py."""
