"""SwiGLU's own tests: its rounding, its steep gates, and the backward in place.

    python -m tests.swiglu_test     # outputs and gradients, also of an MLP, and the memory taken

tests/contracts_*_test.py test what every function has to do, tests/llama_mlp_test.py the MLP.
"""

from harness.cli import command_line

if __name__ == "__main__":  # before PyTorch is imported, which takes seconds
    command_line.answer_flags(__doc__)

import contextlib
import math
from functools import partial
from unittest import mock

import pytest
import torch

from harness.benchmark.checking import (
    DEVICE,
    DTYPE_NAME,
    HAS_GPU,
    Check,
    assert_all_passed,
    compare,
    print_tests,
    print_title,
    print_verdict,
    relative_error,
)
from harness.steps import timing
from next_steps.lessons import swiglu_kernel
from next_steps.lessons.swiglu_kernel import (
    TritonSwiGLU,
    TritonSwiGLUFunction,
    swiglu_backward,
    swiglu_forward,
    swiglu_reference,
)
from tests import tiles
from tests.fixtures import COMPILED_DTYPE, compiled_once, needs_gpu, pads_rows, poisoned_outputs
from tests.llama_mlp_test import MLP_SIZES, make_mlp_inputs, measure_saved_memory, mlp_checks
from tests.subjects.swiglu import make

SHAPE = (
    (2, 512, 14_336) if HAS_GPU else (2, 12, 250)
)  # (B, T, I); LLaMA 3.1 8B has I = 14,336 and H = 4096
MEMORY_SHAPE = (16_384, 14_336)
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
NAN, INF = float("nan"), float("inf")

# 0 * inf and 1 / 0 are the right answers in some tests; the interpreter's NumPy comments on them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let small tensors take several blocks too."""
    tiles.small_tiles(monkeypatch)


def act(gate, up):
    return TritonSwiGLUFunction.apply(gate, up, False)


def make_inputs(shape, dtype=torch.float32, seed=0):
    """gate, up and dy of any shape, each in memory of its own."""
    inputs, douts = make((), math.prod(shape), dtype, seed)
    return tuple(t.view(shape).clone() for t in (*inputs.values(), *douts.values()))


def run(function, *inputs):
    """Return output and gradients; the last input is the gradient for the output."""
    *inputs, dout = inputs
    leaves = [t.detach().requires_grad_() for t in inputs]  # with their strides
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def check_against_float64(name, inputs, function=act) -> list[Check]:
    """One check for the output and each gradient."""
    with poisoned_outputs():
        ours = run(function, *inputs)
    ref64 = run(swiglu_reference, *(t.double() for t in inputs))
    eager = run(swiglu_reference, *inputs)
    parts = zip(("y", "dgate", "dup"), ours, ref64, eager)
    return [compare(f"{name} {part}", *abc) for part, *abc in parts]


def dtype_checks(dtype) -> list[Check]:
    name = DTYPE_NAME[dtype]
    mlp = mlp_checks(make_mlp_inputs(dtype), name=f"{name} MLP")
    return check_against_float64(name, make_inputs(SHAPE, dtype)) + mlp


# ---- The numbers ---------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_activation_and_mlp_match_float64(dtype):
    assert_all_passed(dtype_checks(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_is_rounded_before_up_multiplies_it(dtype):
    # The other order changes a quarter of the entries.
    gate, up, _ = make_inputs((32, 256), dtype)
    same = act(gate, up) == swiglu_reference(gate, up)
    assert same.float().mean() > 0.99


def test_bf16_forward_has_the_bits_of_eager():
    gate, up, _ = make_inputs(SHAPE, torch.bfloat16)
    same = act(gate, up) == swiglu_reference(gate, up)
    assert same.float().mean() > 0.99


@pytest.mark.parametrize("halves", [False, True])
def test_shipped_block_size(halves, monkeypatch):
    tiles.shipped_tiles(monkeypatch)
    gate, up, dy = make_inputs((3, 2100))
    if halves:
        gate, up = torch.cat([gate, up], -1).chunk(2, -1)
    assert_all_passed(check_against_float64("shipped", (gate, up, dy)))


# Where fp32 holds exp(-gate) no more, where it is no longer added to 1, and where gate times
# log2(e) overflows.
STEEP = [0.0, 1.0, 17.0, 50.0, 87.0, 88.0, 89.0, 104.0, 1e4, 3e38, INF]


def test_steep_infinite_and_nan_gates_are_as_in_pytorch():
    gate = torch.tensor([*STEEP, *(-g for g in STEEP), NAN], device=DEVICE)
    _, up, dy = make_inputs(gate.shape)
    for ours, eager in zip(run(act, gate, up, dy), run(swiglu_reference, gate, up, dy)):
        torch.testing.assert_close(ours, eager, equal_nan=True, rtol=1e-4, atol=1e-35)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("offset", [-15.0, 300.0])
def test_gates_far_from_zero(dtype, offset):
    gate, up, dy = make_inputs((6, 100), dtype)
    assert_all_passed(check_against_float64("offset", (gate + offset, up, dy)))


def test_nan_stays_in_its_element():
    inputs = make_inputs((5, 64))
    clean = run(act, *inputs)
    for changed in inputs:
        before = changed[2, 7].clone()
        changed[2, 7] = NAN
        for after, expected in zip(run(act, *inputs), clean):
            differs = after != expected
            assert (
                differs.sum() <= 1
                and torch.equal(after.isnan(), differs)
                and not differs.flatten()[:100].any()
            )
        changed[2, 7] = before


def test_product_of_dy_and_up_may_leave_fp16():
    gate, up, dy = make_inputs((4, 64), torch.float16)
    _, dgate, _ = run(
        act, gate - 12.0, 1e3 * up, 1e3 * dy
    )  # dy * up is 1e6, times silu's slope of 1e-4
    _, expected, _ = run(swiglu_reference, *(t.double() for t in (gate - 12.0, 1e3 * up, 1e3 * dy)))
    assert relative_error(dgate, expected) < 1e-3


# ---- The checks can fail -------------------------------------------------------------------------


def test_comparator_rejects_outputs_that_were_never_written(monkeypatch):
    for kernel, unwritten in (("fwd", [0]), ("bwd", [1, 2])):
        with monkeypatch.context() as patch:
            patch.setattr(swiglu_kernel, f"_swiglu_{kernel}_kernel", mock.MagicMock())
            checks = check_against_float64(kernel, make_inputs((4, 64)))
        assert [i for i, check in enumerate(checks) if not check.passed] == unwritten


# ---- Shapes and layouts --------------------------------------------------------------------------


def test_single_numbers_are_taken():
    assert_all_passed(check_against_float64("0-D", make_inputs(())))


def test_rows_without_columns():
    assert all(t.shape == (3, 0) for t in run(act, *make_inputs((3, 0))))


def test_halves_of_one_tensor_are_not_copied():
    gate, up = make_inputs((2, 3, 128))[0].chunk(2, -1)
    with poisoned_outputs() as shapes:
        swiglu_forward(gate, up)
    assert shapes == [(2, 3, 128 // 2)]


# ---- The contract with autograd ------------------------------------------------------------------


@pytest.fixture
def leaves():
    gate, up, dy = make_inputs((9, 64))
    _, dgate, dup = run(act, gate, up, dy)
    return gate.requires_grad_(), up.requires_grad_(), dy, dgate, dup


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("inplace", [False, True])
def test_one_input_without_a_gradient(leaves, frozen, inplace):
    *inputs, dy, dgate, dup = leaves
    inputs[frozen].requires_grad_(False)
    results = [t * 1.0 for t in inputs]
    TritonSwiGLU(inplace)(*results).backward(dy)
    assert inputs[frozen].grad is None and torch.equal(
        inputs[1 - frozen].grad, (dgate, dup)[1 - frozen]
    )
    assert all(torch.equal(a, b) for a, b in zip(results, inputs)), (
        "overwritten, but somebody else's data"
    )


def test_launcher_of_the_backward_leaves_its_inputs_alone():
    inputs = make_inputs((9, 64), torch.bfloat16)
    before = [t.clone() for t in inputs]
    swiglu_backward(inputs[2], *inputs[:2], need_y=True)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before))


# ---- In place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_launchers_write_over_what_they_were_given(dtype):
    gate, up, dy = make_inputs((5, 150), dtype)
    y = swiglu_forward(gate, up)
    new = swiglu_backward(dy, gate, up, need_y=True)
    assert torch.equal(new[2], y), "y made again has not the forward's bits"
    assert not {t.data_ptr() for t in new} & {t.data_ptr() for t in (gate, up, dy)}
    over = swiglu_backward(dy, gate, up, inplace=True, need_y=True)
    assert [t.data_ptr() for t in over] == [t.data_ptr() for t in (gate, up, dy)]
    assert all(torch.equal(a, b) for a, b in zip(over, new))


def test_y_that_is_not_needed_is_not_written():
    gate, up, dy = make_inputs((5, 150))
    before = dy.clone()
    with poisoned_outputs() as shapes:
        assert swiglu_backward(dy, gate, up)[2] is None
        assert swiglu_backward(dy, gate, up, inplace=True)[2] is None
    assert shapes == 2 * [(5, 150)] and torch.equal(dy, before)


def test_inplace_allocates_only_the_output(leaves):
    gate, up, dy, dgate, dup = leaves
    results = gate * 1.0, up * 1.0
    given = {}
    for name, t in zip(("gate", "up"), results):
        t.register_hook(lambda grad, name=name: given.update({name: grad.data_ptr()}))
    with poisoned_outputs() as shapes:
        TritonSwiGLU(inplace=True)(*results).backward(dy)
    assert shapes == [(9, 64)] and given == {
        "gate": results[0].data_ptr(),
        "up": results[1].data_ptr(),
    }
    assert torch.equal(gate.grad, dgate) and torch.equal(up.grad, dup)


def test_inplace_under_retain_graph_leaves_gate_and_up_alone(leaves):
    results = [t * 1.0 for t in leaves[:2]]
    before = [t.detach().clone() for t in results]
    TritonSwiGLU(inplace=True)(*results).backward(leaves[2], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(results, before))


@pytest.mark.parametrize("shared", [0, 1], ids=["gate", "up"])
def test_inplace_other_saved_use_raises(leaves, shared):
    results = [t * 1.0 for t in leaves[:2]]
    penalty = results[shared].square().sum()
    TritonSwiGLU(inplace=True)(*results).backward(leaves[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_inplace_result_saved_by_the_layer_before_raises(leaves):
    gate, up, dy, *_ = leaves
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        TritonSwiGLU(inplace=True)(gate.tanh(), up * 1.0).backward(dy)


def test_inplace_dy_that_became_y_is_noticed():
    gate, up, dy = make_inputs((5, 64))
    result = dy.requires_grad_() * 1.0
    penalty = result.square().sum()
    swiglu_backward(result, gate, up, inplace=True, need_y=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@pytest.mark.parametrize("refused", [0, 1, 2], ids=["gate", "up", "dy"])
def test_inplace_refuses_what_cannot_hold_a_gradient(refused):
    """kernel_support_test.py has the memory that is refused."""
    sources = list(make_inputs((4, 64)))
    sources[refused] = sources[refused].t().contiguous().t()
    before = [t.clone() for t in sources]
    name = ("gate", "up", "dy")[refused]
    with pytest.raises(ValueError, match=rf"{name} has strides \(1, 4\).*use inplace=False"):
        swiglu_backward(sources[2], *sources[:2], inplace=True, need_y=True)
    assert all(map(torch.equal, sources, before))


def test_inplace_refusal_comes_in_the_forward(leaves):
    with pytest.raises(ValueError, match=r"gate has strides .* is a leaf: True"):
        TritonSwiGLU(inplace=True)(*leaves[:2])


def test_inplace_takes_two_parts_of_one_tensor():
    gate, up, dy = make_inputs((4, 64))
    expected = swiglu_backward(dy, gate, up)
    both = torch.stack([gate, up])
    swiglu_backward(dy, *both, inplace=True)
    assert torch.equal(both, torch.stack(expected[:2]))


# ---- Bad input -----------------------------------------------------------------------------------

ONES = torch.ones(4, 64, device=DEVICE)


@pytest.mark.parametrize(
    "dy, error, sentence",
    [
        (ONES[:3], ValueError, r"dy has shape \(3, 64\), expected \(4, 64\)"),
        (ONES.half(), TypeError, "dy is torch.float16, expected torch.float32"),
    ],
)
def test_dy_unlike_gate_is_refused_with_a_sentence(dy, error, sentence):
    with pytest.raises(error, match=sentence):
        swiglu_backward(dy, ONES, ONES)


def test_dy_as_a_dtensor_is_refused_with_a_sentence(as_dtensor):
    with pytest.raises(TypeError, match=r"dy is a DTensor, .*: pass its to_local\(\)"):
        swiglu_backward(as_dtensor(ONES), ONES, ONES)


# ---- torch.compile -------------------------------------------------------------------------------


def halves_of_a_product(function):
    def graph(x, w_gate_up, w_down):
        return function(*(x @ w_gate_up).chunk(2, -1)) @ w_down

    return graph


def graph_inputs(n_rows, I):
    """x, w_gate_up and w_down, and a gradient for the output."""
    x, dout = torch.randn(n_rows, 24), torch.randn(n_rows, 8)
    w_gate_up, w_down = torch.randn(24, 2 * I) / 5, torch.randn(I, 8) / I**0.5
    return [t.to(DEVICE, COMPILED_DTYPE) for t in (x, w_gate_up, w_down, dout)]


@pads_rows
@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile_of_the_halves_of_a_product(dynamic):
    compiled = torch.compile(halves_of_a_product(TritonSwiGLU()), fullgraph=True, dynamic=dynamic)
    for number, (n_rows, I) in enumerate(((5, 1289), (4, 2048), (16, 48))):
        with compiled_once() if dynamic and number > 0 else contextlib.nullcontext():
            inputs = graph_inputs(n_rows, I)
            ours, eager = (
                run(f, *inputs) for f in (compiled, halves_of_a_product(swiglu_reference))
            )
        ref64 = run(halves_of_a_product(swiglu_reference), *(t.double() for t in inputs))
        checks = [
            compare(f"{n_rows} x {I}, {i}", *abc) for i, abc in enumerate(zip(ours, ref64, eager))
        ]
        assert_all_passed(checks)


@pads_rows
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("need_y", [False, True])
def test_torch_compile_of_the_backward_alone(need_y, inplace):
    gate, up, dy = make_inputs((5, 64))
    expected = swiglu_backward(dy, gate, up, need_y=need_y)
    sources = gate.clone(), up.clone(), dy.clone()

    @torch.compile(fullgraph=True)
    def backward(dy, gate, up):
        return swiglu_backward(dy, gate, up, inplace=inplace, need_y=need_y)

    results = backward(sources[2], *sources[:2])
    assert (results[2] is None) == (not need_y)
    n_results = 3 if need_y else 2
    assert all(map(torch.equal, results[:n_results], expected[:n_results]))
    written = n_results if inplace else 0
    assert all(map(torch.equal, sources, (*expected[:written], *(gate, up, dy)[written:])))


@pytest.mark.exhaustive
@pytest.mark.parametrize("need_y", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64), (0, 64), ()])
def test_operators_promise_torch_compile_what_they_return(shape, need_y):
    gate, up, dy = make_inputs(shape, torch.float16)
    gate = gate.transpose(0, -2).contiguous().transpose(0, -2) if gate.ndim == 3 else gate
    torch.library.opcheck(swiglu_forward.operator, (gate, up))
    backward = swiglu_kernel._backward_into_new_memory.operator
    torch.library.opcheck(backward, (dy, gate, up, need_y))


# ---- What only a GPU can show --------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("halves", [False, True])
def test_offsets_beyond_int32(halves, monkeypatch, gpu_memory):
    tiles.shipped_tiles(monkeypatch)
    n_cols, tail = 14_336, 3
    n_rows = 2**31 // n_cols + 8
    gpu_memory(30)
    last = make_inputs((tail, n_cols), torch.bfloat16)
    if halves:
        gate, up = torch.zeros(n_rows, 2 * n_cols, device=DEVICE, dtype=torch.bfloat16).chunk(2, -1)
    else:
        gate, up = (
            torch.zeros(n_rows, n_cols, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
        )
    dy = torch.zeros(n_rows, n_cols, device=DEVICE, dtype=torch.bfloat16)
    for whole, end in zip((gate, up, dy), last):
        whole[-tail:] = end
    y = swiglu_forward(gate, up)
    dgate, dup, _ = swiglu_backward(dy, gate, up, inplace=not halves)
    for ours, expected in zip((y, dgate, dup), run(act, *last)):
        assert torch.equal(ours[-tail:], expected) and not ours[:-tail].any()


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("odd", range(4), ids=["none", "gate", "up", "dy"])
def test_inplace_at_any_address(dtype, odd, monkeypatch):
    # An address that is no multiple of 16 bytes makes Triton spread that tensor's block over the
    # threads otherwise.
    tiles.shipped_tiles(monkeypatch)
    inputs = list(make_inputs((512, 14_336), dtype))
    expected = swiglu_backward(inputs[2], *inputs[:2], need_y=True)
    if odd > 0:
        memory = inputs[odd - 1].new_empty(inputs[0].numel() + 1)
        inputs[odd - 1] = memory[1:].view(inputs[0].shape).copy_(inputs[odd - 1])
    for _ in range(20):
        copies = [t.clone() for t in inputs]
        if odd > 0:
            memory = inputs[odd - 1].new_empty(inputs[0].numel() + 1)
            copies[odd - 1] = memory[1:].view(inputs[0].shape).copy_(inputs[odd - 1])
        found = swiglu_backward(copies[2], *copies[:2], inplace=True, need_y=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


@needs_gpu
@pytest.mark.parametrize("halves", [False, True])
def test_new_row_counts_do_not_compile_new_kernels(halves, monkeypatch):
    def step(n_rows):
        gate, up, dy = make_inputs((n_rows, 320), torch.bfloat16)
        if halves and n_rows > 1:  # the halves of one row have no gap between their rows
            gate, up = torch.cat([gate, up], -1).chunk(2, -1)
        run(act, gate, up, dy)

    compiled = []
    runtime = swiglu_kernel.triton.knobs.runtime
    monkeypatch.setattr(
        runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["repr"])
    )
    for name in ("fwd", "bwd"):
        getattr(swiglu_kernel, f"_swiglu_{name}_kernel").device_caches.clear()
    step(48)
    assert len(compiled) == 2, (
        "the hook must see the first compilation, or it proves nothing about the others"
    )
    for n_rows in (2, 15, 16, 17, 1000, 1024) if halves else (1, 2, 15, 16, 17, 1000, 1024):
        step(n_rows)
    assert compiled[2:] == []


WAYS = {  # and how many tensors of gate's size it should take, beyond gate, up and dy
    "eager PyTorch": (swiglu_reference, 4),
    "ours": (act, 3),
    "ours, inplace=True": (TritonSwiGLU(inplace=True), 1),
}


def measure_extra_memory() -> tuple[int, dict[str, int]]:
    """Bytes of gate, and for each way the peak beyond gate, up and dy in forward and backward."""
    values = torch.randn(MEMORY_SHAPE, dtype=torch.bfloat16, device=DEVICE)
    dy = torch.randn_like(values)

    def forward_and_backward(function):
        gate, up = timing.as_a_result(values), timing.as_a_result(values)
        function(gate, up).backward(dy)

    peaks = {
        way: timing.peak_extra_bytes(partial(forward_and_backward, function))
        for way, (function, _) in WAYS.items()
    }
    return values.nbytes, {way: peak - 2 * values.nbytes for way, peak in peaks.items()}


def memory_is_as_promised(gate_bytes, extra, saved) -> bool:
    """In place the output and nothing else; and of an MLP gate and up alone are saved."""
    slack = 2**20
    mlp_gate_bytes = 2 * MLP_SIZES[0] * MLP_SIZES[2]
    promises = [
        extra[way] <= n * gate_bytes + slack
        for way, (_, n) in WAYS.items()
        if way != "eager PyTorch"
    ]
    return all(promises) and saved["ours"] <= 2 * mlp_gate_bytes + slack


@needs_gpu
def test_memory_is_the_output_and_nothing_else(gpu_memory):
    gpu_memory(6)
    (gate_bytes, extra), saved = measure_extra_memory(), measure_saved_memory()
    assert memory_is_as_promised(gate_bytes, extra, saved), (gate_bytes, extra, saved)


# ---- The table -----------------------------------------------------------------------------------


def print_memory() -> bool:
    print("\nMemory\n" + "-" * 60)
    if not HAS_GPU:
        print("  (on a GPU only)")
        return True
    (gate_bytes, extra), saved = measure_extra_memory(), measure_saved_memory()
    n_rows, n_cols = MEMORY_SHAPE
    shape = f"{n_rows:,} x {n_cols:,}, bf16"
    print(f"  Forward and backward, beyond gate, up and dy of {gate_bytes / 1e6:.1f} MB ({shape}):")
    for way, size in extra.items():
        print(f"    {way:<24}{size / 1e6:>9.1f} MB")
    n_rows, H, I = MLP_SIZES
    sizes = f"{n_rows:,} tokens, H = {H:,}, I = {I:,}, bf16"
    print(f"  Saved by one MLP for its backward, x apart ({sizes}):")
    for way, size in saved.items():
        print(f"    {way:<24}{size / 1e6:>9.1f} MB")
    passed = memory_is_as_promised(gate_bytes, extra, saved)
    verdict = "PASSED" if passed else "FAILED"
    print(f"  In place the output alone; of an MLP gate and up alone: {verdict}")
    return passed


def main() -> int:
    print_title("SwiGLU")
    passed = print_tests(DTYPES, dtype_checks)
    passed &= print_memory()
    return print_verdict("SwiGLU correctness", passed)


if __name__ == "__main__":
    command_line.run_main(main)
