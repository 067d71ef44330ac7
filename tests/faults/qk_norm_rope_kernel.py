"""Faults in qk_norm_rope_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.qk_norm_rope_kernel"
TESTS = "tests.qk_norm_rope_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[qk_norm_rope-fp32]": [
        ("y1 not rotated", " - n2 * _for_heads(s1)", ""),
        ("sign of sin in y1", " - n2 * _for_heads(s1)", " + n2 * _for_heads(s1)"),
        ("sign of sin in y2", " + n1 * _for_heads(s2)", " - n1 * _for_heads(s2)"),
        ("norm of one half", "tl.sum(x1 * x1 + x2 * x2, axis=1)", "tl.sum(x1 * x1, axis=1)"),
        ("mean over a half", "_sum_of_squares(x1, x2) / (2 * HALF)", "_sum_of_squares(x1, x2) / HALF", 2),
        ("weight left out in y", "n1, n2 = x1 * rstd * _for_heads(w1)", "n1, n2 = x1 * rstd"),
        ("first half of a weight for both", "x2 * rstd * _for_heads(w2)", "x2 * rstd * _for_heads(w1)"),
        ("q's block taken for k's", "T, eps, block - n_q_blocks,", "T, eps, block,"),
        ("k's first block taken for q's", "if block < n_q_blocks:\n        _forward", "if block <= n_q_blocks:\n        _forward"),
        ("cos for sin", "s1, s2 = _load_row(row_of(sin,", "s1, s2 = _load_row(row_of(cos,", 2),
        ("first half of a row for both", "_load_halves(ptrs, cols < HALF, HALF)", "_load_halves(ptrs, cols < HALF, 0)"),
        ("first half of a head for both", "tl.load(ptrs + HALF, mask", "tl.load(ptrs, mask"),
        ("first sample's cos for all", "angles_of(cos),", "(cos, 0, cos.stride(-2)),", 2),
        ("second half not written", "tl.store(ptrs + HALF, y2", "tl.store(ptrs, y2"),
        ("k's number of heads for q", "_strided(q_rot), n_q_heads)", "_strided(q_rot), n_k_heads)"),
        ("k's number of heads for dq", "_strided(dq), n_q_heads,", "_strided(dq), n_k_heads,"),
        ("gradient turned forward", "u1 = dy1 * _for_heads(c1) + dy2", "u1 = dy1 * _for_heads(c1) - dy2"),
        ("halves of sin not exchanged in the backward", "dy2 * _for_heads(s2)", "dy2 * _for_heads(s1)"),
        ("dx without the mean", "rstd * (uw1 - x1 * mean)", "rstd * uw1"),
        ("the mean added", "uw1 - x1 * mean", "uw1 + x1 * mean"),
        ("mean of one half's products", "uw1 * x1 + uw2 * x2, axis", "uw1 * x1, axis"),
        ("mean of the products over a half", "axis=1) / (2 * HALF))[:, None]", "axis=1) / HALF)[:, None]"),
        ("the mean without rstd", "mean = rstd * (tl.sum", "mean = (tl.sum"),
        ("x for x_hat in dx", "x1, x2 = x1 * rstd, x2 * rstd", "x2 = x2 * rstd"),
        ("dx without the weight", "uw1, uw2 = u1 * _for_heads(w1), u2", "uw1, uw2 = u1, u2"),
        ("q's weight in dk", "_strided(k), k_weight, _strided(dk)", "_strided(k), q_weight, _strided(dk)"),
        ("dw of the gradient as it came", "dw1 += u1 * x1", "dw1 += dy1 * x1"),
        ("dw of x, not x_hat", "dw2 += u2 * x2", "dw2 += u2 * x2 / rstd"),
        ("dw of k is q's", "(parts[1], dk_weight,", "(parts[0], dk_weight,"),
        ("dw's halves exchanged", "cols, dw1, dw2, cols < HALF", "cols, dw2, dw1, cols < HALF"),
        ("the weight after the rotation", "n1 * _for_heads(s2)", "x1 * rstd * _for_heads(w2) * _for_heads(s2)"),
        ("q's weight for both", "k_weight.contiguous(), _strided(k_rot)", "q_weight.contiguous(), _strided(k_rot)"),
    ],
    "test_eps_is_used_where_it_shows": [
        ("eps is another", "/ (2 * HALF) + eps)", "/ (2 * HALF) + 1e-7)", 2),
        ("eps left out", "/ (2 * HALF) + eps)", "/ (2 * HALF))", 2),
    ],
    "test_eps_of_zero_leaves_no_nan_from_heads_that_are_none": [
        ("lanes without a head counted", "tl.where(mask, dw1, 0.0)", "dw1"),
    ],
    "tests.rope_test::test_results_are_rounded_once[qk_norm_rope-dtype1]": [
        ("x_hat rounded", "n1, n2 = x1 * rstd *", "n1, n2 = (x1 * rstd).to(tl.bfloat16).to(tl.float32) *"),
    ],
    "tests.contracts_numbers_test::test_ragged_sizes[qk_norm_rope-3-2-6]": [
        ("last column lost", "(cols < HALF)[None, :]", "(cols < HALF - 1)[None, :]"),
        ("masked lanes are 1", "tl.load(ptrs, mask=mask, other=0.0)", "tl.load(ptrs, mask=mask, other=1.0)"),
    ],
    "tests.contracts_numbers_test::test_large_sizes_with_the_shipped_tiles[qk_norm_rope-17-5-256-fp32]": [
        ("first block's heads for all", "block.to(tl.int64) * BLOCK_HEADS +", ""),
        ("first block of k's heads for all in the backward", "T, eps, block, n_k_blocks,", "T, eps, 0 * block, n_k_blocks,"),
        ("last block lost", "[(B * T, n_q_blocks + n_k_blocks)]", "[(B * T, n_q_blocks + n_k_blocks - 1)]"),
        ("heads that fill no block lost", "triton.cdiv(n_k_heads, block_heads)", "n_k_heads // block_heads"),
        ("one block's sums for all", "* n_blocks + block\n", "* n_blocks\n"),
    ],
    "tests.contracts_numbers_test::test_no_row_is_lost_between_programs[qk_norm_rope-17]": [
        ("last token skipped", "tl.program_id(0), n_tokens,", "tl.program_id(0), n_tokens - 1,"),
        ("dw of a program's last token only", "dw1 += u1 * x1", "dw1 = u1 * x1"),
        ("dw of one program lost", "                n_programs,\n                D,", "                n_programs - 1,\n                D,"),
    ],
    "test_any_number_of_programs_gives_the_same_gradients": [
        ("sums of k's blocks as far apart as q's", "eps, block, n_k_blocks,", "eps, block, n_q_blocks,"),
        ("sums of k's last blocks lost", "(parts[1], dk_weight, blocks[1])", "(parts[1], dk_weight, blocks[0])"),
    ],
    "test_no_partial_sum_is_lost_at_the_end": [
        ("last columns lost", "(cols < n_cols)[None, :]", "(cols < n_cols - 1)[None, :]"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-q-dimension 1 repeated (stride 0)]": [
        ("q's strides for its results", "_strided(q_rot)", "(q_rot, *q.stride()[:3])"),
        ("q's strides for its gradient", "_strided(dq)", "(dq, *q.stride()[:3])"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-q-every second column]": [
        ("columns taken for adjacent", "if x.stride(3) == 1 and 1 not in strides:", "if True:"),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-k-columns outermost]": [
        ("the output's taken for adjacent", "support.output_like(k)", "torch.empty_like(k)", 2),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-sin-every second column]": [
        ("columns of sin taken for adjacent", "angles_of(sin),", "(sin, *sin.stride()[:2]),", 2),
    ],
    "tests.contracts_numbers_test::test_any_strides[qk_norm_rope-q_weight-every second column]": [
        ("weight taken for adjacent", "q_weight.contiguous()", "q_weight", 2),
    ],
    "tests.rope_test::test_results_have_the_layout_of_the_inputs": [
        ("results contiguous", "support.output_like(q)", "q.new_empty(q.shape)", 2),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[qk_norm_rope-q-0]": [
        ("32-bit samples", "(number // T).to(tl.int64)", "(number // T).to(tl.int32)"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[qk_norm_rope-dk_rot-1]": [
        ("32-bit heads", "block.to(tl.int64) * BLOCK_HEADS", "block * BLOCK_HEADS"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[qk_norm_rope-q-2]": [
        ("32-bit tokens", "(number % T).to(tl.int64)", "(number % T).to(tl.int32)"),
    ],
    "tests.contracts_autograd_test::test_inputs_and_upstream_gradients_are_never_changed[qk_norm_rope]": [
        ("overwrites unasked", "return support.output_like(q), support.output_like(k), *dweights", "return q.detach(), k.detach(), *dweights"),
    ],
    "test_frozen_weights_get_no_gradient_and_no_buffer": [
        ("few programs and their sums for frozen weights", "    if need_weights:\n        n_programs =", "    if True:\n        n_programs ="),
        ("dw for frozen weights", "need_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]", "need_weights = True"),
    ],
    "tests.contracts_autograd_test::test_frozen_inputs_leave_the_others_their_gradients[qk_norm_rope-q-k-k_weight]": [
        ("q's weight decides alone", "ctx.needs_input_grad[2] or ctx.needs_input_grad[3]", "ctx.needs_input_grad[2]"),
    ],
    "tests.rope_test::test_gradient_of_the_angles_is_refused_not_silently_dropped": [
        ("gradient of sin is dropped", " or ctx.needs_input_grad[6]", ""),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[qk_norm_rope-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("The fused norm and RoPE")', "pass"),
    ],
    "tests.rope_test::test_unsqueeze_dim_is_honoured": [
        ("unsqueeze_dim ignored", "if unsqueeze_dim == 1:", "if True:"),
    ],
}  # fmt: skip
