"""The contracts are asked of a candidate in a process of its own.

A candidate is (subject, library, label): the label that judged.py gives to what a library has, or
without a library FILE.py:NAME.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from triton.runtime.autotuner import Autotuner

from harness.cli.device import HAS_GPU, require_interpreter
from judging import pretended_gpu as pretended
from judging.compile_targets import COMPILING
from judging.contract import Contract
from judging.contracts import CONTRACTS, OF_A_KERNEL, Verdict, of_callable, verdict_of
from judging.judged_file import Stopped, load_function
from judging.optimizers import OPTIMIZER_CONTRACTS, OPTIMIZERS, OptimizerSubject
from judging.processes import Apart
from next_steps.comparisons.judged import LIBRARIES, asked_as, find_judged, installed, limit
from subjects import SUBJECTS
from subjects.subject import Subject

Candidate = tuple[str, str, str]
COMPILES = "compiles"  # the contract that is not asked by running
OF_TRITON = "", "ours"  # libraries whose kernels can be compiled without a GPU
FAULTS = "wrong", "refused"
TOOLS = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "racecheck": {}}
HERE = "next_steps.comparisons.asked_apart"
REPORTED = re.compile(r"^=+ ((?:Invalid|Misaligned|Error: |Warning: ).*)\n=+ +(.*)", re.MULTILINE)
OF_CUBLAS = re.compile(r"cublas|cutlass|gemm|gemv|xmma|nvjet|splitk", re.IGNORECASE)


def contracts_of(name: str) -> dict[str, Contract]:
    """Return the contracts that are asked of somebody else's function or optimizer."""
    contracts = OPTIMIZER_CONTRACTS if name in OPTIMIZERS else CONTRACTS
    return {each: contract for each, contract in contracts.items() if not contract.of_record}


def overview() -> str:
    """Return what may be judged, and what is asked."""
    lines = ["Subjects, what they take of 5 rows, their constants, and what they return:"]
    for name, subject in SUBJECTS.items():
        inputs, douts = subject.make((5,), subject.size, torch.float32)
        takes = [f"{each} {tuple(t.shape)}" for each, t in inputs.items()]
        parameters = inspect.signature(subject.reference).parameters.values()
        takes += [f"{p.name}={p.default}" for p in parameters if isinstance(p.default, float)]
        lines += [f"  {name}({', '.join(takes)}) -> {', '.join(douts)}"]
    lines += ["Optimizers, which are made as torch.optim.AdamW is:", f"  {', '.join(OPTIMIZERS)}"]
    lines += ["Libraries:", f"  {', '.join(LIBRARIES)}"]
    for whose, name in (("a function", "rmsnorm"), ("an optimizer", "adamw")):
        names = COMPILES, *contracts_of(name)
        lines += [f"Contracts of {whose}:", *(f"  {each}" for each in names)]
    return "\n".join(lines)


# ---- In the process of its own ------------------------------------------------------------------


def finding(name: str, library: str) -> Callable[[], tuple[list[str], list[str]]]:
    """Return a function for the labels of what a library has, and sentences of what is absent."""

    def labels() -> tuple[list[str], list[str]]:
        has, absent = find_judged(name, library)
        return [*has], absent

    return labels


def subject_of(name: str, library: str, label: str) -> Subject | OptimizerSubject:
    """Return the subject whose function is the candidate."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of NumPy, in the interpreter
    if not HAS_GPU:  # nothing can be timed: the first configuration is taken
        Autotuner._bench = lambda *arguments, **options: [0.0]
    if library:
        return asked_as(name, label, find_judged(name, library)[0][label])
    function = load_function(*label.rsplit(":", 1))
    if name in OPTIMIZERS:
        return replace(OPTIMIZERS[name], make=function)
    is_autograd = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    return of_callable(SUBJECTS[name], function.apply if is_autograd else function)


def asking(name: str, library: str, label: str) -> Callable[[str], dict | None]:
    """Return a function for the verdict of a contract; "" only loads the candidate."""
    require_interpreter()
    subject, contracts = subject_of(name, library, label), contracts_of(name)
    return lambda contract: asdict(verdict_of(subject, contracts[contract])) if contract else None


def compiling(name: str, library: str, label: str) -> Callable[[], list[str]]:
    """Return a function for the errors of compiling a step, or forward and backward."""
    subject = subject_of(name, library, label)

    def step(p: torch.Tensor, grad: torch.Tensor) -> None:
        p.grad = grad
        subject.make([p], lr=1e-3).step()

    def errors_in(dtype: torch.dtype) -> list[str]:
        function, n_needed, made = step, 0, [torch.empty(16, 256, dtype=dtype)] * 2
        if name in SUBJECTS:
            function, n_needed = subject.function, len(subject.differentiable)
            made = subject.make((5, 3), subject.size, dtype)[0].values()
        case = pretended.Case(
            label, function, lambda _: tuple(map(pretended.on_pretended_gpu, made)), n_needed
        )
        return pretended.compile_errors(lambda: pretended.launch(case, dtype))

    dtypes = [each for each in (torch.float32, torch.bfloat16) if each in subject.dtypes]
    return lambda: [*dict.fromkeys(error for dtype in dtypes for error in errors_in(dtype))]


# ---- In the caller's process --------------------------------------------------------------------


def candidates(name: str, library: str, seconds: float) -> tuple[list[Candidate], list[str]]:
    """Return what a library has of a subject, or "all" have, and what is absent, in sentences."""
    has, absent = [], []
    for each in LIBRARIES if library == "all" else [library]:
        if not installed(each):
            absent.append(f"{each} is not installed")
            continue
        with Apart(f"{HERE}:finding", name, each) as apart:
            labels, sentences = apart.call(seconds=seconds)
        has += [(name, each, label) for label in labels]
        absent += sentences
    return has, absent


def compile_verdict(candidate: Candidate, seconds: float) -> Verdict:
    with Apart(f"{HERE}:compiling", *candidate, environment=COMPILING) as apart:
        try:
            errors = apart.call(seconds=seconds)
        except Stopped as error:  # the code around the kernels needs numbers, or a GPU
            return Verdict(COMPILES, "not tried", words=str(error))
    words = " ".join(errors) or f"for {' and '.join(pretended.JUDGED_TARGETS)}"
    return Verdict(COMPILES, "wrong" if errors else "holds", words=words)


def verdicts_apart(candidate: Candidate, contracts: list[str], seconds: float) -> Iterator[Verdict]:
    """Yield the verdict of each of the named contracts; all together take so many seconds.

    Raises:
        Stopped: the candidate cannot be loaded.
    """
    deadline, (name, library, label) = time.monotonic() + seconds, candidate
    with Apart(f"{HERE}:asking", *candidate) as apart:
        apart.call("", seconds=seconds)
        if COMPILES in contracts and library in OF_TRITON and not HAS_GPU:
            yield compile_verdict(candidate, max(deadline - time.monotonic(), 1))
        for contract in (each for each in contracts if each != COMPILES):
            left = deadline - time.monotonic()
            if left <= 0:
                yield Verdict(contract, "not tried", words="the time was over: give more --seconds")
                continue
            try:
                verdict = Verdict(**apart.call(contract, seconds=left))
            except Stopped as error:
                verdict = Verdict(contract, "wrong", words=str(error))
            if OF_A_KERNEL in verdict.words:
                apart.close()  # the next contract is asked in another process
            if verdict.outcome in FAULTS and (documented := limit(label, name, contract)):
                words = f"{documented}; {verdict.words}"
                verdict = replace(verdict, outcome="limit", words=words)
            yield verdict


def sanitized(tool: str) -> Verdict:
    """Return what compute-sanitizer says of the same run; cuBLAS's own hazards are left out."""
    contract, program = f"sanitize_{tool}", shutil.which("compute-sanitizer")
    if not program:
        words = "compute-sanitizer is not installed: it comes with the CUDA toolkit"
        return Verdict(contract, "not tried", words=words)
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--tool", tool, "--target-processes", "all"]
        command += ["--log-file", f"{folder}/%p", sys.executable]
        command += [flag for flag in sys.argv if flag != "--sanitize"]
        command += ["--json", f"{folder}/record.json"]  # and not over the record of this run
        subprocess.run(command, env=os.environ | TOOLS[tool], stdout=subprocess.DEVNULL)
        said = "".join(log.read_text() for log in Path(folder).iterdir() if not log.suffix)
    if "SUMMARY" not in said:
        return Verdict(contract, "not tried", words="compute-sanitizer ended without a summary")
    reports = dict.fromkeys(map(" ".join, REPORTED.findall(said)))  # one thread's is as another's
    faults = [each for each in reports if not OF_CUBLAS.search(each)]
    words = "; ".join(faults)
    return Verdict(contract, "wrong" if faults else "holds", words=words)
