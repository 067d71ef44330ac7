"""The differentiable functions that every contract is asked of, one record each; a new kernel is a
new record.
"""

from tests.subject import Subject
from tests.subjects import (
    cross_entropy,
    fused_layer,
    linear_cross_entropy,
    lora_linear,
    nf4,
    qk_norm_rope,
    reverse_kl,
    rmsnorm,
    rope,
    split_cross_entropy,
    swiglu,
)

LESSONS = rmsnorm, cross_entropy, linear_cross_entropy, swiglu, rope, reverse_kl, fused_layer
LESSONS += split_cross_entropy, lora_linear, nf4, qk_norm_rope
SUBJECTS: dict[str, Subject] = {
    subject.name: subject for lesson in LESSONS for subject in lesson.SUBJECTS
}
