"""Whose time is a step's, what limits it, what to do.  May import the rooms up to records."""
