"""Faults in linear_cross_entropy_kernel.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.linear_cross_entropy_kernel"
TESTS = "tests.linear_cross_entropy_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_one_chunk_and_many_give_the_reference[4-dtype0]": [
        ("dweight of the last chunk only", "beta=0 if first_row == 0 else 1", "beta=0"),
        ("dweight begins with what the memory held", "beta=0 if first_row == 0 else 1", "beta=1"),
        ("every chunk multiplied by the first one's rows", "dlogits.t(), x, beta", "dlogits.t(), rows[: len(x)], beta"),
        ("mean of each chunk", "*of_chunk, n_valid, ignore_index,", "*of_chunk, n_valid and (row_targets.narrow(*chunk) != -100).sum(), ignore_index,"),
        ("ignored rows' logits are multiplied", "        launch_scale(row_grads, rows, targets, ignore_index)", "        pass"),
    ],
    "test_rows_that_are_left_out_have_loss_and_gradient_of_zero": [
        ("the rows without a target are taken", "torch.argsort(ignored, stable=True)", "torch.argsort(~ignored, stable=True)"),
        ("gradients stay with the rows taken", "zeros.index_copy_(0, taken, dhidden)", "(zeros.narrow(0, 0, len(taken)).copy_(dhidden), zeros)[1]"),
        ("rows' grad_outputs not taken along", "grad_output.reshape(-1)[taken]", "grad_output.reshape(-1)[: len(taken)]"),
        ("losses stay with the rows taken", "index_copy(0, taken, loss)", "index_copy(0, taken.sort().values, loss.flip(0))"),
    ],
    "tests.contracts_autograd_test::test_tensors_that_are_held_negated[linear_cross_entropy-gradients]": [
        ("a negated grad_output goes uphill", "factor.resolve_neg()", "factor"),
    ],
    "tests.contracts_autograd_test::test_tensors_that_are_held_negated[linear_cross_entropy_rows-gradients]": [
        ("negated grad_outputs go uphill", "grad_of_loss.resolve_neg()", "grad_of_loss"),
    ],
    "test_rows_without_a_target_are_not_multiplied": [
        ("all rows multiplied", "max_targets < FEW * targets.numel()", "max_targets < 0"),
    ],
    "test_too_small_a_number_of_targets_gives_nan_not_a_wrong_gradient": [
        ("rows go missing silently", ".masked_fill(too_many, outside)", ""),
        ("no row is left to be NaN", "[: max(max_targets, 1)]", "[:max_targets]"),
    ],
    "test_too_many_targets_are_noticed_whatever_is_ignored": [
        ("what marks the rows is ignored", "outside = -1 if ignore_index != -1 else -2", "outside = -1"),
    ],
    "test_where_nearly_all_rows_have_a_target_the_bits_are_those_without_a_number": [
        ("rows always moved", "max_targets < FEW * targets.numel()", "max_targets < 2 * targets.numel()"),
    ],
    "test_number_of_targets_that_cannot_be_is_refused": [
        ("True is a number", "type(max_targets) in (int, torch.SymInt)", "isinstance(max_targets, int | torch.SymInt)"),
    ],
    "test_chunks_are_few_equal_and_of_whole_tiles": [
        ("last chunk is small", "return min(chunk_size, -(-n_rows // (n_chunks * 128)) * 128)", "return chunk_size"),
        ("no default is large enough for 4 chunks", "(MAX_ROUNDINGS * 128)) * 128), MAX_CHUNK)", "(MAX_ROUNDINGS * 128)) * 128), MIN_CHUNK)"),
    ],
    "test_error_of_dweight_does_not_grow_with_the_number_of_chunks": [
        ("dweight never summed in fp32", "dtype=torch.float32 if fp32_dweight else None", "dtype=None"),
        ("rounded after any number of chunks", "chunk_rows) > MAX_ROUNDINGS", "chunk_rows) > 1000"),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[linear_cross_entropy-fp32]": [
        ("grad_output ignored", "scale_gradient(gradient.view(-1, gradient.shape[-1]), grad_output)", "pass"),
    ],
    "tests.contracts_numbers_test::test_outputs_and_gradients_match_float64[linear_cross_entropy_rows-fp32]": [
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
        ("ignored rows counted", "count_valid(row_targets, ignore_index, reduction)", "count_valid(row_targets, 2**50, reduction)"),
    ],
    "test_no_valid_row_is_as_in_pytorch": [
        ("mean of no row is 0", "return reduced(row_loss.view(targets.shape), reduction),", "return reduced(row_loss.view(targets.shape), reduction).nan_to_num(),"),
    ],
    "test_frozen_head_or_hidden_states_take_no_product_and_no_buffer": [
        ("dweight of a frozen head", "for need in ctx.needs_input_grad[:2]]", "for need in (True, True)]"),
    ],
    "test_no_grad_and_frozen_inputs_compute_the_loss_only": [
        ("gradients under no_grad", "now = grad_enabled and", "now ="),
    ],
    "test_logits_never_exist_as_a_whole": [
        ("one chunk", "chunk_rows = _chunk_rows(n_rows, chunk_size)", "chunk_rows = max(n_rows, 1)"),
        ("rows begin anywhere", "V + -V % 8", "V"),
    ],
    "tests.contracts_autograd_test::test_second_backward_adds_to_the_leaves_own_gradients[linear_cross_entropy]": [
        ("gradients handed out twice", "gradients, ctx.gradients = ctx.gradients, None", "gradients = ctx.gradients"),
    ],
    "test_gradients_become_the_leaves_grad_without_a_copy": [
        ("gradients are kept", "gradients, ctx.gradients = ctx.gradients, None", "gradients = ctx.gradients"),
    ],
    "tests.contracts_autograd_test::test_input_changed_before_the_backward_is_noticed_or_does_not_count[linear_cross_entropy-hidden]": [
        ("changes go unseen", "ctx.save_for_backward(hidden, weight,", "ctx.save_for_backward(hidden.clone(), weight.clone(),"),
    ],
    "tests.contracts_autograd_test::test_second_derivative_is_refused_not_silently_zero[linear_cross_entropy-True]": [
        ("second derivative is zero", 'support.refuse_second_derivative("TritonLinearCrossEntropyLoss")', "pass"),
    ],
    "test_autocast_multiplies_in_its_dtype_and_returns_the_leaves_dtype": [
        ("autocast ignored", "if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):", "if False:"),
    ],
}  # fmt: skip
