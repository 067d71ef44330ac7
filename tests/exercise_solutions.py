"""The exercises solved, and solved with mistakes that a beginner makes.

exercise_solutions.txt is written as exercises/grading/formulas.txt is.  An indented line belongs to
the kernel's body, which replaces `pass`.  Another line is a mistake: `a text of the solution ->
what it becomes :: words of what the checker says`.  After "refused: " stand words of Triton's
compiler, on a kernel that the interpreter takes.  "right" is another right kernel.
"""

from pathlib import Path

from exercises.grading.exercise import code_and_slips
from exercises.grading.words import sections_of

HERE = Path(__file__).parents[1]  # the project's folder
HOLE = "    pass\n"
SECOND_KERNEL = "    # ---- the second kernel\n"
WRITTEN = {
    name: code_and_slips(lines)
    for name, lines in sections_of(HERE / "tests" / "exercise_solutions.txt").items()
}
SOLUTIONS = {name: code for name, (code, _) in WRITTEN.items()}
# (exercise, a text of the solution, what it becomes, words)
CHANGED = [(name, *slip) for name, (_, slips) in WRITTEN.items() for slip in slips]
REFUSED = "refused: "
NOT_COMPILED = [each for each in CHANGED if each[3].startswith(REFUSED)]
MISTAKES = [each for each in CHANGED if each not in NOT_COMPILED and each[3] != "right"]


def solved(name: str, *changes: tuple[str, str]) -> str:
    """Return the learner's file with its kernels written, and with texts replaced in them."""
    text = (HERE / "exercises" / f"{name}.py").read_text()
    for body in SOLUTIONS[name].split(SECOND_KERNEL):
        assert HOLE in text
        text = text.replace(HOLE, body, 1)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


# Of the exercise with a speed to beat: as many programs as an H100 runs at once, of many warps.
FAST_LAUNCH = (
    ("[(n_rows,)]", "[(min(n_rows, 132),)]"),
    ("BLOCK_SIZE=block_size,", "BLOCK_SIZE=block_size, num_warps=16,"),
)
# For another right kernel: small blocks, and a function of the file.
NORM_IN_BLOCKS = """\
    row = tl.program_id(0)
    total = tl.zeros((SMALL,), tl.float32)
    for first in range(0, n_cols, SMALL):
        x = load(x_ptr + row * x_row_stride, first, n_cols)
        total += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(total) / n_cols + eps)
    for first in range(0, n_cols, SMALL):
        y = load(x_ptr + row * x_row_stride, first, n_cols) * load(weight_ptr, first, n_cols) * rstd
        cols = first + tl.arange(0, SMALL)
        tl.store(y_ptr + row * y_row_stride + cols, y, mask=cols < n_cols)
"""
HELPER = """\
SMALL = tl.constexpr(16)


@triton.jit
def load(ptr, first, n_cols):
    cols = first + tl.arange(0, SMALL)
    return tl.load(ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)


@triton.jit
def rmsnorm_forward_kernel("""
MAXIMUM_FIRST = """\
    for first in range(0, n_cols, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        chunk = tl.load(logits_ptr + row * logits_row_stride + cols, cols < n_cols, other=-1e30)
        m = tl.maximum(m, tl.max(chunk.to(tl.float32), axis=0))
    for first"""
LOADED = "target_logit = tl.load(row_ptr + target).to(tl.float32)"
# other right kernels: (exercise, changes of the solution)
RIGHT = [(name, ((old, new),)) for name, old, new, words in CHANGED if words == "right"]
# fmt: off
RIGHT += [
    ("add", (
        ("+ tl.arange(0, BLOCK_SIZE)", "\n    for i in range(i, tl.minimum(i + BLOCK_SIZE, n)):"),
        ("    mask = i < n\n", ""), (", mask=mask", ""), ("    a = ", "        a = "),
        ("    b = ", "        b = "), ("    tl.store", "        tl.store"),
    )),
    ("tile", (
        ("program_id(0)", "program_id(2)"), ("program_id(1)", "program_id(0)"),
        ("program_id(2)", "program_id(1)"), ("(triton.cdiv(n_rows, block_rows), ", "("),
        ("n_cols, block_cols))", "n_cols, block_cols), triton.cdiv(n_rows, block_rows))"),
    )),
    ("rmsnorm_forward", (
        (SOLUTIONS["rmsnorm_forward"], NORM_IN_BLOCKS),
        ("@triton.jit\ndef rmsnorm_forward_kernel(", HELPER),
    )),
    ("rmsnorm_forward", (
        ("row = tl.program_id(0)", "row = tl.program_id(0) * 2 + tl.arange(0, 2)[:, None]"),
        ("mask = cols < n_cols", "cols = cols[None, :]; mask = (cols < n_cols) & (row < n_rows)"),
        ("axis=0", "axis=1, keep_dims=True"), ("eps,\n    BLOCK", "eps,\n    n_rows,\n    BLOCK"),
        ("eps,\n        BLOCK", "eps, n_rows, BLOCK"), ("(n_rows,)]", "(n_rows + 1) // 2,]"),
    )),
    ("rmsnorm_dw", (
        ("tl.store(partial_ptr + program * partial_row_stride", "tl.atomic_add(partial_ptr"),
        ("    rmsnorm_dw_kernel[", "    partial.zero_()\n    rmsnorm_dw_kernel["),
    )),
    ("rmsnorm_dw", (
        ("for row in range(program, n_rows, tl.num_programs(0)):",
         "row = program\n    while row < n_rows:"),
        ("total += dy * x * rstd", "total += dy * x * rstd; row += tl.num_programs(0)"),
    )),
    ("rmsnorm_dw", (
        ("cols, mask=mask, other", "cols, mask=mask & (row < n_rows), other"),
        ("rstd_ptr + row)", "rstd_ptr + row, mask=row < n_rows, other=0.0)"),
        ("range(program, n_rows,", "range(program, n_rows + 8,"),
    )),
    ("online_softmax", (("    for first", MAXIMUM_FIRST),)),
    ("cross_entropy", (
        ("    d = 0.0\n", "    d = 0.0\n    target = tl.load(targets_ptr + row)\n    at = 0.0\n"),
        ("= tl.load(row_ptr + target).to(tl.float32)", "= at"),
        ("m_new =", "at += tl.sum(tl.where(cols == target, chunk, 0.0)); m_new ="),
    )),
    ("cross_entropy_inplace", (
        (f"{LOADED}  # before any thread stores\n", "\n"),
        (" m = m_new\n", f" m = m_new\n        {LOADED}; tl.debug_barrier()\n"),
    )),
    ("softmax_fast", FAST_LAUNCH),
]
# fmt: on
