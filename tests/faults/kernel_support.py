"""Faults of what every lesson takes from kernel_support.py."""

SOURCE = "kernel_support"
TESTS = "tests.kernel_support_test"
FAULTS = {
    "test_tensors_that_a_kernel_cannot_take_are_refused": [
        ("any dtype", "if dtypes and t.dtype not in dtypes:", "if False:"),
        ("a negated tensor", " or (not traced and t.is_neg()):", ":"),
        ("any device", "elif t.device != device:", "elif False:"),
        ("any shape", "if misfit is not None:", "if False:"),
        ("any layout", "if t.layout is not torch.strided:", "if False:"),
        ("any tensor may be None", 'if t is None and name.endswith("?"):', "if t is None:"),
        ("words stand for any length", "lengths.setdefault(word, length) if type(word) is str else word", "length if type(word) is str else word"),
    ],
    "test_words_of_the_shapes_get_their_lengths": [
        ("rows of the last dimension alone", "math.prod(shape[:n_before])", "(shape[:n_before] or (1,))[-1]"),
    ],
    "test_a_cpu_without_the_interpreter_is_refused": [
        ("a CPU is taken for a GPU", "if not t.is_cuda and not (INTERPRETED and t.is_cpu):", "if not t.is_cuda and not t.is_cpu:"),
    ],
    "test_a_wrapper_is_refused": [
        ("a wrapper's memory", "if is_traceable_wrapper_subclass(t):", "if False:"),
    ],
    "test_rows_have_adjacent_columns": [
        ("columns taken for adjacent", "rows if rows.stride(1) == 1 else rows.contiguous()", "rows"),
        ("rows taken for adjacent", "return rows, rows.stride(0)", "return rows, n_cols"),
    ],
    "test_an_output_has_adjacent_columns_and_its_inputs_order_of_dimensions": [
        ("columns anywhere", "if out.stride(-1) != 1:", "if False:"),
        ("always contiguous", "if out.stride(-1) != 1:", "if True:"),
    ],
    "test_only_contiguous_results_with_memory_of_their_own_are_overwritten": [
        ("a leaf", "if leaf or shared or not", "if shared or not"),
        ("a view of a leaf", "if compiling or t._base is None else t._base", "if True else t._base"),
        ("shared memory", "if leaf or shared or not", "if leaf or not"),
        ("any strides", " or not t.is_contiguous():", ":"),
    ],
    "test_a_second_derivative_is_refused_only_where_one_is_asked_for": [
        ("never refused", "if torch.is_grad_enabled():", "if False:"),
    ],
    "test_an_operator_gives_the_launchers_results_also_when_compiled": [
        ("results in another order", "tuple(next(found) if is_there", "tuple(next(found) if not is_there"),
    ],
    "test_an_operator_takes_numbers_of_numpy_and_tensors": [
        ("a whole number cut off", "isinstance(plain, (int, kind))", "isinstance(plain, (int, float))"),
        ("True is 1", "isinstance(plain, bool) or ", ""),
        ("named numbers as they are", "named[name] = number(name, named[name], kind)", "pass"),
    ],
}  # fmt: skip
