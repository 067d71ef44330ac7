"""What a file of tests prints when it runs as a script."""

from collections.abc import Callable

import torch

from harness.benchmark.checking import Check
from harness.cli.device import HAS_GPU


def title(function: str) -> None:
    """Print the first lines."""
    if not HAS_GPU:
        where = "the kernels run on the CPU, in Triton's interpreter, at smaller shapes."
        print(f"No GPU found: {where}\n")
    print(f"{function} Correctness Tests\n{'=' * 60}")


def verdict(function: str, passed: bool) -> int:
    """Print the last lines; return the exit code."""
    found = f"All {function} tests PASSED" if passed else f"Some {function} tests FAILED"
    print(f"\n{'=' * 60}\n{found}")
    return 0 if passed else 1


def checks(made: list[Check]) -> bool:
    """Print one line per check; return True if all passed."""
    for check in made:
        print(f"  {check}")
    return all(check.passed for check in made)


def cases(titled: dict[str, object], checks_of: Callable[[object], list[Check]]) -> bool:
    """Print each case's checks below its number and title; return True if all passed."""
    passed = True
    for number, (name, case) in enumerate(titled.items(), start=1):
        print(f"\nTest {number}: {name}")
        passed &= checks(checks_of(case))
    return passed


def loss(check: Check, reference: torch.Tensor, custom: torch.Tensor) -> bool:
    """Print a check of two scalars with their values; return True if it passed."""
    values = f"ref: {reference.item():.6f}  custom: {custom.item():.6f}  diff: {check.max_diff:.2e}"
    print(f"  {check.name} — {values}  {'PASSED' if check.passed else 'FAILED'}")
    return check.passed
