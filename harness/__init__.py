"""What the scripts share; nothing here knows a kernel."""
