"""The exercises solved, and solved with mistakes that a beginner makes.

A solution is the body of each kernel of the learner's file, in place of `pass`.
"""

from pathlib import Path

HERE = Path(__file__).parents[1]  # the project's folder
HOLE = "    pass\n"

SOLUTIONS: dict[str, tuple[str, ...]] = {
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
        m = -3.4e38
        d = 0.0
        for first in range(0, n_cols, BLOCK_SIZE):
            cols = first + tl.arange(0, BLOCK_SIZE)
            chunk = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m, tl.max(chunk))
            d = d * tl.exp(m - m_new) + tl.sum(tl.exp(chunk - m_new))
            m = m_new
        target_logit = tl.load(row_ptr + target).to(tl.float32)
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
