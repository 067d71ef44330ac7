"""How a script is called and what it writes: flags, errors, tables, files.  Imports no room."""
