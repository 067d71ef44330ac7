"""How much memory a step needs, and what for.  May import the rooms up to patches."""
