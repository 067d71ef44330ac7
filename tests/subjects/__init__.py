"""The differentiable functions that every contract is asked of, one record each; a new kernel is a new record."""

from tests.subject import Subject
from tests.subjects import rmsnorm, swiglu

SUBJECTS: dict[str, Subject] = {
    subject.name: subject for lesson in (rmsnorm, swiglu) for subject in lesson.SUBJECTS
}
