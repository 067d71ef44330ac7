"""A run: steps, validation, checkpoints, saving.  May import the rooms up to profiling."""
