"""All contracts of a differentiable function, and the verdicts on one.

`verdict_of` asks a subject of this project, or what somebody else's function has in common with it
(`of_callable`).  The tests ask the same of each subject of this project, case by case
(tests/contracts.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from harness.benchmark.checking import DTYPE_NAME
from judging import addresses, autograd, numbers, on_gpu, refusals
from judging.contract import Contract, NotTried, Wrong
from subjects.subject import Subject

CONTRACTS: dict[str, Contract] = {  # in the order in which they are asked
    each.name: each
    for module in (numbers, autograd, refusals, addresses, on_gpu)
    for each in vars(module).values()
    if isinstance(each, Contract)
}


OF_A_KERNEL = "CUDA error: an illegal"  # no refusal; the process can use its GPU no more


@dataclass(frozen=True)
class Verdict:
    """What was found of one contract."""

    contract: str
    outcome: str  # "holds", "wrong", "refused", "not tried"
    n_cases: int = 0  # that were asked
    case: str = ""  # the first that does not hold, in words
    words: str = ""  # what was given and expected; the refusal; why it was not tried


def case_name(case: object, between: str = "-") -> str:
    """Return a case in words: a dtype, a size, a name, or several of them."""
    if isinstance(case, tuple) and case:
        return between.join(case_name(each, between) for each in case)
    return DTYPE_NAME[case].lower() if isinstance(case, torch.dtype) else str(case)


def of_callable(subject: Subject, function: Callable) -> Subject:
    """Return the subject of somebody else's function, which takes what the subject's own takes.

    Nothing is known of what the function keeps for its backward, of its sentences, and of the order
    of its sums.
    """
    known = {"recorded": False, "exact_again": False, "saved": (), "fixed_outputs": {}}
    return replace(subject, function=function, entry=None, kernels=(), **known)


def verdict_of(subject: Subject, asked: Contract) -> Verdict:
    """Ask a contract up to its first case that does not hold."""
    if asked.name in subject.exempt:
        return Verdict(asked.name, "not tried", words=subject.exempt[asked.name])
    n_cases, reason = 0, "there is no case"
    for case in asked.cases(subject):
        try:
            asked(subject, case)
        except NotTried as why:
            reason = str(why)
            continue
        except Wrong as broken:
            outcome, words = "wrong", str(broken)
        except Exception as error:
            first_line, *_ = *str(error).strip().splitlines(), ""
            words = f"{type(error).__name__}: {first_line}"
            outcome = "wrong" if OF_A_KERNEL in words else "refused"
        else:
            n_cases += 1
            continue
        where = f"{asked.argument} {case_name(case, ', ')}" if asked.argument else ""
        return Verdict(asked.name, outcome, n_cases + 1, where, words)
    if n_cases == 0:
        return Verdict(asked.name, "not tried", words=reason)
    return Verdict(asked.name, "holds", n_cases)
