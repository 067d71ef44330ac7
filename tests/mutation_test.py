"""Would the tests notice if a kernel were wrong?

The tables in tests/faults plant faults in the sources.  Each fault names the test that must fail.
A mutant is imported in its kernel's place, and pytest runs that test inside this process, on a
fresh import of the test's file, which so finds the mutant.  Only a failed assertion counts as
caught: a mutant that crashes proves nothing.  The source without a fault is treated likewise, and
must pass one case of every test that a fault names: what this treatment could spoil is the same
for the other cases, which the usual run shows to pass.

Mutants run on a CPU only.  There a wrong address usually reads some number, where a GPU ends all
work of the process.  No fault stores outside its tensor.  Where that takes one certain layout, the
table names that one case of the test.
"""

import contextlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from triton.runtime import interpreter

import subjects  # noqa: F401  every kernel is imported before the first mutant
from harness.cli.device import HAS_GPU
from tests import faults

pytestmark = pytest.mark.skipif(HAS_GPU, reason="mutants run on the CPU only")

HERE = Path(__file__).parents[1]  # the project's folder
# the contracts of an optimizer meet the kernels through it
IMPORTERS = ("next_steps.lessons.adamw_optimizer",)
TABLES = {
    table.SOURCE: table
    for table in (
        importlib.import_module(f"tests.faults.{file.name}")
        for file in pkgutil.iter_modules(faults.__path__)
    )
}


class Outcomes:
    """A pytest plugin: count the tests that pass, keep what the others raise.

    Only the named functions are collected: to list the cases of a whole file takes longer than most
    faults.  one_case_each: of each function one case runs.
    """

    def __init__(self, names: set[str], one_case_each: bool):
        self.names, self.one_case_each = names, one_case_each
        self.passed, self.raised = 0, []

    def pytest_pycollect_makeitem(self, name):
        return [] if name.startswith("test_") and name not in self.names else None

    def pytest_collection_modifyitems(self, items):
        if self.one_case_each:
            items[:] = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed

    def pytest_exception_interact(self, call):
        self.raised.append(call.excinfo.value)


def modules_of_tests() -> list[str]:
    """Return the modules that may have imported a kernel to test it, and their packages."""
    others = {__name__, "tests.conftest", "tests.fixtures"}  # they know no kernel
    return [
        name
        for name in sys.modules
        if name not in others and not name.startswith("tests.faults")
        if name.partition(".")[0] in ("tests", "subjects", "judging") or name.endswith("_test")
    ]


@contextlib.contextmanager
def attributes_put_back(owner: object) -> Iterator[None]:
    """Give a class or an object its present attributes back at the end."""
    before = dict(vars(owner))
    try:
        yield
    finally:
        for name, value in before.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


@contextlib.contextmanager
def imported_instead(kernel, file):
    """`import kernel` gives this file meanwhile, also to the tests, which are imported anew."""
    names = {kernel, *modules_of_tests(), *IMPORTERS} & sys.modules.keys()
    before = {name: sys.modules.pop(name) for name in names}
    spec = importlib.util.spec_from_file_location(kernel, file)
    sys.modules[kernel] = importlib.util.module_from_spec(spec)
    package, _, name = kernel.rpartition(".")
    with contextlib.ExitStack() as stack:
        if not HAS_GPU:  # kernel_support changes the interpreter, and so does its mutant
            changed = interpreter, interpreter.InterpreterBuilder, interpreter.interpreter_builder
            for owner in changed:
                stack.enter_context(attributes_put_back(owner))
        if package:  # `from package import name` looks among the package's attributes first
            package = importlib.import_module(package)
            stack.enter_context(attributes_put_back(package))
            stack.enter_context(mock.patch.object(package, name, sys.modules[kernel], create=True))
        try:
            spec.loader.exec_module(sys.modules[kernel])
            yield
        finally:
            for name in (kernel, *modules_of_tests(), *IMPORTERS):
                sys.modules.pop(name, None)
            sys.modules.update(before)


def run_tests(kernel, source, tests, folder, one_case_each=False) -> Outcomes:
    """Run the tests with this source as the kernel's, up to the first that fails."""
    # Triton reads a kernel's source from a file.
    file = folder / f"{kernel.rpartition('.')[2]}.py"
    # The mutant's operators have names of their own, or the kernel would lose its operators.
    file.write_text(source.replace('"tutorial::', '"mutant::'))
    paths = [test if "::" in test else f"{TABLES[kernel].TESTS}::{test}" for test in tests]
    files_and_names = [path.split("::", 1) for path in paths]
    paths = [f"{HERE / file.replace('.', '/')}.py::{name}" for file, name in files_and_names]
    # Two of these plugins collect garbage for half a second.  Two belong to the outer run.
    plugins = "unraisableexception", "threadexception", "faulthandler", "cacheprovider"
    options = ["--noconftest", "-ptests.fixtures", "--capture=no", "--exitfirst", "--tb=no"]
    options += [f"-pno:{plugin}" for plugin in plugins]
    outcomes = Outcomes({name.partition("[")[0] for _, name in files_and_names}, one_case_each)
    with imported_instead(kernel, file):
        pytest.main([*options, *paths], plugins=[outcomes])
    return outcomes


def source_of(kernel: str) -> str:
    return (HERE / f"{kernel.replace('.', '/')}.py").read_text()


def asked(kernel, *values, name="", shown=False):
    """Return a case of a test.  A reader sees some of them; a change is asked all of them."""
    marks = [] if shown else [pytest.mark.exhaustive]
    return pytest.param(kernel, *values, id=f"{kernel}{name and f': {name}'}", marks=marks)


@pytest.mark.parametrize("kernel", [asked(k, shown=k == "rmsnorm_kernel") for k in TABLES])
def test_source_without_a_fault_passes_every_test_named_here(kernel, tmp_path):
    modules = dict(sys.modules)
    modules.pop("transformers", None)  # the first import of peft makes it anew
    tests = list(TABLES[kernel].FAULTS)
    outcomes = run_tests(kernel, source_of(kernel), tests, tmp_path, one_case_each=True)
    assert not outcomes.raised
    assert outcomes.passed == len({test.partition("[")[0] for test in tests})
    changed = [name for name, module in modules.items() if sys.modules.get(name) is not module]
    assert not changed, "not all modules were put back"


def planted():
    """Yield each fault.  A reader sees the first one of each table."""
    for kernel, table in TABLES.items():
        faults = [(test, fault) for test, found in table.FAULTS.items() for fault in found]
        for number, (test, (name, *fault)) in enumerate(faults):
            yield asked(kernel, test, fault, name=name, shown=number == 0)


@pytest.mark.parametrize("kernel, test, fault", list(planted()))
def test_fault_is_caught(kernel, test, fault, tmp_path):
    source = source_of(kernel)
    text, replacement, times = fault if len(fault) == 3 else (*fault, 1)
    assert source.count(text) == times, f"the fault no longer fits the source, adapt it: {text!r}"
    outcomes = run_tests(kernel, source.replace(text, replacement), [test], tmp_path)
    assert outcomes.raised, f"{test} passes in spite of the fault"
    assert all(isinstance(e, AssertionError | pytest.fail.Exception) for e in outcomes.raised), (
        outcomes.raised
    )
