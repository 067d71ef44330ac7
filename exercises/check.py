"""Is the kernel of an exercise right?  If not, what is wrong, and which mistake was made?

    python -m exercises.check                              # the exercises
    python -m exercises.check rmsnorm_forward              # judges exercises/rmsnorm_forward.py
    python -m exercises.check rmsnorm_forward --hint       # the first of three hints; then --hint 2
    python -m exercises.check rmsnorm_forward --file runs/mine.py

Only reads the file.  Without a GPU Triton's interpreter runs the kernel.  The page of the exercises
is docs/exercises.md.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from exercises.grading.words import WORDS
from harness.cli import command_line
from harness.cli.command_line import RunError, UserError
from harness.cli.tables import TERMINAL

HERE = Path(__file__).parents[1]  # the project's folder
JUDGE = """
from exercises.grading import answer
from harness.cli import command_line
command_line.run_main(answer.main)
"""


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
    """Judge a file in another process; return its exit code.

    Raises:
        RunError: that process ended before it had judged.
    """
    with tempfile.TemporaryFile() as verdict:
        number = verdict.fileno()
        command = [sys.executable, "-c", JUDGE, name, str(file.resolve()), str(number)]
        code = subprocess.run(command, cwd=HERE, pass_fds=[number]).returncode
        verdict.seek(0)
        if said := verdict.read():
            return int(said)
    if code < 0:
        ended = signal.Signals(-code).name
        where = "the kernel read or wrote far outside of its tensors"
        raise RunError(f"{ended} ended the run: {where}; look at the addresses, first the strides")
    raise RunError(f"{file} ended the run before it was judged: take out what ends it, as os._exit")


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="of an exercise; without it all are listed")
    add("--hint", nargs="?", type=int, const=1, choices=(1, 2, 3), help="print a hint, 1 to 3")
    add("--file", type=Path, help="the file to judge (default: exercises/NAME.py)")
    args = parser.parse_args()
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
