"""The differentiable functions that every contract is asked of, one record each.

A new kernel is a new file here: each file's SUBJECTS are found by themselves.
"""

import importlib
import pkgutil

from tests.subject import Subject

FILES = sorted(file.name for file in pkgutil.iter_modules(__path__) if file.name != "__main__")
SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for name in FILES
    for subject in importlib.import_module(f"{__name__}.{name}").SUBJECTS
}
