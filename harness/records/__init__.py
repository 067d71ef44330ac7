"""What a run writes down as JSON, and how far its steps lie apart.

May import the rooms up to steps.
"""
