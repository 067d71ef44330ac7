"""Experiments, each a script: the ladder, scaling, FP8, long sequences.

May import the rooms up to finetuning.
"""
