"""The contracts of a GPU, asked of every function; and large offsets, compiling, memory, a second
GPU.
"""

import pytest
import torch

from harness.benchmark.checking import FLOOR, assert_all_passed, relative_error
from judging import on_gpu
from rmsnorm_kernel import triton
from subjects.subject import compare_parts, references, run
from tests import tiles
from tests.contracts import contract, contracts_of
from tests.fixtures import needs_gpu, needs_two_gpus

pytestmark = [needs_gpu, pytest.mark.usefixtures("small_tiles")]
BF16 = torch.bfloat16
globals().update(contracts_of(on_gpu))


@contract()
def test_rows_beyond_int32_in_memory(subject, monkeypatch, gpu_memory):
    """The last rows begin beyond 2**31 elements; all others are zeros, or do not count: they have
    nothing to say.
    """
    tiles.shipped_tiles(monkeypatch)
    tail = 4
    inputs, douts = subject.make((tail, *subject.gpu_rows[1:]), subject.gpu_size, BF16)
    width = max(inputs[name].numel() // tail for name in subject.row_inputs)
    n_rows = 2**31 // width + 8
    rows = [inputs[name] for name in subject.row_inputs] + list(douts.values())
    gpu_memory(3 * sum(n_rows * t.nbytes // tail for t in rows) / 2**30)

    def placed(t):
        if t.ndim == 0:  # the gradient of a mean
            return t
        nothing = 0 if t.is_floating_point() or t.dtype == torch.bool else -100  # no target
        whole = t.new_full((n_rows, *t.shape[1:]), nothing)
        whole[-tail:] = t
        return whole

    far = {name: placed(t) if name in subject.row_inputs else t for name, t in inputs.items()}
    far_douts = {name: placed(dout) for name, dout in douts.items()}
    found = run(subject, subject.function, far, far_douts)
    ref64, eagers = references(subject, inputs, douts)
    whole = {name for name, t in found.items() if t.shape[:1] == (n_rows,)}
    last = {name: t[-tail:] if name in whole else t for name, t in found.items()}
    assert_all_passed(compare_parts(subject, last, inputs, ref64, eagers))
    gradients = [found[name] for name in whole if name.startswith("d")]
    assert not any(gradient[:-tail].any() for gradient in gradients)


@needs_two_gpus
@contract()
def test_tensors_on_a_gpu_that_is_not_the_current_one(subject):
    inputs, douts = on_gpu.of_real_size(subject)
    here = run(subject, subject.function, inputs, douts)
    assert torch.cuda.current_device() == 0
    inputs, douts = (
        {name: t.to("cuda:1") for name, t in tensors.items()} for tensors in (inputs, douts)
    )
    there = run(subject, subject.function, inputs, douts)
    assert torch.cuda.current_device() == 0
    for part, result in there.items():
        assert result.device == torch.device("cuda:1")
        if subject.made_by_kernels_alone:
            assert torch.equal(result.to("cuda:0"), here[part]), part
        else:
            assert relative_error(result, here[part]) <= FLOOR[BF16], part


@contract()
def test_new_row_counts_compile_no_new_kernels(subject, compiled_kernels, monkeypatch):
    tiles.shipped_tiles(monkeypatch)

    def step(*rows):
        run(subject, subject.function, *subject.make(rows, subject.gpu_size, BF16))

    kernels = [
        k
        for module in subject.kernels
        for k in vars(module).values()
        if isinstance(k, triton.JITFunction)
    ]
    for kernel in kernels:
        kernel.device_caches.clear()
    step(48)
    assert compiled_kernels, (
        "the hook must see the first compilation, or it proves nothing about the others"
    )
    compiled_kernels.clear()
    for n_rows in (1, 2, 15, 16, 17, 33, 1000, 1024):
        step(n_rows)
    for rows in ((2, 48), (3, 17), (3, 1)):  # of RoPE samples and tokens
        step(*rows)
    assert compiled_kernels == []


@contract()
def test_memory_is_bounded(subject, monkeypatch, gpu_memory):
    """Outputs, gradients, what the record says, and nothing else."""
    gpu_memory(16)
    tiles.shipped_tiles(monkeypatch)
    inputs, douts = subject.make((8192,), subject.gpu_size, BF16)
    outputs = run(subject, subject.function, inputs, douts)
    del outputs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = run(subject, subject.function, inputs, douts)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= sum(t.nbytes for t in outputs.values()) + subject.workspace(inputs)
