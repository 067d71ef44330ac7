"""Training in other ways: any kernels, checkpoints, distillation, other libraries.

May import the rooms up to memory.
"""
