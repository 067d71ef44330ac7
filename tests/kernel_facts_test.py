"""What a new kernel costs: each row of the facts has its other places, and they agree with it."""

import ast
import importlib
import itertools
from pathlib import Path

import pytest

from harness.model.families import FAMILIES
from harness.profiling.kernel_facts import (
    CATEGORIES,
    KERNEL_ROWS,
    KERNELS,
    RUNGS,
    Facts,
    Sizes,
    launch_of,
)

HERE = Path(__file__).parents[1]  # the project's folder


def file_of(module: str) -> Path:
    return HERE / f"{module.replace('.', '/')}.py"


def launched_kernels(lesson: str) -> set[str]:
    """The functions of a lesson that Triton compiles and that are launched, by its source.

    What only another kernel calls does not end in _kernel.
    """
    tree = ast.parse(file_of(lesson).read_text())
    compiled = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    subscripted = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    }
    assert all(name.endswith("_kernel") for name in compiled & subscripted)
    return {name for name in compiled if name.endswith("_kernel")}


def of_every_row(function):
    return pytest.mark.parametrize("row", KERNEL_ROWS, ids=lambda row: row.name)(function)


def test_names_are_unique():
    assert (
        len({row.name for row in KERNEL_ROWS})
        == len({row.lesson for row in KERNEL_ROWS})
        == len(KERNEL_ROWS)
    )
    assert [row.rung for row in RUNGS] == list(range(1, len(RUNGS) + 1))
    # linear_cross_entropy takes the place of the other
    assert {row.name for row in RUNGS} == set(KERNELS) - {"cross_entropy"}


@of_every_row
def test_a_row_has_its_lesson_its_test_and_its_page(row: Facts):
    """Its test is a subject of the contracts, a file of tests of its own, or both."""
    assert file_of(row.lesson).is_file()
    places = itertools.product(("", "tests"), (row.name, row.lesson.rpartition(".")[2]))
    files = [HERE / folder / f"{name}_test.py" for folder, name in places]
    assert any(file.is_file() for file in (*files, HERE / "subjects" / f"{row.name}.py"))
    if row.lesson.startswith("next_steps."):  # the others are the playbook's, in README.md
        pages = (page.stem for page in (HERE / "docs").glob("*.md"))
        assert any(page in row.name for page in pages)  # AdamW's 8 bits are on the page of AdamW


@of_every_row
def test_a_row_has_faults_for_the_mutation_check(row: Facts):
    faults = importlib.import_module(f"tests.faults.{row.lesson.rpartition('.')[2]}")
    assert row.lesson == faults.SOURCE and faults.FAULTS


@of_every_row
def test_each_kernel_that_a_lesson_launches_is_covered_by_one_prefix(row: Facts):
    names = launched_kernels(row.lesson)
    if row.name == "swiglu":  # its twins with adapters
        names |= launched_kernels("next_steps.layers.lora_swiglu")
    assert bool(names) == bool(row.launches)
    found = {name: launch_of(name) for name in names}
    assert not [name for name, known in found.items() if known is None or known[0] is not row]
    for launch in row.launches:
        assert any(name.startswith(launch.prefix) for name in names), launch.prefix
    others = [each for each in KERNEL_ROWS for each in each.launches if each not in row.launches]
    for launch in row.launches:
        assert not any(each.prefix.startswith(launch.prefix) for each in others), launch.prefix


def test_a_kernel_that_is_not_ours_is_known_to_no_row():
    assert launch_of("vectorized_elementwise_kernel") is None


def test_benchmark_and_compile_check_know_these_kernels_and_no_others():
    from harness.benchmark.benchmark_specs import SPECS
    from next_steps.comparisons import benchmark_contenders, benchmark_problems
    from tools.compile_cases import CASES

    names = [row.name for row in KERNEL_ROWS if row.launches]
    assert list(SPECS) == names
    for table in (benchmark_problems.PROBLEMS, benchmark_contenders.CONTENDERS, CASES):
        assert set(table) == set(names)
    assert all(CASES.values())


@of_every_row
def test_a_row_speaks_of_categories_tensors_and_parts_that_exist(row: Facts):
    from next_steps.memory import memory_ledger, peak_attribution

    sizes = set(Sizes.__annotations__)
    assert row.replaces <= set(CATEGORIES) and set(row.advice) <= set(CATEGORIES)
    assert set(row.functions.values()) <= set(CATEGORIES)
    assert {launch.tensor for launch in row.launches} - {None} <= sizes
    assert set(row.floor) <= sizes
    has_floor = bool(row.floor) or any(launch.floor for launch in row.launches)
    assert bool(row.rung) == has_floor, "the ladder predicts each of its rungs"
    for part in row.memory:
        name, phase = part if isinstance(part, tuple) else (part, None)
        assert name in peak_attribution.PARTS and phase in [None, *peak_attribution.PHASES]
    assert set(row.allocates.values()) <= set(memory_ledger.KINDS)


@of_every_row
def test_a_rows_functions_and_module_are_the_lessons(row: Facts):
    """By their names: what is renamed there must be renamed here."""
    source = file_of(row.lesson).read_text()
    classes = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    functions = [name for name in classes if name.endswith("Function")]
    for part in row.functions:
        assert any(part in name for name in functions), part
    if row.module:
        assert all(family.part(row.module[1]) for family in FAMILIES.values())
        files = file_of(row.lesson), *file_of("next_steps").with_suffix("").glob("*/*.py")
        assert any(f"class {row.module[0]}(" in each.read_text() for each in files)


def test_what_kernels_knows_is_what_is_patched_in():
    """apply_kernels.py has a patch for each, and for nothing else."""
    from next_steps.patches import apply_kernels

    source = file_of("next_steps.patches.apply_kernels").read_text()
    for row in KERNEL_ROWS:
        assert (row.name in KERNELS) == (row.patches is not None)
        assert row.patches in (None, "model", "loss", "optimizer")
        if row.patches:
            assert f'"{row.name}"' in source, f"no patch for {row.name}"
    assert set(apply_kernels.model_kernels(KERNELS)) == set(KERNELS) - {"adamw"}
