"""How a script is called and what it writes: flags, one workload, errors, tables, files.

Imports no other room.
"""
