"""What is known of each differentiable function, once: a record each, which tests, benchmark,
exercises and tools read.  May import the lessons, the layers and the harness.

A new kernel is a new file here: each file's SUBJECTS are found by themselves.
"""

import importlib
import pkgutil

from subjects.subject import Subject

FILES = sorted(file.name for file in pkgutil.iter_modules(__path__) if file.name != "subject")
SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for name in FILES
    for subject in importlib.import_module(f"{__name__}.{name}").SUBJECTS
}
