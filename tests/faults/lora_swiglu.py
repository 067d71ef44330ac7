"""Faults in lora_swiglu.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.lora_swiglu"
TESTS = "tests.lora_swiglu_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_the_numbers_are_those_of_products_that_add": [
        ("up with gate's columns of h", "_columns(h_ptr + RANKS[0], RANKS[0]", "_columns(h_ptr, RANKS[0]", 2),
        ("up with gate's scale", "_add(up, up_adapter[1],", "_add(up, gate_adapter[1],", 2),
        ("dy without the adapter", "        dy = _add(dy, 1.0, _dot(dh, a), dtype)\n", ""),
        ("the first tile of a strip alone", "(step * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))", "(0 * step + tl.arange(0, BLOCK_ROWS))", 2),
    ],
    "test_the_backward_has_the_forwards_y": [
        ("y of gate without its adapter", "y = swiglu_of(gate, sigmoid, up, dtype)", "y = swiglu_of(dgate, sigmoid, up, dtype)"),
    ],
    "test_results_may_lie_over_dy_gate_and_up": [
        ("nobody is told what was overwritten", "        torch.autograd.graph.increment_version(t)\n", "        pass\n"),
        ("dgate over gate", "results = dy.detach(), gate.detach()", "results = gate.detach(), dy.detach()"),
    ],
    "test_y_is_written_only_if_it_is_needed": [
        ("y all the same", "up.detach() if need_y else None", "up.detach()"),
    ],
    "test_a_rank_too_large_is_refused": [
        ("any rank", "if max(ranks.values()) > LARGEST_RANK:", "if False:"),
    ],
    "test_what_does_not_fit_is_refused": [
        ("any h", '("n_rows", b_gate.shape[-1] + b_up.shape[-1])', '("n_rows", "R")'),
        ("any dtype of b_up", '("b_up", b_up, SAME,', '("b_up", b_up, FLOATS,'),
        ("any dh", '("n_rows", "R_DOWN")', '("N", "R_DOWN")'),
        ("any a", '("R_DOWN", "I")', '("R_DOWN", "J")'),
    ],
}  # fmt: skip
