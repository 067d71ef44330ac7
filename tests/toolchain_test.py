"""compile_check.py, check_toolchain.py, make test: they pass here, and what makes them fail."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import check_toolchain
import rmsnorm_kernel
from harness.benchmark.checking import Check
from harness.cli import command_line, device
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU
from harness.profiling.kernel_facts import KERNEL_ROWS
from harness.records import run_records
from harness.steps import launches, parallel
from judging import pretended_gpu
from judging.compile_targets import UNALIGNED, CompiledKernel, widest_access
from next_steps.comparisons import repeats
from next_steps.lessons.adamw_optimizer import TritonAdamW
from tests.cli_test import raising
from tests.conftest import HERE, tracked
from tools import compile_check, run_tests

COLUMNS = ["First used by, kernel", "Target", "Registers", "Spills", "Shared, B", "Access, B"]
GOOD = CompiledKernel(
    "_kernel", "RMSNorm, bf16", "sm_90", registers=64, spills=0, shared=32, widest=16
)


def run(*command: str, cwd: Path = HERE, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | env, cwd=cwd)


# ---------------------------------------------------------------- compile_check.py


def compiled_by(program: str, target: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a program that calls compile_check's main, from a file in the folder."""
    script = folder / "program.py"
    script.write_text(program)
    environment = {"PYTHONPATH": str(HERE), "TRITON_CACHE_DIR": str(folder)}
    return run(sys.executable, str(script), "--targets", target, **environment)


@pytest.mark.parametrize(
    "ptx, widest",
    [
        ("ld.param.b64 %rd1, [p]; st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};", 0),
        ("@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", 2),
        ("st.global.f32 [ %rd1 + 0 ], { %r1 }; ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", 4),
        ("ld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r1, %r2 }, [ %rd1 + 0 ], %rd2;", 16),
        (
            "ld.global.b16 { %rs1 }, [ %rd1 ]; cp.async.cg.shared.global [ %r1 ], [ %rd2 ], 0x10;",
            16,
        ),
    ],
)
def test_widest_access_is_read_from_ptx(ptx, widest):
    assert widest_access(ptx) == widest


@pytest.mark.parametrize("flags", [("--targets", "sm_103,sm_1"), ("--kernel", "softmax")])
def test_unknown_name_is_one_sentence_and_exit_code_2(run_script, flags):
    outcome = run_script(compile_check, *flags)
    unknown = flags[1].split(",")[-1]
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and f"'{unknown}'" in outcome.err


@pytest.mark.parametrize(
    "row, said",
    [
        (CompiledKernel("_kernel", "RMSNorm, bf16", "sm_90", 64, 0, 32, 16), None),
        (CompiledKernel("_kernel", f"AdamW, {UNALIGNED}, bf16", "sm_90", 64, 0, 32, 2), None),
        (CompiledKernel("_kernel", "on AMD", "sm_90", 64, 0, 32, None), None),
        (
            CompiledKernel("_kernel", "RMSNorm, bf16", "sm_90", 255, 12, 32, 16),
            "spills 12 registers",
        ),
        (
            CompiledKernel("_kernel", "RMSNorm, bf16", "sm_90", 64, 0, 32, 2),
            "at most 2 bytes at once",
        ),
        (
            CompiledKernel("(none)", "RMSNorm, bf16", "sm_90", error="CompilationError: x"),
            "not compile",
        ),
    ],
)
def test_verdict_fails_a_spill_and_a_compile_error(row, said):
    found = compile_check.failures([GOOD, row])
    assert row.kernel in compile_check.render([GOOD, row])
    assert len(found) == (said is not None)
    for sentence in found:
        assert said in sentence and "sm_90" in sentence and "RMSNorm, bf16" in sentence


def test_verdict_fails_when_nothing_was_compiled():
    assert compile_check.failures([]) == ["no kernel was compiled"]


@pytest.mark.parametrize(
    "value, encoded", [(7, "07"), (200, "cc c8"), (512, "cd 02 00"), (70_000, "ce 00 01 11 70")]
)
def test_amd_note_reads_every_width(value, encoded):
    binary = b"\x00.vgpr_count\x2a.vgpr_spill_count" + bytes.fromhex(encoded) + b"\xaf.wavefront"
    assert pretended_gpu.amd_note(binary, b".vgpr_spill_count") == value
    assert pretended_gpu.amd_note(binary, b".vgpr_count") == 42


# In a process of its own: Triton decides when a kernel is defined whether it will be compiled or
# interpreted.  In a file of its own: Triton reads a kernel's source from there.
BROKEN_KERNELS = """
import os
os.environ.update(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
import torch, triton, triton.language as tl
from harness.cli import command_line
from judging import pretended_gpu
from tools import compile_cases, compile_check
from tools.compile_cases import Case

@triton.jit
def _spilling_kernel(x_ptr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets)  # 16,384 values in 32 threads: 512 registers each, of 255
    tl.store(x_ptr + offsets, x * tl.sum(x))

@triton.jit
def _misspelled_kernel(x_ptr, BLOCK_SIZE: tl.constexpr):
    tl.store(x_ptr, tl.lod(x_ptr))

class Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kernel):
        kernel[(1,)](x, BLOCK_SIZE=16384, num_warps=1)
        return x

    @staticmethod
    def backward(ctx, dx):
        return dx, None

pretended_gpu.COMPILED_DTYPES = {"fp32": torch.float32}
compile_cases.CASES = {"broken": [
    Case("spilling", Launch, lambda t: (t(16384), _spilling_kernel)),
    Case("misspelled", Launch, lambda t: (t(16384), _misspelled_kernel)),
]}
command_line.run_main(compile_check.main)
"""


@pytest.mark.exhaustive
def test_kernel_that_spills_does_not_compile_or_is_left_out_fails_the_check(tmp_path):
    result = compiled_by(BROKEN_KERNELS, "sm_90", tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert all(text in result.stdout for text in COLUMNS)
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED: ")]
    first, second, *left_out = failed
    assert "FAILED: _rope_kernel is launched by no case of compile_cases.py" in left_out
    assert "_spilling_kernel" in first and "spills" in first
    assert "misspelled" in second and "does not compile" in second


# ---------------------------------------------------------------- check_toolchain.py


@pytest.mark.exhaustive
def test_toolchain_says_yes_here():
    result = run(sys.executable, "check_toolchain.py")
    assert result.returncode == 0, result.stdout + result.stderr
    last = result.stdout.splitlines()[-1]
    cpu = "yes, on the CPU through Triton's interpreter (no CUDA GPU found)"
    assert last == f"These kernels run here: {'yes' if HAS_GPU else cpu}"
    names = "Triton", "PyTorch", "CUDA", "transformers", "GPU", "Compute capability", "GPU memory"
    assert all(f"{name}:" in result.stdout for name in names)
    (repeated,) = (line for line in result.stdout.splitlines() if "Repeated launches:" in line)
    assert "kernels gave the same bits in" in repeated


@pytest.mark.exhaustive
@pytest.mark.parametrize("package", ["triton", "transformers"])
def test_missing_package_is_one_sentence_with_a_remedy(tmp_path, package):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('gone', name={package!r})")
    result = run(sys.executable, "check_toolchain.py", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert package in result.stderr and "pip install" in result.stderr


@pytest.mark.parametrize(
    "message, advice",
    [
        ("Failed to find C compiler", "gcc"),
        ("PTXAS error: `ptxas` failed\nlong", "newer"),
        ("odd", "README"),
    ],
)
def test_failed_launch_is_no_with_a_remedy(monkeypatch, message, advice):
    monkeypatch.setattr(check_toolchain, "check_kernels", raising(RuntimeError(message)))
    last = check_toolchain.render(check_toolchain.inspect()).splitlines()[-1]
    assert last.startswith("These kernels run here: no: RuntimeError: ") and advice in last


def test_wrong_result_is_no(monkeypatch):
    checks = [Check("RMSNorm y, FP32", 0.5, 1e-6, 1.0), Check("RMSNorm dx, FP32", 0.0, 1e-6, 0.0)]
    monkeypatch.setattr(check_toolchain, "check_kernels", lambda: checks)
    last = check_toolchain.render(check_toolchain.inspect()).splitlines()[-1]
    assert last.startswith("These kernels run here: no: RMSNorm y, FP32") and "dx" not in last


def plant(monkeypatch, kernel, at: int) -> None:
    """Have each third launch of a kernel give another lowest bit of its first argument."""
    launches, run_it = itertools.count(1), type(kernel).run

    def faulty(self, *arguments, **options):
        result = run_it(self, *arguments, **options)
        if self is kernel and next(launches) % 3 == 0:
            arguments[at].view(torch.int8).flatten()[0] ^= 1
        return result

    monkeypatch.setattr(type(kernel), "run", faulty)


def launch_two_kernels() -> None:
    x = torch.randn(8, 256, device=DEVICE, requires_grad=True)
    weight = torch.ones(256, device=DEVICE)
    rmsnorm_kernel.TritonRMSNormFunction.apply(x, weight, 1e-5).sum().backward()


def test_a_bit_that_differs_at_the_third_run_is_a_sentence_and_exit_code_1(monkeypatch, run_script):
    monkeypatch.setattr(check_toolchain, "check_kernels", list)
    monkeypatch.setattr(repeats, "launch_all", launch_two_kernels)
    monkeypatch.setattr(repeats, "RUNS", 3)
    outcome = run_script(check_toolchain)
    agree = "Repeated launches:   2 kernels gave the same bits in 3 runs on the same inputs"
    assert outcome.code == 0 and agree in outcome.out
    plant(monkeypatch, rmsnorm_kernel._rmsnorm_fwd_kernel, at=0)
    outcome = run_script(check_toolchain)
    last = outcome.out.splitlines()[-1]
    said = "no: _rmsnorm_fwd_kernel gave 2 different results in 3 runs on the same inputs: install"
    assert outcome.code == 1 and last.startswith(f"These kernels run here: {said}")
    assert "_rmsnorm_bwd_kernel" not in outcome.out and agree not in outcome.out


def test_each_run_has_the_memory_as_it_was():
    """In place, the second run would else begin with the first one's results."""

    def weight_after_a_step() -> torch.Tensor:
        p, g = (torch.ones(64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        p.requires_grad_().grad = g
        TritonAdamW([p], lr=1.0, weight_decay=0.0).step()
        return p

    once = weight_after_a_step()
    with repeats.repeated(3) as found:
        repeated = weight_after_a_step()
    assert found == {"_adamw_kernel": 1}
    assert torch.equal(repeated, once) and once.abs().max() < 1e-6  # one step of lr, not three


@pytest.mark.exhaustive
def test_every_kernel_is_repeated():
    found = repeats.repeat_all(1)
    known = {launch.prefix for row in KERNEL_ROWS for launch in row.launches} - {
        "_obvious",
        "_plain",
    }
    assert not [each for each in known if not any(name.startswith(each) for name in found)]


def test_no_kernel_adds_by_atomics():
    """repeats.py states that, and therefore exempts no kernel from giving the same bits."""
    sources = [*tracked("*_kernel.py"), *tracked("next_steps/*.py")]
    assert not [path for path in sources if "tl.atomic" in path.read_text()]


GB300, RTX, SECOND_RTX = (
    SimpleNamespace(name=f"NVIDIA {name}", uuid=f"4c02-{number}")
    for number, name in enumerate(["GB300", "RTX PRO 6000", "RTX PRO 6000"])
)


def seeing(*gpus: SimpleNamespace) -> contextlib.AbstractContextManager:
    """Let torch.cuda answer as where these GPUs are visible."""
    return launches.replaced(
        torch.cuda,
        device_count=lambda: len(gpus),
        get_device_properties=gpus.__getitem__,
        get_device_name=lambda: gpus[0].name,
    )


@pytest.mark.parametrize("gpus, differ, pick", [
    ([GB300], False, False),
    ([RTX, SECOND_RTX], False, True),
    ([RTX, GB300], True, True),
])  # fmt: skip
def test_several_visible_gpus_are_named_with_the_one_that_is_used(gpus, differ, pick):
    with seeing(*gpus):
        text = "\n".join(check_toolchain.several_gpus(device.list_gpus()))
    assert ("The visible GPUs differ." in text) == differ
    assert all((f"{gpu.name}, GPU-{gpu.uuid}\n" in text) == pick for gpu in gpus)
    assert (f"Scripts use the first, {gpus[0].name}." in text) == pick
    assert all((word in text) == pick for word in ("CUDA_VISIBLE_DEVICES=", "device=GPU-"))


@pytest.mark.parametrize("gpus, said", [
    ([RTX], ""),
    ([RTX, SECOND_RTX], ""),
    ([RTX, GB300], " (not used: NVIDIA GB300)"),
])  # fmt: skip
def test_a_record_names_the_gpus_of_another_kind(gpus, said, monkeypatch):
    monkeypatch.setattr(device, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    with seeing(*gpus):
        assert run_records.gpu_line(run_records.environment()) == f"GPU: NVIDIA RTX PRO 6000{said}"


@pytest.mark.parametrize("n_processes", [1, 2])
def test_processes_on_gpus_of_different_kinds_are_refused(n_processes, monkeypatch):
    monkeypatch.setattr(parallel, "HAS_GPU", True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(n_processes))
    workload = SimpleNamespace(parallel="ddp")
    with seeing(RTX, SECOND_RTX, GB300):
        parallel.start(workload)
    with seeing(RTX, GB300):
        if n_processes == 1:
            return parallel.start(workload)
        with pytest.raises(UserError, match=r"kinds \(NVIDIA RTX PRO 6000, NVIDIA GB300\)"):
            parallel.start(workload)


def test_gpus_that_no_process_opens_together_are_one_sentence(capsys):
    said = "CUDA call failed lazily: device >= 0 && device < num_gpus INTERNAL ASSERT FAILED"
    assert command_line.exit_code(raising(torch.cuda.DeferredCudaCallError(said))) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "CUDA_VISIBLE_DEVICES=" in error


@pytest.mark.parametrize("cuda, advice", [(None, "CUDA build"), ("13.0", "--gpus")])
def test_without_a_gpu_it_says_how_to_get_one(monkeypatch, cuda, advice):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    assert advice in check_toolchain.gpu_remedy()


# ---------------------------------------------------------------- setting up

BROUGHT = [
    "torch==2.10.0a0+nv26.1",
    "pytorch-triton==3.6.0",
    "PyYAML==6.0.2",
    "typing_extensions==4.1",
]
PIP = """#!/bin/sh
case $1 in
    list) printf '%s\\n' {brought} ;;
    install) cp missing.txt tested.txt kept ;;
esac
"""


def commands_in(folder: Path, **commands: str) -> str:
    """A PATH on which these commands come first."""
    for name, script in commands.items():
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_the_image_gets_tested_versions_of_what_it_lacks(tmp_path):
    for name in ("requirements.txt", "constraints.txt"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "kept").mkdir()
    _, steps = (HERE / "Dockerfile").read_text().split("\nRUN ")
    path = commands_in(tmp_path, pip=PIP.format(brought=" ".join(BROUGHT)))
    script = steps.split("\n\n")[0].replace("/tmp", str(tmp_path))
    assert run("sh", "-ec", script, PATH=path).returncode == 0
    asked, tested, all_tested, required = (
        {line for line in file.read_text().splitlines() if not line.startswith("#")}
        for file in (
            tmp_path / "kept" / "missing.txt",
            tmp_path / "kept" / "tested.txt",
            HERE / "constraints.txt",
            HERE / "requirements.txt",
        )
    )
    assert {line.split(">")[0] for line in required - asked} == {"torch", "triton"}
    names = {line.split("==")[0] for line in all_tested - tested}
    assert names == {"torch", "pyyaml", "typing-extensions"} and tested < all_tested


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_setup_says_where_triton_does_not_run(tmp_path):
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(HERE / name, tmp_path)
    path = commands_in(tmp_path, uname="#!/bin/sh\necho Darwin\n")
    # the make that runs these tests may have been told SETUP=, and tells this one
    flags = "SETUP=.venv/installed", "PYTHON=false"
    result = run("make", "setup", *flags, cwd=tmp_path, PATH=path, MAKEFLAGS="")
    assert result.returncode and "WSL" in result.stdout and "pip" not in result.stdout


# ---------------------------------------------------------------- make test

ALONE = "@pytest.mark.alone\n"
SKIPPED = "@pytest.mark.skipif(True, reason='no GPU')\n"
PASSES, FAILS = "def test_that_passes(): pass\n", "def test_that_fails(): assert False\n"
BROKEN = "@pytest.fixture\ndef broken():\n    yield\n    assert False\n"
BROKEN += "def test_after_which_an_error_comes(broken): pass\n"


def make_project(folder: Path, tests: str) -> None:
    """Give a folder this project's Makefile, and these tests in place of the project's."""
    for name in ("tools", "tests"):
        (folder / name).mkdir()
    for name in ("Makefile", "tools/run_tests.py", "pyproject.toml"):
        shutil.copy(HERE / name, folder / name)
    (folder / "tools" / "compile_check.py").write_text("print('all kernels compile')")
    (folder / "tests" / "fixtures.py").touch()
    (folder / "tests" / "some_test.py").write_text(f"import pytest\n{tests}")


def make_test(folder: Path, tests: str, target: str = "test") -> subprocess.CompletedProcess:
    """`make test` in such a folder."""
    make_project(folder, tests)
    # a `make test` above this one hands down what would make this one a sub-make, which prints its
    # folder last
    above = dict.fromkeys(["MAKEFLAGS", "MAKELEVEL"], "")
    return run("make", target, "SETUP=", f"PY={sys.executable}", cwd=folder, **above)


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize(
    "tests, count, passes",
    [
        (PASSES, "1 passed, 0 failed, 0 skipped", True),
        (PASSES + ALONE + SKIPPED + FAILS, "1 passed, 0 failed, 1 skipped", True),
        (FAILS + BROKEN + ALONE + PASSES, "1 passed, 2 failed, 0 skipped", False),
        (PASSES + ALONE + FAILS, "1 passed, 1 failed, 0 skipped", False),
        ("import missing_module", "0 passed, 1 failed, 0 skipped", False),
    ],
    ids=["none alone", "skipped", "failed", "failed alone", "not imported"],
)
def test_make_tests_last_line_counts_all_tests(tmp_path, tests, count, passes):
    result = make_test(tmp_path, tests)
    *_, failures, last = ["", *result.stdout.splitlines()][-2:]
    assert last == count
    assert failures.startswith("FAILED ") == (not passes), "the failures come right before it"
    assert (result.returncode == 0) == passes, result.stdout + result.stderr


AS_WITH_A_GPU = """
import sys
from tools import run_tests
run_tests.visible_gpus = lambda: ["0"]
sys.exit(run_tests.main())
"""


@pytest.mark.exhaustive
def test_a_file_that_cannot_be_imported_counts_once_and_keeps_no_other_from_running(tmp_path):
    """With a GPU there are two calls, and each of them tries to import the file."""
    make_project(tmp_path, ALONE + PASSES + PASSES.replace("passes", "passes_beside_others"))
    (tmp_path / "tests" / "broken_test.py").write_text("import missing_module")
    result = run(sys.executable, "-c", AS_WITH_A_GPU, cwd=tmp_path)
    *_, dots, failure, last = result.stdout.splitlines()
    assert last == "2 passed, 1 failed, 0 skipped", result.stdout + result.stderr
    assert failure == "FAILED tests.broken_test: collection failure"
    assert "FAILED" not in dots and result.returncode == 1


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("target, count", [("test", 1), ("test-all", 2)])
def test_what_is_exhaustive_is_left_to_test_all(tmp_path, target, count):
    tests = PASSES + "@pytest.mark.exhaustive\n" + PASSES.replace("passes", "passes_too")
    result = make_test(tmp_path, tests, target)
    assert result.stdout.splitlines()[-1] == f"{count} passed, 0 failed, 0 skipped"


@pytest.mark.parametrize("gpus", [[], ["0"], ["0", "1"]])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_each_test_runs_in_one_call(gpus, everything, has_gpu, monkeypatch):
    """With every mixture of its marks, which stand in the calls' expressions as names."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # what the user says counts
    has_gpu = has_gpu or bool(gpus)
    everything = everything or bool(gpus)
    for alone, several, exhaustive in itertools.product((False, True), repeat=3):
        marks = {"alone": alone, "several_gpus": several, "exhaustive": exhaustive}
        chosen = [
            (selected, workers)
            for selected, workers in run_tests.calls(everything, gpus, has_gpu)
            if eval(selected or "True", dict(marks))
        ]
        assert len(chosen) == (everything or not exhaustive), marks
        for selected, workers in chosen:
            assert (workers == 0) == (alone and has_gpu)
            needs_all = len(gpus) > 1 and several and not alone
            environment = run_tests.environment_of(selected, gpus)
            assert ("ONE_GPU_OF" in environment) == (bool(gpus) and not needs_all)
            assert not gpus or environment["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)
            assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("kinds, used, said", [
    (["H200"], ["0"], ""),
    (["H200", "H200"], ["0", "1"], ""),
    (["RTX", "GB300"], ["0"], "The tests use RTX. Not used: GB300, 1.\n"),
    (["H200", "RTX", "H200"], ["0", "2"], "The tests use H200. Not used: RTX, 1.\n"),
])  # fmt: skip
def test_gpus_of_another_kind_than_the_first_are_left_out(kinds, used, said, monkeypatch, capsys):
    monkeypatch.setattr(run_tests, "kind_of", lambda gpu: kinds[int(gpu)])
    assert run_tests.of_one_kind([str(number) for number in range(len(kinds))]) == used
    assert capsys.readouterr().out == said


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
def test_the_kind_of_a_gpu_is_its_name():
    assert run_tests.kind_of(run_tests.visible_gpus()[0]) == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("worker, gpu", [("gw0", "4"), ("gw1", "7"), ("gw5", "7"), (None, "4,7")])
def test_a_worker_and_its_children_see_one_of_several_gpus(monkeypatch, worker, gpu):
    environment = {"ONE_GPU_OF": "4,7", "CUDA_VISIBLE_DEVICES": "4,7"}
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    environment |= {"PYTEST_XDIST_WORKER": worker} if worker else {}
    code = "import os, tests.conftest; e = os.environ; "
    code += "print(e['CUDA_VISIBLE_DEVICES'], 'ONE_GPU_OF' in e)"
    found = run(sys.executable, "-c", code, **environment)
    assert found.stdout.split() == [gpu, str(worker is None)], found.stderr


def test_check_of_a_new_machine_ends_on_the_count():
    commands = (HERE / ".ci" / "run").read_text().split("\n")
    assert commands[-2:] == ["make test-all", ""]
    assert any(command.startswith("make demo ") for command in commands)
