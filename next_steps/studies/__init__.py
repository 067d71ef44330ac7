"""Experiments, a script each: ladder, scaling, FP8, longest.  May import rooms up to finetuning."""
