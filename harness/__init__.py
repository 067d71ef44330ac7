"""What the scripts share; nothing here knows a kernel."""

import os

# read on import: one error sentence must not drown in a library's warnings (progress bars stay)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
