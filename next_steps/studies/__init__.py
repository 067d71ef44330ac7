"""Experiments, a script each: ladder, scaling, FP8, longest, predictions.  prepared.py: processes
that import ahead.  May import rooms up to finetuning.
"""
