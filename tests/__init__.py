"""The exhaustive suite."""
