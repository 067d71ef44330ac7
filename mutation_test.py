"""Would the tests notice if a kernel were wrong?

The two tables below plant faults in the kernels' sources and name, for each, the test that must fail.  A mutant is
imported in its kernel's place, and pytest runs that test inside this process, on a fresh import of the test's file,
which so finds the mutant.  Only a failed assertion counts as caught; a mutant that crashes proves nothing.  Nor would
"caught" prove anything if the source without a fault, treated likewise, did not pass every test named here.

Only on a CPU: there a wrong address usually reads some number; a GPU ends all work of the process.  And no fault
stores outside its tensor.  Where that takes one certain layout, the table names that one case of the test.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

from checking import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="mutants run on the CPU only")

HERE = Path(__file__).parent
KERNELS = {"rmsnorm_kernel": "rmsnorm_test", "cross_entropy_kernel": "cross_entropy_test"}  # and their tests

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
NORM_FAULTS = {
    "test_forward_and_backward_match_float64": [
        ("c1 term dropped", " - x_hat * c1)\n        tl.store", ")\n        tl.store"),
        ("c1 term added", " - x_hat * c1)\n        tl.store", " + x_hat * c1)\n        tl.store"),
        ("dx without the weight", "dx = rstd * (w * dy", "dx = rstd * (dy"),
        ("dw of x, not x_hat", "dw += dy.to(tl.float32) * x_hat", "dw += dy.to(tl.float32) * x"),
    ],
    "test_x_hat_is_rounded_before_the_weight_multiplies_it": [
        ("x_hat not rounded", "(x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)", "x * rstd"),
    ],
    "test_mixed_dtypes_are_promoted_as_pytorch_does": [
        ("y in x's dtype", "dtype=torch.promote_types(x.dtype, weight.dtype)", "dtype=x.dtype"),
    ],
    "test_eps_is_used_where_it_shows": [
        ("eps is another", "tl.cast(eps, tl.float32)", "1e-7"),
        ("eps outside the root", "tl.rsqrt(tl.sum(x * x, axis=0) / n_cols +", "1 / (tl.sqrt(tl.sum(x * x, axis=0) / n_cols) +"),
    ],
    "test_masked_lanes_do_not_leak_into_the_row": [
        ("mask dropped", "x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to", "x = tl.load(x_ptr + row * x_row_stride + cols).to"),
        ("masked lanes are 1", "row * x_row_stride + cols, mask=mask, other=0.0).to", "row * x_row_stride + cols, mask=mask, other=1.0).to"),
        ("mean over BLOCK_SIZE", "tl.sum(x * x, axis=0) / n_cols", "tl.sum(x * x, axis=0) / BLOCK_SIZE"),
        ("c1 over BLOCK_SIZE", "* rstd / n_cols", "* rstd / BLOCK_SIZE"),
    ],
    "test_no_row_is_lost_between_programs": [
        ("last row skipped", "tl.range(pid, n_rows,", "tl.range(pid, n_rows - 1,"),
        ("dw of a program's last row only", "dw += dy", "dw = dy"),
        ("dw of one program lost", "dweight, n_programs, H", "dweight, n_programs - 1, H"),
    ],
    "test_any_strides_of_x": [
        ("y's stride for x", "row * x_row_stride + cols, mask=mask, other=0.0).to", "row * y_row_stride + cols, mask=mask, other=0.0).to"),
        ("columns taken for adjacent", "rows if rows.stride(1) == 1 else rows.contiguous()", "rows"),
    ],
    "test_any_strides_of_x[one row repeated (stride 0)]": [
        ("x's stride for dx", "row * dx_row_stride", "row * x_row_stride"),
    ],
    "test_any_strides_of_dy": [("x's stride for dy", "row * dy_row_stride", "row * x_row_stride")],
    "test_any_stride_of_the_weight": [
        ("weight taken for contiguous", "rows, weight = _as_rows(x), weight.contiguous()", "rows = _as_rows(x)"),
    ],
    "properties_test::test_norm_of_rows_beyond_int32": [
        ("32-bit offsets forward", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
        ("32-bit offsets backward", "tl.cast(row, tl.int64)", "tl.cast(row, tl.int32)"),
    ],
    "test_frozen_weight_gets_no_gradient_and_no_buffer": [
        ("dw for a frozen weight", "need_dweight=ctx.needs_input_grad[1]", "need_dweight=True"),
    ],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():", "if False:"),
    ],
}  # fmt: skip

LOSS_FAULTS = {
    "test_one_tile_and_many_give_the_reference": [
        ("powers of 2, not of e", "LOG2E, LN2 = tl.constexpr(1.4426950408889634)", "LOG2E, LN2 = tl.constexpr(1.0)"),
        ("sum not rescaled from tile to tile", "d = d * tl.exp2(m - m_new)", "d = d"),
        ("sum not rescaled to the row", "tl.sum(d * tl.exp2(m - m_row))", "tl.sum(d)"),
        ("edge of the row not summed", " + tl.sum(tl.exp2(tl.fma(edge_logits, LOG2E, -m_row)))", ""),
        ("mask dropped", 'body_ptr + cols, mask=cols < n_body, other=-float("inf")', "body_ptr + cols", 2),
        ("masked lanes are 0", 'mask=cols < n_body, other=-float("inf")', "mask=cols < n_body, other=0.0", 2),
        ("next column's logit for the target's", "row_ptr + target, mask", "row_ptr + (target + 1) % n_cols, mask", 2),
        ("target subtracted in the next column", "out_row_ptr + target\n", "out_row_ptr + (target ^ 1)\n"),
        ("target not subtracted", "(tl.exp2(tl.fma(target_logit, LOG2E, -m)) - d)", "tl.exp2(tl.fma(target_logit, LOG2E, -m))"),
        ("sign of the gradient", 'float("nan")) / d', 'float("nan")) / -d'),
        ("gradient of the target only", "tl.exp2(tl.fma(logits, LOG2E, -m)) * factor", "tl.zeros_like(logits)"),
        ("one tile not written", "range(0, n_body, TILE_SIZE)", "range(TILE_SIZE, n_body, TILE_SIZE)"),
        ("loss not divided by n_valid", "row_loss_ptr + row, loss * scale", "row_loss_ptr + row, loss"),
        ("gradient not divided by n_valid", "scale = scale / tl.load(n_valid_ptr)", "scale = scale"),
    ],
    "test_large_offset_does_not_cost_digits": [
        ("product rounded before m is subtracted", "tl.fma(logits, LOG2E, -m_new[None, :])", "logits * LOG2E - m_new[None, :]"),
        ("log(d) added to a large m", "tl.log(d_row / tl.exp2(t))", "tl.log(d_row) + m_row * LN2 - target_logit"),
    ],
    "test_masked_vocabulary_is_not_nan": [
        ("column of -inf is NaN", "tl.full((TILE_COLS,), LOWEST", 'tl.full((TILE_COLS,), -float("inf")'),
    ],
    "test_ignored_rows_are_neither_counted_nor_trained": [
        ("only -100 is ignored", "if target == ignore_index:", "if target == -100:", 2),
        ("ignored rows counted", "(targets.long() != ignore_index).sum()", "(targets == targets).sum()"),
    ],
    "test_no_valid_row_is_as_in_pytorch": [
        ("mean of no row is 0", 'row_loss.mean() if n_rows == 0 and reduction == "mean" else row_loss.sum()', "row_loss.sum()"),
    ],
    "test_target_outside_the_vocabulary_gives_nan_for_its_row_only": [
        ("target outside the row is trained", 'tl.where(in_row, scale, float("nan"))', "scale"),
    ],
    "test_arbitrary_grad_output": [
        ("grad_output ignored", "tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride).to(tl.float32)", "1.0"),
        ("one grad_output for all rows", "grad_output_ptr + row.to(tl.int64) * grad_output_stride", "grad_output_ptr"),
    ],
    "test_layout[padded vocabulary]": [
        ("V for the logits' stride", "row, logits_row_stride, n_cols)\n        target", "row, n_cols, n_cols)\n        target"),
    ],
    "test_layout[expanded]": [
        ("logits' stride for dlogits", "_cut_row(dlogits_ptr, row, dlogits_row_stride", "_cut_row(dlogits_ptr, row, logits_row_stride"),
    ],
    "properties_test::test_loss_of_rows_beyond_int32": [
        ("32-bit offsets", "tl.cast(row, tl.int64) * row_stride", "tl.cast(row, tl.int32) * row_stride"),
    ],
    "test_inputs_are_not_changed": [
        ("overwrites unasked", "m_d = None if overwrite else", "m_d = None if True else"),
    ],
    "test_inplace_writes_the_gradient_over_the_logits": [
        ("in place not divided by n_valid", "m_row, d_row, scale, tile", "m_row, d_row, 1.0, tile"),
        ("a program's first row only", "range(tl.program_id(0), n_rows,", "range(tl.program_id(0), tl.num_programs(0),"),
    ],
    "test_inplace_gradient_is_multiplied_by_any_grad_output": [
        ("grad_output ignored in place", "elif scale != 1.0:", "elif scale < -1e30:"),
    ],
    "test_inplace_use_saved_before_raises_even_if_the_loss_is_never_trained_on": [
        ("overwrites without a word to autograd", "torch.autograd.graph.increment_version(logits)", "pass"),
    ],
    "test_inplace_second_backward_raises": [
        ("second backward scales again", "torch.autograd.graph.increment_version(dlogits)", "pass"),
    ],
    "test_inplace_leaf_is_refused_because_its_grad_would_be_its_own_memory": [
        ("a leaf is overwritten", " or (owner.is_leaf and owner.requires_grad)", ""),
    ],
    "test_inplace_without_a_gradient_to_compute_leaves_the_logits_alone": [
        ("overwrites under no_grad", "self.inplace and torch.is_grad_enabled() and", "self.inplace and"),
    ],
    "test_inplace_in_fp16_waits_for_the_loss_scale": [
        ("fp16 is overwritten", " and logits.dtype != torch.float16", ""),
    ],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():", "if False:"),
    ],
}  # fmt: skip

TABLES = dict(zip(KERNELS, (NORM_FAULTS, LOSS_FAULTS)))


class Outcomes:
    """A pytest plugin that counts the tests that pass and keeps what the others raise."""

    def __init__(self):
        self.passed, self.raised = 0, []

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed

    def pytest_exception_interact(self, call):
        self.raised.append(call.excinfo.value)


@contextlib.contextmanager
def imported_instead(kernel, file):
    """`import kernel` gives this file meanwhile, also to the tests, which are imported anew."""
    names = [kernel, *KERNELS.values(), "properties_test"]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    spec = importlib.util.spec_from_file_location(kernel, file)
    sys.modules[kernel] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[kernel])
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def run_tests(kernel, source, tests, folder) -> Outcomes:
    """Of the tests, up to the first that fails with this source as the kernel's."""
    file = folder / f"{kernel}.py"  # a file, because Triton reads a kernel's source from one
    file.write_text(source)
    paths = [test if "::" in test else f"{KERNELS[kernel]}::{test}" for test in tests]
    paths = [f"{HERE}/{path.replace('::', '.py::', 1)}" for path in paths]
    # Without the plugins that take half a second for collecting garbage, or the outer run's handlers and cache.
    plugins = "unraisableexception", "threadexception", "faulthandler", "cacheprovider"
    options = ["--noconftest", "--capture=no", "--exitfirst", *(f"-pno:{plugin}" for plugin in plugins)]
    outcomes = Outcomes()
    with imported_instead(kernel, file):
        pytest.main([*options, *paths], plugins=[outcomes])
    return outcomes


@pytest.mark.parametrize("kernel", KERNELS)
def test_source_without_a_fault_passes_every_test_named_here(kernel, tmp_path):
    modules = dict(sys.modules)
    tests = list(TABLES[kernel])
    outcomes = run_tests(kernel, (HERE / f"{kernel}.py").read_text(), tests, tmp_path)
    assert not outcomes.raised and outcomes.passed >= len(tests)
    assert all(sys.modules[name] is module for name, module in modules.items()), "not all modules were put back"


FAULTS = [(kernel, test, *fault) for kernel in KERNELS for test, faults in TABLES[kernel].items() for fault in faults]


@pytest.mark.parametrize("kernel, test, fault", [pytest.param(f[0], f[1], f[3:], id=f"{f[0]}: {f[2]}") for f in FAULTS])
def test_fault_is_caught(kernel, test, fault, tmp_path):
    source = (HERE / f"{kernel}.py").read_text()
    text, replacement, times = fault if len(fault) == 3 else (*fault, 1)
    assert source.count(text) == times, f"the fault no longer fits the source, adapt it: {text!r}"
    outcomes = run_tests(kernel, source.replace(text, replacement), [test], tmp_path)
    assert outcomes.raised, f"{test} passes in spite of the fault"
    assert all(isinstance(e, AssertionError | pytest.fail.Exception) for e in outcomes.raised), outcomes.raised
