"""For whoever works on the project."""
