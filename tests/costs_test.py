"""What an operation or a kernel moves and computes, counted by hand and in real steps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import profile_baseline
from harness.cli.workload import Workload
from harness.model import architecture
from harness.model.architecture import ModelFacts
from harness.model.families import FAMILIES
from harness.profiling import costs
from harness.profiling.attribution import category_by_name
from harness.profiling.costs import NO_COST, Cost
from harness.profiling.kernel_facts import FACTS_BY_NAME, KERNEL_ROWS, OTHER, RUNGS, Sizes
from tests.conftest import tracked
from tests.kernel_facts_test import launched_kernels

SIZES = Sizes(weights=1000, stream=100, heads=60, inner=300, logits=400, layers=2, width=2)
BF16, FP32 = torch.bfloat16, torch.float32


# ---------------------------------------------------------------- bytes and FLOPs of an operation


def counted(tmp_path: Path, function) -> dict[str, Cost]:
    """Name -> cost of the operations that function() calls, through the profiler and its trace."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    found = costs.costs_of_trace(trace, SIZES, seq_len=8)
    return {event.name: found[event.id] for event in profiler.events() if event.id in found}


def randn(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


MATRIX, OTHER_MATRIX, COLUMN = randn(6, 4), randn(4, 5), randn(6, 1)
NARROW, LIST = randn(6, 4, dtype=BF16), [randn(3, 2, dtype=BF16), randn(4, dtype=BF16)]
INDEX = torch.tensor([0, 2, 2])


def addcmul_lists():
    return torch._foreach_addcmul_(list(LIST), LIST, LIST, 0.1)


F = torch.nn.functional
OPERATIONS = {  # how it is called: the operation, bytes read + written by hand, FLOPs
    "mm": (lambda: MATRIX @ OTHER_MATRIX, "mm", 4 * (24 + 20 + 30), 2 * 6 * 4 * 5),
    "mm into": (lambda: torch.mm(MATRIX, OTHER_MATRIX, out=randn(6, 5)), "mm", 4 * 74, 240),
    "addmm in place": (lambda: randn(6, 5).addmm_(MATRIX, OTHER_MATRIX), "addmm_", 4 * 104, 240),
    "bmm": (lambda: randn(2, 6, 4).bmm(randn(2, 4, 5)), "bmm", 2 * 4 * 74, 480),
    "same shapes": (lambda: MATRIX * MATRIX.clone(), "mul", 4 * 3 * 24, 24),
    "a number": (lambda: MATRIX * 2.0, "mul", 4 * (2 * 24) + 8, 24),
    "broadcast": (lambda: MATRIX + COLUMN, "add", 4 * (24 + 6 + 24), 24),
    "a view that repeats": (lambda: MATRIX * COLUMN.expand(6, 4), "mul", 4 * (24 + 6 + 24), 24),
    "two dtypes": (lambda: NARROW * MATRIX, "mul", 24 * (2 + 4 + 4), 24),
    "in place": (lambda: randn(6, 4).add_(MATRIX), "add_", 4 * 3 * 24, 24),
    "to another dtype": (lambda: MATRIX.to(BF16), "copy_", 24 * (4 + 2), 0),
    "copy of such a view": (lambda: COLUMN.expand(6, 4).contiguous(), "copy_", 4 * (24 + 6), 0),
    "fill": (lambda: torch.full((6, 4), 1.0), "fill_", 4 * 24, 0),
    "cat": (lambda: torch.cat(LIST[:1] * 2), "cat", 2 * 2 * 12, 0),
    "sum over rows": (lambda: MATRIX.sum(0), "sum", 4 * (24 + 4), 24),
    "sum of everything": (lambda: MATRIX.sum(), "sum", 4 * (24 + 1), 24),
    "sum over the last": (lambda: MATRIX.sum(-1, keepdim=True), "sum", 4 * (24 + 6), 24),
    "largest of everything": (lambda: MATRIX.amax(), "amax", 4 * (24 + 1), 24),
    "log_softmax": (lambda: MATRIX.log_softmax(-1), "_log_softmax", 4 * 48, 24),
    "rows": (lambda: F.embedding(INDEX, MATRIX), "index_select", 3 * 8 + 2 * 4 * 12, 0),
    "numbers": (lambda: F.nll_loss(randn(3, 4), INDEX), "nll_loss_forward", 3 * 8 + 2 * 4 * 3, 0),
    "list": (lambda: torch._foreach_sqrt([t.abs() for t in LIST]), "_foreach_sqrt", 40, 10),
    "list in place": (lambda: torch._foreach_mul_(list(LIST), 2.0), "_foreach_mul_", 40, 10),
    "two lists": (lambda: torch._foreach_lerp_(list(LIST), LIST, 0.1), "_foreach_lerp_", 60, 10),
    "squares of a gradient": (addcmul_lists, "_foreach_addcmul_", 3 * 2 * 10, 10),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_bytes_and_flops_of_an_operation(name, tmp_path):
    call, operation, n_bytes, flops = OPERATIONS[name]
    assert counted(tmp_path, call)[f"aten::{operation}"] == Cost(n_bytes, flops)


def test_a_list_too_long_for_the_profiler_is_all_parameters(tmp_path):
    """PyTorch records no shapes of more than 30 tensors; LLaMA 3.1 8B's AdamW has lists of 291."""
    tensors = [randn(5, dtype=BF16) for _ in range(31)]
    found = counted(tmp_path, lambda: torch._foreach_mul_(tensors, 2.0))
    assert found["aten::_foreach_mul_"] == Cost(2 * SIZES.weights, SIZES.weights / SIZES.width)


def test_attention_counts_the_causal_half_and_five_products_backward(tmp_path):
    q, k, v = (randn(2, heads, 8, 16).requires_grad_() for heads in (4, 2, 2))

    def attend():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(torch.randn_like(out))

    found = counted(tmp_path, attend)
    names = sorted(name for name in found if costs.ATTENTION_PATTERN.match(name))
    forward, backward = (found[name] for name in names)
    # of T x T scores with D columns, for every head of every sequence; half
    product = 2 * (2 * 4) * 8 * 8 * 16 / 2
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    large, small, per_row = 4 * q.numel(), 4 * k.numel(), 4 * 2 * 4 * 8
    assert forward.n_bytes == 2 * large + 2 * small  # q, k, v in, the result out
    gradients = large + 2 * small
    assert backward.n_bytes == 3 * large + 2 * small + per_row + gradients


@pytest.mark.parametrize(
    "name", ["aten::view", "aten::empty", "aten::item", "aten::linear", "MulBackward0", "mul"]
)
def test_what_does_no_work_itself_costs_nothing(name):
    inputs = {"Input Dims": [[6, 4]], "Input Strides": [[4, 1]], "Input type": ["float"]}
    inputs["Concrete Inputs"] = [""]
    assert costs.cost_of_call(name, inputs, SIZES, 8) == NO_COST
    assert costs.cost_of_call("aten::neg", inputs, SIZES, 8) == Cost(2 * 96, 24)


def test_a_product_of_fp8_reads_bytes_and_its_flops_are_counted_apart():
    """As a trace of a GPU has it: a, b, the scales of their rows, and what is no tensor."""
    inputs = {
        "Input Dims": [[6, 32], [32, 16], [6, 1], [1, 16], [], []],
        "Input Strides": [[32, 1], [1, 32], [1, 1], [1, 1], [], []],
        "Input type": ["c10::Float8_e4m3fn"] * 2 + ["float"] * 2 + ["", "Scalar"],
        "Concrete Inputs": [""] * 6,
    }
    flops = 2 * 6 * 32 * 16
    expected = Cost(6 * 32 + 32 * 16 + SIZES.width * 6 * 16, flops, flops)
    assert costs.cost_of_call("aten::_scaled_mm", inputs, SIZES, 8) == expected


def test_every_operation_that_takes_time_in_a_recorded_step_is_counted():
    counted = (
        costs.ELEMENTWISE | costs.REDUCTIONS | costs.FILLS | costs.PICKS | costs.ROW_PICKS
        | {"copy", "cat", *costs.MATMULS}
    )  # fmt: skip
    for path in tracked("results/profile_*.json"):
        rows = json.loads(path.read_text())["operations"]
        times = {row["name"]: row["us"] for row in rows if row["name"].startswith("aten::")}
        long = [name for name, us in times.items() if us > 1e-4 * sum(times.values())]
        others = [
            name.removeprefix("aten::") for name in long if not costs.ATTENTION_PATTERN.match(name)
        ]
        kinds = {name.removeprefix("_foreach_").removesuffix("_") for name in others}
        assert kinds <= counted, path.name


# ---------------------------------------------------------------- bytes of our kernels


def test_every_kernel_of_ours_is_counted_or_moves_next_to_nothing():
    small = {"_rmsnorm_dw_kernel", "_qk_norm_rope_dw_kernel"}
    small |= {"_scale_kernel", "_cross_entropy_scale_kernel", "_reverse_kl_bwd_kernel"}  # by 1
    small |= {"_plain_fwd_kernel", "_plain_bwd_kernel", "_obvious_kernel"}  # in no step
    names = {name for row in KERNEL_ROWS for name in launched_kernels(row.lesson)}
    assert {name for name in names if costs.cost_of_kernel(name, 1, SIZES) is None} == small
    assert costs.cost_of_kernel("vectorized_elementwise_kernel", 1, SIZES) is None


def sizes_of_8b(**workload) -> Sizes:
    return costs.sizes_of(ModelFacts(architecture.llama_3_1_8b_config(), Workload(**workload)))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_step_writes_each_quantized_weight_out_twice(micro_batches):
    """6.98e9 numbers of 2 bytes, from half a byte and a little each."""
    sizes, launches = sizes_of_8b(accumulate=micro_batches), 2 * 7 * 32 * micro_batches
    moved = launches * costs.cost_of_kernel("_nf4_dequantize_kernel", launches, sizes).n_bytes
    assert moved == pytest.approx(2 * 6.98e9 * 2.516 * micro_batches, rel=3e-3)


# of a step with all kernels but the fused layer, whose norms compute their output once more
LAUNCHES = {
    "_rmsnorm_fwd_kernel": 2 * SIZES.layers,
    "_rmsnorm_bwd_kernel": 2 * SIZES.layers,
    "_rope_kernel": 2 * SIZES.layers,
    "_swiglu_fwd_kernel": SIZES.layers,
    "_swiglu_bwd_kernel": SIZES.layers,
    "_adamw_kernel": 17,
    "_cross_entropy_inplace_kernel": 3,
}


@pytest.mark.parametrize(
    "rung", [rung for rung in RUNGS if rung.category], ids=lambda rung: rung.name
)
def test_what_our_kernels_move_is_what_is_necessary(rung):
    """The two counts agree: the passes of a category's kernels add up to its floor."""
    moved = sum(
        launches * costs.cost_of_kernel(name, launches, SIZES).n_bytes
        for name, launches in LAUNCHES.items()
        if category_by_name(name) == rung.category
    )
    assert moved == pytest.approx(rung.floor_bytes(SIZES))


# ---------------------------------------------------------------- a whole step


@pytest.mark.exhaustive
def test_bytes_and_flops_of_a_real_step(tmp_path, monkeypatch):
    """Of rmsnorm_kernel.py's 128 bytes a number, 12 add gradients of two paths: no layer's."""
    config = architecture.tiny_config()
    config.hidden_size = 512  # so that what there is one of per row does not count
    monkeypatch.setattr(architecture, "tiny_config", lambda: config)
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    flags = ["--model", "tiny", "--dtype", "bf16", "--seq-len", "32", "--warmup", "1"]
    workload = Workload.from_flags(profile_baseline.parse_args(flags), on_gpu=False)
    trace = str(tmp_path / "trace.json")
    record = profile_baseline.profile_training(workload, trace, stacks=False)
    parts, sizes = record["categories"], Sizes(**record["sizes"])
    in_attention = 6 * config.num_hidden_layers * 4 * config.head_dim * 32
    products = ModelFacts(config).flops_per_token(32) - in_attention  # and the angles' small one
    assert parts["matmul"]["flops"] == pytest.approx(32 * products, rel=1e-3)
    numbers = 5 * 32 * 512
    assert parts["normalization"]["bytes"] == pytest.approx(116 * numbers, rel=0.03)
    assert parts["optimizer"]["bytes"] == pytest.approx(20 * sizes.weights, rel=0.01)
    in_swiglu = 28 * 2 * 32 * 160  # by swiglu_kernel.py
    assert parts["activation"]["bytes"] == pytest.approx(in_swiglu, rel=0.01)
    heads = 2 * 4 * config.head_dim * 32 * 32  # the scores' columns, over both layers
    assert parts["attention"]["flops"] == pytest.approx(7 * heads, rel=1e-3)
    assert all(record["categories"][name]["bytes"] > 0 for name in ("rotary", "loss", OTHER))
    rows = record["operations"]
    for key in ("bytes", "flops"):
        total = sum(part[key] for part in parts.values())
        assert sum(row[key] for row in rows) == pytest.approx(total)


# ---------------------------------------------------------------- the speed of light


CEILINGS = {"matmul_tflops": 0.5, "copy_gbs": 2.0}


def test_the_speed_of_light_is_the_flops_and_what_fused_kernels_must_move():
    """By hand, of tiny in fp32.  Two tokens have a token's bytes twice, and the weights' once."""
    config = architecture.tiny_config()
    per_token = 4 * (2 * 64 * (10 - 2) + 2 * 96 * 4 + 2 * 160 * 9 + 257 * 2)
    weights = 4 * 119_232 * 7
    for batch_size, n_tokens in ((1, 1), (2, 2), (4, 2)):  # the last has as much padding
        workload = Workload(model="tiny", dtype="fp32", batch_size=batch_size, seq_len=1)
        ms = costs.least_ms(ModelFacts(config, workload), n_tokens, 1e6, CEILINGS)
        expected = n_tokens * 1e6 / 0.5e9 + (weights + n_tokens * per_token) / 2e6
        assert ms == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype, n_bytes", [("bf16", 10 + 16 / 256), ("fp32", 16 + 16 / 256)])
def test_8_bit_moments_are_read_and_written_as_bytes(dtype, n_bytes):
    workload = Workload(dtype=dtype, seq_len=8, kernels=("adamw",), moments="8bit")
    facts = ModelFacts(architecture.tiny_config(), workload)
    sizes = costs.sizes_of(facts)
    necessary = FACTS_BY_NAME["adamw"].floor_bytes(sizes)
    assert necessary == pytest.approx(n_bytes * facts.parameters, rel=1e-4)
    if dtype == "bf16":  # what the kernel moves, by its own row
        moved = costs.cost_of_kernel("_adamw8_kernel", 1, sizes).n_bytes
        assert moved == pytest.approx(necessary, rel=1e-3)


def test_norms_over_heads_and_layers_without_rotation_are_counted():
    one, sizes = Workload(seq_len=512), {}
    for kind, family in FAMILIES.items():
        sizes[kind] = costs.sizes_of(ModelFacts(family.example_config(), one))
    heads = 2 * 512 * 36 * (32 + 8) * 128  # of Qwen3-8B: bytes, tokens, layers, q and k
    assert sizes["qwen3"].heads == sizes["qwen3"].head_norms == heads
    of_smollm3 = sizes["smollm3"]
    assert of_smollm3.unrotated * 4 == of_smollm3.heads and of_smollm3.head_norms == 0
    assert sizes["llama"].unrotated == sizes["llama"].head_norms == 0


def test_with_fp8_the_projections_flops_pass_at_its_rate():
    plain = Workload(model="tiny", dtype="bf16", kernels=("fused_layer",))
    of_plain, of_fp8 = (
        ModelFacts(architecture.tiny_config(), each) for each in (plain, replace(plain, fp8="all"))
    )
    with_rate = CEILINGS | {"fp8_tflops": 1.0}
    in_layers = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 160)  # weights, of two layers
    without, within = (costs.least_ms(of_fp8, 10, 1e6, each) for each in (CEILINGS, with_rate))
    assert without == costs.least_ms(of_plain, 10, 1e6, with_rate)
    saved = 10 * 2 * 3 * in_layers * (1 / 0.5 - 1 / 1.0) / 1e9
    assert without - within == pytest.approx(saved, rel=1e-9)


# bytes of one number of LLaMA 3.1 8B: of each weight in a layer, and for each of 512 tokens
WEIGHTS, TOKENS = 2 * 32 * 218_103_808, 2 * 32 * 512
X, QKV, INNER = 4096, 6144, 14_336


def test_with_lora_fp8_takes_two_products_of_frozen_weights_but_for_the_first_inputs():
    lora = {"seq_len": 512, "lora_rank": 16, "lora_alpha": 16, "lora_targets": "all"}
    facts = ModelFacts(architecture.llama_3_1_8b_config(), Workload(**lora, fp8="all"))
    of_all = 4 * 32 * 218_103_808 - 2 * X * QKV  # q, k and v of the first layer
    assert costs.fp8_flops_per_token(facts) == of_all
    sizes, compact = costs.sizes_of(facts), sizes_of_8b(**lora, fp8="compact")
    inputs, gradients = 3 * X + INNER, QKV + X + 2 * INNER + X
    assert sizes.quantized == TOKENS * (inputs + gradients) - TOKENS // 32 * QKV
    assert sizes.transposed == 0
    assert compact.transposed == WEIGHTS and compact.quantized == sizes.quantized


def test_what_fp8_quantizes_and_transposes_in_a_step():
    """By hand: docs/fp8_casts.md has the numbers per token."""
    plain = {"seq_len": 512, "kernels": ("fused_layer",)}
    of_all, none = sizes_of_8b(**plain, fp8="all"), sizes_of_8b(**plain)
    assert of_all.quantized == WEIGHTS + TOKENS * (2 * X + QKV + 2 * X)
    assert of_all.transposed == WEIGHTS * 3 / 2 + TOKENS * 69_632  # weights come in as bf16
    assert none.quantized == none.transposed == 0
    one = costs.cost_of_kernel("_fp8_transpose_kernel", 10, of_all)
    assert one.n_bytes == of_all.transposed / 10
