"""What makes steps fast on GPUs: kernels in Triton (kernels.py), steps as CUDA graphs (graphs.py), and
whether all fits (room.py)."""
