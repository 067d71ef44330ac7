"""Kernels for a learner to write, one a file, and check.py, which answers: docs/exercises.md."""
