"""What benchmark_kernels.py times and what its --sweep tries.  May import all of next_steps."""
