"""Faults in adamw8.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.adamw8"
TESTS = "tests.adamw8_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_steps_match_the_reference[FP32]": [
        ("first scale for all", "m_scale_ptr = moments[2] + tl.program_id(0)", "m_scale_ptr = moments[2]"),
        ("m's scale for v", "root_scale_ptr = m_scale_ptr + tl.num_programs(0)", "root_scale_ptr = m_scale_ptr"),
        ("v for its root", "step_of(p, g, m, root * root, factors)", "step_of(p, g, m, root, factors)"),
        ("sign lost in the code", "m_code = tl.where(m < 0, -m_code, m_code)", "m_code = m_code * 1.0"),
        ("sign lost in m", "m = tl.where(m_code < 0, -m, m)", "m = m * 1.0"),
        ("scale without its power", "* (1 / 127**4)\n    root_scale", "* (1 / 127**3)\n    root_scale"),
        ("codes of m not written", "    tl.store(m_ptr + lane, m_code.to(tl.int8), mask=mask)\n", ""),
        ("codes of v not written", "    tl.store(v_ptr + lane, tl.maximum(v_code, 0.0).to(tl.uint8), mask=mask)\n", ""),
        ("scales of v not written", "    tl.store(root_scale_ptr, root_scale)\n", ""),
        ("last program lost", "(triton.cdiv(n, BLOCK),)", "(n // BLOCK,)"),
        ("last element lost", "mask = lane < n - start", "mask = lane < n - start - 1"),
    ],
    "test_codes_are_the_references": [
        ("codes cut off", "* levels + 0.5)\n\n\n# Their", "* levels)\n\n\n# Their"),
        ("square codes", "tl.sqrt(tl.sqrt(x / scale))", "tl.sqrt(x / scale)"),
    ],
    "test_a_code_is_the_nearest_one_and_v_has_none_for_0": [
        ("codes cut off in the formula", "* levels + 0.5).floor()", "* levels).floor()"),
        ("v rounded down to the smallest code of m", "(_nearest_code(root, scales[1], 256) - 1).clamp_min(0)", "_nearest_code(root, scales[1], 255)"),
    ],
    "test_no_step_explodes_where_one_element_of_a_block_is_large[1e-12]": [
        ("a code of 0 for v", "tl.load(v_ptr + lane, mask=mask, other=0).to(tl.float32) + 1.0", "tl.load(v_ptr + lane, mask=mask, other=0).to(tl.float32) * (256 / 255)"),
    ],
    "test_first_step_is_that_of_fp32_moments_to_the_bit[0]": [
        ("every program draws alike", "p, seed, tl.program_id(0), 0,", "p, seed, tl.program_id(0) * 0, 0,"),
    ],
    "test_second_moment_decays_by_a_tenth_of_a_percent_a_step": [
        ("a scale never falls", "tl.max(root, 0)\n", "tl.maximum(tl.max(root, 0), root_scale * 256**4)\n"),
    ],
    "tests.optimizers_test::test_what_is_not_finite_stays_in_its_element[adamw8-inf]": [
        ("infinity in a scale", "tl.where(fits, tl.abs(m), 0.0), tl.where(fits, tl.sqrt(v), 0.0)", "tl.abs(m), tl.sqrt(v)"),
    ],
    "test_square_beyond_fp32_is_forgotten_with_its_gradient": [
        ("m without its v", "tl.where(fits, tl.abs(m), 0.0)", "tl.where(m == m, tl.abs(m), 0.0)"),
    ],
    "tests.optimizers_test::test_views_are_stepped_in_their_memory_alone[adamw8-columns]": [
        ("a copy not written back", "if not p.is_contiguous():\n        p.detach().copy_(p_dense)", "if False:\n        p.detach().copy_(p_dense)"),
    ],
    "tests.optimizers_test::test_gradients_of_any_layout[adamw8-transposed]": [
        ("gradient as it lies", "grad.detach().contiguous()", "grad.detach()"),
    ],
    "tests.optimizers_test::test_settings_are_pytorchs[adamw8-maximize]": [
        ("maximize in name only", "MAXIMIZE=bool(maximize)", "MAXIMIZE=False"),
    ],
    "tests.adamw_test::test_step_continues_from_the_count_it_is_given[8 bits-1]": [
        ("counts from 2", "tl.load(steps_done_ptr) + 1.0", "tl.load(steps_done_ptr) + 2.0"),
    ],
    "tests.adamw_test::test_bad_input_is_refused_with_a_sentence": [
        ("any codes", '("m", m, (torch.int8,), shape)', '("m", m, (torch.int8, torch.uint8), shape)'),
        ("codes of any strides", "if not t.is_contiguous():\n            given", "if False:\n            given"),
        ("any number of blocks", "(2, triton.cdiv(p.numel(), BLOCK))),", "None),"),
    ],
}  # fmt: skip
