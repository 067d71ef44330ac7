"""Faults in lora_swiglu.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.lessons.lora_swiglu"
TESTS = "tests.lora_swiglu_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_the_numbers_are_those_of_products_that_add": [
        (
            "up with gate's columns of h",
            "_columns(h_ptr + R_GATE, R_GATE + R_UP",
            "_columns(h_ptr, R_GATE + R_UP",
            2,
        ),
        ("up with gate's scale", "up = _add(up, s_up,", "up = _add(up, s_gate,", 2),
        ("dy without the adapter", "        dy = _add(dy, 1.0, _dot(dh, a, EXACT), dtype)\n", ""),
        (
            "the first tile of a strip alone",
            "(step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))",
            "(0 * step + tl.arange(0, BLOCK_ROWS))",
            2,
        ),
    ],
    "test_the_backward_has_the_forwards_y": [
        (
            "y of gate without its adapter",
            "y = swiglu_of(gate, sigmoid, up, dtype)",
            "y = swiglu_of(dgate, sigmoid, up, dtype)",
        ),
    ],
    "test_results_may_lie_over_dy_gate_and_up": [
        (
            "nobody is told what was overwritten",
            "            torch.autograd.graph.increment_version(t)\n",
            "            pass\n",
        ),
        (
            "dgate over gate",
            "sources = (dy, gate, up) if need_y",
            "sources = (gate, dy, up) if need_y",
        ),
    ],
    "test_y_is_written_only_if_it_is_needed": [
        (
            "y all the same",
            "sources = (dy, gate, up) if need_y else (dy, gate)",
            "need_y, sources = True, (dy, gate, up)",
        ),
    ],
    "test_a_rank_too_large_is_refused": [
        ("any rank", "if max(r_gate, r_up, r_down) > LARGEST_RANK:", "if False:"),
    ],
    "test_what_does_not_fit_is_refused": [
        ("any shape", "given != (shapes[name], gate.dtype, gate.device)", "given[1] != gate.dtype"),
        (
            "any dtype",
            "given != (shapes[name], gate.dtype, gate.device)",
            "given[0] != shapes[name]",
        ),
    ],
}
