"""The house: which floor may import which, no circle, and no module that has grown too long."""

import ast
import functools
from pathlib import Path

import pytest

from tests.conftest import HERE, tracked

# at the root: the playbook's
LESSONS = {"rmsnorm_kernel", "cross_entropy_kernel"}
LONGEST = 500  # lines of a module; lessons and tests are as long as they read well
WIDEST = 100  # columns
SUPPORT = "kernel_support"  # lies beside every lesson; a lesson is carried away with it

# Arrows only go down: a floor, and what it may import.
MADE_OF = {"layers", "lessons", "harness", "support"}
BELOW = {
    "scripts": {"tools", "next_steps", "judging", "subjects"} | MADE_OF,
    "tools": {"scripts", "tools", "exercises", "next_steps", "judging", "subjects"} | MADE_OF,
    "exercises": {"exercises", "judging", "subjects"} | MADE_OF,
    "next_steps": {"next_steps", "judging", "subjects"} | MADE_OF,
    "judging": {"judging", "subjects"} | MADE_OF,
    "subjects": {"subjects"} | MADE_OF,
    "layers": MADE_OF,  # and the further lessons
    "harness": {"harness", "support"},
    "lessons": {"lessons", "support"},
    "support": set(),
}

# Within a floor the same: each room may import those before it.  What lies in no room, the scripts
# of the floor, may import all of them.
ROOMS = {
    "harness": ["cli", "model", "data", "steps", "records", "profiling", "training", "benchmark"],
    "next_steps": [
        "lessons",
        "layers",
        "patches",
        "hugging_face",
        "memory",
        "finetuning",
        "studies",
        "comparisons",
    ],
    "exercises": ["grading"],  # a learner's files lie in no room
}
MOST_FILES = 13  # of a room, with its __init__.py


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {name_of(file): file for file in tracked("*.py")}


def floor_of(module: str) -> str:
    if module in LESSONS or module == SUPPORT:
        return "support" if module == SUPPORT else "lessons"
    package = module.partition(".")[0]
    floors = "harness", "judging", "subjects", "next_steps", "exercises", "tools", "tests"
    if module.startswith(("next_steps.lessons", "next_steps.layers")):
        return "layers"
    return package if package in floors else "scripts"


MODULES = [m for m in SOURCES if floor_of(m) != "tests" and not m.endswith("_test")]
IS_LESSON = {
    module: module in LESSONS or (floor_of(module) == "layers" and module.endswith("_kernel"))
    for module in MODULES
}


@functools.cache
def imports(module: str) -> set[str]:
    """Return the modules of this project that a module imports, also inside of functions.

    Where a name comes from a package, its module counts and not the package.
    """
    found = set()
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            taken = inner & set(SOURCES)
            found |= taken or {node.module}
    return found & set(SOURCES)


def test_arrows_only_go_down():
    up = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imports(module)
        if floor_of(other) not in BELOW[floor_of(module)]
    ]
    assert not up


def room_of(module: str) -> tuple[str, int] | None:
    """Return a module's floor and the number of its room; None for what lies in no room."""
    floor, room, *_ = *module.split("."), ""
    return (floor, ROOMS[floor].index(room)) if room in ROOMS.get(floor, ()) else None


def test_a_room_imports_only_rooms_before_it():
    """Neither does it import what lies in no room of its floor, except the floor's __init__."""
    for module in MODULES:
        for other in imports(module) - {floor_of(module)} if room_of(module) else ():
            if floor_of(other) == floor_of(module):
                assert room_of(other) and room_of(other) <= room_of(module), f"{module}: {other}"


def test_every_folder_is_a_room_that_is_small_and_says_what_lives_there():
    for floor, rooms in ROOMS.items():
        folders = {path.parent.name for path in (HERE / floor).glob("*/*.py")}
        assert folders == set(rooms)
        for room in rooms:
            assert len(list((HERE / floor / room).glob("*.py"))) <= MOST_FILES
            assert ast.get_docstring(ast.parse((HERE / floor / room / "__init__.py").read_text()))


@pytest.mark.parametrize("module", [module for module in MODULES if IS_LESSON[module]])
def test_a_lesson_can_be_carried_away(module):
    """It needs kernel_support beside it, and three need the lesson that they build on."""
    beside = {SUPPORT}
    if "linear_cross_entropy" in module or "reverse_kl" in module:
        beside.add("cross_entropy_kernel")
    if "qk_norm_rope" in module:
        beside.add("next_steps.lessons.rope_kernel")
    assert imports(module) and imports(module) <= beside


def test_no_circle():
    """Not even one that an import inside of a function hides."""
    graph = {module: imports(module) & set(MODULES) for module in MODULES}
    while graph:
        leaves = {module for module, needed in graph.items() if not needed & set(graph)}
        assert leaves, f"these import each other: {', '.join(sorted(graph))}"
        graph = {module: needed for module, needed in graph.items() if module not in leaves}


def test_the_harness_is_never_run_by_itself():
    for module in MODULES:
        if floor_of(module) == "harness":
            assert "\nif __name__ ==" not in SOURCES[module].read_text(), module


def test_nothing_that_users_run_imports_mocks():
    """harness/steps/launches.py is the one place that sees a launch or replaces an attribute."""
    assert not [module for module in MODULES if "mock" in SOURCES[module].read_text()]


def test_no_module_is_too_long_and_no_line_too_wide():
    for module, file in SOURCES.items():
        lines = file.read_text().splitlines()
        if module in MODULES and not IS_LESSON[module]:
            assert len(lines) <= LONGEST, module
        wide = [number for number, line in enumerate(lines, start=1) if len(line) > WIDEST]
        assert not wide or module.startswith("tests.faults"), f"lines {wide} of {module}"


# Modules of one shape have parts of one name: a subject's, a lesson's constants (it is carried away
# alone), a command's flags, what a record prints and draws, lesson 11's two scripts, the decoder
# layer in each precision.
SHARED = {"SUBJECTS", "MEAN", "ROWS", "EPS", "make", "make_plain", "reference", "eager"}
SHARED |= {"wrong_answers", "bad_input", "bytes_of_statistics", "LOG2E", "LOWEST", "DecoderLayer"}
SHARED |= {"FLAGS", "HERE", "NAME", "main", "parse_args", "plot", "render"}


def test_a_public_name_means_one_thing():
    defined_in = {}
    for module in MODULES:
        if floor_of(module) == "exercises":  # a learner's files repeat the lessons' names
            continue
        for node in ast.parse(SOURCES[module].read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for name in [getattr(node, "name", "_"), *(t.id for t in targets if hasattr(t, "id"))]:
                if not name.startswith("_"):
                    defined_in.setdefault(name, set()).add(module)
    assert {name for name, modules in defined_in.items() if len(modules) > 1} == SHARED


def test_every_new_tensor_has_a_dtype():
    """Without one it has the process's, which torch.set_default_dtype changes.

    A subject's are cast where they are made.
    """
    makers = {"arange", "as_tensor", "empty", "full", "linspace", "ones", "rand", "randn"}
    makers |= {"tensor", "zeros"}
    without = [
        f"{module}.py, line {call.lineno}"
        for module in MODULES
        if floor_of(module) != "subjects"
        for call in ast.walk(ast.parse(SOURCES[module].read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if ast.unparse(call.func.value) == "torch" and call.func.attr in makers
        if not {"dtype", None} & {keyword.arg for keyword in call.keywords}  # None: **options
    ]
    assert not without


def test_every_launch_says_whether_multiply_and_add_are_one_instruction():
    """Triton 3.9 warns where a launch leaves it open: Triton 3.10 will not fuse them there."""
    open_launches = [
        f"{module}.py, line {call.lineno}"
        for module in MODULES
        for call in ast.walk(ast.parse(SOURCES[module].read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
        if ast.unparse(call.func.value).endswith("kernel")  # kernel[grid](...)
        if "enable_fp_fusion" not in [keyword.arg for keyword in call.keywords]
    ]
    assert not open_launches


# transformers calls these with whatever the model was called with, and its own ignore the rest
IGNORE_THE_REST = {"packed_attention", "meta_attention", "keep_attention", "loss_function"}
IGNORE_THE_REST |= {"ForCausalLMLoss.forward"}


def test_what_is_taken_by_any_name_is_passed_on():
    """An argument that transformers renames must not end in **kwargs."""
    swallowing = []
    for module in MODULES:
        if not module.startswith(("next_steps.", "harness.model.")):
            continue
        tree = ast.parse(SOURCES[module].read_text())
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.name_around = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            if isinstance(node, ast.FunctionDef) and node.args.kwarg:
                names = [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]
                if node.args.kwarg.arg not in names:
                    swallowing.append(node.name_around + node.name)
    assert set(swallowing) == IGNORE_THE_REST
