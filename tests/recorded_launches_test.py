"""Which launches torch.compile makes itself, and what it knows of them.

Without a GPU launchers are traced with tensors that have no memory, in a process whose kernels are
not interpreted.  A GPU is asked whether the compiled code gives eager's bits.
"""

import runpy
from functools import partial

import pytest
import torch
from torch._functorch import config
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import cross_entropy_kernel
import kernel_support
import rmsnorm_kernel
from harness.cli.device import DEVICE
from judging.compile_targets import COMPILING
from judging.processes import Apart
from kernel_support import operator
from next_steps.lessons import rope_kernel, swiglu_kernel
from subjects import SUBJECTS
from subjects.subject import run, same_bits
from tests.fixtures import needs_gpu

INDEX, SINGLE = {"dtype": torch.long}, {"dtype": torch.float32}
# operator: (the launcher, its arguments by the number of rows, {kernel: what it writes})
CASES = {
    "rmsnorm_forward": (
        lambda: rmsnorm_kernel.rmsnorm_forward,
        lambda n, new: (new(n, 40), new(40), 1e-5),
        {"_rmsnorm_fwd_kernel": ["y_ptr", "rstd_ptr"]},
    ),
    "rmsnorm_backward": (
        lambda: rmsnorm_kernel.rmsnorm_backward,
        lambda n, new: (new(n, 40), new(n, 40), new(40), new(n, **SINGLE)),
        {
            "_rmsnorm_bwd_kernel": ["dx_ptr", "dw_partial_ptr"],
            "_rmsnorm_dw_kernel": ["dw_ptr"],
        },
    ),
    "cross_entropy_forward": (
        lambda: cross_entropy_kernel.cross_entropy_forward,
        lambda n, new: (new(n, 40), new(n, **INDEX)),
        {"_cross_entropy_fwd_kernel": ["row_loss_ptr", "stats_ptr"]},
    ),
    "cross_entropy_backward": (
        lambda: cross_entropy_kernel.cross_entropy_backward,
        lambda n, new: (
            *(new(**SINGLE), new(n, 40), new(n, **INDEX)),
            *(new(n, 3, **SINGLE), new(**INDEX)),
        ),
        {"_cross_entropy_bwd_kernel": ["dlogits_ptr"]},
    ),
    "cross_entropy_inplace": (
        lambda: cross_entropy_kernel.cross_entropy_inplace,
        lambda n, new: (new(n, 40), new(n, **INDEX)),
        {"_cross_entropy_inplace_kernel": ["logits_ptr", "row_loss_ptr"]},
    ),
    "swiglu_forward": (
        lambda: swiglu_kernel.swiglu_forward,
        lambda n, new: (new(n, 40), new(n, 40)),
        {"_swiglu_fwd_kernel": ["y_ptr"]},
    ),
    "swiglu_backward": (
        lambda: swiglu_kernel._backward_into_new_memory,
        lambda n, new: (new(n, 40), new(n, 40), new(n, 40), True),
        {"_swiglu_bwd_kernel": ["dgate_ptr", "dup_ptr", "y_ptr"]},
    ),
    "rope": (
        lambda: rope_kernel._launch,
        lambda n, new: (new(1, 4, n, 16), new(1, 2, n, 16), new(n, 16), new(n, 16), False),
        {"_rope_kernel_without_tuples": ["q_rot_ptr", "k_rot_ptr"]},
    ),
}


# ---- In the other process


def tracing():
    """Return a function for the graph of a case: its operators, and its kernels' written arguments.

    It takes the case's name, the number of rows, None for an unknown one, and whether the graph is
    one to export.
    """
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_functional,
    )
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from judging.pretended_gpu import pretend_gpu

    def trace(name, n_rows, exporting):
        launcher, arguments, _ = CASES[name]
        mode = FakeTensorMode(shape_env=ShapeEnv())
        unknown = mode.from_tensor(torch.empty(5), static_shapes=False).shape[0]
        with pretend_gpu("sm_90"), mode, config.patch(decompose_custom_triton_ops=not exporting):
            function = dispatch_functionalize(launcher().operator, FunctionalTensorMode())
            given = arguments(n_rows or unknown, partial(new_tensor, "cuda"))
            nodes = make_fx(function)(*given).graph.nodes
        launches = [
            node.kwargs for node in nodes if node.target is triton_kernel_wrapper_functional
        ]
        kernels = [kernel_side_table.get_kernel(launch["kernel_idx"]) for launch in launches]
        written = [list(launch["tensors_to_clone"]) for launch in launches]
        operators = [str(node.target) for node in nodes if "tutorial" in node.format_node()]
        return operators, {k.fn.__name__: args for k, args in zip(kernels, written, strict=True)}

    return trace


def new_tensor(device, *shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.fixture(scope="module")
def trace():
    with Apart("tests.recorded_launches_test:tracing", environment=COMPILING) as apart:
        yield partial(apart.call, seconds=60)


@pytest.mark.parametrize("name", CASES)
def test_launches_are_in_the_graph_with_what_each_writes(trace, name):
    assert tuple(trace(name, 5, False)) == ([], CASES[name][2])


@pytest.mark.parametrize("n_rows, exporting", [(None, False), (5, True)])
@pytest.mark.parametrize("name", CASES)
def test_the_operator_stays_if_a_size_is_unknown_or_to_be_exported(trace, name, n_rows, exporting):
    operators, kernels = trace(name, n_rows, exporting)
    assert len(operators) == 1 and not kernels


def test_a_changed_file_is_another_key_of_compiled_graphs(tmp_path, monkeypatch):
    """Else an edited kernel would not run: PyTorch finds a graph by its operators' names."""
    monkeypatch.setattr(kernel_support, "INTERPRETED", False)
    file, keys = tmp_path / "launcher.py", []
    for number, factor in enumerate((2, 3, 3)):
        file.write_text(f"def launch(x):\n    return x * {factor}\n")
        name, schema = f"recorded_launches_test::times_{number}", "(Tensor x) -> Tensor"
        recorded = operator(name, schema, torch.empty_like, launches_are_recordable=True)
        with torch.compiler.config.patch(cache_key_tag=""):
            recorded(runpy.run_path(str(file))["launch"])
            keys.append(torch.compiler.config.cache_key_tag)
    assert keys[0] != keys[1] == keys[2]


# ---- On a GPU

ACTIVATIONS = {  # subject: what other operations of the graph make
    "rmsnorm": ("x",),
    "cross_entropy": ("logits",),
    "cross_entropy_rows": ("logits",),
    "cross_entropy_inplace": ("logits",),
    "swiglu": ("gate", "up"),
    "rope": ("q", "k"),
}


def after_an_addition(subject, call=lambda function, *inputs: function(*inputs)):
    """Return the subject inside of a graph, which adds up its activations with gaps between rows.

    call: takes what it is called with, the subject's function first.
    """
    names = list(subject.make((1, 1), subject.size, torch.float32)[0])

    def with_gaps(t):
        return torch.cat((t + t.flip(0), t), -1)[..., : t.shape[-1]]

    def graph(function):
        def larger(*inputs):
            given = dict(zip(names, inputs, strict=True))
            made = {name: with_gaps(given[name]) for name in ACTIVATIONS[subject.name]}
            return call(function, *(given | made).values())

        return larger

    return subject.called_as(graph)


def assert_eagers_bits(found, expected):
    if found.get("loss", torch.ones(1)).ndim == 0:  # PyTorch adds up the rows' losses
        torch.testing.assert_close(found.pop("loss"), expected.pop("loss"))
    assert same_bits(found, expected)


@needs_gpu
@pytest.mark.usefixtures("compiler_pads_rows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_compiled_code_launches_kernels_and_gives_eagers_bits(name, dtype):
    subject = after_an_addition(SUBJECTS[name])
    function = torch.compile(subject.function, fullgraph=True)
    (rows, size), *_ = subject.compiled_first
    # Some versions of PyTorch take the second number of rows for any.  One row is compiled apart.
    sizes = [rows[-1], rows[-1] + 4, 1]
    if name == "cross_entropy_inplace":
        del sizes[-1]  # PyTorch 2.13: KeyError in Inductor's scheduler, also with the operator
    for n_rows in sizes:
        inputs, douts = subject.make((*rows[:-1], n_rows), size, dtype)
        found, codes = run_and_get_code(run, subject, function, inputs, douts)
        if n_rows == rows[-1]:
            lines = (line.partition("#")[0] for line in "".join(codes).splitlines())
            assert codes and not [line for line in lines if "torch.ops.tutorial" in line]
        assert_eagers_bits(found, run(subject, subject.function, inputs, douts))


@needs_gpu
@pytest.mark.parametrize("name", ["rmsnorm", "swiglu", "rope"])
def test_recorded_launches_are_made_again_for_a_checkpoint(name):
    subject = after_an_addition(SUBJECTS[name], partial(checkpoint, use_reentrant=False))
    inputs, douts = subject.make((2, 5), subject.size, torch.bfloat16)
    found = run(subject, torch.compile(subject.function, fullgraph=True), inputs, douts)
    assert_eagers_bits(found, run(subject, subject.function, inputs, douts))


@needs_gpu
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_operator(strict):
    norm, x = rmsnorm_kernel.TritonRMSNorm(64, device=DEVICE), torch.ones(3, 64, device=DEVICE)
    with torch.no_grad():
        program = torch.export.export(norm, (x,), strict=strict)
    for graph in (program.graph, program.run_decompositions().graph):
        assert "tutorial.rmsnorm_forward" in str(graph)
