"""Print how far each function's results and gradients are from float64, in each dtype.

    python -m tests.numbers rope swiglu    # of these functions; all unless told

tests/contracts_numbers_test.py asks the same at many sizes and layouts.
"""

from harness.benchmark.checking import DTYPE_NAME
from harness.cli import command_line
from subjects import SUBJECTS
from subjects.subject import checks
from tests import printing


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SUBJECTS))
    names = parser.parse_args().names or list(SUBJECTS)
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        parser.error(f"there is no {unknown[0]}, expected of {', '.join(SUBJECTS)}")
    printing.title("Kernels'")
    cases = {
        f"{name}, {DTYPE_NAME[dtype]}": (SUBJECTS[name], dtype)
        for name in names
        for dtype in SUBJECTS[name].dtypes
    }

    def checks_of(case):
        subject, dtype = case
        return checks(subject, *subject.make((5, 3), subject.size, dtype))

    return printing.verdict("kernels'", printing.cases(cases, checks_of))


if __name__ == "__main__":
    command_line.run_main(main)
