"""The further lessons, one kernel each.  May import the root's lessons."""
