"""Faults in qk_norm_rope_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.qk_norm_rope_kernel"
TESTS = "tests.qk_norm_rope_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[qk_norm_rope-fp32]": [
        ("y1 not rotated", " - n2 * s1[None, :]", ""),
        ("sign of sin in y1", " - n2 * s1[None, :]", " + n2 * s1[None, :]"),
        ("sign of sin in y2", " + n1 * s2[None, :]", " - n1 * s2[None, :]"),
        ("norm of one half", "tl.sum(x1 * x1 + x2 * x2, axis=1)", "tl.sum(x1 * x1, axis=1)"),
        ("mean over a half", "x2 * x2, axis=1) / (2 * HALF)", "x2 * x2, axis=1) / HALF"),
        ("weight left out in y", "n1, n2 = x_hat1 * w1[None, :], x_hat2 *", "n1, n2 = x_hat1, x_hat2 *"),
        ("first half of a weight for both", "q_ptrs, q1, q2, qw1, qw2", "q_ptrs, q1, q2, qw1, qw1"),
        ("q's weight for k in y", "k_ptrs, k1, k2, kw1, kw2", "k_ptrs, k1, k2, qw1, qw2"),
        ("cos for sin", "s1, s2 = _load_row(_row_of(sin,", "s1, s2 = _load_row(_row_of(cos,", 2),
        ("first half of a row for both", "return first.to(tl.float32), second.to", "return first.to(tl.float32), first.to"),
        ("first sample's cos for all", "return t, 0 if shared else t.stride(0), t", "return t, 0, t"),
        ("second half not written", "tl.store(ptrs + HALF, y2", "tl.store(ptrs, y2"),
        ("k's number of heads for q", "_my_heads(n_q_heads,", "_my_heads(n_k_heads,", 2),
        ("gradient turned forward", "u1 = dy1 * c1[None, :] + dy2", "u1 = dy1 * c1[None, :] - dy2"),
        ("halves of sin not exchanged in the backward", "dy2 * s2[None, :]", "dy2 * s1[None, :]"),
        ("dx without the mean", "rstd * (uw1 - x_hat1 * mean)", "rstd * uw1"),
        ("the mean added", "uw1 - x_hat1 * mean", "uw1 + x_hat1 * mean"),
        ("mean of one half's products", "uw1 * x_hat1 + uw2 * x_hat2, axis", "uw1 * x_hat1, axis"),
        ("dx without the weight", "uw1, uw2 = u1 * w1[None, :], u2", "uw1, uw2 = u1, u2"),
        ("q's weight in dk", "k_dy2, k1, k2, kw1, kw2", "k_dy2, k1, k2, qw1, qw2"),
        ("dw of the gradient as it came", "return u1 * x_hat1, u2", "return dy1 * x_hat1, u2"),
        ("dw of x, not x_hat", "return u1 * x_hat1, u2 * x_hat2", "return u1 * x_hat1, u2 * x2.to(tl.float32)"),
        ("dw of q and k exchanged", "if which == 0:", "if which == 1:"),
        ("dw's halves exchanged", "dqw1, dqw2, q_mask, cols", "dqw2, dqw1, q_mask, cols"),
    ],
    "test_a_head_is_normalized_first_and_then_turned": [
        ("the weight after the rotation", "n1 * s2[None, :]", "x_hat1 * w2[None, :] * s2[None, :]"),
    ],
    "test_the_others_weight_changes_nothing": [
        ("q's weight for both", "k_weight.contiguous(), _strided(k_rot)", "q_weight.contiguous(), _strided(k_rot)"),
    ],
    "test_eps_is_used_where_it_shows": [
        ("eps is another", "/ (2 * HALF) + eps)", "/ (2 * HALF) + 1e-7)"),
        ("eps outside the mean", "/ (2 * HALF) + eps)[:, None]", "/ (2 * HALF))[:, None]"),
    ],
    "test_eps_of_zero_leaves_no_nan_from_heads_that_are_none": [
        ("lanes without a head counted", "tl.where(mask, dw1, 0.0)", "dw1"),
    ],
    "test_results_are_rounded_once": [
        ("x_hat rounded", "return x1 * rstd, x2 * rstd, rstd", "return (x1 * rstd).to(tl.bfloat16).to(tl.float32), x2 * rstd, rstd"),
    ],
    "tests.contracts_numbers_test::test_ragged_sizes[qk_norm_rope-3-2-6]": [
        ("last column lost", "(cols < HALF)[None, :]", "(cols < HALF - 1)[None, :]"),
        ("masked lanes are 1", "tl.load(ptrs, mask=mask, other=0.0)", "tl.load(ptrs, mask=mask, other=1.0)"),
    ],
    "tests.contracts_numbers_test::test_large_sizes_with_the_shipped_tiles[qk_norm_rope-17-5-256-fp32]": [
        ("first group's heads for all", "tl.program_id(1).to(tl.int64) * BLOCK +", ""),
        ("last group lost", "[(B * T, n_groups)]", "[(B * T, n_groups - 1)]"),
        ("one group's sums for all", "+ tl.program_id(1)\n", "\n"),
    ],
    "tests.contracts_numbers_test::test_no_row_is_lost_between_programs[qk_norm_rope-17]": [
        ("last token skipped", "tl.program_id(0), n_tokens,", "tl.program_id(0), n_tokens - 1,"),
        ("dw of a program's last token only", "dkw1 += dw1", "dkw1 = dw1"),
        ("dw of one program lost", "n_programs * n_groups,", "n_programs * n_groups - 1,"),
    ],
    "test_no_partial_sum_is_lost_at_the_end": [
        ("last columns lost", "(cols < n_cols)[None, :]", "(cols < n_cols - 1)[None, :]"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-q-dimension 1 repeated (stride 0)]": [
        ("q's strides for its results", "_strided(q_rot)", "(q_rot, *q.stride()[:3])"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-q-every second column]": [
        ("columns taken for adjacent", "x = x if x.stride(3) == 1 else x.contiguous()", "pass"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-k-columns outermost]": [
        ("the output's taken for adjacent", "if out.stride(3) != 1:", "if False:"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-sin-every second column]": [
        ("columns of sin taken for adjacent", "t = t if t.stride(-1) == 1 else t.contiguous()", "pass"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-q_weight-every second column]": [
        ("weight taken for adjacent", "q_weight.contiguous()", "q_weight", 2),
    ],
    "test_results_have_the_layout_of_the_inputs": [
        ("results contiguous", "torch.empty_like(x)", "x.new_empty(x.shape)"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[qk_norm_rope-q-0]": [
        ("32-bit samples", "(number // T).to(tl.int64)", "(number // T).to(tl.int32)"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[qk_norm_rope-dk_rot-1]": [
        ("32-bit heads", "tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[qk_norm_rope-q-2]": [
        ("32-bit tokens", "(number % T).to(tl.int64)", "(number % T).to(tl.int32)"),
    ],
    "tests.contracts_autograd_test::test_inputs_and_upstream_gradients_are_never_changed[qk_norm_rope]": [
        ("overwrites unasked", "return _output_like(q), _output_like(k), *dweights", "return q.detach(), k.detach(), *dweights"),
    ],
    "test_frozen_weights_get_no_gradient_and_no_buffer": [
        ("dw for frozen weights", "need_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]", "need_weights = True"),
    ],
    "test_one_weight_may_be_frozen": [
        ("q's weight decides alone", "ctx.needs_input_grad[2] or ctx.needs_input_grad[3]", "ctx.needs_input_grad[2]"),
    ],
    "test_gradient_of_the_angles_is_refused_not_silently_dropped": [
        ("gradient of sin is dropped", " or ctx.needs_input_grad[6]", ""),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[qk_norm_rope-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("The fused norm and RoPE")', "pass"),
    ],
    "test_unsqueeze_dim_is_honoured[2]": [
        ("unsqueeze_dim ignored", "if unsqueeze_dim == 1:", "if True:"),
    ],
}  # fmt: skip
