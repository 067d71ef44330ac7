"""judge.py: what it says of right and wrong files, and that none of them does harm."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import judge
from harness.cli.device import HAS_GPU
from judging.compile_targets import COMPILING
from judging.judged_file import Stopped
from judging.processes import Apart
from next_steps.comparisons.asked_apart import sanitized
from tests.conftest import assert_refused
from tools.page_records import HERE

PAGE = (HERE / "docs" / "judge.md").read_text()
LOAD = "judging.judged_file:load_function"
NUMBERS = "outputs_and_gradients_match_float64"
COPY = """
import torch
from kernel_support import tl, triton
LIMIT = 4

@triton.jit
def copy_kernel(x_ptr, y_ptr, n_cols, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    {line}
    tl.store(y_ptr + row * n_cols + cols, x, mask=cols < n_cols)

def launch(x, y):
    copy_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK_SIZE=triton.next_power_of_2(x.shape[1]))
"""
LOOP = "for i in range(n_cols):\n        "
REFUSED = {  # what the interpreter takes: the line that is shown, and a part of Triton's words
    f"acc = 0.0\n    {LOOP}acc += x": (LOOP[:-9], "acc has initial type fp32 but is re-assigned"),
    f"d = 0\n    {LOOP}d = d * tl.exp(0.5)": (LOOP[:-9], "d has initial type int32"),
    f"z = None\n    {LOOP}z = x if z is None else z + x": (LOOP[:-9], "z is not a triton value"),
    f"{LOOP}if i > 3:\n            break": ("break", "Break"),
    "x = x * LIMIT": ("x = x * LIMIT", "global variable LIMIT"),
    "print(row)": ("print(row)", "not string"),
    "x = x + sum([1, 2])": ("x = x + sum([1, 2])", "sum is not defined"),
    "x = x + int(row / 4)": ("x = x + int(row / 4)", "int() argument"),
}


@pytest.fixture
def file_of(tmp_path):
    """file_of(source): the path of a file."""
    path = tmp_path / "mine.py"

    def write(source: str | bytes) -> str:
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        return str(path)

    return write


# ---- The process --------------------------------------------------------------------------------


def stopped(file: str, seconds: float = 60) -> str:
    with Apart(LOAD, file, "f") as apart, pytest.raises(Stopped) as error:
        apart.call(torch.ones(3), seconds=seconds)
    return str(error.value)


def test_an_answer_comes_back_and_prints_are_the_users(file_of, capfd):
    file = file_of("print('loaded')\ndef f(x, n):\n    print('called')\n    return {'x': x + n}")
    with Apart(LOAD, file, "f") as apart:
        first, second = (apart.call(torch.ones(1_000_000), n, seconds=60) for n in (1, 2))
    assert torch.equal(first["x"], second["x"] - 1)
    assert capfd.readouterr().out.split() == ["loaded", "called", "called"]


STOPS = {
    "import sys\nsys.exit(0)": ["line 2 of mine.py", "SystemExit: 0"],
    "import os\nos._exit(0)": ["exit code 0", "take out"],
    "import os\ndef f(x):\n    os.kill(os.getpid(), 11)": ["SIGSEGV", "far outside"],
    "\nimport nosuch_module": ["line 2 of mine.py", "nosuch_module"],
    "def f(x)\n    pass": ["line 1 of mine.py", "no Python"],
    "def g(x):\n    pass": ["no function `f`"],
    "def f(x):\n    return 1 / 0": ["line 2 of mine.py", "ZeroDivisionError"],
    "class A:\n    pass\ndef f(x):\n    return A()": ["no plain data"],
    "def f(x): pass".encode("utf-16"): ["not UTF-8"],
    b"def f(x):\0 pass": ["not UTF-8"],
}


@pytest.mark.parametrize("source, words", STOPS.items())
def test_what_ends_the_process_becomes_a_sentence(source, words, file_of):
    said = stopped(file_of(source))
    assert all(each in said for each in words), said


STARTS = """
import subprocess
with open("{}", "w") as file:
    file.write(str(subprocess.Popen(["sleep", "600"]).pid))
while True:
    pass
"""


def test_an_endless_loop_is_shown_with_its_line_and_what_it_started_ends(file_of, tmp_path):
    said = stopped(file_of(STARTS.format(tmp_path / "pid")), seconds=2)
    assert re.search(r"longer than 2 s, at last in line [56] of mine.py: .* never ends", said)
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    until = time.monotonic() + 20  # SIGKILL was sent; the end may come later on a busy machine
    while is_alive(status) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(status)


def is_alive(status: Path) -> bool:
    try:
        return ") Z " not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_file_that_is_not_there_is_said():
    assert "cannot be read (No such file" in stopped("/nowhere/mine.py")


# ---- The compiler -------------------------------------------------------------------------------


def compile_copy(file: str) -> list[list[str]]:
    """Return the compile errors for fp32 and bf16."""
    with Apart("judging.pretended_gpu:compiler_of", file, "launch", environment=COMPILING) as apart:
        return [
            apart.call({"x": x, "y": x}, seconds=120)
            for x in (torch.empty(4, 50, dtype=each) for each in (torch.float32, torch.bfloat16))
        ]


@pytest.mark.parametrize("line, shown", REFUSED.items())
def test_what_triton_refuses_is_shown_with_its_line(line, shown, file_of):
    source = COPY.replace("{line}", line)
    code, words = shown
    for errors in compile_copy(file_of(source)):
        (sentence,) = errors
        assert "does not compile for sm_90 and sm_103" in sentence and words in sentence
        number = int(re.match(r"line (\d+) of mine.py", sentence)[1])
        assert source.splitlines()[number - 1].strip().startswith(code), sentence


def test_what_triton_takes_has_no_sentence(file_of):
    assert compile_copy(file_of(COPY.replace("{line}", "x = tl.exp(x)"))) == [[], []]


# ---- The command --------------------------------------------------------------------------------


@pytest.mark.skipif(HAS_GPU, reason="compiles by running; the numbers are those of the interpreter")
def test_the_page_shows_what_the_judge_says(tmp_path, run_script):
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "my_norm.py"
    file.write_text(source)
    path = {"PYTHONPATH": str(HERE)}
    started = subprocess.run([sys.executable, file], capture_output=True, env=os.environ | path)
    assert started.stdout == b"True\n", started.stderr
    names = re.findall(r"^\w[\w ]{9} (\w+)", shown, re.MULTILINE)
    flags = "--contracts", ",".join(names)
    outcome = run_script(judge, "rmsnorm", f"{file}:MyNorm", *flags)
    *said, counted = outcome.out.splitlines()[1:]
    assert "\n".join(said) == shown.rstrip() and outcome.code == 1
    assert counted == "2 holds, 2 wrong, 0 refused, 0 limit, 1 not tried"


def test_ours_holds_and_the_record_says_the_same(recorded):
    flags = "--library", "ours", "--contracts", f"compiles,{NUMBERS}"
    record = recorded(judge, "rmsnorm", *flags)
    asked = {each["contract"]: each["outcome"] for each in record["judged"]["ours"]}
    assert asked == {NUMBERS: "holds"} | ({} if HAS_GPU else {"compiles": "holds"})
    assert f"{len(asked)} holds, 0 wrong" in record["printed"]


SGD = """
import torch

class Mine(torch.optim.SGD):
    def __init__(self, params, lr, **rest):
        super().__init__(params, lr)
"""
ENDS = """
import os, torch

def f(x, weight):
    if x.ndim > 2:
        os._exit(0)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-5)

def loop(x, weight):
    while True:
        pass
"""


def test_an_optimizer_of_a_file_is_judged(file_of, run_script):
    for candidate, code in ((["--library", "pytorch"], 0), ([f"{file_of(SGD)}:Mine"], 1)):
        outcome = run_script(judge, "adamw", *candidate, "--contracts", "steps_match_float64")
        assert outcome.code == code, outcome.out


def test_what_stops_is_one_line_and_the_others_are_asked(file_of, run_script):
    asked = "--contracts", "one_to_four_dimensions,ragged_sizes"
    outcome = run_script(judge, "rmsnorm", f"{file_of(ENDS)}:f", *asked)
    assert "wrong      one_to_four_dimensions: The process ended with exit code 0" in outcome.out
    assert "holds      ragged_sizes" in outcome.out and outcome.code == 1


def test_an_endless_loop_ends_the_time_of_all(file_of, run_script):
    asked = "--contracts", f"{NUMBERS},ragged_sizes", "--seconds", "20"
    outcome = run_script(judge, "rmsnorm", f"{file_of(ENDS)}:loop", *asked)
    assert f"wrong      {NUMBERS}: The code ran longer than" in outcome.out
    assert "not tried  ragged_sizes: the time was over" in outcome.out and outcome.code == 1


def test_the_list_names_subjects_constants_libraries_and_contracts(run_script):
    said = run_script(judge, "--list").out
    for words in ("rmsnorm(x (5, 64), weight (64,), eps=1e-05) -> y", "liger, quack", NUMBERS):
        assert words in said


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "give a subject"),
        (["rmsnorm"], "give a subject, and FILE.py:NAME"),
        (["rmsnorm", "mine.py"], "names no function"),
        (["rms_norm", "mine.py:f"], "no subject 'rms_norm'"),
        (["rmsnorm", "--library", "ligre"], "no library 'ligre'"),
        (["rmsnorm", "mine.py:f", "--contracts", "nosuch"], "no contract 'nosuch'"),
    ],
)
def test_unknown_names_are_refused(flags, words, run_script):
    assert_refused(run_script(judge, *flags), words)


# ---- compute-sanitizer: what it wrote of a norm without a mask, on an H200 -----------------------

REPORT = """========= Invalid __global__ write of size 4 bytes
=========     at {place}+0x490 in my_norm.py:13
=========     by thread ({thread},0,0) in block (14,0,0)
=========     Access to 0x7ef9f280a300 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: PyErr_Error [0x18218f] in python3
=========
"""
SUMMARY = "========= ERROR SUMMARY: 2 errors\n"


@pytest.mark.parametrize(
    ("log", "outcome", "words"),
    [
        (REPORT + REPORT.replace("{thread}", "65") + SUMMARY, "wrong", "my_norm.py:13"),
        (REPORT.replace("{place}", "sm90_xmma_gemm_f32") + SUMMARY, "holds", ""),
        (SUMMARY, "holds", ""),
        ("", "not tried", "without a summary"),
    ],
)
def test_a_report_of_the_sanitizer_is_a_verdict(tmp_path, monkeypatch, log, outcome, words):
    program = tmp_path / "compute-sanitizer"
    text = ("========= COMPUTE-SANITIZER\n" + log).replace("{place}", "_my_norm")
    write = f"import sys; open(sys.argv[6].replace('%p', '1'), 'w').write({text!r})"
    program.write_text(f"#!{sys.executable}\n{write}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    verdict = sanitized("memcheck")
    assert verdict.outcome == outcome and words in verdict.words
    assert verdict.words.count("Invalid") == (outcome == "wrong")  # two threads, one fault
