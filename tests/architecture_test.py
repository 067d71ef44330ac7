"""The known configurations are LLaMA's, and a model's weights and work what they are said to be."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from harness.model import architecture, loading
from next_steps.studies import frontier, scaling
from tests.small_workloads import tiny_workload

README = Path(__file__).parents[1] / "README.md"


def test_the_8b_config_is_llama_3_1():
    config = architecture.llama_3_1_8b_config()
    published = {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 128_000, "eos_token_id": 128_001,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in published} == published
    assert config.rope_parameters == {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert architecture.ModelFacts(config).parameters == 8_030_261_248


@pytest.mark.exhaustive
def test_rope_scaling_reaches_the_frequencies():
    config = architecture.llama_3_1_8b_config()
    config.num_hidden_layers, config.intermediate_size, config.vocab_size = 1, 8, 8
    frequencies = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    unscaled = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    wavelengths = 2 * math.pi / unscaled
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    torch.testing.assert_close(frequencies[fast], unscaled[fast])  # high frequencies stay
    torch.testing.assert_close(frequencies[slow], unscaled[slow] / 8)  # low ones are slowed 8 times
    between = frequencies[~fast & ~slow] / unscaled[~fast & ~slow]
    assert len(between) > 0 and (between > 1 / 8).all() and (between < 1).all()


def test_tiny_has_a_position_for_each_token_of_the_longest_step_that_a_study_takes():
    """`--model tiny` rehearses a study on a GPU before the 8B model is there."""
    lengths = [size.seq_len for size in scaling.SIZES[scaling.GPU]]
    lengths += [seq_len for _, seq_len, _ in frontier.SIZES[frontier.GPU]]
    lengths += map(int, re.findall(r"--seq-len (\d+)", README.read_text()))
    assert architecture.tiny_config().max_position_embeddings >= max(lengths)


def test_weights_depend_on_the_seed_and_on_nothing_else():
    first, again, other = (
        loading.load_model(tiny_workload("--seed", seed)).state_dict() for seed in "778"
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_flops_per_token_is_what_pytorch_counts():
    config = architecture.tiny_config()
    config._attn_implementation = "eager"  # its matrix products are visible to the counter
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # eager attention also multiplies the half of the scores that the causal mask throws away
    masked_half = 6.0 * config.num_hidden_layers * config.hidden_size * 64
    expected = ids.numel() * (architecture.ModelFacts(config).flops_per_token(64) + masked_half)
    # RoPE's angles are 3e-5 of it
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)
