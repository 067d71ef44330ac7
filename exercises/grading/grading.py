"""Run an exercise's `launch` on its cases, and say in words what is right and what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from exercises.grading import elementwise, reductions
from exercises.grading.exercise import Case, Exercise, Inputs, converted
from exercises.grading.findings import (
    UNWRITTEN,
    difference_in_words,
    in_pieces,
    known_mistakes,
    places_in_words,
)
from harness.benchmark.checking import compare
from harness.cli.device import DEVICE
from judging.judged_file import Stopped
from judging.layouts import Layout
from subjects.subject import same_bits

EXERCISES: dict[str, Exercise] = {
    each.name: each
    for module in (elementwise, reductions)
    for each in vars(module).values()
    if isinstance(each, Exercise)
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
    tensors = seen["tensors"]
    changed = [n for n, t in tensors.items() if not same_bits({n: t}, {n: values[n]})]
    new = [name for name in tensors if name not in inputs]
    written = {name: tensors[name].to(DEVICE) for name in (*new, *exercise.overwritten)}
    if is_first and not seen["findings"] and not changed:
        names = ", ".join(written)
        return [f"Nothing is written yet: the launch changed nothing in {names}."]
    harmed = [name for name in changed if name not in written]
    found = [f"{name} was changed, which the kernel only reads." for name in harmed]
    found = seen["findings"] + found
    for name in new:
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
    found, split = exercise.parts(inputs, written), exercise.split(inputs)
    right = formula.computed(exact_inputs, found)
    eager = formula.computed(converted(inputs, torch.float32), found)
    rounded = {part: t.to(found[part].dtype) for part, t in eager.items()}  # once
    theirs, exact, ours = (in_pieces(each, split) for each in (rounded, right, found))
    checks = {piece: compare(piece[0], t, exact[piece], theirs[piece]) for piece, t in ours.items()}
    failed = {piece: check for piece, check in checks.items() if not check.passed}
    if not failed:
        return [], [case.question] if isinstance(case.question, str) else []
    wrong, sentences = [*dict.fromkeys(part for part, _ in failed)], []
    for name in wrong:
        allowed = max(check.allowed for (part, _), check in checks.items() if part == name)
        words = difference_in_words(found[name], right[name], allowed, exercise.axes)
        sentences.append(f"{name} is wrong {words}")
    mistakes = formula.mistakes(exact_inputs, right)
    if not exercise.overwritten:
        before = {name: torch.full_like(t, UNWRITTEN) for name, t in written.items()}
        held = exercise.parts(inputs, before)
        mistakes[ADDED] = {part: t + held[part] for part, t in right.items() if part in wrong}
    named = known_mistakes(found, split, checks, mistakes)
    if named:
        return sentences, [f"A known mistake gives the same numbers: {each}." for each in named]
    question = case.question
    if isinstance(question, dict):
        question = question.get(wrong[0], "")
    asked = [question] if question else []
    is_small = all(2e-5 < check.error < 2e-2 for check in failed.values())
    if case.dtype == torch.float32 and is_small:
        # the first case asks for nothing else that a small error could come from
        asked = [NOT_FP32] if case is exercise.cases[0] else [*asked, NOT_FP32]
    return sentences + explained([found[part] for part in wrong]), asked


def explained(wrong: list[torch.Tensor]) -> list[str]:
    """Return where numbers come from that no right kernel gives."""
    numbers = torch.cat([t.flatten().double() for t in wrong])
    multiples = UNWRITTEN * torch.arange(1, 9, dtype=numbers.dtype, device=numbers.device)
    near = (numbers[:, None] - multiples).abs() < abs(UNWRITTEN) / 20
    return [NAN] * bool(numbers.isnan().any()) + [BEFORE] * bool(near.any())
