"""The exercises solved, and solved with mistakes that a beginner makes.

A solution is the body of each kernel of the learner's file, in place of `pass`.
"""

from pathlib import Path

HERE = Path(__file__).parents[1]  # the project's folder
HOLE = "    pass\n"

SOLUTIONS: dict[str, tuple[str, ...]] = {
    "add": (
        """\
    i = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = i < n
    a = tl.load(a_ptr + i, mask=mask).to(tl.float32)
    b = tl.load(b_ptr + i, mask=mask).to(tl.float32)
    tl.store(c_ptr + i, a + b, mask=mask)
""",
    ),
    "tile": (
        """\
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=mask).to(tl.float32)
    scale = tl.load(scale_ptr + rows, mask=rows < n_rows).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=cols < n_cols).to(tl.float32)
    y = x * scale[:, None] + bias[None, :]
    tl.store(y_ptr + rows[:, None] * y_row_stride + cols[None, :], y, mask=mask)
""",
    ),
    "rmsnorm_forward": (
        """\
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)
    tl.store(y_ptr + row * y_row_stride + cols, x * rstd * weight, mask=mask)
""",
    ),
    "rmsnorm_dx": (
        """\
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    x_hat = x * rstd
    wdy = weight * dy
    c1 = tl.sum(wdy * x_hat, axis=0) / n_cols
    dx = rstd * (wdy - x_hat * c1)
    tl.store(dx_ptr + row * dx_row_stride + cols, dx, mask=mask)
""",
    ),
    "rmsnorm_dw": (
        """\
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    total = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    for row in range(program, n_rows, tl.num_programs(0)):
        dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        total += dy * x * rstd
    tl.store(partial_ptr + program * partial_row_stride + cols, total, mask=mask)
""",
    ),
    "online_softmax": (
        """\
    row = tl.program_id(0)
    m = -3.4e38
    d = 0.0
    for first in range(0, n_cols, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        mask = cols < n_cols
        chunk = tl.load(
            logits_ptr + row * logits_row_stride + cols, mask=mask, other=-float("inf")
        ).to(tl.float32)
        m_new = tl.maximum(m, tl.max(chunk))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(chunk - m_new))
        m = m_new
    tl.store(m_ptr + row, m)
    tl.store(d_ptr + row, d)
""",
    ),
    "cross_entropy": (
        """\
    row = tl.program_id(0)
    row_ptr = logits_ptr + row * logits_row_stride
    m = -3.4e38
    d = 0.0
    for first in range(0, n_cols, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        chunk = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(chunk))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(chunk - m_new))
        m = m_new
    target = tl.load(targets_ptr + row)
    target_logit = tl.load(row_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row, m - target_logit + tl.log(d))
    tl.store(m_ptr + row, m)
    tl.store(d_ptr + row, d)
""",
        """\
    row = tl.program_id(0)
    dloss = tl.load(dloss_ptr + row)
    target = tl.load(targets_ptr + row)
    m = tl.load(m_ptr + row)
    d = tl.load(d_ptr + row)
    for first in range(0, n_cols, BLOCK_SIZE):
        cols = first + tl.arange(0, BLOCK_SIZE)
        mask = cols < n_cols
        logits = tl.load(logits_ptr + row * logits_row_stride + cols, mask=mask).to(tl.float32)
        softmax = tl.exp(logits - m) / d
        dlogits = tl.where(cols == target, softmax - 1.0, softmax) * dloss
        tl.store(dlogits_ptr + row * dlogits_row_stride + cols, dlogits, mask=mask)
""",
    ),
    "cross_entropy_inplace": (
        """\
    row = tl.program_id(0)
    row_ptr = logits_ptr + row * logits_row_stride
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        for first in range(0, n_cols, BLOCK_SIZE):
            cols = first + tl.arange(0, BLOCK_SIZE)
            tl.store(row_ptr + cols, tl.zeros((BLOCK_SIZE,), tl.float32), mask=cols < n_cols)
    else:
        target_logit = tl.load(row_ptr + target).to(tl.float32)  # before any thread stores
        m = -3.4e38
        d = 0.0
        for first in range(0, n_cols, BLOCK_SIZE):
            cols = first + tl.arange(0, BLOCK_SIZE)
            chunk = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m, tl.max(chunk))
            d = d * tl.exp(m - m_new) + tl.sum(tl.exp(chunk - m_new))
            m = m_new
        for first in range(0, n_cols, BLOCK_SIZE):
            cols = first + tl.arange(0, BLOCK_SIZE)
            mask = cols < n_cols
            logits = tl.load(row_ptr + cols, mask=mask).to(tl.float32)
            softmax = tl.exp(logits - m) / d
            tl.store(
                row_ptr + cols, tl.where(cols == target, softmax - 1.0, softmax) * scale, mask=mask
            )
        tl.store(loss_ptr + row, m - target_logit + tl.log(d))
""",
    ),
    "swiglu_backward": (
        """\
    i = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = i < n
    dy = tl.load(dy_ptr + i, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + i, mask=mask).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(dgate_ptr + i, dy * up * s * (1.0 + gate * (1.0 - s)), mask=mask)
    tl.store(dup_ptr + i, dy * gate * s, mask=mask)
""",
    ),
    "rope_backward": (
        """\
    sample = tl.program_id(0) // T
    token = tl.program_id(0) % T
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK_HALF)
    mask = cols < HALF
    dy = dy_ptr + sample * dy_sample_stride + head * dy_head_stride + token * dy_token_stride
    dx = dx_ptr + sample * dx_sample_stride + head * dx_head_stride + token * dx_token_stride
    cos = cos_ptr + token * cos_token_stride
    sin = sin_ptr + token * sin_token_stride
    dy1 = tl.load(dy + cols, mask=mask).to(tl.float32)
    dy2 = tl.load(dy + HALF + cols, mask=mask).to(tl.float32)
    c1 = tl.load(cos + cols, mask=mask).to(tl.float32)
    c2 = tl.load(cos + HALF + cols, mask=mask).to(tl.float32)
    s1 = tl.load(sin + cols, mask=mask).to(tl.float32)
    s2 = tl.load(sin + HALF + cols, mask=mask).to(tl.float32)
    tl.store(dx + cols, dy1 * c1 + dy2 * s2, mask=mask)
    tl.store(dx + HALF + cols, dy2 * c2 - dy1 * s1, mask=mask)
""",
    ),
    "adamw": (
        """\
    i = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = i < n
    p = tl.load(p_ptr + i, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + i, mask=mask).to(tl.float32)
    m = tl.load(m_ptr + i, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + i, mask=mask).to(tl.float32)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * (1.0 - lr * weight_decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
    tl.store(p_ptr + i, p, mask=mask)
    tl.store(m_ptr + i, m, mask=mask)
    tl.store(v_ptr + i, v, mask=mask)
""",
    ),
    "residual_norm": (
        """\
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_row_stride + cols, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    h = (x + residual.to(tl.float32)).to(h_ptr.dtype.element_ty).to(tl.float32)
    tl.store(h_ptr + row * h_row_stride + cols, h, mask=mask)
    rstd = tl.rsqrt(tl.sum(h * h, axis=0) / n_cols + eps)
    tl.store(y_ptr + row * y_row_stride + cols, h * rstd * weight, mask=mask)
""",
    ),
    "softmax_fast": (
        """\
    lanes = tl.arange(0, BLOCK_SIZE)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row_ptr = logits_ptr + row * logits_row_stride
        y_row_ptr = y_ptr + row * y_row_stride
        m = tl.full((BLOCK_SIZE,), -3.4e38, tl.float32)  # of each lane
        d = tl.zeros((BLOCK_SIZE,), tl.float32)
        for first in range(0, n_cols, BLOCK_SIZE):
            mask = first + lanes < n_cols
            chunk = tl.load(row_ptr + first + lanes, mask=mask, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m, chunk)
            d = d * tl.exp(m - m_new) + tl.exp(chunk - m_new)
            m = m_new
        m_row = tl.max(m)
        factor = 1.0 / tl.sum(d * tl.exp(m - m_row))
        for first in range(0, n_cols, BLOCK_SIZE):
            mask = first + lanes < n_cols
            chunk = tl.load(row_ptr + first + lanes, mask=mask).to(tl.float32)
            y = tl.exp(chunk - m_row) * factor
            tl.store(y_row_ptr + first + lanes, y, mask=mask, cache_modifier=".cs")
""",
    ),
}


def solved(name: str, *changes: tuple[str, str]) -> str:
    """Return the learner's file with its kernels written, and with texts replaced in them."""
    text = (HERE / "exercises" / f"{name}.py").read_text()
    for body in SOLUTIONS[name]:
        assert HOLE in text
        text = text.replace(HOLE, body, 1)
    for old, new in changes:
        assert text.count(old) > 0, old
        text = text.replace(old, new)
    return text


# exercise: mistakes, each (a text of the solution, what it becomes, words of what the checker says)
# fmt: off
MISTAKES: dict[str, list[tuple[str, str, str]]] = {
    "add": [
        ("a + b, mask=mask)", "a + b)", "A store without a mask reaches outside of c"),
        ("i < n", "i <= n", "reaches outside of a"),
        ("tl.load(b_ptr", "tl.load(a_ptr", "a is added to itself"),
        ("* BLOCK_SIZE + tl", "+ tl", "Does program i begin at i * BLOCK_SIZE?"),
        ("triton.cdiv(n, block_size)", "n // block_size", "c is not written from number 128 on"),
        ("tl.store(c", "tl.atomic_add(c", "added to what the memory held before the launch"),
    ],
    "tile": [
        ("(rows[:, None] < n_rows) & (cols[None, :] < n_cols)", "cols[None, :] < n_cols + 0 * "
         "rows[:, None]", "does the mask ask both"),
        ("program_id(1)", "program_id(0)", "There are several tiles here"),
        ("x * scale[:, None] +", "x +", "scale is missing"),
        ("x * scale[:, None] + bias[None, :]", "(x + bias[None, :]) * scale[:, None]",
         "bias is added before scale multiplies"),
        ("bias_ptr + cols, mask=cols < n_cols", "bias_ptr + cols", "reaches outside of bias"),
    ],
    "rmsnorm_forward": [
        ("/ n_cols + eps", "/ BLOCK_SIZE + eps", "the mean divides by BLOCK_SIZE"),
        ("x_row_stride + cols, mask=mask, other=0.0)", "x_row_stride + cols)", "is there a mask"),
        ("x_row_stride + cols, mask=mask, other=0.0)", "x_row_stride + cols, mask=mask)",
         "a masked lane of a load without other="),
        ("rstd * weight, mask=mask)", "rstd * weight)", "reaches outside of y"),
        ("weight_ptr + cols, mask=mask, other=0.0", "weight_ptr + cols", "outside of weight"),
        ("row * x_row_stride", "row * n_cols", "begin at r * the stride of that tensor"),
        ("row * y_row_stride", "row * x_row_stride", "a gap between the elements"),
        ("+ eps)", ")", "eps is missing"),
        ("+ eps)", "+ 1e-6)", "eps is 1e-6, whatever"),
        ("tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + eps)",
         "1.0 / (tl.sqrt(tl.sum(x * x, axis=0) / n_cols) + eps)", "eps stands outside of the root"),
        ("/ n_cols + eps", "/ (n_cols - 1) + eps", "the mean divides by n_cols - 1"),
        ("    rstd =", "    x = tl.where(mask, x - tl.sum(x) / n_cols, 0.0)\n    rstd =",
         "LayerNorm"),
        ("[(n_rows,)]", "[(min(n_rows, 8),)]", "Fewer rows were right"),
        ("mask = cols < n_cols", "mask = cols < n_cols - 1", "y is not written in column 63"),
        ("mask=mask, other=0.0).to(tl.float32)\n    weight", "mask=mask, other=0.0)\n    weight",
         ".to(tl.float32)"),
        ("tl.program_id(0)", "tl.program_id(1)", "y is not written from row 1 on"),
    ],
    "rmsnorm_dx": [
        ("wdy - x_hat * c1", "wdy", "dx without the c1 term"),
        ("axis=0) / n_cols", "axis=0) / BLOCK_SIZE", "c1 divides by BLOCK_SIZE"),
        ("wdy - x_hat * c1", "wdy - x * c1", "x stands once where x_hat is meant"),
        ("dx_ptr + row * dx_row_stride", "dx_ptr + row * x_row_stride", "a gap between"),
    ],
    "rmsnorm_dw": [
        ("total += dy", "total = dy", "each program stores its last row alone"),
        ("range(program, n_rows,", "range(program, n_rows - n_rows % 4,", "share evenly"),
        ("range(program, n_rows, tl.num_programs(0))", "range(0, n_rows)", "every program adds"),
        ("n_rows, tl.num_programs(0)):", "n_rows):", "the loop has no step"),
        ("range(program, n_rows,", "range(program, min(n_rows, 64),", "its first 16 rows alone"),
        ("rstd_ptr + row)", "rstd_ptr + program)", "rstd is read at the program's number"),
        ("tl.store(partial_ptr", "tl.atomic_add(partial_ptr", "the memory held before the launch"),
        ("program * partial_row_stride", "0", "programs run in any order"),
        ("total, mask=mask)", "total, mask=mask & (program < 3))", "is not written in row 3"),
        ("total, mask=mask)", "total * (program < 3), mask=mask)",
         "dweight of the last program is missing"),
        ("total += dy * x * rstd",
         "total = (total + dy * x * rstd).to(x_ptr.dtype.element_ty).to(tl.float32)",
         "added up in fp32"),
    ],
    "online_softmax": [
        ("d * tl.exp(m - m_new) +", "d +", "the sum so far is not rescaled"),
        ("tl.exp(m - m_new)", "tl.exp(m_new - m)", "inf - inf"),
        ("m = -3.4e38", "m = 0.0", "m begins at 0"),
        ("range(0, n_cols,", "range(0, 8 * BLOCK_SIZE,", "only the row's first 8 chunks"),
        ("cols = first +", "cols =", "every turn of the loop reads the row's first chunk"),
        ("tl.maximum(m, tl.max(chunk))", "tl.max(chunk)", "m is that of the last chunk alone"),
        ('other=-float("inf")', "other=0.0", "lanes beyond the row load 0"),
        ("m = -3.4e38", 'm = -float("inf")', "does m begin finite?"),
        ("tl.store(d_ptr + row, d)", "pass", "Nothing of d is written"),
    ],
    "cross_entropy": [
        (", softmax) * dloss", ", softmax)", "not multiplied by dloss"),
        (" + tl.log(d)", "", "log(d) is missing from the loss"),
        ("dlogits, mask=mask)", "dlogits)", "outside of dlogits"),
        ("row_ptr + target)", "row_ptr + target % BLOCK_SIZE)", "with this row's own target"),
        ("tl.store(m_ptr + row, m)", "tl.store(m_ptr + row, m + 1.0)", "Is m the largest logit"),
        ("cols == target", "cols - first == target", "a column's place in its chunk"),
    ],
    "cross_entropy_inplace": [
        (", softmax) * scale", ", softmax)", "is not multiplied by scale"),
        ("if target == ignore_index:", "if target == -1:", "reaches outside of logits"),
        ("if target == ignore_index:", "if target == -100:", "ignore_index -1"),
        ("tl.zeros((BLOCK_SIZE,), tl.float32), mask=cols < n_cols", "0.0, mask=cols < 0",
         "ignored rows keep their logits"),
        ("mask=mask\n            )", "\n            )", "outside of logits"),
        ("m - target_logit + tl.log(d)", "(m - target_logit + tl.log(d)) * scale",
         "the loss is multiplied by scale"),
        ("m - target_logit + tl.log(d)", "m - tl.load(row_ptr + target).to(tl.float32) + tl.log(d)",
         "a barrier is missing"),
    ],
    "swiglu_backward": [
        ("1.0 + gate * (1.0 - s)", "gate * (1.0 - s)", "dgate lacks the 1 +"),
        ("dy * gate * s", "dy * gate", "dup lacks s"),
        ("tl.program_id(0) * BLOCK_SIZE", "tl.program_id(0)", "is not written from number"),
        ("dy * gate * s, mask=mask", "dy * gate * s", "outside of dup"),
        ("1.0 / (1.0 + tl.exp(-gate))", "tl.exp(gate) / (1.0 + tl.exp(gate))", "inf / inf is NaN"),
    ],
    "rope_backward": [
        ("dy1 * c1 + dy2 * s2", "dy1 * c1 - dy2 * s2", "dx1 has - dy2 * s2"),
        ("token * cos_token_stride", "0", "every token takes row 0 of cos."),
        ("+ head * dx_head_stride", "", "dx is not written"),
        ("HALF + cols", "BLOCK_HALF + cols", "HALF is no power of two"),
        ("token * dx_token_stride", "token * dy_token_stride", "a gap between the elements"),
        ("head * dy_head_stride + token * dy_token_stride", "token * dy_head_stride + head * "
         "dy_token_stride", "the strides of head and token are exchanged"),
    ],
    "adamw": [
        ("tl.sqrt(v / correction2) + eps", "tl.sqrt(v / correction2 + eps)", "eps stands inside"),
        ("p * (1.0 - lr * weight_decay)", "p", "the weight decay is missing"),
        ("m = beta1 * m + (1.0 - beta1) * g",
         "g += weight_decay * p\n    m = beta1 * m + (1.0 - beta1) * g",
         "(L2), and multiplies p as well"),
        ("p, mask=mask)", "p)", "outside of p"),
        ("p * (1.0 - lr * weight_decay) - lr", "(1.0 - lr * weight_decay) * p - (1.0 - lr * "
         "weight_decay) * lr", "the weight decay comes after the step"),
        ("tl.sqrt(v / correction2) + eps", "(tl.sqrt(v) + eps) / tl.sqrt(correction2 + 0.0 * v)",
         "eps is added to the root before the correction"),
        ("    p = p", "    m = m.to(m_ptr.dtype.element_ty).to(tl.float32)\n    p = p",
         "a rounding before the store shows"),
        ("beta1 * m + (1.0 - beta1)", "0.8 * m + 0.2", "other settings"),
    ],
    "residual_norm": [
        ("tl.sum(h * h", "tl.sum(x * x", "rstd is that of x"),
        ("cols, h, mask", "cols, x, mask", "h is x alone where it is stored"),
        ("row * residual_row_stride", "row * x_row_stride", "a gap between the elements"),
    ],
    "softmax_fast": [
        (" * factor", "", "y is not divided by d"),
        ("(d * tl.exp(m - m_row))", "(d)", "Compare each line"),
        ("y, mask=mask", "y", "outside of y"),
        ("n_rows, tl.num_programs(0)):", "n_rows - 1, tl.num_programs(0)):", "y is not written"),
    ],
}
# what the interpreter takes: the same, with words of the compiler
NOT_COMPILED: dict[str, list[tuple[str, str, str]]] = {
    "rmsnorm_forward": [
        ("mask = cols", "mask = 0 <= cols", "multiple comparison"),
        ("tl.sum(x * x, axis=0)", "sum([tl.sum(x * x, axis=0)])", "sum is not defined"),
        ("    tl.store", "    print(rstd)\n    tl.store", "`print(rstd)`"),
        ("tl.program_id(0)", "int(tl.program_id(0) / 1)", "int() argument"),
    ],
    "rmsnorm_dw": [
        ("tl.zeros((BLOCK_SIZE,), dtype=tl.float32)", "0.0", "Loop-carried variable total"),
        ("        total", "        if row > n_rows:\n            break\n        total", "Break"),
    ],
    "online_softmax": [("d = 0.0", "d = 0", "Loop-carried variable d")],
    "rmsnorm_dx": [("tl.load(rstd_ptr + row)", "rstd_ptr + row", "tl.load reads what lies")],
}
# fmt: on


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
LOADED = "        target_logit = tl.load(row_ptr + target).to(tl.float32)"
WRITES = "        for first in range(0, n_cols, BLOCK_SIZE):\n" + 12 * " "
WRITES += "cols = first + tl.arange(0, BLOCK_SIZE)\n            mask"
ATOMIC = "tl.atomic_add(partial_ptr + cols, total, mask=mask)"
# exercise: other right kernels, each as changes of the solution
# fmt: off
RIGHT: dict[str, list[tuple[tuple[str, str], ...]]] = {
    "add": [
        (("+ tl.arange(0, BLOCK_SIZE)\n",
          "\n    for i in range(i, tl.minimum(i + BLOCK_SIZE, n)):\n"),
         ("    mask = i < n\n", ""), (", mask=mask", ""), ("    a = ", "        a = "),
         ("    b = ", "        b = "), ("    tl.store", "        tl.store")),
        (("block_size=1024", "block_size=16"), ("n, BLOCK", "n, num_warps=8, BLOCK")),
    ],
    "tile": [
        (("program_id(0)", "program_id(2)"), ("program_id(1)", "program_id(0)"),
         ("program_id(2)", "program_id(1)"), ("(triton.cdiv(n_rows, block_rows), ", "("),
         ("triton.cdiv(n_cols, block_cols))",
          "triton.cdiv(n_cols, block_cols), triton.cdiv(n_rows, block_rows))")),
        (("(rows[:, None] < n_rows) & (cols[None, :] < n_cols)",
          "tl.where(rows[:, None] < n_rows, cols[None, :] < n_cols, False)"),),
    ],
    "rmsnorm_forward": [
        ((SOLUTIONS["rmsnorm_forward"][0], NORM_IN_BLOCKS),
         ("@triton.jit\ndef rmsnorm_forward_kernel(", HELPER)),
        (("x_row_stride + cols, mask=mask, other=0.0).to(tl.float32)",
          "x_row_stride + cols, mask=mask).to(tl.float32)\n    x = tl.where(mask, x, 0.0)"),),
        (("row = tl.program_id(0)", "row = tl.program_id(0) * 2 + tl.arange(0, 2)[:, None]"),
         ("mask = cols < n_cols",
          "cols = cols[None, :]\n    mask = (cols < n_cols) & (row < n_rows)"),
         ("axis=0", "axis=1, keep_dims=True"), ("eps,\n    BLOCK", "eps,\n    n_rows,\n    BLOCK"),
         ("eps,\n        BLOCK", "eps, n_rows, BLOCK"), ("(n_rows,)]", "(n_rows + 1) // 2,]")),
    ],
    "rmsnorm_dx": [(("rstd * (wdy - x_hat * c1)", "rstd * wdy - x * (rstd * rstd * c1)"),)],
    "rmsnorm_dw": [
        (("tl.store(partial_ptr + program * partial_row_stride + cols, total, mask=mask)", ATOMIC),
         ("    rmsnorm_dw_kernel[", "    partial.zero_()\n    rmsnorm_dw_kernel[")),
        (("for row in range(program, n_rows, tl.num_programs(0)):",
          "row = program\n    while row < n_rows:"),
         ("total += dy * x * rstd", "total += dy * x * rstd\n        row += tl.num_programs(0)")),
        (("cols, mask=mask, other", "cols, mask=mask & (row < n_rows), other"),
         ("rstd_ptr + row)", "rstd_ptr + row, mask=row < n_rows, other=0.0)"),
         ("range(program, n_rows,", "range(program, n_rows + 8,")),
    ],
    "online_softmax": [
        (("    for first", MAXIMUM_FIRST),),
        (("tl.maximum(m, tl.max(chunk))", "tl.max(tl.where(mask, tl.maximum(chunk, m), m))"),),
    ],
    "cross_entropy": [
        (("    d = 0.0\n", "    d = 0.0\n    target = tl.load(targets_ptr + row)\n    at = 0.0\n"),
         ("= tl.load(row_ptr + target).to(tl.float32)", "= at"),
         ("        m_new =",
          "        at += tl.sum(tl.where(cols == target, chunk, 0.0))\n        m_new =")),
        (("softmax - 1.0, softmax) * dloss", "dloss * (softmax - 1.0), dloss * softmax)"),),
    ],
    "cross_entropy_inplace": [
        ((f"{LOADED}  # before any thread stores\n", ""),
         (WRITES, f"{LOADED}\n        tl.debug_barrier()\n{WRITES}")),
    ],
    "swiglu_backward": [
        (("1.0 / (1.0 + tl.exp(-gate))", "tl.sigmoid(gate)"), ("i < n", "(i + 1) <= n")),
    ],
    "rope_backward": [(("dy + HALF + cols", "dy + (HALF + cols) % (2 * HALF)"),)],
    "adamw": [
        (("m = beta1 * m + (1.0 - beta1) * g", "m += (1.0 - beta1) * (g - m)"),
         ("p = p * (1.0 - lr * weight_decay) -", "p = p - lr * weight_decay * p -")),
    ],
    "residual_norm": [
        (("h, mask=mask)\n", "h, mask=mask)\n    h = tl.load(h_ptr + row * h_row_stride + cols, "
          "mask=mask, other=0.0).to(tl.float32)\n"),),
    ],
    "softmax_fast": [(
        ("[(n_rows,)]", "[(min(n_rows, 132),)]"), ("block_size=4096", "block_size=8192"),
        ("BLOCK_SIZE=block_size,", "BLOCK_SIZE=block_size, num_warps=16,"),
    )],
}
# fmt: on
