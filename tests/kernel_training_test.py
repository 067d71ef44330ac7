"""The further kernels' flags, and their step as one CUDA graph."""

import sys

import pytest
import torch

import finetune_optimized
from harness import architecture, command_line, device, loading, run_records, stepping
from harness.checking import DEVICE
from harness.dataset import Batch
from harness.device import HAS_GPU
from harness.workload import WARMUP_STEPS, Workload, finetune_parser
from next_steps import apply_kernels, kernel_training
from tests.fixtures import needs_gpu
from tests.small_workloads import smaller_config

# a dozen rows are all that Triton's interpreter gets through in a tenth of a second
TINY = ["--model", "tiny", "--dtype", "fp32"]
# the third step may be a CUDA graph
SMALL = [*TINY, "--batch-size", "1", "--seq-len", "8", "--steps", "3"]


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setattr(architecture, "tiny_config", smaller_config)


def small_workload(*flags: str) -> Workload:
    return Workload.from_flags(finetune_parser("").parse_args([*SMALL, *flags]), HAS_GPU)


# ---------------------------------------------------------------- flags


def test_a_picture_without_a_ladder_is_refused(run_script, tmp_path):
    outcome = run_script(finetune_optimized, *SMALL, "--plot", str(tmp_path / "x.png"))
    assert (
        outcome.code == 2
        and "draws the ladder: add --ladder" in outcome.err
        and not list(tmp_path.iterdir())
    )


@pytest.mark.parametrize("flag", ["--cuda-graph", "--stochastic-rounding"])
@pytest.mark.parametrize(
    "kernels", [[], ["--kernels", "none"], ["--kernels", "rmsnorm,swiglu"]], ids=str
)
def test_flags_of_the_adamw_kernel_are_refused_without_it(run_script, flag, kernels):
    outcome = run_script(finetune_optimized, *SMALL, flag, *kernels)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: {flag} needs the adamw kernel: --kernels all\n"


def test_a_graph_without_a_gpu_is_refused(run_script, monkeypatch):
    monkeypatch.setattr(device, "HAS_GPU", False)
    outcome = run_script(finetune_optimized, *SMALL, "--cuda-graph", "--kernels", "all")
    assert (outcome.code, outcome.err) == (
        2,
        "error: --cuda-graph needs a CUDA GPU and none was found\n",
    )


def test_an_opponent_that_is_not_installed_is_refused_before_the_model_is_loaded(
    run_script, monkeypatch
):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    monkeypatch.setattr(kernel_training, "load_model", lambda workload: pytest.fail("loaded"))
    outcome = run_script(finetune_optimized, *SMALL, "--opponent", "liger")
    assert (outcome.code, outcome.err) == (
        2,
        "error: Liger-Kernel is not installed: pip install liger-kernel\n",
    )


def test_an_unknown_opponent_is_refused(run_script):
    outcome = run_script(finetune_optimized, *SMALL, "--opponent", "nobody")
    assert outcome.code == 2 and "nobody" in outcome.err and outcome.err.count("\n") == 1


@pytest.mark.exhaustive
def test_stochastic_rounding_reaches_the_optimizer_and_the_record(
    monkeypatch, tmp_path, run_script, small_model
):
    made, path = [], tmp_path / "run.json"
    real = apply_kernels.triton_adamw

    def triton_adamw(*args, **options):
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(apply_kernels, "triton_adamw", triton_adamw)
    flags = ["--dtype", "bf16", "--kernels", "adamw", "--stochastic-rounding", "--json", str(path)]
    outcome = run_script(finetune_optimized, *SMALL, *flags)
    assert outcome.code == 0, outcome.err
    assert made[0].param_groups[0]["stochastic_rounding"]
    record = run_records.read_record(str(path), "finetune")
    assert record["kernels"] == ["adamw"] and record["stochastic_rounding"] is True
    assert "Custom kernels: adamw, stochastic_rounding;" in outcome.out


# ---------------------------------------------------------------- the captured step


def attention_masks(model, monkeypatch) -> list:
    """What attention is told about the mask in one forward: None where it is causal and nothing
    else.
    """
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    ids = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        model(input_ids=ids, labels=ids)
    return masks


def test_attention_is_causal_in_a_capture_too(monkeypatch, small_model):
    """Not by a mask, which transformers makes where it cannot look at the positions."""
    model = loading.load_model(small_workload())
    assert attention_masks(model, monkeypatch) == [None]
    find = architecture.masking_utils.find_packed_sequence_indices
    # as it finds in a capture
    monkeypatch.setattr(architecture.masking_utils, "is_tracing", lambda tensor=None: True)
    assert attention_masks(model, monkeypatch) != [None], "transformers needs no help any more"
    with architecture.unpacked_sequences():
        assert attention_masks(model, monkeypatch) == [None]
    assert architecture.masking_utils.find_packed_sequence_indices is find


def losses_of_six_steps(run_script, path, *flags) -> list[float]:
    workload = [
        "--model",
        "tiny",
        "--batch-size",
        "2",
        "--seq-len",
        "64",
        "--steps",
        "6",
        "--kernels",
        "all",
    ]
    outcome = run_script(finetune_optimized, *workload, *flags, "--json", str(path))
    assert outcome.code == 0, outcome.err
    return run_records.read_record(str(path), "finetune")["losses"]


@needs_gpu
@pytest.mark.parametrize("dtype", architecture.TORCH_DTYPES)
def test_captured_steps_are_the_same_steps(run_script, tmp_path, dtype):
    plain, captured = (
        losses_of_six_steps(run_script, tmp_path / "run.json", "--dtype", dtype, *flags)
        for flags in ([], ["--cuda-graph"])
    )
    assert plain[5] != plain[2], "this comparison cannot fail"
    assert captured == pytest.approx(plain, rel=1e-5 if dtype == "fp32" else 1e-3)


@needs_gpu
def test_batch_of_another_shape_is_refused_by_the_graph():
    model = apply_kernels.apply_kernels(loading.load_model(small_workload("--dtype", "bf16")))
    optimizer, stream = apply_kernels.triton_adamw(model, 1e-3), torch.cuda.Stream()

    def batch(n_tokens):
        ids = torch.randint(architecture.BYTE_VOCABULARY, (1, n_tokens), device=DEVICE)
        return Batch(ids, ids, n_tokens)

    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            stepping.training_step(model, optimizer, batch(16))
        step = stepping.captured_step(model, optimizer, batch(16), stream)
        before = model.lm_head.weight.clone()
        step(model, optimizer, batch(16))
        assert not torch.equal(model.lm_head.weight, before)
        with pytest.raises(
            command_line.UserError,
            match=r"the shape \(1, 8\), but the CUDA graph was recorded with \(1, 16",
        ):
            step(model, optimizer, batch(8))
