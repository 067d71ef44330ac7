"""The exercises: the checker accepts right kernels, and names what is wrong with the others.

tests/exercise_solutions.py has both kinds.  A wrong kernel is a solution in which a text is
replaced, so that the checker is proven on what learners write, and not on its own formulas.
"""

import ast
import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exercises import check
from exercises.grading import grading, learner, speed
from exercises.grading.exercise import converted
from exercises.grading.grading import EXERCISES, Verdict, grade
from exercises.grading.reductions import rstd_of
from exercises.grading.words import WORDS
from harness.benchmark.checking import relative_error
from harness.cli.device import HAS_GPU
from judging import pretended_gpu
from judging.compile_targets import COMPILING
from judging.judged_file import Stopped
from judging.processes import Apart
from subjects.cross_entropy import ROWS
from subjects.rmsnorm import RMSNORM
from subjects.subject import run
from subjects.swiglu import SWIGLU
from tests.conftest import assert_refused, tracked
from tests.exercise_solutions import (
    FAST_LAUNCH,
    MISTAKES,
    NOT_COMPILED,
    REFUSED,
    RIGHT,
    SOLUTIONS,
    solved,
)
from tests.fixtures import needs_gpu
from tools.page_records import HERE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
on_a_cpu = pytest.mark.skipif(HAS_GPU, reason="the addresses are seen in the interpreter alone")


def file_of(name):
    return HERE / "exercises" / f"{name}.py"


@pytest.fixture
def file_with(tmp_path):
    """file_with(name, *changes): the file of the solution, in which texts are replaced."""

    def write(name, *changes):
        file = tmp_path / f"{name}.py"
        file.write_text(solved(name, *changes))
        return str(file)

    return write


@pytest.fixture(scope="module")
def compiler():
    """A process that compiles: compiler(name, file) -> the sentences."""
    with Apart("tests.exercises_test:compiling", environment=COMPILING) as apart:
        yield functools.partial(apart.call, seconds=60)


def compiling():
    return lambda name, file: grading.refused_by_triton(
        EXERCISES[name], pretended_gpu.compiler_of(file, "launch")
    )


def ids(mistakes):
    return [f"{name}: {words}" for name, _, _, words in mistakes]


def test_every_exercise_has_a_file_words_a_solution_and_mistakes():
    assert [*WORDS] == [*SOLUTIONS] and {*WORDS} == {*EXERCISES}
    assert {*WORDS} == {name for name, *_ in MISTAKES} == {name for name, _ in RIGHT}
    files = {path.stem for path in tracked("exercises/*.py") if path.parent.name == "exercises"}
    assert files == {"__init__", "check", *EXERCISES}
    numbers = [ast.get_docstring(ast.parse(file_of(name).read_text())) for name in WORDS]
    assert all(f"Exercise {i}: " in text for i, text in enumerate(numbers, start=1))
    assert all(len(words.hints) == 3 for words in WORDS.values())


@pytest.mark.parametrize(
    "name, changes",
    [(name, ()) for name in WORDS] + [pytest.param(*each, marks=on_a_cpu) for each in RIGHT],
)
def test_the_solution_and_other_right_kernels_are_right_and_compile(
    name, changes, file_with, compiler
):
    verdict = grade(EXERCISES[name], learner.launching(file_with(name, *changes)))
    assert verdict.right, verdict
    assert compiler(name, file_with(name, *changes)) == []


@pytest.mark.parametrize("name", EXERCISES)
def test_the_untouched_file_says_that_nothing_is_written(name):
    verdict = grade(EXERCISES[name], learner.launching(str(file_of(name))))
    right, lines = check.report(name, verdict, [])
    assert not right and "Nothing is written yet" in lines[1] and "--hint" in lines[-1]


@on_a_cpu
@pytest.mark.parametrize("name, old, new, words", MISTAKES, ids=ids(MISTAKES))
def test_a_mistake_is_named(name, old, new, words, file_with):
    verdict = grade(EXERCISES[name], learner.launching(file_with(name, (old, new))))
    assert words in " ".join([verdict.title, *verdict.sentences]), verdict


@on_a_cpu
@pytest.mark.parametrize("name, old, new, words", NOT_COMPILED, ids=ids(NOT_COMPILED))
def test_what_the_interpreter_takes_and_triton_refuses_is_shown(
    name, old, new, words, file_with, compiler
):
    file = file_with(name, (old, new))
    (sentence,) = compiler(name, file)
    assert words.removeprefix(REFUSED) in sentence and f"of {name}.py does not compile" in sentence
    if "pointer" not in sentence:  # which the interpreter refuses as well
        verdict = grade(EXERCISES[name], learner.launching(file), lambda: [sentence])
        assert verdict == Verdict("compiled for a GPU", [sentence])


def test_a_small_error_asks_for_fp16_and_not_for_the_formula(file_with):
    file = file_with("rmsnorm_forward", ("other=0.0).to(tl.float32)", "other=0.0).to(tl.float16)"))
    verdict = grade(EXERCISES["rmsnorm_forward"], learner.launching(file))
    assert verdict.sentences[1:] == [grading.NOT_FP32]


def asked_of_slip(exercise, sentence) -> list[str]:
    """Return what is asked of the numbers that a slip gives, in the first case that it changes."""

    def slipped(inputs, written):
        in_fp32, formula = converted(inputs, torch.float32), exercise.formula
        right = formula.computed(in_fp32, exercise.parts(inputs, written))
        return right | formula.mistakes(in_fp32, right).get(sentence, {})

    answer = dataclasses.replace(exercise, parts=slipped, writes=exercise.reads)
    for case in exercise.cases:
        inputs = exercise.make(case.rows, case.size, case.dtype, **case.options)
        written = exercise.outputs(inputs) | {name: inputs[name] for name in exercise.overwritten}
        wrong, asked = grading.part_findings(answer, inputs, written, case)
        if wrong:
            return asked
    return []


def test_every_slip_is_named_in_one_exercise_at_least():
    """Else no kernel could ever be told that it makes the mistake."""
    slips = {(e.name, words) for e in EXERCISES.values() for words in e.formula.slips}
    named = "A known mistake gives the same numbers: {}.".format
    told = {words for name, words in slips if named(words) in asked_of_slip(EXERCISES[name], words)}
    assert {words for _, words in slips} == told


@pytest.mark.parametrize(
    "name, subject, parts",
    [
        ("rmsnorm_dx", RMSNORM, ["dx"]),
        ("rmsnorm_dw", RMSNORM, ["dweight"]),
        ("cross_entropy", ROWS, ["loss", "dlogits"]),
        ("swiglu_backward", SWIGLU, ["dgate", "dup"]),
    ],
)
def test_a_formula_gives_what_autograd_finds(name, subject, parts):
    given, douts = (converted(t, torch.float64) for t in subject.make((5,), 33, torch.float32))
    (dout,) = douts.values()
    inputs = given | {"dy": dout, "dloss": dout}
    if "x" in given:
        inputs["rstd"] = rstd_of(given["x"])
    if "targets" in given:
        given["targets"].clamp_(min=0)
    found = EXERCISES[name].formula.computed(inputs, parts)
    exact = run(subject, subject.reference, given, douts)
    assert all(relative_error(found[part], exact[part]) < 1e-12 for part in parts)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_docstring_counts_the_bytes_that_the_checker_counts(name):
    total = re.search(r"^Bytes per bf16 \w+: .* = (\d+)\.", file_of(name).read_text(), re.MULTILINE)
    assert f"It moves {total[1]} bytes per element" in speed.bytes_in_words(EXERCISES[name])


@pytest.mark.parametrize("name", EXERCISES)
def test_the_lesson_that_is_named_is_there(name):
    file, functions = WORDS[name].lesson.split(", ", 1)
    source = (HERE / file).read_text()
    names = re.findall(r"_?\w+_kernel\b|_online_softmax|step_of", functions)
    assert names and all(f"def {function}(" in source for function in names)


@pytest.mark.parametrize("name", [name for name in EXERCISES if HAS_GPU or name != "softmax_fast"])
def test_times_stand_beside_the_opponents(name, file_with):
    """With small tensors: on a CPU the times mean nothing, but the lesson takes the same inputs."""
    case = EXERCISES[name].cases[1]
    small = dataclasses.replace(EXERCISES[name], timed=(case.rows, case.size))
    rows = speed.times(small, learner.load_function(file_with(name), "launch"))
    lines = speed.times_table(small, rows).splitlines()
    assert lines[0].split("  ")[0] == f"{small.in_words(case.rows, case.size)}, bf16"
    assert [line.split("  ")[0] for line in lines[2:]] == ["yours", small.opponent]


@needs_gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", EXERCISES)
def test_times_at_llamas_size(name, file_with):
    file = file_with(name, *(FAST_LAUNCH if EXERCISES[name].to_beat else ()))
    (yours, us, *_), (opponent, opponent_us, *_) = learner.timing(file, name)()
    assert yours == "yours" and us > 0 and opponent == EXERCISES[name].opponent
    assert us < opponent_us or not EXERCISES[name].to_beat


def test_the_last_exercise_says_whether_it_beats_its_opponent():
    right = Verdict("", [])
    rows = [("yours", 2.0, 1.0, 1.0), ("torch.compile", 3.0, 1.0, 1.0)]
    question = "Is it faster than torch.compile's? "
    assert question + "Yes." in check.report("softmax_fast", right, rows)[1]
    assert question + "Not yet." in check.report("softmax_fast", right, rows[::-1])[1]
    assert not any(question in line for line in check.report("softmax_fast", right, [])[1])


# ---- The command line


def test_exercises_are_listed_and_hints_are_printed(run_script):
    listed = run_script(check).out
    assert all(name in listed for name in EXERCISES)
    first = run_script(check, "adamw", "--hint").out
    assert first == run_script(check, "adamw", "--hint", "1").out != ""
    assert first == run_script(check, str([*WORDS].index("adamw") + 1), "--hint").out
    assert WORDS["adamw"].lesson in run_script(check, "adamw", "--hint", "3").out


def test_wrong_flags_are_refused_with_a_sentence(run_script):
    assert_refused(run_script(check, "adamv"), "'adamv'", "adamw")
    assert_refused(run_script(check, "14"), "'14'", "adamw")
    assert_refused(run_script(check, "--hint", "2"), "give its NAME")
    assert_refused(run_script(check, "adamw", "--hint", "4"), "--hint")
    assert_refused(run_script(check, "adamw", "--file", "no.py"), "no.py", "exercises/adamw.py")
    assert_refused(run_script(check, "adamw", "--hint", "--file", "no.py"), "--hint judges no file")


def test_the_checker_runs_in_its_own_folder():
    command = [sys.executable, "check.py", "add", "--hint"]
    run = subprocess.run(command, cwd=HERE / "exercises", capture_output=True, text=True)
    assert run.returncode == 0 and "tl.program_id(0)" in run.stdout, run.stderr


def test_a_file_of_ones_own_is_judged_and_not_written(run_script, file_with):
    file = file_with("rmsnorm_dx")
    outcome = run_script(check, "rmsnorm_dx", "--file", file)
    assert outcome.code == 0 and "is right in all" in outcome.out
    assert Path(file).read_text() == solved("rmsnorm_dx")


@pytest.mark.parametrize(
    "text, words",
    [
        ("import os\nos._exit(0)\n", "ended with exit code 0"),
        (solved("add", ("    i =", "    while True:\n        pass\n    i =")), "longer than 2 s"),
    ],
)
def test_a_file_that_cannot_be_judged_is_answered_in_a_sentence(
    text, words, run_script, tmp_path, monkeypatch
):
    monkeypatch.setattr(check, "SECONDS", 2)
    file = tmp_path / "mine.py"
    file.write_text(text)
    outcome = run_script(check, "add", "--file", str(file))
    assert outcome.code == 1 and words in " ".join(outcome.out.split()), outcome


@pytest.mark.parametrize(
    "body, words",
    [
        ("y.copy_(x)", "`launch` computes with PyTorch (copy_)"),
        ("y.copy_(weight * x)", "`launch` computes with PyTorch (mul, copy_)"),
        ("y.fill_(0.0)", "`launch` starts no kernel"),
        ("from rmsnorm_kernel import rmsnorm_forward as f; f(x, weight, eps)", "rmsnorm_kernel.py"),
    ],
)
def test_a_launch_without_a_kernel_of_its_own_is_no_answer(body, words, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"def launch(x, weight, eps, y):\n    {body}\n")
    verdict = grade(EXERCISES["rmsnorm_forward"], learner.launching(str(file)))
    assert words in verdict.sentences[0], verdict


def test_a_process_that_ends_is_a_sentence_of_the_verdict(file_with):
    def ended(*values):
        raise Stopped("it ended")

    run = learner.launching(file_with("add"))
    assert grade(EXERCISES["add"], ended).sentences == ["it ended"]
    assert grade(EXERCISES["add"], run, ended) == Verdict("compiled for a GPU", ["it ended"])


# ---- The page

# of docs/exercises.md, in its order: what is replaced in the solution
SESSIONS = [
    ("/ n_cols + eps", "/ BLOCK_SIZE + eps"),
    ("rstd * weight, mask=mask)", "rstd * weight)"),
    ("", ""),
]


@on_a_cpu
def test_the_page_shows_what_the_checker_prints(file_with):
    text = (HERE / "docs" / "exercises.md").read_text()
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(shown) == len(SESSIONS)
    name = "rmsnorm_forward"
    for change, printed in zip(SESSIONS, shown):
        verdict = grade(EXERCISES[name], learner.launching(file_with(name, change)))
        _, lines = check.report(name, verdict, [])
        assert printed == "\n".join([*map(check.broken, lines), ""])
