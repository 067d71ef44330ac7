"""What a run writes down, and how far its steps lie apart.  May import the rooms up to steps."""
