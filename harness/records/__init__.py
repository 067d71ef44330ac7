"""What a run writes down, its keys, and how far its steps lie apart.  May import the rooms up to steps."""
