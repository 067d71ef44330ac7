"""Faults in exact_modules.py, as tests/mutation_test.py plants them."""

SOURCE = "harness.model.exact_modules"
TESTS = "tests.exact_modules_test"  # where a test is looked for whose file is not named

# test: faults, each (its name, a text of the source, what it becomes, how often it occurs if not once)
FAULTS = {
    "test_a_linear_layer_without_a_bias_is_a_matrix": [
        ("subclass is a matrix", "type(module) is torch.nn.Linear", "isinstance(module, torch.nn.Linear)"),
        ("a subclass's product forgotten", "as_written and has_plain_parameters(module) and", "as_written and"),
        ("bias forgotten", "is_linear(module) and module.bias is None", "is_linear(module)"),
    ],
    "test_a_hook_of_somebody_changes_a_module": [
        ("hooks forgotten", " and not has_hooks(module)", ""),
        ("hooks before the backward forgotten", ', "_backward_pre_hooks"\n', "\n"),
    ],
    "test_a_forward_of_its_own_changes_a_module": [
        ("own forward forgotten", ' and "forward" not in vars(module)', ""),
    ],
    "test_a_forward_that_another_package_put_into_a_class_changes_it[Linear0]": [
        ("patched class forgotten", "return package == of_class", "return True"),
    ],
    "test_what_transformers_leaves_behind_changes_nothing": [
        ("recorders are somebody's hooks", 'startswith(HARMLESS_HOOKS)', "startswith(HARMLESS_HOOKS[1])"),
    ],
    "test_a_unit_of_fully_shard_is_unchanged_and_its_weight_is_no_matrix": [
        ("class of fully_shard", "if cls.__bases__[0] is FSDPModule", "if False"),
        ("hooks of fully_shard are somebody's", 'startswith(HARMLESS_HOOKS)', "startswith(HARMLESS_HOOKS[0])"),
        ("a share of a weight is a matrix", "type(module) is torch.nn.Linear", "class_of(module) is torch.nn.Linear"),
    ],
}  # fmt: skip
