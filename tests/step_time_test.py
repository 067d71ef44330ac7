"""The work that is counted is the step's: the model's FLOPs, and what is computed twice."""

import functools

import pytest

from harness.cli.flags import RECOMPUTE
from harness.cli.workload import Workload
from harness.model import architecture
from harness.profiling.kernel_facts import KERNELS
from next_steps.memory import step_time

B, T = 2, 256
RATES = {
    "matmul_tflops": 500.0,
    "copy_gbs": 4000.0,
    "link_gbs": 50.0,
    "attention_tflops": {"forward": 400.0, "backward": 300.0},
}


CONFIG = architecture.llama_3_1_8b_config()
CONFIG.num_hidden_layers, CONFIG.vocab_size = 2, 2048
FACTS = architecture.ModelFacts(CONFIG)


@functools.cache
def work_of(*kernels, level=None, offload=False) -> step_time.Work:
    ways = {"kernels": kernels, "recompute": level, "offload": offload}
    return step_time.count_work(CONFIG, Workload(batch_size=B, seq_len=T, **ways))


@pytest.mark.parametrize("kernels", [[], KERNELS], ids=["none", "all"])
def test_the_flops_are_the_models(kernels):
    work, n_tokens = work_of(*kernels), B * T
    in_products = FACTS.flops_per_token(0) * n_tokens
    in_attention = FACTS.flops_per_token(T) * n_tokens - in_products
    assert work.product_flops == pytest.approx(in_products, rel=1e-3)  # RoPE's angles
    assert sum(work.attention_flops.values()) == pytest.approx(in_attention * 7 / 6)


def test_what_is_computed_twice_counts_twice():
    works = {level: work_of(level=level) for level in RECOMPUTE}
    assert works["none"].product_flops == works["norm"].product_flops == works["mlp"].product_flops
    forward = FACTS.flops_per_token(0) / 3
    head, down = 2 * 4096 * 2048, 2 * 2 * 4096 * 14_336
    again = (works["layer"].product_flops - works["none"].product_flops) / (B * T)
    assert again == pytest.approx(forward - head - down, rel=1e-3)
    assert works["layer"].attention_flops["forward"] == 2 * works["none"].attention_flops["forward"]
    moved = [works[level].moved["other"] for level in RECOMPUTE]
    assert moved == sorted(moved) and len(set(moved)) == len(RECOMPUTE)


def test_offloaded_bytes_go_there_and_back():
    inputs = 2 * B * T * 4096 * 2  # of both layers, bf16
    assert work_of(level="layer", offload=True).link_bytes == 2 * inputs
    assert work_of(level="layer").link_bytes == 0


def test_our_adamw_moves_seven_times_the_weights():
    work = work_of(*KERNELS)
    assert work.bytes_of_kernels()["optimizer"] == 7 * work.sizes.weights
    assert work.moved["optimizer"] < 1e-3 * work.sizes.weights
    assert work_of().moved["optimizer"] > 10 * work.sizes.weights


def test_a_step_takes_the_sum_of_its_parts():
    work = work_of()
    one, two = (step_time.predict_ms(work, RATES, n) for n in (1, 2))
    products = work.product_flops / 500e9
    assert one > products
    assert two - one > products + 3 * work.sizes.weights / (0.9 * 4000e6)
    slow = RATES | {"link_gbs": 1e-3}
    assert step_time.predict_ms(work_of(level="layer", offload=True), slow) > 1e3
