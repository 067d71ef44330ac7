"""What the scripts share, and what they know of the kernels: `kernel_facts` has a row for each."""

import contextlib
import getpass
import os
import tempfile

# read on import: one error sentence must not drown in a library's warnings (progress bars stay)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")


def own_folder() -> str:
    """Make a folder for temporary files that no other user can have put something into."""
    folder = os.path.join(tempfile.gettempdir(), f"kernel-dev-ft-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder if os.lstat(folder).st_uid == os.getuid() else tempfile.mkdtemp()


def give_home() -> None:
    """Give libraries a name and a place for their caches where the user has none.

    `docker run --user 1234` makes such a user, with / for a home.  A home that cannot be written
    but holds caches stays the home: models and tokens are read there.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # as PyTorch does it, for a folder's name
        os.environ["USER"] = str(os.getuid())
    home = os.path.expanduser("~")
    is_known = os.path.isabs(home)  # else it is ~, a folder where the script is started
    if is_known and os.path.isdir(home) and os.access(home, os.W_OK):
        return
    folder = own_folder()
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, ".triton", "cache"))
    if not (is_known and os.path.isdir(os.path.join(home, ".cache"))):
        os.environ["HOME"] = folder


with contextlib.suppress(OSError):  # nothing can be written anywhere: what needs to says so
    give_home()
