"""How one kernel is measured and judged.  May import every room of the harness."""
