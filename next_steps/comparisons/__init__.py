"""What benchmark_kernels.py times, the sweep of launch settings, and profiles side by side.

May import all of next_steps but studies.
"""
