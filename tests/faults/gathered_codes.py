"""Faults in gathered_codes.py, as tests/mutation_test.py plants them."""

SOURCE = "next_steps.layers.gathered_codes"
TESTS = "tests.gathered_codes_test"

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_codes_are_for_one_pass_and_the_weight_is_never_read": [
        ("a scale for each weight", "scale=self.largest.amax())", "scale=self.largest[i])"),
        ("the last scale, not the largest", "torch.amax(gathered[1], 0,", "torch.amax(gathered[1][-1:], 0,"),
        ("the second weight's scale", "self.largest.amax().repeat(self", "self.largest[1].repeat(self"),
        ("any pass", "if turned != self.are_turned:", "if False:"),
        ("memory kept", "while self.unread:", "while False:"),
    ],
}  # fmt: skip
