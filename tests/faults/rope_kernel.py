"""Faults in rope_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.rope_kernel"
TESTS = "tests.rope_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[rope-fp32]": [
        ("y1 not rotated", " - x2 * s1[None, :]", ""),
        ("sign of sin in y1", " - x2 * s1[None, :]", " + x2 * s1[None, :]"),
        ("sign of sin in y2", " + x1 * s2[None, :]", " - x1 * s2[None, :]"),
        ("backward is the forward", "if BACKWARD:", "if False:"),
        ("halves of sin not exchanged in the backward", "s1, s2 = -s2, -s1", "s1, s2 = -s1, -s2"),
        ("sin not negated in the backward", "s1, s2 = -s2, -s1", "s1, s2 = s2, s1"),
        ("first half of cos for both", "c1, c2 = c1.to(tl.float32), c2.to", "c1, c2 = c1.to(tl.float32), c1.to"),
        ("first half of sin for both", "s1, s2 = s1.to(tl.float32), s2.to", "s1, s2 = s1.to(tl.float32), s1.to"),
        ("cos for sin", "s1, s2 = s1.to(tl.float32), s2", "s1, s2 = c1.to(tl.float32), s2"),
        ("first sample's cos for all", "angles_of(cos),", "(cos, 0, cos.stride(-2)),"),
        ("first token's sin for all", "angles_of(sin),", "(*angles_of(sin)[:2], 0),"),
        ("second half not written", "tl.store(y_ptrs + HALF, y2", "tl.store(y_ptrs, y2"),
        ("k's halves exchanged", "k_ptrs, k1, k2, c1", "k_ptrs, k2, k1, c1"),
        ("k's number of heads for q", "(q_heads < n_q_heads)", "(q_heads < n_k_heads)"),
        ("last head of k lost", "(k_heads < n_k_heads)", "(k_heads < n_k_heads - 1)"),
    ],
    "tests.contracts_numbers_test::test_ragged_sizes[rope-3-2-6]": [
        ("second half after the block", "q_heads, cols), q_mask, HALF)", "q_heads, cols), q_mask, BLOCK_HALF)"),
        ("last column lost", "cols < HALF", "cols < HALF - 1"),
    ],
    "tests.contracts_numbers_test::test_large_sizes_with_the_shipped_tiles[rope-17-5-512-fp32]": [
        ("first group's heads of q for all", "group * BLOCK_Q + tl.arange(0, BLOCK_Q)", "tl.arange(0, BLOCK_Q)"),
        ("first group's heads of k for all", "group * BLOCK_K + tl.arange(0, BLOCK_K)", "tl.arange(0, BLOCK_K)"),
        ("last group lost", "[(B * T, n_groups)]", "[(B * T, n_groups - 1)]"),
    ],
    "test_results_are_rounded_once[rope-dtype1]": [
        ("product rounded", "y1 = x1 * c1[None, :] -", "y1 = (x1 * c1[None, :]).to(y_ptrs.dtype.element_ty).to(tl.float32) -"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rope-q-dimension 1 repeated (stride 0)]": [
        ("q's stride of heads for its output", "(q_rot, *q_rot.stride()[:3])", "(q_rot, q_rot.stride(0), q.stride(1), q_rot.stride(2))"),
        ("q's stride of heads for k", "(k, *k.stride()[:3])", "(k, k.stride(0), q.stride(1), k.stride(2))"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rope-dk_rot-dimension 2 repeated (stride 0)]": [
        ("k's stride of tokens for its output", "(k_rot, *k_rot.stride()[:3])", "(k_rot, *k_rot.stride()[:2], k.stride(2))"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rope-dq_rot-dimension 0 repeated (stride 0)]": [
        ("q's stride of samples for its output", "(q_rot, *q_rot.stride()[:3])", "(q_rot, q.stride(0), *q_rot.stride()[1:3])"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rope-q-every second column]": [
        ("columns taken for adjacent", "return x if x.stride(3) == 1 else out.copy_(x.detach())", "return x"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rope-k-columns outermost]": [
        ("the output's taken for adjacent", "support.output_like(k)", "torch.empty_like(k)"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rope-cos-dimensions 0 and 1 exchanged]": [
        ("cos's stride of samples for sin", "angles_of(sin),", "(sin, cos.stride(0), sin.stride(1)),"),
        ("cos's stride of tokens for sin", "angles_of(sin),", "(sin, sin.stride(0), cos.stride(1)),"),
    ],
    "tests.contracts_numbers_test::test_any_strides[rope-sin-every second column]": [
        ("columns of sin taken for adjacent", "t = t if t.stride(-1) == 1 else t.contiguous()", "pass"),
    ],
    "test_results_have_the_layout_of_the_inputs": [
        ("outputs contiguous", "support.output_like(q)", "q.new_empty(q.shape)"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[rope-q-0]": [
        ("32-bit samples", "(tl.program_id(0) // T).to(tl.int64)", "(tl.program_id(0) // T).to(tl.int32)"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[rope-k-1]": [
        ("32-bit heads", "tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),
    ],
    "tests.contracts_numbers_test::test_rows_beyond_int32[rope-q-2]": [
        ("32-bit tokens", "(tl.program_id(0) % T).to(tl.int64)", "(tl.program_id(0) % T).to(tl.int32)"),
    ],
    "tests.contracts_autograd_test::test_inputs_and_upstream_gradients_are_never_changed[rope]": [
        ("overwrites unasked", "return support.output_like(q), support.output_like(k)", "return q.detach(), k.detach()"),
    ],
    "test_launchers_keep_out_of_autograd": [
        ("the copy is autograd's", "out.copy_(x.detach())", "out.copy_(x)"),
    ],
    "test_gradient_of_the_angles_is_refused_not_silently_dropped": [
        ("gradient of sin is dropped", " or ctx.needs_input_grad[3]", ""),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[rope-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("The fused RoPE")', "pass"),
    ],
    "test_unsqueeze_dim_is_honoured": [
        ("unsqueeze_dim ignored", "if unsqueeze_dim == 1:", "if unsqueeze_dim in (1, 2):"),
    ],
}  # fmt: skip
