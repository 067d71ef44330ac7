"""The tokens that a model is trained on, in batches.  May import cli and model."""
