"""Run an exercise's `launch` on its cases, and say in words what is right and what is wrong."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from exercises.grading.elementwise import ADAMW, ADD, ROPE_BACKWARD, SWIGLU_BACKWARD, TILE
from exercises.grading.exercise import Case, Exercise, Inputs, converted
from exercises.grading.findings import (
    UNWRITTEN,
    Answer,
    in_pieces,
    known_mistakes,
    places_in_words,
)
from exercises.grading.losses import (
    CROSS_ENTROPY,
    CROSS_ENTROPY_INPLACE,
    ONLINE_SOFTMAX,
    SOFTMAX_FAST,
)
from exercises.grading.norms import DW, DX, FORWARD, RESIDUAL
from harness.benchmark.checking import compare
from harness.cli.device import DEVICE
from judging.judged_file import Stopped
from judging.layouts import Layout
from subjects.subject import same_bits

EXERCISES: dict[str, Exercise] = {  # in the order of the lessons
    "add": ADD,
    "tile": TILE,
    "rmsnorm_forward": FORWARD,
    "rmsnorm_dx": DX,
    "rmsnorm_dw": DW,
    "online_softmax": ONLINE_SOFTMAX,
    "cross_entropy": CROSS_ENTROPY,
    "cross_entropy_inplace": CROSS_ENTROPY_INPLACE,
    "swiglu_backward": SWIGLU_BACKWARD,
    "rope_backward": ROPE_BACKWARD,
    "adamw": ADAMW,
    "residual_norm": RESIDUAL,
    "softmax_fast": SOFTMAX_FAST,
}
ADDED = (
    f"the result is added to what the memory held before the launch, here {UNWRITTEN:,.0f}: store "
    "the result, or zero the memory before"
)
NAN = (
    "NaN is what a masked lane of a load without other= holds here; inf - inf, 0 * inf and inf / "
    "inf give NaN too."
)
BEFORE = f"The memory of the results held {UNWRITTEN:,.0f} before the launch."
NOT_FP32 = (
    "So small an error comes from a number that is rounded to fp16 or bf16 on the way, or added up "
    "in one of these, or else from a term that is small beside the others."
)
ADDRESS = "; an argument such as x_ptr is an address: tl.load reads what lies there"
Run = Callable[[Inputs, str], dict]  # as learner.launching serves it


@dataclass(frozen=True)
class Verdict:
    """What the first case that is wrong shows; nothing, if every case is right."""

    title: str  # of the case
    sentences: list[str]

    @property
    def right(self) -> bool:
        return not self.sentences


def grade(exercise: Exercise, run: Run, compiled: Callable[[], list[str]] = list) -> Verdict:
    """Run the cases one after the other, up to the first that is wrong.

    compiled: returns what the compiler refuses; that comes first.
    """
    for number, case in enumerate(exercise.cases, start=1):
        sentences = wrong_in(exercise, run, case, is_first=number == 1)
        if sentences:
            break
    title = f"case {number} of {len(exercise.cases)}: {exercise.title(case)}"
    try:
        refused = compiled()
    except Stopped as stopped:
        refused = [] if sentences else [str(stopped)]
    if not refused:
        return Verdict(title, sentences)
    # of a loop that never ends the compiler may say anything
    return Verdict("compiled for a GPU", refused + [s for s in sentences if "longer than" in s])


def placed(values: torch.Tensor, gap: int) -> torch.Tensor:
    """Return a copy whose dimensions lie in the same order, with a gap behind each row."""
    order = sorted(range(values.ndim), key=lambda dim: -values.stride(dim))
    return Layout(tuple(order), (1,) * values.ndim, gap * (values.ndim > 1)).place(values)


def arguments(exercise: Exercise, case: Case) -> tuple[Inputs, Inputs]:
    """Return the inputs of a case, and all arguments of `launch` in memory of their own."""
    inputs = exercise.make(case.rows, case.size, case.dtype, **case.options)
    outputs = {n: torch.full_like(t, UNWRITTEN) for n, t in exercise.outputs(inputs).items()}
    values, gap = {}, 0
    for name, value in (inputs | outputs).items():
        gap += 3 if case.gaps else 0  # each tensor has another one: strides cannot be exchanged
        values[name] = placed(value.cpu(), gap) if isinstance(value, torch.Tensor) else value
    return inputs, values | exercise.blocks


def refused_by_triton(exercise: Exercise, compiled: Callable[[dict], list[str]]) -> list[str]:
    """Return what does not compile in the first case, of fp32, or in the last one, of bf16.

    compiled: pretended_gpu.compiler_of.
    """
    for case in (exercise.cases[0], exercise.cases[-1]):
        _, values = arguments(exercise, case)
        if found := compiled(values):
            return [sentence + ADDRESS * ("pointer<" in sentence) for sentence in found]
    return []


def wrong_in(exercise: Exercise, run: Run, case: Case, is_first: bool) -> list[str]:
    """Return sentences about what is wrong in a case; none if it is right."""
    inputs, values = arguments(exercise, case)
    try:
        seen = run(values, case.order)
    except Stopped as stopped:
        return [str(stopped)]
    tensors = {name: t.to(DEVICE) for name, t in seen["tensors"].items()}
    changed = {n: not same_bits({n: t}, {n: values[n].to(t.device)}) for n, t in tensors.items()}
    read = [n for n in inputs if n in tensors and n not in exercise.overwritten]
    written = {name: t for name, t in tensors.items() if name not in read}
    if is_first and not seen["findings"] and not any(changed.values()):
        names = ", ".join(written)
        return [f"Nothing is written yet: the launch changed nothing in {names}."]
    found = list(seen["findings"])
    found += [f"{name} was changed, which the kernel only reads." for name in read if changed[name]]
    for name in [name for name in written if name not in exercise.overwritten]:
        unwritten = written[name] == UNWRITTEN
        if unwritten.all():
            found.append(f"Nothing of {name} is written.")
        elif unwritten.any():
            places = places_in_words(unwritten, exercise.axes)
            found.append(f"{name} is not written {places}.")
    wrong, asked = part_findings(exercise, inputs, written, case)
    if found:  # wrong numbers follow from these
        return found if is_first else found + asked
    return wrong + asked if wrong else []


def part_findings(
    exercise: Exercise, inputs: Inputs, written: dict, case: Case
) -> tuple[list[str], list[str]]:
    """Return sentences about parts that are wrong, and the known mistake or else a question."""
    formula, exact_inputs = exercise.formula, converted(inputs, torch.float64)
    right = formula.computed(exact_inputs)
    eager = formula.computed(converted(inputs, torch.float32))
    found, all_pieces, answers = exercise.parts(inputs, written), exercise.split(inputs), {}
    for part, exact in right.items():
        pieces = all_pieces.get(part, {})
        tensors = found[part], exact, eager[part].to(found[part].dtype)  # rounded once
        checks = [compare(part, *map(piece, tensors)) for piece in in_pieces(pieces)]
        answers[part] = Answer(found[part], exact, pieces, checks)
    wrong = {part: answer for part, answer in answers.items() if not answer.passed}
    if not wrong:
        return [], [case.question] if isinstance(case.question, str) else []
    sentences = [f"{p} is wrong {answer.in_words(exercise.axes)}" for p, answer in wrong.items()]
    mistakes = formula.mistakes(exact_inputs, right)
    if not exercise.overwritten:
        before = {name: torch.full_like(t, UNWRITTEN) for name, t in written.items()}
        held = exercise.parts(inputs, before)
        mistakes[ADDED] = {part: t + held[part] for part, t in right.items() if part in wrong}
    named = known_mistakes(answers, mistakes)
    if named:
        return sentences, [f"A known mistake gives the same numbers: {each}." for each in named]
    question = case.question
    if isinstance(question, dict):
        question = question.get(next(iter(wrong)), "")
    asked = [question] if question else []
    errors = [check.error for answer in wrong.values() for check in answer.failed]
    if case.dtype == torch.float32 and all(2e-5 < error < 2e-2 for error in errors):
        # the first case asks for nothing else that a small error could come from
        asked = [NOT_FP32] if case is exercise.cases[0] else [*asked, NOT_FP32]
    return sentences + explained(wrong.values()), asked


def explained(answers: Iterable[Answer]) -> list[str]:
    """Return where numbers come from that no right kernel gives."""
    numbers = torch.cat([answer.found.flatten().double() for answer in answers])
    multiples = UNWRITTEN * torch.arange(1, 9, dtype=numbers.dtype, device=numbers.device)
    near = (numbers[:, None] - multiples).abs() < abs(UNWRITTEN) / 20
    return [NAN] * bool(numbers.isnan().any()) + [BEFORE] * bool(near.any())
