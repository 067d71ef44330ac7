"""Is the kernel of an exercise right?  If not, what is wrong, and which mistake was made?

    python -m exercises.check                              # the exercises
    python -m exercises.check rmsnorm_forward              # judges exercises/rmsnorm_forward.py
    python -m exercises.check rmsnorm_forward --hint       # the first of three hints; then --hint 2
    python -m exercises.check 3 --file runs/mine.py        # by its number; judges another file

Only reads the file.  Triton's interpreter runs the kernel, and then a GPU, if there is one.  The
page of the exercises is docs/exercises.md.
"""

import argparse
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `python check.py`

from exercises.grading.words import WORDS
from harness.cli import command_line
from harness.cli.command_line import UserError
from harness.cli.tables import TERMINAL

HERE = Path(__file__).parents[1]  # the project's folder
LEARNER = "exercises.grading.learner"
COMPILER = "judging.pretended_gpu:compiler_of"
INTERPRETING = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SECONDS = 60  # of a launch; in the interpreter one of a kernel of blocks takes less than one


def overview() -> str:
    """Return a line for each exercise: its number, its name and what it teaches."""
    width = max(map(len, WORDS))
    lines = [
        f"{number:2}  {name:{width}}  {words.teaches}"
        for number, (name, words) in enumerate(WORDS.items(), start=1)
    ]
    how = "Write the kernel in exercises/NAME.py, then: python -m exercises.check NAME"
    return "\n".join([*lines, "", how])


def hint(name: str, number: int) -> str:
    words, last = WORDS[name], len(WORDS[name].hints)
    more = f"More: --hint {number + 1}" if number < last else f"The solution: {words.lesson}"
    return f"{textwrap.fill(words.hints[number - 1], TERMINAL)}\n{more}"


def judge(name: str, file: Path) -> int:
    """Judge a file, print what is said of it, and return 0 if it is right, or 1.

    The file runs in processes of its own.  The verdict is made in this one.
    """
    from exercises.grading.grading import EXERCISES, grade, refused_by_triton
    from harness.cli.device import HAS_GPU
    from judging.compile_targets import COMPILING
    from judging.processes import Apart

    exercise, path = EXERCISES[name], str(file.resolve())
    with (
        ThreadPoolExecutor() as pool,
        Apart(f"{LEARNER}:launching", path, environment=INTERPRETING) as interpreter,
        Apart(COMPILER, path, "launch", environment=COMPILING) as compiler,
    ):
        run, compiled = (partial(each.call, seconds=SECONDS) for each in (interpreter, compiler))
        refused = pool.submit(refused_by_triton, exercise, compiled)
        verdict = grade(exercise, run, refused.result)
    rows = []
    if verdict.right and HAS_GPU:
        with Apart(f"{LEARNER}:launching", path) as gpu:
            verdict = grade(exercise, partial(gpu.call, seconds=SECONDS))
        with Apart(f"{LEARNER}:timing", path, name) as clock:
            rows = clock.call(seconds=SECONDS) if verdict.right else []
    right, lines = report(name, verdict, rows)
    print("\n".join(map(broken, lines)), flush=True)
    return int(not right)


def report(name: str, verdict, rows: list) -> tuple[bool, list[str]]:
    """Return whether an answer is right, and what is said of it.

    verdict: a grading.Verdict.  rows: of speed.times; none without a GPU.
    """
    from exercises.grading import speed
    from exercises.grading.grading import EXERCISES

    exercise, words, names = EXERCISES[name], WORDS[name], list(WORDS)
    if not verdict.right:
        hint = f"A hint: python -m exercises.check {name} --hint"
        return False, [f"{name}, {verdict.title}", *(f"- {s}" for s in verdict.sentences), hint]
    lines = [f"{name} is right in all {len(exercise.cases)} cases."]
    lines += [speed.bytes_in_words(exercise)]
    if rows:
        lines += speed.times_table(exercise, rows).splitlines()
    else:
        lines += ["Without a GPU nothing is timed."]
    if exercise.to_beat and rows:
        faster = "yes" if rows[0][1] < rows[1][1] else "not yet"
        lines += [f"Is it faster than {exercise.opponent}'s? {faster.capitalize()}."]
    lines += [f"The lesson: {words.lesson}.", f"Beyond this exercise it {words.beyond}."]
    if following := names[names.index(name) + 1 :]:
        lines += [f"The next exercise: exercises/{following[0]}.py"]
    return True, lines


def broken(line: str) -> str:
    """Break a long sentence."""
    return textwrap.fill(line, TERMINAL, subsequent_indent="  ") if "  " not in line else line


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="an exercise, or its number; none: lists all")
    add("--hint", nargs="?", type=int, const=1, choices=(1, 2, 3), help="print a hint, 1 to 3")
    add("--file", type=Path, help="the file to judge (default: exercises/NAME.py)")
    args = parser.parse_args()
    if args.name in map(str, range(1, len(WORDS) + 1)):
        args.name = list(WORDS)[int(args.name) - 1]
    if args.name is None and (args.hint or args.file):
        raise UserError("--hint and --file belong to one exercise: give its NAME first")
    if args.hint and args.file:
        raise UserError("--hint judges no file: leave --file out")
    if args.name is not None and args.name not in WORDS:
        raise UserError(f"there is no exercise {args.name!r}: choose {', '.join(WORDS)}")
    if args.file and not args.file.is_file():
        raise UserError(f"there is no file {args.file}: copy exercises/{args.name}.py there")
    return args


def main() -> int:
    args = parse_arguments()
    if args.name is None:
        print(overview())
    elif args.hint:
        print(hint(args.name, args.hint))
    else:
        return judge(args.name, args.file or HERE / "exercises" / f"{args.name}.py")
    return 0


if __name__ == "__main__":
    command_line.run_main(main)
