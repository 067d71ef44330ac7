"""The exercises: the checker accepts right kernels, and names what is wrong with the others.

tests/exercise_solutions.py has both kinds.  A wrong kernel is a solution in which a text is
replaced, so that the checker is proven on what learners write, and not on its own formulas.
"""

import ast
import dataclasses
import os
import re

import pytest
import torch
from triton.compiler import CompilationError

from exercises import check
from exercises.grading import answer, speed
from exercises.grading.grading import EXERCISES, grade, in_float64, stopped
from exercises.grading.words import WORDS
from harness.benchmark.checking import FLOOR, relative_error
from harness.cli.device import HAS_GPU
from tests.conftest import assert_refused
from tests.exercise_solutions import MISTAKES, SOLUTIONS, solved
from tests.fixtures import needs_gpu
from tools.page_records import HERE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def file_of(name):
    return HERE / "exercises" / f"{name}.py"


@pytest.fixture
def launch_of(tmp_path):
    """launch_of(name, *changes): the `launch` of the solution, in which texts are replaced."""

    def load(name, *changes):
        file = tmp_path / f"{name}.py"
        file.write_text(solved(name, *changes))
        return answer.load(str(file))

    return load


def test_every_exercise_has_a_file_words_a_solution_and_mistakes():
    assert [*EXERCISES] == [*WORDS] == [*SOLUTIONS] == [*MISTAKES]
    files = {path.stem for path in (HERE / "exercises").glob("*.py")}
    assert files == {"__init__", "check", *EXERCISES}
    numbers = [ast.get_docstring(ast.parse(file_of(name).read_text())) for name in EXERCISES]
    assert all(f"Exercise {i}: " in text for i, text in enumerate(numbers, start=1))


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_right(name, launch_of):
    verdict = grade(EXERCISES[name], launch_of(name))
    assert verdict.right, verdict


@pytest.mark.parametrize("name", EXERCISES)
def test_the_untouched_file_says_that_nothing_is_written(name):
    right, said = answer.report(name, answer.load(str(file_of(name))))
    assert not right and "Nothing is written yet" in said and "--hint" in said


@pytest.mark.skipif(HAS_GPU, reason="mutants run on the CPU only")
@pytest.mark.parametrize(
    "name, old, new, words",
    [
        pytest.param(name, *mistake, id=f"{name}-{i}")
        for name, mistakes in MISTAKES.items()
        for i, mistake in enumerate(mistakes)
    ],
)
def test_a_mistake_is_named(name, old, new, words, launch_of):
    verdict = grade(EXERCISES[name], launch_of(name, (old, new)))
    assert words in " ".join(verdict.sentences), verdict


def test_each_exercise_has_five_mistakes_at_least_that_a_sentence_of_its_own_names():
    for name, mistakes in MISTAKES.items():
        assert len({words for *_, words in mistakes}) >= 5, name


@pytest.mark.parametrize("name", EXERCISES)
def test_every_known_mistake_differs_from_the_right_answer(name):
    """In one case at least: else no kernel could ever be told that it makes the mistake."""
    subject, seen, told = EXERCISES[name], set(), set()
    for case in subject.cases:
        inputs = in_float64(subject.make(case.rows, case.size, case.dtype, **case.options))
        right = subject.answers(inputs)
        for sentence, parts in subject.mistakes(inputs, right).items():
            seen.add(sentence)
            errors = [relative_error(t, right[part]) for part, t in parts.items()]
            if any(error > 10 * FLOOR[torch.float32] for error in errors):  # NaN is no answer
                told.add(sentence)
    assert seen - told == set()


def test_an_input_that_the_kernel_changed_is_named(launch_of):
    store = "    tl.store(y_ptr"
    also = "    tl.store(x_ptr + row * x_row_stride + cols, x + 1.0, mask=mask)\n"
    launch = launch_of("rmsnorm_forward", (store, also + store))
    found = grade(EXERCISES["rmsnorm_forward"], launch).sentences
    assert "x was changed, which the kernel only reads." in found


WITHOUT_TL = "rstd = tl.rsqrt", "rstd = rsqrt"


def assert_shown_with_its_line(sentence):
    number = int(re.search(r"line (\d+) of rmsnorm_forward.py", sentence)[1])
    line = solved("rmsnorm_forward", WITHOUT_TL).splitlines()[number - 1]
    assert line.strip().startswith("rstd = ") and "NameError" in sentence and "rsqrt" in sentence


def test_code_that_stops_is_shown_with_its_line(launch_of):
    launch = launch_of("rmsnorm_forward", WITHOUT_TL)
    (sentence,) = grade(EXERCISES["rmsnorm_forward"], launch).sentences
    assert_shown_with_its_line(sentence)


def test_code_that_does_not_compile_is_shown_with_its_line(launch_of):
    """As the compiler of a GPU raises it: it counts the lines of the kernel alone."""
    launch = launch_of("rmsnorm_forward", WITHOUT_TL)
    kernel = solved("rmsnorm_forward", WITHOUT_TL).partition("@triton.jit\n")[2]
    kernel = kernel.partition("def launch")[0]
    nodes = ast.walk(ast.parse(kernel))
    name = next(node for node in nodes if isinstance(node, ast.Name) and node.id == "rsqrt")
    error = CompilationError(kernel, name, "NameError('rsqrt is not defined')")
    file = launch.__code__.co_filename
    assert_shown_with_its_line(stopped(error, file))
    # in a function of Triton's own, which the learner's kernel calls
    error.__cause__ = CompilationError("def sum(x):\n    y\n", ast.parse("\ny").body[0], "no y")
    assert "line" in stopped(error, file) and "with no y" in stopped(error, file)


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


@pytest.mark.parametrize("name", EXERCISES)
def test_times_stand_beside_the_lessons(name, launch_of):
    """With small tensors: on a CPU the times mean nothing, but the lesson takes the same inputs."""
    case = EXERCISES[name].cases[1]
    small = dataclasses.replace(EXERCISES[name], timed=(case.rows, case.size))
    lines = speed.times_table(small, launch_of(name)).splitlines()
    assert lines[0].split("  ")[0] == f"{small.in_words(case.rows, case.size)}, bf16"
    assert [line.split("  ")[0] for line in lines[2:]] == ["yours", "the lesson"]


@needs_gpu
@pytest.mark.alone
@pytest.mark.parametrize("name", EXERCISES)
def test_times_at_llamas_size(name, launch_of):
    assert "yours" in speed.times_table(EXERCISES[name], launch_of(name))


# ---- The command line


def test_exercises_are_listed_and_hints_are_printed(run_script):
    listed = run_script(check).out
    assert all(name in listed for name in EXERCISES)
    first = run_script(check, "adamw", "--hint").out
    assert first == run_script(check, "adamw", "--hint", "1").out != ""
    assert WORDS["adamw"].lesson in run_script(check, "adamw", "--hint", "3").out


def test_wrong_flags_are_refused_with_a_sentence(run_script):
    assert_refused(run_script(check, "adamv"), "'adamv'", "adamw")
    assert_refused(run_script(check, "--hint", "2"), "give its NAME")
    assert_refused(run_script(check, "adamw", "--hint", "4"), "--hint")
    assert_refused(run_script(check, "adamw", "--file", "no.py"), "no.py", "exercises/adamw.py")
    assert_refused(run_script(check, "adamw", "--hint", "--file", "no.py"), "--hint judges no file")


@pytest.mark.skipif(HAS_GPU, reason="a GPU raises an error, which is shown")
def test_a_wild_address_ends_the_run_with_a_sentence(run_script, tmp_path):
    file = tmp_path / "wild.py"
    file.write_text(solved("rmsnorm_forward", ("row * x_row_stride", "(1 << 30) + (1 << 30)")))
    outcome = run_script(check, "rmsnorm_forward", "--file", str(file))
    assert_refused(outcome, "SIGSEGV", "far outside", code=1)


@pytest.mark.exhaustive
def test_a_file_of_ones_own_is_judged_and_not_written(run_script, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(solved("rmsnorm_dx"))
    outcome = run_script(check, "rmsnorm_dx", "--file", str(file))
    assert outcome.code == 0 and file.read_text() == solved("rmsnorm_dx")


@pytest.mark.parametrize(
    "text, words",
    [
        ("def launch(:\n", "line 1 of .*mine.py is no Python"),
        ("x = 1\n", "no function `launch`"),
        ("launch = 1\n", "no function `launch`"),
        ("class launch: pass\n", "no function `launch`"),
        ("import functools\nlaunch = functools.partial(print)\n", "no function `launch`"),
        ("\n1 / 0\n", "line 2 of mine.py with ZeroDivisionError: division by zero, before"),
        ("import nosuch\n", "line 1 of mine.py with ModuleNotFoundError: No module named 'nosuch'"),
        ("import sys\nsys.exit(0)\n", "line 2 of mine.py with SystemExit: 0, before"),
    ],
)
def test_a_file_that_is_no_exercise_is_refused(text, words, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(answer.UserError, match=words):
        answer.load(str(file))


@pytest.mark.parametrize(
    "text, words",
    [
        ("def launch(**_):\n    raise SystemExit(0)\n", "line 2 of mine.py with SystemExit: 0"),
        (
            "class Mute(Exception):\n    def __str__(self):\n        1 / 0\n"
            "def launch(**_):\n    raise Mute\n",
            "line 5 of mine.py with Mute: ",
        ),
        (
            "import torch\n@torch.no_grad()\ndef launch(**_):\n    1 / 0\n",
            "line 4 of mine.py with ZeroDivisionError",
        ),
    ],
    ids=["exit", "mute", "decorated"],
)
def test_a_launch_that_stops_is_shown_with_its_line(text, words, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    right, said = answer.report("rmsnorm_forward", answer.load(str(file)))
    assert not right and words in said


def test_the_file_is_judged_as_it_is_now_and_nothing_lies_beside_it(tmp_path):
    """Python takes a compiled form for the file's, if the file's size and time are the same."""
    file = tmp_path / "mine.py"
    for number in (1, 2):
        file.write_text(f"def launch():\n    return {number}\n")
        os.utime(file, (0, 0))
        assert answer.load(str(file))() == number
    assert os.listdir(tmp_path) == ["mine.py"]


@pytest.mark.parametrize(
    "judge, code",
    [
        ("os._exit(0)", 1),
        ("os._exit(2)", 1),
        ("os.write(int(sys.argv[3]), b'1'); os._exit(0)", 1),
        ("os.write(int(sys.argv[3]), b'0'); os._exit(1)", 0),
    ],
)
def test_right_is_what_the_judge_says_and_not_the_exit_code(judge, code, run_script, monkeypatch):
    monkeypatch.setattr(check, "JUDGE", f"import os, sys; {judge}")
    outcome = run_script(check, "adamw")
    assert outcome.code == code
    if "write" not in judge:
        assert_refused(outcome, "adamw.py ended the run before it was judged", code=1)


def test_the_judge_says_its_exit_code_at_its_end(monkeypatch, tmp_path):
    for name, said in (("adamw", "1"), ("nosuch", "2")):
        with open(tmp_path / "verdict", "w") as verdict:
            arguments = "adamw", str(file_of(name)), str(verdict.fileno())
            monkeypatch.setattr("sys.argv", ["-c", *arguments])
            assert str(answer.main()) == said == (tmp_path / "verdict").read_text()


# ---- The page

# of docs/exercises.md, in its order: what is replaced in the solution
SESSIONS = {
    "BLOCK_SIZE": ("/ n_cols + eps", "/ BLOCK_SIZE + eps"),
    "no mask": ("rstd * weight, mask=mask)", "rstd * weight)"),
    "right": ("", ""),
}


def session(change, launch_of) -> str:
    name = "rmsnorm_forward"
    return f"{answer.report(name, launch_of(name, change))[1]}\n"


@pytest.mark.skipif(HAS_GPU, reason="the page shows what is printed without a GPU")
def test_the_page_shows_what_the_checker_prints(launch_of):
    text = (HERE / "docs" / "exercises.md").read_text()
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert shown == [session(change, launch_of) for change in SESSIONS.values()]
