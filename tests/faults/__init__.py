"""Faults to plant, one file per mutated source: see tests/mutation_test.py."""
