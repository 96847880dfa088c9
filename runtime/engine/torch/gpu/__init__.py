"""What makes steps fast on GPUs: kernels in Triton (kernels.py), and replays of whole decode steps (graphs.py)."""
