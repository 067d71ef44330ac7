"""A lesson is carried away as two files, itself and kernel_support.py, and computes the same there.
What a lesson builds on goes along, under the name by which the lesson imports it.

Each lesson is copied into an empty folder.  One process, which sees nothing of this project, runs
all of them by the code below.  The same code is run on the lessons of this project.
"""

import importlib
import os
import shutil
import subprocess
import sys

import pytest
import torch

from harness.cli.device import HAS_GPU
from tests.conftest import HERE, tracked

LESSONS = {  # the lesson: files beside it, and what is run of it
    "rmsnorm_kernel": ([], "TritonRMSNormFunction.apply(x, row, 1e-5)"),
    "cross_entropy_kernel": (
        [],
        "TritonCrossEntropyLoss()(x, targets)"
        " + lesson.TritonCrossEntropyLoss(inplace=True)(x * 1, targets)",
    ),
    "swiglu_kernel": ([], "TritonSwiGLU()(x, other)"),
    "rope_kernel": ([], "triton_apply_rotary_pos_emb(q, q, q[:, 0], q[:, 0])[0]"),
    "qk_norm_rope_kernel": (
        ["next_steps.lessons.rope_kernel"],
        "triton_qk_norm_rope(q, q, q[0, 0, 0], q[0, 1, 0], 1e-6, q[:, 0], q[:, 1])[0]",
    ),
    "linear_cross_entropy_kernel": (
        ["cross_entropy_kernel"],
        "TritonLinearCrossEntropyLoss(chunk_size=4)(x, weight, targets)",
    ),
    "adamw_kernel": (
        [],
        "adamw_step(other, x.detach(), m, m.abs(), steps, 1e-2, 0.9, 0.999, 1e-8, 0.1) or other",
    ),
    "reverse_kl_kernel": (["cross_entropy_kernel"], "TritonReverseKLLoss()(x, other)"),
    "fp8_kernel": ([], "dequantize(lesson.quantize_rows(x), x.dtype)"),
    "nf4_kernel": ([], "nf4_dequantize(lesson.nf4_quantize(weight), (128, 128), x.dtype)"),
}
RUN = """
def run(lesson, call):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, torch.bfloat16)
    x = draw(8, 128).requires_grad_()
    other, row, weight, q = draw(8, 128), draw(128), draw(128, 128), draw(1, 2, 4, 16)
    m, steps = draw(8, 128), torch.ones((), device=DEVICE)
    targets = torch.arange(8, device=DEVICE)
    y = eval(f"lesson.{call}", {**locals(), "lesson": lesson})
    if y.requires_grad:
        y.float().sum().backward()
    return y.detach(), x.grad
"""
ALONE = f"""
import importlib, sys, torch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
{RUN}
found = {{}}
for name, call in CALLS.items():
    sys.path.insert(0, name)
    found[name] = run(importlib.import_module(name), call)
    sys.path.pop(0)
    for module in [m for m in sys.modules if m.endswith("_kernel") or m == "kernel_support"]:
        del sys.modules[module]
torch.save(found, "found.pt")
"""


def name_in_the_project(lesson: str) -> str:
    return lesson if (HERE / f"{lesson}.py").exists() else f"next_steps.lessons.{lesson}"


def file_of(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


@pytest.fixture(scope="module")
def carried_away(tmp_path_factory):
    """Return the results of the lessons, each run from a folder of its own."""
    folder = tmp_path_factory.mktemp("lessons")
    for name, (beside, _) in LESSONS.items():
        (folder / name).mkdir()
        shutil.copy(HERE / file_of(name_in_the_project(name)), folder / name)
        for module in ("kernel_support", *beside):
            copy = folder / name / file_of(module)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / file_of(module), copy)
    calls = {name: call for name, (_, call) in LESSONS.items()}
    (folder / "run.py").write_text(f"CALLS = {calls!r}\n{ALONE}")
    variables = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([sys.executable, "run.py"], cwd=folder, env=variables, check=True)
    return torch.load(folder / "found.pt")


def test_every_lesson_is_here():
    folders = HERE, HERE / "next_steps" / "lessons"
    files = [file for file in tracked("*_kernel.py") if file.parent in folders]
    assert {file.stem for file in files} == set(LESSONS)


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_that_was_carried_away_computes_the_same(carried_away, name):
    names = {"torch": torch, "DEVICE": "cuda" if HAS_GPU else "cpu"}
    exec(RUN, names)
    lesson = importlib.import_module(name_in_the_project(name))
    expected = names["run"](lesson, LESSONS[name][1])
    for found, tensor in zip(carried_away[name], expected, strict=True):
        assert (found is None) == (tensor is None)
        assert found is None or torch.equal(found, tensor)
