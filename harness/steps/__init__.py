"""One training step, on one GPU or several, and its clocks.  May import cli, model and data."""
