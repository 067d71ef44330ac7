"""Is a kernel right?  Ask it all that this project's own kernels are asked.

    python judge.py rmsnorm my_file.py:my_norm       # a callable that takes what the subject takes
    python judge.py adamw my_file.py:MyAdamW         # a class that is made as torch.optim.AdamW is
    python judge.py cross_entropy --library liger    # or quack, torch.compile, ours, ..., all
    python judge.py --list                           # subjects, what they take, and the contracts

One line for each contract: it holds, it is wrong (the smallest case that shows it), the function
refused it, a limit that the library documents, or it was not tried (why).  Exit code 0 only if all
that was tried holds.  What is judged runs in a process of its own.  Without a GPU Triton's
interpreter runs the kernels, and each is also compiled for two GPUs.  docs/judge.md.
"""

import argparse
import re
import textwrap
from collections import Counter

from harness.cli import command_line
from harness.cli.command_line import UserError, positive_int
from harness.cli.output_files import check_outputs
from harness.cli.tables import TERMINAL
from harness.records.run_records import environment, write_record

OUTCOMES = "holds", "wrong", "refused", "limit", "not tried"


def names(text: str) -> list[str]:
    """argparse type: names, separated by commas."""
    return text.split(",")


def parse_args() -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    add = parser.add_argument
    add("subject", nargs="?", metavar="SUBJECT", help="what the function computes")
    add("file", nargs="?", metavar="FILE.py:NAME", help="the function, or the optimizer's class")
    add("--library", metavar="NAME|all", help="judge what a library has of the subject")
    add("--list", action="store_true", help="print the subjects, libraries and contracts")
    add("--contracts", type=names, default=[], metavar="NAME,NAME", help="ask only these")
    add("--seconds", type=positive_int, default=600, help="for each function (default: 600)")
    add("--sanitize", action="store_true", help="on a GPU, also under compute-sanitizer")
    add("--json", metavar="FILE", help="write the verdicts as a JSON record")
    args = parser.parse_args()
    if not args.list and (not args.subject or bool(args.file) == bool(args.library)):
        raise UserError("give a subject, and FILE.py:NAME or --library NAME; --list names them")
    if args.file and not re.fullmatch(r".+\.py:\w+", args.file):
        raise UserError(f"{args.file} names no function: give FILE.py:NAME")
    check_outputs(args)
    return args


def require_known_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the contracts to ask."""
    from next_steps.comparisons import asked_apart

    subjects = [*asked_apart.SUBJECTS, *asked_apart.OPTIMIZERS]
    require_listed("subject", args.subject, subjects)
    require_listed("library", args.library or "all", [*asked_apart.LIBRARIES, "all"])
    contracts = [asked_apart.COMPILES, *asked_apart.contracts_of(args.subject)]
    for name in args.contracts:
        require_listed("contract", name, contracts)
    return args.contracts or contracts


def require_listed(what: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise UserError(f"there is no {what} {name!r}: --list names all")


def in_lines(verdict) -> str:
    """Return a `Verdict` as a sentence, broken into lines."""
    n = verdict.n_cases if verdict.outcome == "holds" else 0
    cases = f"{n} case{'s' if n > 1 else ''}" if n else ""
    words = filter(None, (verdict.contract, cases, verdict.case, verdict.words))
    line = f"{verdict.outcome:9}  {': '.join(words)}"
    return textwrap.fill(line, TERMINAL, subsequent_indent=" " * 11, break_on_hyphens=False)


def main() -> int:
    args = parse_args()
    from judging.judged_file import Stopped
    from next_steps.comparisons import asked_apart

    if args.list:
        print(asked_apart.overview())
        return 0
    contracts, judged, absent = require_known_names(args), {}, []
    found = [(args.subject, "", args.file)]
    if args.library:
        found, absent = asked_apart.candidates(args.subject, args.library, args.seconds)
    for candidate in found:
        *_, label = candidate
        print(f"{args.subject}: {label}")
        verdicts = judged[label] = []
        try:
            for verdict in asked_apart.verdicts_apart(candidate, contracts, args.seconds):
                print(in_lines(verdict), flush=True)
                verdicts.append(verdict)
        except Stopped as error:
            absent.append(f"{label} cannot be judged: {error}")
    if args.sanitize:
        judged["compute-sanitizer"] = [*map(asked_apart.sanitized, asked_apart.TOOLS)]
        print("\n".join(map(in_lines, judged["compute-sanitizer"])))
    for sentence in absent:
        print(textwrap.fill(sentence, TERMINAL))
    n = Counter(each.outcome for verdicts in judged.values() for each in verdicts)
    print(", ".join(f"{n[outcome]} {outcome}" for outcome in OUTCOMES))
    if args.json:
        rows = {label: [vars(each) for each in verdicts] for label, verdicts in judged.items()}
        record = {"kind": "judge", "environment": environment(), "subject": args.subject}
        write_record(args.json, record | {"judged": rows, "absent": absent})
    return int(not n["holds"] or any(n[fault] for fault in asked_apart.FAULTS))


if __name__ == "__main__":
    command_line.run_main(main)
