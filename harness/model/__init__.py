"""The model of a workload: its config.json, architecture, weights, adapters.  May import cli."""
