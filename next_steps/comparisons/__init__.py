"""What benchmark_kernels.py times, and what its --sweep tries.  May import no studies."""
