"""Would the tests notice if a kernel were wrong?

The tables below plant faults in the kernels' sources and name, for each, the test that must fail.  A mutant is
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
from unittest import mock

import pytest

from harness.checking import HAS_GPU

pytestmark = pytest.mark.skipif(HAS_GPU, reason="mutants run on the CPU only")

HERE = Path(__file__).parents[1]  # the project's folder
KERNELS = {  # and their tests
    "rmsnorm_kernel": "rmsnorm_test",
    "cross_entropy_kernel": "cross_entropy_test",
    "next_steps.linear_cross_entropy_kernel": "tests.linear_cross_entropy_test",
    "next_steps.swiglu_kernel": "tests.swiglu_test",
    "next_steps.adamw_kernel": "tests.adamw_test",
    "next_steps.rope_kernel": "tests.rope_test",
    "next_steps.reverse_kl_kernel": "tests.reverse_kl_test",
    "next_steps.fused_layer": "tests.fused_layer_test",
    "next_steps.distill": "tests.distill_test",
    "next_steps.apply_kernels": "tests.apply_kernels_test",
    "harness.llama": "tests.llama_test",
    "harness.measure": "tests.files_test",
}

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
        ("y in x's dtype", "x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)", "x.dtype"),
    ],
    "test_eps_is_used_where_it_shows": [
        ("eps is another", "/ n_cols + eps)", "/ n_cols + 1e-7)"),
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
        ("weight taken for contiguous", "weight = None if weight is None else weight.contiguous()", "weight = weight", 2),
    ],
    "test_without_a_weight": [("gradient without a weight is 0", "    w = 1.0\n", "    w = 0.0\n")],
    "test_module_without_a_weight_has_no_parameters": [
        ("any length without a weight", "if self.weight is None and x.shape[-1:] != (self.hidden_size,):", "if False:"),
    ],
    "test_rstd_of_another_shape_or_dtype_is_refused_with_a_sentence": [
        ("any rstd", "if rstd.dtype != torch.float32 or rstd.device != device or rstd.shape != (n_rows,):", "if False:"),
    ],
    "test_rstd_may_have_gaps": [("rstd taken for adjacent", "    rstd = rstd.contiguous()\n", "")],
    "tests.properties_test::test_norm_of_rows_beyond_int32": [
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
        ("mask dropped", 'body_ptr + cols, mask=cols < n_body, other=-float("inf")', "body_ptr + cols", 4),
        ("masked lanes are 0", 'mask=cols < n_body, other=-float("inf")', "mask=cols < n_body, other=0.0", 4),
        ("next column's logit for the target's", "row_ptr + target, mask", "row_ptr + (target + 1) % n_cols, mask", 3),
        ("target subtracted in the next column", "out_row_ptr + target\n", "out_row_ptr + (target ^ 1)\n"),
        ("target not subtracted", "(tl.exp2(tl.fma(target_logit, unit, -m)) - d)", "tl.exp2(tl.fma(target_logit, unit, -m))"),
        ("sign of the gradient", 'float("nan")) / d', 'float("nan")) / -d'),
        ("gradient of the target only", "tl.exp2(tl.fma(logits, unit, -m)) * factor", "tl.zeros_like(logits)"),
        ("one tile not written", "for done in range(0, n_body, TILE_SIZE)", "for done in range(TILE_SIZE, n_body, TILE_SIZE)"),
        ("loss not divided by n_valid", "_loss_of_row(target_logit, m, d, unit) * scale", "_loss_of_row(target_logit, m, d, unit)", 2),
        ("gradient not divided by n_valid", "scale = scale / tl.load(n_valid_ptr)", "scale = scale"),
    ],
    "test_large_offset_does_not_cost_digits": [
        ("product rounded before m is subtracted", "tl.fma(logits, LOG2E, -m_new[None, :])", "logits * LOG2E - m_new[None, :]"),
        ("log(d) added to a large m", "tl.log(d / tl.exp2(t))", "tl.log(d) + m * LN2 - target_logit"),
    ],
    "test_logits_of_any_magnitude": [
        ("a huge maximum is rounded like any other", "if tl.abs(m_row) >= HUGE:", "if False:"),
        ("maxima are counted from too high a number on", "tl.constexpr(torch.finfo(torch.float32).min)", "tl.constexpr(-1e38)"),
        ("columns of one huge negative number overflow", "-HUGE, dtype", "LOWEST, dtype"),
    ],
    "test_loss_of_a_target_far_below_is_finite_as_long_as_pytorchs": [
        ("loss in powers of 2", "tl.log(d) - t * to_log", "tl.log(d) - t"),
        ("target times LOG2E overflows", 't == -float("inf")', "t != t"),
    ],
    "test_masked_vocabulary_is_not_nan": [
        ("column of -inf is NaN", "-HUGE, dtype", '-float("inf"), dtype'),
    ],
    "test_ignored_rows_are_neither_counted_nor_trained": [
        ("only -100 is ignored", "if target == ignore_index:", "if target == -100:", 4),
        ("ignored rows counted", "(targets.long() != ignore_index).sum()", "(targets == targets).sum()"),
    ],
    "test_no_valid_row_is_as_in_pytorch": [
        ("mean of no row is 0", "return row_loss.mean()", "return row_loss.sum()"),
    ],
    "test_target_outside_the_vocabulary_gives_nan_for_its_row_only": [
        ("target outside the row is trained", 'tl.where(in_row, scale, float("nan"))', "scale"),
    ],
    "test_arbitrary_grad_output": [
        ("grad_output ignored", "tl.load(grad_output_ptr + row.to(tl.int64) * grad_output_stride).to(tl.float32)", "1.0", 2),
        ("one grad_output for all rows", "grad_output_ptr + row.to(tl.int64) * grad_output_stride", "grad_output_ptr", 2),
    ],
    "test_layout[padded vocabulary]": [
        ("V for the logits' stride", "row, logits_row_stride, n_cols)\n    target", "row, n_cols, n_cols)\n    target"),
    ],
    "test_layout[expanded]": [
        ("logits' stride for dlogits", "_, _, _ = _cut_row(dlogits_ptr, row, dlogits_row_stride", "_, _, _ = _cut_row(dlogits_ptr, row, logits_row_stride"),
    ],
    "tests.properties_test::test_loss_of_rows_beyond_int32": [
        ("32-bit offsets", "tl.cast(row, tl.int64) * row_stride", "tl.cast(row, tl.int32) * row_stride"),
    ],
    "test_inputs_are_not_changed": [
        ("overwrites unasked", "    if overwrite:\n        _refuse_to_overwrite(logits, logits if logits._base is None else logits._base)\n", "    if True:\n"),
    ],
    "test_inplace_writes_the_gradient_over_the_logits": [
        ("in place not divided by n_valid", "\n                m, d, unit, scale, tile", "\n                m, d, unit, 1.0, tile"),
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
    "test_torch_compile_in_place_gives_ignored_rows_zeros_even_where_their_logits_are_nan": [
        ("compiled, ignored rows are trained", ".masked_fill(ignored, 0)", ""),
    ],
    "test_torch_compile_of_any_layout[padded vocabulary]": [
        ("operator promises other strides", "return _new_drows(rows).view(logits.shape)\n", "return logits.new_empty_strided(logits.shape, logits.stride())\n"),
    ],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():", "if False:"),
    ],
}  # fmt: skip

LINEAR_LOSS_FAULTS = {
    "test_one_chunk_and_many_give_the_reference[4-dtype0]": [
        ("dweight of the last chunk only", "beta=0 if number == 0 else 1", "beta=0"),
        ("dweight begins with what the memory held", "beta=0 if number == 0 else 1", "beta=1"),
        ("every chunk multiplied by the first one's rows", "dlogits.t(), x, beta", "dlogits.t(), rows[: len(x)], beta"),
        ("mean of each chunk", "chunk_grads, n_valid,", "chunk_grads, n_valid and (chunk_targets != -100).sum(),"),
        ("ignored rows' logits are multiplied", "        ce.launch_scale(row_grads, logits, targets, ignore_index)", "        pass"),
    ],
    "test_chunks_are_few_equal_and_of_whole_tiles": [
        ("last chunk is small", "return min(chunk_size, -(-n_rows // (n_chunks * 128)) * 128)", "return chunk_size"),
        ("no default is large enough for 4 chunks", "(MAX_ROUNDINGS * 128)) * 128), MAX_CHUNK)", "(MAX_ROUNDINGS * 128)) * 128), MIN_CHUNK)"),
    ],
    "test_error_of_dweight_does_not_grow_with_the_number_of_chunks": [
        ("dweight never summed in fp32", "dtype=torch.float32 if fp32_dweight else None", "dtype=None"),
    ],
    "test_error_of_dweight_is_bounded_by_default": [
        ("rounded after any number of chunks", "chunk_rows) > MAX_ROUNDINGS", "chunk_rows) > 1000"),
    ],
    "test_arbitrary_grad_output[sum-dtype0]": [
        ("grad_output ignored", "scale_gradient(gradient.view(-1, gradient.shape[-1]), grad_output)", "pass"),
    ],
    "test_arbitrary_grad_output[none-dtype0]": [
        ("one grad_output for all rows", "if overwrite else grad_output\n", "if overwrite else grad_output.flatten()[0]\n"),
        ("dweight without the rows' factors", 'now = grad_enabled and reduction != "none"', "now = grad_enabled"),
    ],
    "test_scale_gradient_in_place": [
        ("one block of columns only", "range(0, n_cols, BLOCK_SIZE)", "range(0, 1, BLOCK_SIZE)"),
        ("wrong factor", ".to(tl.float32) * factor", ".to(tl.float32) * factor * factor"),
    ],
    "test_every_program_of_scale_gradient_loops_over_its_rows": [
        ("a program's first row only", "range(tl.program_id(0), n_rows,", "range(tl.program_id(0), tl.num_programs(0),"),
    ],
    "test_gradient_is_not_touched_if_grad_output_is_one": [
        ("multiplies by 1", "if factor != 1.0:", "if factor == factor:"),
    ],
    "test_fp16_gradient_waits_for_the_loss_scale": [
        ("fp16 divided before it is scaled", " and hidden.dtype != torch.float16", ""),
    ],
    "test_ignored_rows_are_neither_counted_nor_trained": [
        ("ignored rows counted", "(row_targets.long() != ignore_index).sum()", "(row_targets == row_targets).sum()"),
    ],
    "test_no_valid_row_is_as_in_pytorch": [
        ("mean of no row is 0", 'row_loss.mean() if n_rows == 0 and reduction == "mean" else row_loss.sum()', "row_loss.sum()"),
    ],
    "test_frozen_head_gets_no_gradient_and_no_buffer": [
        ("dweight of a frozen head", "for needed in ctx.needs_input_grad[:2])", "for needed in (True, True))"),
    ],
    "test_no_grad_and_frozen_inputs_compute_the_loss_only": [
        ("gradients under no_grad", "now = grad_enabled and", "now ="),
    ],
    "test_logits_never_exist_as_a_whole": [
        ("one chunk", "chunk_rows = _chunk_rows(n_rows, chunk_size)", "chunk_rows = max(n_rows, 1)"),
        ("rows begin anywhere", "V + -V % 8", "V"),
    ],
    "test_second_backward_through_a_retained_graph": [
        ("gradients handed out twice", "gradients, ctx.gradients = ctx.gradients, None", "gradients = ctx.gradients"),
    ],
    "test_gradients_become_the_leaves_grad_without_a_copy": [
        ("gradients are kept", "gradients, ctx.gradients = ctx.gradients, None", "gradients = ctx.gradients"),
    ],
    "test_input_changed_before_the_backward_raises": [
        ("changes go unseen", "ctx.save_for_backward(hidden, weight,", "ctx.save_for_backward(hidden.clone(), weight.clone(),"),
    ],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():", "if False:"),
    ],
    "test_autocast_multiplies_in_its_dtype_and_returns_the_leaves_dtype": [
        ("autocast ignored", "if torch.is_autocast_enabled(hidden.device.type):", "if False:"),
    ],
}  # fmt: skip

SWIGLU_FAULTS = {
    "test_zero_to_four_dimensions": [
        ("powers of 2, not of e", "tl.constexpr(1.4426950408889634)", "tl.constexpr(1.0)"),
        ("sigmoid of -gate", "tl.exp2(gate * -LOG2E)", "tl.exp2(gate * LOG2E)"),
        ("y without gate", "(gate * sigmoid).to(dtype)", "sigmoid.to(dtype)"),
        ("dgate with sigmoid held constant", "(1.0 + gate * (1.0 - sigmoid))", "1.0"),
        ("dgate with s for 1 - s", "gate * (1.0 - sigmoid)", "gate * sigmoid"),
        ("dgate without up", "dy * up * sigmoid * (1.0", "dy * sigmoid * (1.0"),
        ("dup of gate, not silu", "dup = dy * (gate * sigmoid)", "dup = dy * gate"),
        ("dup without dy", "dup = dy * (gate * sigmoid)", "dup = gate * sigmoid"),
    ],
    "test_silu_is_rounded_before_up_multiplies_it": [
        ("silu not rounded", "(gate * sigmoid).to(dtype).to(tl.float32) * up", "gate * sigmoid * up"),
    ],
    "test_steep_infinite_and_nan_gates_are_as_in_pytorch": [
        ("overflow above 88", "1.0 / (1.0 + tl.exp2(gate * -LOG2E))", "tl.exp2(gate * LOG2E) / (1.0 + tl.exp2(gate * LOG2E))"),
    ],
    "test_no_element_is_lost_at_the_end_of_a_block": [
        ("last element lost", "cols < length", "cols < length - 1"),
        ("last block lost", "-(-n_rows * n_cols // BLOCK_SIZE) if line", "n_rows * n_cols // BLOCK_SIZE if line"),
    ],
    "test_rows_with_gaps_between_them": [
        ("last block of each row lost", "n_rows * -(-n_cols // BLOCK_SIZE)", "n_rows * (n_cols // BLOCK_SIZE)"),
    ],
    "test_any_strides[half of each row-up]": [
        ("rows taken for one line", "line = all(t is None or t.is_contiguous() for t in rows)", "line = True"),
        ("gate's stride for up", "up_ptr + row * up_row_stride + cols, mask=mask).to", "up_ptr + row * gate_row_stride + cols, mask=mask).to", 2),
    ],
    "test_any_strides[half of each row-dy]": [("gate's stride for dy", "row * dy_row_stride", "row * gate_row_stride")],
    "test_any_strides[one row repeated (stride 0)-gate]": [
        ("gate's stride for dgate", "row * dgate_row_stride", "row * gate_row_stride"),
    ],
    "test_any_strides[one row repeated (stride 0)-up]": [("up's stride for dup", "row * dup_row_stride", "row * up_row_stride")],
    "test_any_strides[every second column-gate]": [
        ("columns taken for adjacent", "return rows if rows.stride(1) == 1 else rows.contiguous()", "return rows"),
    ],
    "test_rows_beyond_int32": [("32-bit offsets", "(pid // blocks_per_row).to(tl.int64)", "(pid // blocks_per_row)")],
    "test_launchers_write_over_what_they_were_given": [
        ("y made again is not rounded twice", "        y = _swiglu(gate, sigmoid, up, dtype)\n", "        y = gate * sigmoid * up\n"),
        ("y made again is silu", "y = _swiglu(gate, sigmoid, up, dtype)\n", "y = gate * sigmoid\n"),
    ],
    "test_inputs_are_never_changed": [("overwrites unasked", "t.detach() if inplace else", "t.detach() if True else")],
    "test_inplace_allocates_only_the_output": [
        ("not in place", "inplace=_begin_backward() and ctx.inplace", "inplace=_begin_backward() and False"),
    ],
    "test_inplace_under_retain_graph_leaves_gate_and_up_alone": [
        ("overwrites what is needed again", "not torch._C._autograd._get_current_graph_task_keep_graph()", "True"),
    ],
    "test_inplace_other_saved_use_raises": [
        ("overwrites without a word to autograd", "torch.autograd.graph.increment_version(t)", "pass"),
    ],
    "test_inplace_refusal_comes_in_the_forward": [("a leaf is overwritten", "if leaf or shared or", "if shared or")],
    "test_inplace_refuses_memory_that_cannot_hold_both_gradients": [
        ("one memory takes two gradients", "if leaf or shared or", "if leaf or"),
        ("gaps are overwritten", " or not t.is_contiguous()", ""),
    ],
    "test_torch_compile_of_the_backward_alone[True-True]": [
        ("compiled, does not overwrite", "[t.copy_(result) for t, result in zip(sources, results)]", "results"),
    ],
    "test_torch_compile_of_the_backward_alone[True-False]": [
        ("compiled, overwrites unasked", "    if inplace:  # as the compiler", "    if True:  # as the compiler"),
    ],
    "test_one_input_without_a_gradient": [
        ("overwrites an input without a gradient", "inplace and all(ctx.needs_input_grad[:2])", "inplace"),
    ],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():", "if False:"),
    ],
    "test_mlp_of_unusual_strides": [
        ("dx of gate alone", ".addmm_(dup, w_up)", ""),
        ("dW_up of gate", "dw_up = dup.t()", "dw_up = dgate.t()"),
        ("dW_down of dy", "dw_down = dout.t() @ y", "dw_down = dout.t() @ dy.sigmoid()"),
        ("gate and up swapped", "swiglu_forward(gate, up) @", "swiglu_forward(up, gate) @"),
    ],
    "test_frozen_weights_get_no_gradient_and_no_matmul": [
        ("matmul for a frozen weight", "dgate.t() @ rows if need_w_gate else None", "dgate.t() @ rows"),
    ],
    "test_mlp_of_another_activation_is_refused_with_a_sentence": [
        ("any activation is silu", 'if given not in ("silu", "swish"):', "if False:"),
    ],
    "test_hooks_are_called_and_what_they_keep_is_not_overwritten": [
        ("hooks are not called", "plain and not any(getattr(module, h) for h in hooks)", "plain"),
    ],
    "test_forward_that_a_library_replaced_is_called": [("forward is not called", ' and "forward" not in vars(module)', "")],
    "test_global_hooks_are_called": [("global hooks are not called", "torch.nn.modules.module._has_any_global_hook() or ", "")],
}  # fmt: skip

ADAMW_FAULTS = {
    "test_steps_match_float64[FP32]": [
        ("no weight decay", "p = p * decay -", "p = p -"),
        ("weight decay without lr", "1.0 - lr * _scalar(weight_decay)", "1.0 - _scalar(weight_decay)"),
        ("uphill", "p * decay - step_size", "p * decay + step_size"),
        ("g for m", "step_size * m /", "step_size * g /"),
        ("m not corrected", "lr / _one_minus_power(_scalar(log_beta1), step)", "lr"),
        ("v not corrected", "1.0 / tl.sqrt(_one_minus_power(_scalar(log_beta2), step))", "1.0"),
        ("m corrected with beta2", "lr / _one_minus_power(_scalar(log_beta1)", "lr / _one_minus_power(_scalar(log_beta2)"),
        ("beta1 for 1 - beta1", "(g - m) * rate1", "(g - m) * (1.0 - rate1)"),
        ("g not squared", "g * g * rate2", "tl.abs(g) * rate2"),
        ("no square root", "tl.sqrt(v) * sqrt_scale", "v * sqrt_scale"),
        ("no eps", " * sqrt_scale + eps)", " * sqrt_scale)"),
        ("m not written", "    _store(m_ptr, lane, mask, m, seed, block, 1, index, step, BLOCK_SIZE)\n", ""),
        ("v not written", "    _store(v_ptr, lane, mask, v, seed, block, 2, index, step, BLOCK_SIZE)\n", ""),
        ("last element lost", "lane < n - start", "lane < n - start - 1"),
        ("last block lost", "(n + BLOCK_SIZE - 1) // BLOCK_SIZE", "n // BLOCK_SIZE"),
        ("steps not counted", "list(self._stepped.values()), 1)", "list(self._stepped.values()), 0)"),
    ],
    "test_step_continues_from_the_count_it_is_given[1]": [
        ("counts from 2", "tl.load(steps_done_ptr) + 1.0", "tl.load(steps_done_ptr) + 2.0"),
    ],
    "test_bias_correction_does_not_cancel_in_the_first_steps_nor_drift_in_late_ones": [
        ("1 - exp(x) cancels", "tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))", "1.0 - tl.exp(x)"),
        ("series too short", "tl.static_range(9, 1, -1)", "tl.static_range(5, 1, -1)"),
        ("series far from 0", "x > -0.5", "x > -2.5"),
    ],
    "test_representable_numbers_infinities_and_nan_stay_what_they_are": [
        ("NaN rounded to -0", "tl.where(x == x, random, 0)", "random"),
    ],
    "test_rounding_goes_to_one_of_the_two_neighbours_only": [
        ("17 random bits", "words >> 16), (BLOCK_SIZE", "words >> 15), (BLOCK_SIZE"),
    ],
    "test_rounding_is_right_on_average[60000]": [
        ("never up", "+ tl.where(x == x, random, 0)", ""),
        ("15 random bits", "words & 0xFFFF, words >> 16", "words & 0x7FFF, words >> 17"),
    ],
    "test_draws_of_other_seeds_parameters_steps_and_tensors_are_not_correlated": [
        ("every step draws alike", "index, step.to(tl.int32), ROUNDS", "index, 0, ROUNDS"),
        ("every parameter draws alike", "eight, tensor, index,", "eight, tensor, 0,"),
        ("p, m and v draw alike", "eight, tensor, index,", "eight, 0, index,"),
        ("every seed draws alike", "tl.philox(seed, eight,", "tl.philox(seed * 0, eight,"),
        ("one counter for two", "eight, tensor, index, step.to(tl.int32)", "eight, tensor, index + step.to(tl.int32), 0"),
    ],
    "test_draws_of_neighbouring_elements_are_not_correlated": [
        ("half of the bits drawn twice", "words & 0xFFFF, words >> 16", "words & 0xFFFF, words & 0xFFFF"),
        ("every block draws alike", "block * (BLOCK_SIZE // 8) + tl.arange", "tl.arange"),
    ],
    "test_second_moment_decays_by_a_tenth_of_a_percent_a_step": [
        ("v rounded to nearest", "_store(v_ptr, lane, mask, v, seed,", "_store(v_ptr, lane, mask, v, None,"),
    ],
    "test_equal_parameters_are_rounded_differently_and_alike_in_any_order": [
        ("every parameter is the first", "else None, index,", "else None, 0,"),
    ],
    "test_gradient_with_other_strides": [("p's strides for the gradient", "grad = dense(grad.resolve_neg())", "grad = grad")],
    "test_gradient_that_autograd_leaves_negated": [("negated gradient as it lies", "grad.resolve_neg()", "grad")],
    "test_parameters_with_gaps_between_their_elements[False-columns]": [
        ("what lies in gaps is stepped", "if t.stride() == strides:", "if True:"),
        ("copies not written back", "if result is not t:", "if False:"),
    ],
    "test_parameter_whose_strides_change_keeps_its_moments": [
        ("moments not written back", "in zip((p, m, v), stepped)", "in zip((p,), stepped)"),
        ("moments as they lie", "dense(p), dense(m), dense(v)", "dense(p), m, v"),
    ],
    "test_bad_input_is_refused_with_a_sentence[windows]": [
        ("windows share memory", "stride <= reach", "stride == 0"),
    ],
    "test_dtensors_are_refused_at_construction_and_with_a_new_group[False]": [
        ("wrappers refused in the step alone", '            _check_memory("a parameter", p, FLOATS)\n', ""),
    ],
    "test_numbers_and_tensors_give_the_same_bits": [
        ("1 - beta for beta", "(1 - beta).float()", "beta.float()"),
        ("log2(beta)", "beta.log().float()", "beta.log2().float()"),
    ],
    "test_maximize_goes_up_the_gradient": [
        ("maximize in name only", "MAXIMIZE=bool(maximize)", "MAXIMIZE=False"),
        ("maximize in the launcher alone", '            group["maximize"],\n', ""),
    ],
    "test_tensors_on_the_cpu_are_read_by_the_host_and_those_of_the_gpu_are_left_there": [
        ("the CPU's tensors moved", 'value.item() if value.device.type == "cpu" else', "None or"),
    ],
    "test_bad_options_are_refused_with_a_sentence": [
        ("tensors not looked at", "_is_number(value) and 0.0 <= value < below", "_is_number(value) and (isinstance(value, torch.Tensor) or 0.0 <= value < below)"),
    ],
    "test_a_refused_group_leaves_the_optimizer_as_it_was": [
        ("a refused group stays", "group = self.param_groups.pop()", "group = self.param_groups[-1]"),
    ],
    "test_a_refused_constructor_leaves_no_hooks": [
        ("hooks before all is accepted", "self._step_in_backward, self._hooks, self._stepped = False, [], {}", "self._step_in_backward, self._hooks, self._stepped = step_in_backward, [], {}"),
    ],
    "test_state_that_does_not_fit_is_refused_and_changes_nothing": [
        ("moments broadcast", "if loaded[key].shape != shape:", "if False:"),
        ("one tensor for two numbers", "if filled.setdefault(own, number) != number:", "if filled.setdefault(own, number) is None:"),
        ("settings not looked at", "            _check_group(group)\n", ""),
    ],
    "test_settings_are_loaded_into_what_the_optimizer_has": [
        ("tensors not filled", "            tensor.fill_(number)\n", "            pass\n"),
    ],
    "test_state_loaded_after_a_backward_replaces_what_that_stepped": [
        ("a step of before counts", "        self._stepped.clear()\n        self.__setstate__", "        self.__setstate__"),
    ],
    "test_hooks_around_loading_see_and_change_what_is_loaded": [
        ("what a hook returns is dropped", "state_dict if result is None else result", "state_dict"),
    ],
    "test_groups_have_their_own_settings": [
        ("first group's lr for all", 'group["lr"], *group["betas"]', 'self.param_groups[0]["lr"], *group["betas"]'),
    ],
    "test_autograd_notices_that_a_weight_was_changed": [
        ("steps without a word to autograd", "torch.autograd.graph.increment_version(p)", "pass"),
    ],
    "test_run_continues_with_the_same_bits[bf16, stochastic-load_state_dict]": [
        ("count not loaded", "in loaded[p].items():", "in list(loaded[p].items())[1:]:"),
    ],
    "test_loading_fills_the_tensors_a_cuda_graph_may_know_and_shares_none": [
        ("moments elsewhere", "self.state.get(p) or _new_state", "_new_state"),
        ("lr elsewhere", "            return own\n", "            return torch.tensor(number, device=own.device)\n"),
    ],
    "test_loading_keeps_the_dtype_of_the_moments_that_was_asked_for": [
        ("dtype of the saved moments", '("params", *MODES)', '("params",)'),
    ],
    "test_steps_inside_the_backward_are_the_same_steps": [
        ("first group's settings in the backward", "self._step_parameter(self.param_groups[group_number]", "self._step_parameter(self.param_groups[0]"),
        ("parameters counted from 0 in each group", "start=before", "start=0"),
    ],
    "test_gradients_never_exist_all_at_once": [("gradients kept", "grad, p.grad = p.grad, None", "grad = p.grad")],
    "test_gradient_accumulation_is_refused_and_a_step_recovers": [("accumulation steps twice", "if p in self._stepped:", "if False:")],
    "test_step_without_a_backward_is_refused": [("a step of nothing", "elif not self._stepped:", "elif False:")],
    "test_a_dropped_optimizer_frees_its_states_and_lets_go_of_the_parameters": [
        ("hooks hold the optimizer", "weakref.proxy(self)", "self"),
        ("hooks outlive it", "[hook.remove() for hook in hooks]", "None"),
    ],
    "test_close_removes_the_hooks_and_step_uses_gradients_again": [("hooks stay", "            hook.remove()\n", "            pass\n")],
}  # fmt: skip

ROPE_FAULTS = {
    "test_small_shape_matches_float64": [
        ("y1 not rotated", " - x2 * s1[None, :]", ""),
        ("sign of sin in y1", " - x2 * s1[None, :]", " + x2 * s1[None, :]"),
        ("sign of sin in y2", " + x1 * s2[None, :]", " - x1 * s2[None, :]"),
        ("backward is the forward", "if BACKWARD:", "if False:"),
        ("halves of sin not exchanged in the backward", "s1, s2 = -s2, -s1", "s1, s2 = -s1, -s2"),
        ("sin not negated in the backward", "s1, s2 = -s2, -s1", "s1, s2 = s2, s1"),
        ("first half of cos for both", "tl.load(cos_ptr + HALF, mask", "tl.load(cos_ptr, mask"),
        ("first half of sin for both", "tl.load(sin_ptr + HALF, mask", "tl.load(sin_ptr, mask"),
        ("cos for sin", "s1, s2 = tl.load(sin_ptr,", "s1, s2 = tl.load(cos_ptr,"),
        ("first sample's cos for all", "cos_ptr += batch * cos_batch_stride + ", "cos_ptr += "),
        ("first token's sin for all", "token * sin_token_stride", "0 * sin_token_stride"),
        ("second half not written", "tl.store(y_ptr + HALF, y2", "tl.store(y_ptr, y2"),
        ("k's halves exchanged", "k_tile, k1, k2, c1", "k_tile, k2, k1, c1"),
        ("k's number of heads for q", "(q_heads < n_q_heads)", "(q_heads < n_k_heads)"),
        ("last head of k lost", "(k_heads < n_k_heads)", "(k_heads < n_k_heads - 1)"),
    ],
    "test_any_even_head_dim[6]": [
        ("second half after the block", "q_ptr + q_tile + HALF", "q_ptr + q_tile + BLOCK_HALF"),
        ("last column lost", "cols < HALF", "cols < HALF - 1"),
    ],
    "test_heads_are_shared_out_among_several_programs[17-5-512]": [
        ("first group's heads of q for all", "group * BLOCK_Q + tl.arange(0, BLOCK_Q)", "tl.arange(0, BLOCK_Q)"),
        ("first group's heads of k for all", "group * BLOCK_K + tl.arange(0, BLOCK_K)", "tl.arange(0, BLOCK_K)"),
        ("last group lost", "[(B * T, n_groups)]", "[(B * T, n_groups - 1)]"),
    ],
    "test_sum_is_rounded_once": [
        ("product rounded", "y1 = x1 * c1[None, :] -", "y1 = (x1 * c1[None, :]).to(y_ptr.dtype.element_ty).to(tl.float32) -"),
    ],
    "test_any_strides[one head repeated (stride 0)-q]": [
        ("q's stride of heads for its output", "q_heads[:, None] * q_out_head_stride", "q_heads[:, None] * q_head_stride"),
        ("q's stride of heads for k", "k_heads[:, None] * k_head_stride", "k_heads[:, None] * q_head_stride"),
    ],
    "test_any_strides[one token repeated (stride 0)-dk_rot]": [
        ("k's stride of tokens for its output", "token * k_out_token_stride", "token * k_token_stride"),
    ],
    "test_any_strides[one sample repeated (stride 0)-dq_rot]": [
        ("q's stride of samples for its output", "batch * q_out_batch_stride", "batch * q_batch_stride"),
    ],
    "test_any_strides[every second column-q]": [
        ("columns taken for adjacent", "return x if x.stride(3) == 1 else out.copy_(x.detach()), out", "return x, out"),
    ],
    "test_any_strides[columns before heads-k]": [("the output's taken for adjacent", "if out.stride(3) != 1:", "if False:")],
    "test_any_strides_of_the_angles[tokens before samples-cos]": [
        ("cos's stride of samples for sin", "batch * sin_batch_stride", "batch * cos_batch_stride"),
        ("cos's stride of tokens for sin", "token * sin_token_stride", "token * cos_token_stride"),
    ],
    "test_any_strides_of_the_angles[every second column-sin]": [
        ("columns of sin taken for adjacent", "(t if t.stride(-1) == 1 else t.contiguous())", "t"),
    ],
    "test_outputs_have_the_layout_of_the_inputs": [
        ("outputs contiguous", "torch.empty_like(x)", "x.new_empty(x.shape)"),
    ],
    "test_heads_beyond_int32": [
        ("32-bit samples", "(tl.program_id(0) // T).to(tl.int64)", "(tl.program_id(0) // T).to(tl.int32)"),
        ("32-bit tokens", "(tl.program_id(0) % T).to(tl.int64)", "(tl.program_id(0) % T).to(tl.int32)"),
        ("32-bit heads", "tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),
    ],
    "test_inplace_gives_the_same_numbers_in_the_memory_it_was_given": [
        ("overwrites unasked", "x if inplace else _output_like(x)", "x"),
        ("does not overwrite", "x if inplace else _output_like(x)", "_output_like(x)"),
    ],
    "test_inplace_use_saved_before_raises": [
        ("overwrites without a word to autograd", "torch.autograd.graph.increment_version([q, k])", "pass"),
    ],
    "test_inplace_refuses_memory_that_is_shared_or_would_be_copied": [
        ("shared memory is overwritten", " or any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape))", ""),
        ("a copy is overwritten", "if t.stride(3) != 1 or any", "if any"),
    ],
    "test_inplace_refuses_what_autograd_watches": [
        ("overwrites what needs a gradient", "if t.requires_grad and torch.is_grad_enabled():", "if False:"),
    ],
    "test_inputs_and_upstream_gradients_are_never_changed": [
        ("upstream gradients overwritten", "*ctx.saved_tensors)", "*ctx.saved_tensors, inplace=True)"),
    ],
    "test_launchers_keep_out_of_autograd": [("the copy is autograd's", "out.copy_(x.detach())", "out.copy_(x)")],
    "test_gradient_of_the_angles_is_refused_not_silently_dropped": [
        ("gradient of sin is dropped", " or ctx.needs_input_grad[3]", ""),
    ],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():  #", "if False:  #"),
    ],
    "test_torch_compile_of_the_launchers_in_place": [
        ("compiled, does not overwrite", "t.copy_(result)  # as", "pass  # as"),
    ],
    "test_unsqueeze_dim_is_honoured[2]": [
        ("unsqueeze_dim ignored", "if unsqueeze_dim == 1:", "if unsqueeze_dim in (1, 2):"),
    ],
}  # fmt: skip

REVERSE_KL_FAULTS = {
    "test_rising_maxima_are_rescaled": [
        ("d_s not rescaled", "return a, d_s * factor, d_t", "return a, d_s, d_t"),
        ("d_t not rescaled", "d_t * tl.exp2(-rise_t * unit)", "d_t"),
        ("a not shifted", "(a + d_s * (rise_t - rise_s)) * factor, 0.0)  #", "a * factor, 0.0)  #"),
        ("a shifted the other way", "(rise_t - rise_s)) * factor, 0.0)  #", "(rise_s - rise_t)) * factor, 0.0)  #"),
        ("a not rescaled", "(rise_t - rise_s)) * factor, 0.0)  #", "(rise_t - rise_s)), 0.0)  #"),
        ("not rescaled to the row", "_rescale(a, d_s, d_t, m_s_row - m_s, m_t_row - m_t, unit)", "(a, d_s, d_t)"),
        ("teacher not rescaled to the row", "m_s_row - m_s, m_t_row - m_t, unit)", "m_s_row - m_s, m_t - m_t, unit)"),
    ],
    "test_one_tile_and_many_give_the_reference[tile0-dtype0]": [
        ("edge of the row not summed", "tl.sum(a) + tl.sum(w * x)", "tl.sum(a)"),
        ("edge of the teacher not summed", "tl.sum(d_t) + tl.sum(z)", "tl.sum(d_t)"),
        ("masked lanes are 0", 'mask=mask, other=-float("inf")', "mask=mask, other=0.0", 2),
        ("mean not subtracted", "w * factor * (x - mean)", "w * factor * x", 2),
        ("sign of the gradient", "w * factor * (x - mean)", "w * factor * (mean - x)", 2),
        ("student's statistics for the teacher", "stats = m_s_row, m_t_row,", "stats = m_s_row, m_s_row,"),
        ("powers of 2 in the gradient", "inverse_t / d_s * (unit * LN2)", "inverse_t / d_s * unit"),
        ("powers of 2 in the loss", "a_row / d_s_row * (unit * LN2) +", "a_row / d_s_row * unit +"),
        ("gradient not divided by n_counted", "tl.num_programs(0) if n_counted_ptr is None else tl.load(n_counted_ptr)", "1"),
        ("one tile not written", "for done in range(0, n_body, TILE_SIZE)", "for done in range(TILE_SIZE, n_body, TILE_SIZE)"),
        ("edge not written", "mask=in_edge)", "mask=in_edge & (edge < 0))"),
    ],
    "test_any_part_of_a_row_may_be_kept_in_the_cache[0]": [
        ("what is not kept is not read", "range(first_kept if kept else 0, n_read if kept else", "range(first_kept, n_read if kept else"),
    ],
    "test_any_part_of_a_row_may_be_kept_in_the_cache[300]": [
        ("what is kept is not read", "n_read if kept else first_kept, TILE_SIZE)", "first_kept, TILE_SIZE)"),
        ("a part is read twice", "range(first_kept if kept else 0, n_read", "range(0, n_read"),
    ],
    "test_temperature_divides_both_and_no_square_multiplies[dtype0-2]": [
        ("temperature multiplies", "1 / (LN2.value * SHRINK.value * temperature)", "temperature / (LN2.value * SHRINK.value)"),
        ("temperature ignored", "1 / (LN2.value * SHRINK.value * temperature)", "1 / (LN2.value * SHRINK.value)"),
        ("gradient not divided by T", "inverse_t = unit * LN2 * SHRINK", "inverse_t = 1.0"),
    ],
    "test_large_offset_does_not_cost_digits": [
        ("product rounded before m is subtracted", "tl.fma(logits[0], SHRINK, -m_s)", "tl.fma(logits[0] * 0.3, SHRINK / 0.3, -m_s)"),
    ],
    "test_logits_of_any_magnitude[True-dtype6-10000000000.0-0.6]": [
        ("maximum multiplied, and rounded", "tl.fma(logits[0], SHRINK, -m_s)", "tl.fma(logits[0], SHRINK * 0.3, -m_s * 0.3) / 0.3"),
    ],
    "test_rows_at_an_end_of_the_range[-1]": [
        ("first maximum is not the lowest number", "tl.constexpr(torch.finfo(torch.float32).min * 2.0**-24)", "tl.constexpr(-1e31)"),
    ],
    "test_vocabulary_masked_by_a_large_number[teacher--3.4028234663852886e+38]": [
        ("sum of large log-ratios overflows", "2.0**-24", "2.0**0", 2),
    ],
    "test_padded_vocabulary_is_not_nan[both-first chunk]": [
        ("-inf - -inf", "tl.where(w > 0, s - t, 0.0)", "s - t"),
        ("column of -inf is NaN", "tl.constexpr(torch.finfo(torch.float32).min * 2.0**-24)", 'tl.constexpr(-float("inf"))'),
    ],
    "test_reductions_with_and_without_a_mask[True-batchmean]": [
        ("mask ignored", "None if mask is None else mask.reshape(-1).contiguous()", "None"),
        ("all rows counted", "n_counted = mask.sum()", "n_counted = mask.numel() + 0 * mask.sum()"),
        ("loss not divided", "return row_loss.sum() / n_counted", "return row_loss.sum()"),
    ],
    "test_nan_logits_of_rows_that_do_not_count_stay_out": [
        ("rows that do not count are read", "tl.where(counted, n_body, 0), in_edge & counted", "n_body, in_edge", 2),
    ],
    "test_targets_as_a_mask": [
        ("only -100 is ignored", "mask = mask != self.ignore_index", "mask = mask != -100"),
    ],
    "test_any_grad_output": [
        ("given gradient is kept whatever grad_output", "if not GIVEN or scale != 1.0:", "if not GIVEN or scale == 3.0:"),
    ],
    "test_grad_output_of_every_row_with_unusual_strides": [
        ("one grad_output for all rows", "grad_output_ptr + tl.cast(row, tl.int64) * grad_output_stride", "grad_output_ptr"),
    ],
    "test_layouts_of_student_and_teacher[contiguous-odd row stride]": [
        ("teacher not cut like the student", "x.stride(1) == 1 and (x.stride(0) - x.shape[1]) % 8 == 0", "x.stride(1) == 1"),
    ],
    "test_layouts_of_student_and_teacher[contiguous-padded by sixteen]": [
        ("student's stride for the teacher", "t, t.stride(0), None if", "t, s.stride(0), None if"),
    ],
    "test_mass_that_underflows_where_the_teacher_has_none_is_not_nan": [
        ("inf * 0", "tl.where(factor > 0, (a + d_s * (rise_t - rise_s)) * factor, 0.0)", "(a + d_s * (rise_t - rise_s)) * factor"),
    ],
    "test_statistics_of_shards_combine_to_those_of_whole_rows": [
        ("shards' a not shifted", "(a + d_s * (rise_t - rise_s)) * factor, 0.0)\n    d_s, d_t", "a * factor, 0.0)\n    d_s, d_t"),
        ("shards' d_t not rescaled", "d_t * torch.exp2(-rise_t * _unit(temperature))", "d_t"),
    ],
    "test_gradient_of_the_forward_becomes_the_leafs_without_a_copy": [
        ("given gradient is held while it is handed out", "dstudent, ctx.dstudent = ctx.dstudent, None", "dstudent = ctx.dstudent"),
        ("given gradient not used", "mask, *options, now)", "mask, *options, False)"),
    ],
    "test_teacher_that_needs_a_gradient_is_refused": [
        ("teacher's gradient dropped", "if grad_enabled and ctx.needs_input_grad[1]:", "if False:"),
    ],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():", "if False:"),
    ],
}  # fmt: skip

FUSED_LAYER_FAULTS = {
    "test_outputs_and_gradients_match_float64": [
        ("dw of x, not of the norm", "rmsnorm_forward(x, norm_weight, ctx.eps)[0].view(-1, x.shape[-1])", "x.reshape(-1, x.shape[-1])"),
        ("dy of the last product alone", "dout @ weight if dy is None else dy.addmm_(dout, weight)", "dout @ weight"),
        ("dy of the first product alone", "dout @ weight if dy is None else dy.addmm_(dout, weight)", "dout @ weight if dy is None else dy"),
        ("residual's gradient dropped", "dx if dresidual is None else dx.add_(dresidual)", "dx"),
        ("residual's gradient subtracted", "dx.add_(dresidual)", "dx.sub_(dresidual)"),
        ("gradients exchanged", "return dgate, dup, dweight", "return dup, dgate, dweight"),
        ("dw_down of dgate", "h.view(-1, h.shape[-1]) if need_weight", "dgate.view(-1, h.shape[-1]) if need_weight"),
        ("gate and up exchanged", "linear(swiglu_forward(gate, up), weight)", "linear(swiglu_forward(up, gate), weight)"),
    ],
    "test_eps_is_used_where_it_shows": [
        ("another eps in the forward", "rmsnorm_forward(x, norm_weight, eps)", "rmsnorm_forward(x, norm_weight, 1e-5)"),
        ("another eps in the backward", "rmsnorm_forward(x, norm_weight, ctx.eps)", "rmsnorm_forward(x, norm_weight, 1e-5)"),
    ],
    "test_norm_linear_saves_x_rstd_and_parameters": [
        ("y is saved", "ctx.save_for_backward(x, norm_weight, rstd, *weights)", "ctx.save_for_backward(x, norm_weight, rstd, *weights, y)"),
        ("residual is copied", "return x.view_as(x), *", "return x.clone(), *"),
    ],
    "test_swiglu_linear_saves_gate_and_up_and_its_weight": [
        ("silu(gate) * up is saved", "ctx.save_for_backward(gate, up, weight)", "ctx.save_for_backward(gate, up, weight, swiglu_forward(gate, up))"),
    ],
    "test_norm_linear_with_frozen_inputs": [
        ("product for a frozen weight", "if used[i] and need:", "if used[i]:"),
        ("products for a frozen norm", "if not (need_x or need_norm_weight) or not any(used):", "if not any(used):"),
    ],
    "test_frozen_products_need_no_second_norm": [
        ("norm for frozen products", "if any(given and need for given, need in zip(used, need_weights)):", "if True:"),
    ],
    "test_gradient_of_the_residual_is_added": [
        ("gradient of the residual alone is dropped", "return dresidual, None, None, *dweights", "return None, None, None, *dweights"),
    ],
    "test_outputs_that_nobody_uses": [
        ("zeros for what nobody used", "        ctx.set_materialize_grads(False)  # None, not zeros, for a result that nobody used\n", ""),
    ],
    "test_backward_writes_over_gate_and_up_unless_the_graph_is_kept": [
        ("overwrites a graph that is kept", "swiglu_kernel._begin_backward() and", "True and"),
        ("does not overwrite", "inplace=inplace", "inplace=False"),
    ],
    "test_constants_are_not_overwritten": [("overwrites constants", " and all(need_both)", "")],
    "test_second_derivative_is_refused_not_silently_zero": [
        ("second derivative is zero", "if torch.is_grad_enabled():", "if False:"),
    ],
    "test_functions_take_the_layers_modules": [
        ("norm's eps ignored", "norm.variance_epsilon", "1e-5"),
    ],
}  # fmt: skip

DISTILL_FAULTS = {
    "test_loss_and_gradients_are_pytorchs[eager-2.5]": [
        ("forward KL", "reverse_kl(logits, teacher_logits, targets", "reverse_kl(teacher_logits, logits, targets"),
        ("temperature ignored by PyTorch", "counts, temperature)", "counts, 1.0)"),
    ],
    "test_loss_and_gradients_are_pytorchs[loss-2.5]": [
        ("temperature ignored by the kernel", "TritonReverseKLLoss(temperature)", "TritonReverseKLLoss()"),
        ("every position counts", "reverse_kl(logits, teacher_logits, targets != ignore_index)", "reverse_kl(logits, teacher_logits)"),
        ("labels not shifted", "loss_function(logits, labels)", "loss_function(logits, None, shift_labels=labels)"),
    ],
    "test_the_validation_loss_is_that_of_the_labels": [
        ("validation by the teacher", "if not self.training:", "if False:"),
    ],
    "test_the_teacher_stays_as_it_is_and_outside_of_the_student": [
        ("teacher is a part of the student", "    student.forward =", "    student.teacher = teacher\n    student.forward ="),
    ],
    "test_the_teacher_runs_once_per_step_and_keeps_nothing_for_a_backward": [
        ("teacher keeps a graph", "with torch.no_grad():", "with torch.enable_grad():"),
    ],
    "test_the_kernels_named_run_in_both_models": [
        ("kernel never used", "if fused else eager", "if False else eager"),
        ("kernel always used", "if fused else eager", "if True else eager"),
    ],
}  # fmt: skip

APPLY_FAULTS = {
    "test_in_evaluation_the_logits_are_untouched_where_gradients_are_wanted[cross_entropy]": [
        ("logits overwritten in evaluation", "inplace=without_logits", "inplace=True"),
    ],
    "test_the_gradient_takes_the_logits_memory_in_training_only": [
        ("never in place", "inplace=without_logits", "inplace=False"),
    ],
    "test_in_training_there_are_no_logits_and_a_tuple_is_refused[cross_entropy]": [
        ("overwritten logits handed out", "logits=None if without_logits else logits", "logits=logits"),
    ],
    "test_logits_that_somebody_else_holds_are_not_overwritten[cross_entropy]": [
        ("held logits overwritten", "self.training and is_plain(self.lm_head)", "self.training"),
    ],
    "test_another_label_may_be_ignored[cross_entropy-True]": [
        ("ignore_index dropped by cross_entropy", "TritonCrossEntropyLoss(ignore_index, ", "TritonCrossEntropyLoss("),
    ],
    "test_another_label_may_be_ignored[linear_cross_entropy-True]": [
        ("ignore_index dropped by linear_cross_entropy", "TritonLinearCrossEntropyLoss(ignore_index)", "TritonLinearCrossEntropyLoss()"),
    ],
    "test_subclass_of_a_part_keeps_its_forward[model.layers.1.self_attn-False]": [
        ("subclass bypassed", "if type(module) is base:", "if isinstance(module, base):"),
    ],
    "test_forward_that_was_put_into_a_class_before_is_called[False-LlamaMLP]": [
        ("patched class bypassed", "return FORWARDS.get(cls) is cls.forward", "return cls in FORWARDS"),
    ],
    "test_forward_that_was_put_into_a_class_before_is_called[True-LlamaMLP]": [
        ("class patched before the import bypassed", "    if is_from_the_same_package(cls.forward, cls)\n", ""),
    ],
    "test_forward_that_a_part_had_before_is_called[model.layers.0.mlp]": [
        ("patched module bypassed", ' and "forward" not in vars(module)', ""),
    ],
    "test_rotary_function_that_was_replaced_before_is_called": [
        ("patched rotary function bypassed", "if modeling_llama.apply_rotary_pos_emb is ROTARY:", "if True:"),
    ],
    "test_another_activation_in_one_mlp_is_called[True]": [
        ("activation bypassed", "is_unchanged(mlp) and type(mlp.act_fn) in SILU and is_unchanged(mlp.act_fn)", "is_unchanged(mlp)"),
    ],
    "test_loss_function_of_the_users_own_wins[cross_entropy-True-True]": [
        ("the user's loss bypassed", " and self.loss_function is ForCausalLMLoss", ""),
    ],
}  # fmt: skip

LLAMA_FAULTS = {
    "test_loss_and_gradient_are_hugging_faces[17]": [
        ("labels not shifted", "pad(labels[..., 1:], (0, 1)", "pad(labels, (0, 0)"),
    ],
    "test_another_ignore_index_is_hugging_faces[False-17]": [
        ("ignore_index dropped", "cross_entropy(logits, shift_labels, ignore_index)", "cross_entropy(logits, shift_labels, IGNORE_INDEX)"),
        ("ignored labels counted", "(shift_labels != ignore_index).sum()", "(shift_labels != IGNORE_INDEX).sum()"),
    ],
    "test_a_subclass_and_what_make_gives_back_stay": [
        ("subclass replaced", "if type(module) is cls]", "if isinstance(module, cls)]"),
    ],
    "tests.files_test::test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[one file, another shape]": [
        ("config.json changes last alone", "    loaded_here.replace(target / CONFIG)\n", ""),
    ],
    "tests.files_test::test_a_save_killed_at_any_moment_leaves_the_whole_old_or_the_whole_new_model[shards become one file]": [
        ("index goes before its shards", "(*sorted(shards_of(target / INDEX)), WEIGHTS, INDEX)", "(INDEX, WEIGHTS, *sorted(shards_of(target / INDEX)))"),
        ("old shards stay", "(*sorted(shards_of(target / INDEX)), WEIGHTS, INDEX)", "(WEIGHTS, INDEX)"),
    ],
    "tests.files_test::test_what_an_earlier_crash_left_is_removed_and_files_of_that_name_are_not": [
        ("crash leaves its files", "            shutil.rmtree(folder, ignore_errors=True)\n", "            pass\n"),
    ],
    "tests.files_test::test_an_old_index_cannot_name_files_of_the_user": [
        ("index names other folders' files", "Path(str(name)).name == name and", "isinstance(name, str) and"),
    ],
}  # fmt: skip

MEASURE_FAULTS = {
    "test_a_write_that_stops_half_way_leaves_the_old_record_and_nothing_beside": [
        ("written in place", "with open(unfinished, \"xb\") as file:", "with open(target, \"wb\") as file:"),
        ("half a file stays", "            os.unlink(unfinished)\n", "            pass\n"),
    ],
    "test_a_link_is_followed_and_stays": [("link replaced", "target = os.path.realpath(path)", "target = path")],
    "test_a_pipe_gets_the_record": [("pipe replaced", "    if written_straight(path):\n", "    if False:\n")],
    "test_permissions_stay_and_a_new_file_has_the_usual_ones": [
        ("permissions lost", "os.chmod(unfinished, stat.S_IMODE(before.st_mode))", "pass"),
    ],
    "test_a_flag_counts_as_given_when_its_value_is_the_default": [
        ("every flag counts as given", "for name, value in again.items() if value is not absent", "for name in again"),
    ],
}  # fmt: skip

TABLES = {
    "rmsnorm_kernel": NORM_FAULTS,
    "cross_entropy_kernel": LOSS_FAULTS,
    "next_steps.linear_cross_entropy_kernel": LINEAR_LOSS_FAULTS,
    "next_steps.swiglu_kernel": SWIGLU_FAULTS,
    "next_steps.adamw_kernel": ADAMW_FAULTS,
    "next_steps.rope_kernel": ROPE_FAULTS,
    "next_steps.reverse_kl_kernel": REVERSE_KL_FAULTS,
    "next_steps.fused_layer": FUSED_LAYER_FAULTS,
    "next_steps.distill": DISTILL_FAULTS,
    "next_steps.apply_kernels": APPLY_FAULTS,
    "harness.llama": LLAMA_FAULTS,
    "harness.measure": MEASURE_FAULTS,
}


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
    names = [kernel, *KERNELS.values(), "tests.properties_test"]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    spec = importlib.util.spec_from_file_location(kernel, file)
    sys.modules[kernel] = importlib.util.module_from_spec(spec)
    package, _, name = kernel.rpartition(".")
    with contextlib.ExitStack() as stack:
        if package:  # `from package import name` looks among the package's attributes first
            package = importlib.import_module(package)
            stack.enter_context(mock.patch.object(package, name, sys.modules[kernel], create=True))
        try:
            spec.loader.exec_module(sys.modules[kernel])
            yield
        finally:
            for name in names:
                sys.modules.pop(name, None)
            sys.modules.update(before)


def run_tests(kernel, source, tests, folder) -> Outcomes:
    """Of the tests, up to the first that fails with this source as the kernel's."""
    file = folder / f"{kernel.rpartition('.')[2]}.py"  # a file, because Triton reads a kernel's source from one
    # With operators of its own: a name that is registered once more is lost to the kernel that had it.
    file.write_text(source.replace('"tutorial::', '"mutant::'))
    paths = [test if "::" in test else f"{KERNELS[kernel]}::{test}" for test in tests]
    files_and_names = [path.split("::", 1) for path in paths]
    paths = [f"{HERE / file.replace('.', '/')}.py::{name}" for file, name in files_and_names]
    # Without the plugins that take half a second for collecting garbage, or the outer run's handlers and cache.
    plugins = "unraisableexception", "threadexception", "faulthandler", "cacheprovider"
    options = [
        "--noconftest",
        "-ptests.fixtures",
        "--capture=no",
        "--exitfirst",
        *(f"-pno:{plugin}" for plugin in plugins),
    ]
    outcomes = Outcomes()
    with imported_instead(kernel, file):
        pytest.main([*options, *paths], plugins=[outcomes])
    return outcomes


def source_of(kernel: str) -> str:
    return (HERE / f"{kernel.replace('.', '/')}.py").read_text()


@pytest.mark.parametrize("kernel", KERNELS)
def test_source_without_a_fault_passes_every_test_named_here(kernel, tmp_path):
    modules = dict(sys.modules)
    tests = list(TABLES[kernel])
    outcomes = run_tests(kernel, source_of(kernel), tests, tmp_path)
    assert not outcomes.raised and outcomes.passed >= len(tests)
    assert all(sys.modules[name] is module for name, module in modules.items()), "not all modules were put back"


FAULTS = [(kernel, test, *fault) for kernel in KERNELS for test, faults in TABLES[kernel].items() for fault in faults]


@pytest.mark.parametrize("kernel, test, fault", [pytest.param(f[0], f[1], f[3:], id=f"{f[0]}: {f[2]}") for f in FAULTS])
def test_fault_is_caught(kernel, test, fault, tmp_path):
    source = source_of(kernel)
    text, replacement, times = fault if len(fault) == 3 else (*fault, 1)
    assert source.count(text) == times, f"the fault no longer fits the source, adapt it: {text!r}"
    outcomes = run_tests(kernel, source.replace(text, replacement), [test], tmp_path)
    assert outcomes.raised, f"{test} passes in spite of the fault"
    assert all(isinstance(e, AssertionError | pytest.fail.Exception) for e in outcomes.raised), outcomes.raised
