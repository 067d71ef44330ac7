"""Run an exercise's `launch` on its cases, and say in words what is right and what is wrong."""

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.compiler.errors import CompilationError

from exercises.grading.elementwise import ADAMW, ROPE_BACKWARD, SWIGLU_BACKWARD
from exercises.grading.exercise import Case, Exercise, Inputs
from exercises.grading.findings import Answer, in_pieces, known_mistakes, places_in_words
from exercises.grading.losses import CROSS_ENTROPY, CROSS_ENTROPY_INPLACE, ONLINE_SOFTMAX
from exercises.grading.memory import UNWRITTEN, Guarded
from exercises.grading.norms import DW, DX, FORWARD, RESIDUAL
from harness.benchmark.checking import compare

EXERCISES: dict[str, Exercise] = {  # in the order of the lessons
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
}


@dataclass(frozen=True)
class Verdict:
    """What the first case that is wrong shows; nothing, if every case is right."""

    case: int  # its number, from 1 on
    title: str
    sentences: list[str]

    @property
    def right(self) -> bool:
        return not self.sentences


def grade(exercise: Exercise, launch: Callable) -> Verdict:
    """Run the cases one after the other, up to the first that is wrong."""
    for number, case in enumerate(exercise.cases, start=1):
        sentences = wrong_in(exercise, launch, case, is_first=number == 1)
        if sentences:
            break
    return Verdict(number, exercise.title(case), sentences)


def arguments(exercise: Exercise, inputs: Inputs, gaps: bool) -> tuple[dict, dict]:
    """Return inputs and outputs of a launch in memory of their own: {name: Guarded or number}."""
    given, written, gap = {}, {}, 0
    outputs = exercise.outputs(inputs)
    for name, value in (inputs | outputs).items():
        if not isinstance(value, torch.Tensor):
            given[name] = value
            continue
        gap += 3 if gaps else 0  # for each tensor another one, so that strides cannot be exchanged
        if name in outputs:
            written[name] = Guarded(torch.full_like(value, UNWRITTEN), gap, UNWRITTEN)
        else:
            place = written if name in exercise.overwritten else given
            place[name] = Guarded(value, gap)
    return given, written


def call(exercise: Exercise, launch: Callable, given: dict, written: dict) -> None:
    """Call `launch` with tensors and numbers by name."""
    values = {
        name: value.tensor if isinstance(value, Guarded) else value
        for name, value in (given | written).items()
    }
    if exercise.block_size:
        values["block_size"] = exercise.block_size
    launch(**values)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wrong_in(exercise: Exercise, launch: Callable, case: Case, is_first: bool) -> list[str]:
    """Return sentences about what is wrong in a case; none if it is right."""
    inputs = exercise.make(case.rows, case.size, case.dtype, **case.options)
    given, written = arguments(exercise, inputs, case.gaps)
    try:
        call(exercise, launch, given, written)
    except (Exception, SystemExit) as error:  # whatever the learner's code raises
        return [stopped(error, inspect.unwrap(launch).__code__.co_filename)]
    if is_first and not any(memory.changed().any() for memory in written.values()):
        names = ", ".join(written)
        return [f"Nothing is written yet: the launch changed nothing in {names}."]
    found = memory_findings(exercise, given, written)
    if found and is_first:
        return found
    if not found:
        found, is_named = part_findings(exercise, inputs, written)
        if not found or is_named:
            return found
    return [*found, case.question]


def stopped(error: BaseException, file: str) -> str:
    """Return where and why the learner's code stopped."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    last, where = chain[-1], Path(file).name
    frames = [frame for each in chain for frame in traceback.extract_tb(each.__traceback__)]
    lines = [frame.lineno for frame in frames if frame.filename == file]
    # its words, also of an error that raises another one when asked for them
    why = f"{type(last).__name__}: {traceback.TracebackException.from_exception(last)}"
    for each in chain:
        if isinstance(each, CompilationError) and each.node is not None:
            # of the kernel alone: its own lines, and not the file's, are counted
            line = each.src.splitlines()[each.node.lineno - 1]
            source = Path(file).read_text().splitlines()
            lines = [1 + source.index(line)] if line in source else lines  # of Triton's own code
            why = each.error_message if each is last else why
    first, *_ = why.strip().splitlines()
    return f"The code stops in {f'line {lines[-1]} of ' if lines else ''}{where} with {first}"


def memory_findings(exercise: Exercise, given: dict, written: dict) -> list[str]:
    """Return sentences about memory that was written and should not, or the reverse."""
    sentences = []
    for name, memory in given.items():
        if isinstance(memory, Guarded) and memory.changed().any():
            sentences.append(f"{name} was changed, which the kernel only reads.")
    for name, memory in written.items():
        if n := memory.n_changed_outside():
            elements = "1 element" if n == 1 else f"{n:,} elements"
            sentences.append(
                f"The kernel wrote {elements} outside of {name}: behind a row's end, or with the "
                "stride of another tensor."
            )
        if name not in exercise.overwritten:
            unwritten = memory.tensor == UNWRITTEN
            if unwritten.all():
                sentences.append(f"Nothing of {name} is written.")
            elif unwritten.any():
                places = places_in_words(unwritten, exercise.axes)
                sentences.append(f"{name} is not written {places}.")
    return sentences


def part_findings(exercise: Exercise, inputs: Inputs, written: dict) -> tuple[list[str], bool]:
    """Return sentences about parts that are wrong, and whether a known mistake was found."""
    exact_inputs = in_float64(inputs)
    right, eager = exercise.answers(exact_inputs), exercise.answers(inputs)
    found = exercise.parts(inputs, {name: memory.tensor for name, memory in written.items()})
    all_pieces = exercise.split(inputs)
    answers = {}
    for part, exact in right.items():
        pieces = all_pieces.get(part, {})
        checks = [
            compare(part, *(piece(t) for t in (found[part], exact, eager[part])))
            for piece in in_pieces(pieces)
        ]
        answers[part] = Answer(found[part], exact, pieces, checks)
    sentences = [
        f"{part} is wrong {answer.in_words(exercise.axes)}"
        for part, answer in answers.items()
        if not answer.passed
    ]
    if not sentences:
        return [], False
    named = known_mistakes(answers, exercise.mistakes(exact_inputs, right))
    sentences += [f"That is the answer of a known mistake: {sentence}." for sentence in named]
    return sentences, bool(named)


def in_float64(inputs: Inputs) -> Inputs:
    return {
        name: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in inputs.items()
    }
