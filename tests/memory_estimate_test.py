"""The estimate meets every recorded run, keeps what autograd keeps, and needs no GPU or weights."""

import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch
import triton
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import kernel_support
from harness.cli import device
from harness.cli.device import DEVICE
from harness.cli.flags import DEFAULT_MODEL
from harness.cli.workload import Workload
from harness.model import architecture, config_file
from harness.model.patching import called_function
from harness.profiling.kernel_facts import KERNELS, MODEL_KERNELS
from harness.steps import stepping
from next_steps.memory import estimate, memory_estimate, memory_ledger, meta_step
from next_steps.memory.memory_ledger import GRADIENTS, LOSS, PARAMETERS, STATE
from next_steps.memory.peak_attribution import KEPT, TEMPORARY, WORKSPACES, history, kept_blocks
from next_steps.patches.apply_kernels import apply_kernels
from tests.small_workloads import as_kernels_module, imported_anew
from tools.page_records import RESULTS

REQUIRED = [
    *(f"finetune_{way}_1x512" for way in ("baseline", "optimized", "all")),
    *(f"finetune_{way}_4x2048" for way in ("baseline", "optimized", "all")),
    *("profile_1x512", "profile_1x512_rmsnorm", "profile_1x512_both"),
    *("profile_4x2048", "profile_4x2048_both"),
]
TOLERANCE = 1e-3  # the largest of these is off by 0.07 %, a CUDA graph's third cuBLAS workspace


def recorded(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


ESTIMATE = memory_estimate.estimate  # the real one, also where a test has put another in its place


@functools.cache
def estimate_8b(dtype: str, batch_size: int, seq_len: int, kernels: tuple[str, ...]) -> dict:
    workload = Workload(dtype=dtype, batch_size=batch_size, seq_len=seq_len, kernels=kernels)
    return ESTIMATE(architecture.llama_3_1_8b_config(), workload)


def estimate_of(record: dict) -> dict:
    kernels = tuple(name for name in record["kernels"] if name in KERNELS)
    return estimate_8b(record["dtype"], record["batch_size"], record["seq_len"], kernels)


def tiny_estimate(*kernels: str, seq_len=64, config=None, **more) -> dict:
    workload = Workload(batch_size=2, seq_len=seq_len, kernels=kernels, **more)
    return memory_estimate.estimate(config or architecture.tiny_config(), workload)


def tiny_step(kernels, batch_size: int, seq_len: int) -> memory_ledger.Ledger:
    workload = Workload(batch_size=batch_size, seq_len=seq_len, kernels=tuple(kernels))
    return meta_step.run_step(architecture.tiny_config(), workload)


# ---------------------------------------------------------------- recorded runs


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REQUIRED)
def test_the_recorded_peak_is_met(name):
    record = recorded(name)
    assert record["model"] == DEFAULT_MODEL
    peak = pytest.approx(record["peak_memory_bytes"], rel=TOLERANCE)
    assert estimate_of(record)["peak_memory_bytes"] == peak


@pytest.mark.parametrize("name", [name for name in REQUIRED if name.startswith("profile")])
def test_the_recorded_memory_between_steps_is_met(name):
    record = recorded(name)
    parts = estimate_of(record)["parts"]
    resting = parts[PARAMETERS] + parts[STATE] + parts[WORKSPACES]
    # a newer record's kernels are also recorded in steps of their own
    profiled = 4 if record.get("timeline") else 2
    n_batches = record["warmup_steps"] + len(record["step_ms"]) + profiled
    waiting = n_batches * 2 * 8 * record["batch_size"] * record["seq_len"]  # ids and labels
    assert record["resting_memory_bytes"] == resting + waiting


def test_the_peak_moves_from_the_optimizer_to_the_loss_as_batches_grow():
    short, long = (
        estimate_of(recorded(f"finetune_baseline_{size}")) for size in ("1x512", "4x2048")
    )
    assert short["phase"] == "optimizer"
    denom, *rest = short["made_by"].values()  # of AdamW, as many bytes as the weights
    assert next(iter(short["made_by"])) == "_foreach_sqrt"
    assert denom["bytes"] == short["parts"][TEMPORARY] == short["parts"][GRADIENTS]
    # one number
    assert sum(row["bytes"] for row in rest) == short["parts"][LOSS] == memory_ledger.ROUNDING
    assert (long["phase"], long["layer"]) == ("backward", None)
    logits = 4 * 8192 * 128_256  # fp32
    # the log-softmax, its gradient and the logits'
    made = [row["bytes"] for row in long["made_by"].values()]
    assert made[:3] == pytest.approx([logits] * 3, rel=1e-3)
    assert long["parts"][LOSS] == pytest.approx(3 * logits, rel=1e-3)
    assert long["parts"][TEMPORARY] == 0


# ---------------------------------------------------------------- what autograd keeps


def bytes_saved_by_a_real_step(kernels: list[str], batch_size: int, seq_len: int) -> int:
    """Of unique storages that the layers of a tiny model leave to the backward, weights apart."""
    model = AutoModelForCausalLM.from_config(architecture.tiny_config(), dtype=torch.bfloat16)
    apply_kernels(model.to(DEVICE).train(), kernels)
    layers = model.model.layers
    not_theirs = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved, last, inside = {}, [], []

    def enter(layer, inputs, keywords):
        inside[:] = [True]
        if layer is layers[0]:
            given = inputs[0], *keywords["position_embeddings"]
            not_theirs.update(t.untyped_storage().data_ptr() for t in given)

    def leave(layer, inputs, output):
        inside.clear()
        last[:] = [output.untyped_storage()]

    def pack(t):
        storage = t.untyped_storage()
        # it may keep what the last layer made
        of_last_norm = last and storage.data_ptr() == last[0].data_ptr()
        if (inside or of_last_norm) and storage.data_ptr() not in not_theirs and t.numel() > 1:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    for layer in layers:
        layer.register_forward_pre_hook(enter, with_kwargs=True)
    layers[-1].register_forward_hook(leave)
    ids = torch.zeros((batch_size, seq_len), dtype=torch.int64, device=DEVICE)
    with saved_tensors_hooks(pack, lambda t: t):
        result = model.model(ids, use_cache=False)
    del result  # only now may memory be reused
    return sum(saved.values())


def bytes_kept_in_layers(ledger: memory_ledger.Ledger) -> int:
    """Without single numbers: on a GPU attention saves the two of dropout's generator."""
    kept = [block for block in kept_blocks(ledger) if block.stage[1] is not None]
    sizes = [(math.prod(block.shape), block.dtype.itemsize) for block in kept]
    return sum(numel * width for numel, width in sizes if numel > 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kernels", [[], *([name] for name in MODEL_KERNELS), MODEL_KERNELS], ids="+".join
)
def test_the_layers_keep_what_autograd_saves(kernels):
    estimated = bytes_kept_in_layers(tiny_step(kernels, 2, 9))
    assert estimated == bytes_saved_by_a_real_step(kernels, 2, 9)


def test_the_rotary_function_in_a_module_of_kernels_is_known_by_the_functions_code(monkeypatch):
    rotary = called_function(modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", as_kernels_module(rotary))
    assert imported_anew(memory_ledger).KIND_OF_CODE == memory_ledger.KIND_OF_CODE


@pytest.mark.parametrize("kernels", [[], MODEL_KERNELS], ids=["none", "all"])
def test_every_kept_tensor_has_a_kind(kernels):
    ledger = tiny_step(kernels, 2, 64)
    assert {block.kind for block in kept_blocks(ledger)} <= set(memory_ledger.KINDS)


# ---------------------------------------------------------------- the ledger


def living(ledger: memory_ledger.Ledger) -> int:
    return sum(block.n_bytes for block in ledger.living.values())


def test_a_storage_counts_once_from_its_birth_to_its_death_in_units_of_the_allocator():
    with memory_ledger.Ledger() as ledger:
        x = torch.empty(100, dtype=torch.float32, device="meta")  # 400 bytes
        assert living(ledger) == 512
        view = x.view(10, 10).t()
        x.add_(1)
        assert living(ledger) == 512
        y = view @ view  # 400
        z = torch.empty(129, dtype=torch.float32, device="meta")  # 516
        assert living(ledger) == 512 + 512 + 1024
        del x, z
        assert living(ledger) == 512 + 512  # the view still holds x
        del view, y
        assert living(ledger) == 0
    assert max(map(sum, zip(*history(ledger, 0).values()))) == 2048


def test_what_the_graph_holds_lives_until_the_backward():
    with memory_ledger.Ledger() as ledger:
        x = torch.empty(128, device="meta", requires_grad=True)
        y = (x * 2).exp().sum()  # exp keeps its result, the product with 2 nothing
        assert living(ledger) == 3 * 512
        y.backward()
        assert living(ledger) == 3 * 512  # x, y and the gradient


def test_a_step_in_the_backward_never_has_all_gradients():
    every, one = tiny_estimate(seq_len=4), tiny_estimate("adamw", seq_len=4)
    n_parameters = 2 + 1 + 2 * 9
    # it counts its steps on the GPU
    assert one["parts"][STATE] - every["parts"][STATE] == n_parameters * 512
    weights = every["parts"][PARAMETERS]
    assert every["parts"][GRADIENTS] == pytest.approx(weights, rel=0.02)
    assert one["parts"][GRADIENTS] < 0.2 * weights
    assert one["phases"]["optimizer"] < one["peak_memory_bytes"]


def test_8_bit_moments_are_codes_and_scales():
    wide, coded = (
        tiny_estimate("adamw", seq_len=4, moments=each)["parts"][STATE] for each in (None, "8bit")
    )
    # small tensors take 512 bytes, whatever is in them
    assert 0.5 < coded / wide < 0.6


def test_tied_embeddings_are_one_parameter():
    config = architecture.tiny_config()
    apart = tiny_estimate(config=config)
    config.tie_word_embeddings = True
    tied = tiny_estimate(config=config)
    saved = apart["parts"][PARAMETERS] - tied["parts"][PARAMETERS]
    assert saved == 2 * 257 * 64 + 384  # to a multiple of 512


def test_fp32_with_grouped_queries_keeps_the_weights_of_attention():
    config = architecture.tiny_config()
    weights = 2 * 4 * 512 * 512 * 4  # (B, heads, T, T) fp32

    def kept() -> int:
        estimated = tiny_estimate(dtype="fp32", seq_len=512, config=config)
        return estimated["kept_in_layers"]["attention"]

    grouped = kept()
    config.num_key_value_heads = 4
    assert grouped > 2 * weights > kept()


def test_large_heads_that_share_keys_get_copies_of_them_as_transformers_does_it():
    """So the memory-efficient attention, which knows no grouped queries, runs for them too."""
    config, workload = architecture.tiny_config(), Workload(dtype="fp32", seq_len=8)
    for head_dim, efficient in ((256, False), (264, True)):
        config.head_dim = head_dim
        ledger = meta_step.run_step(config, workload)
        operations = {block.operation for block in ledger.blocks}
        assert ("_scaled_dot_product_efficient_attention" in operations) == efficient


def test_kernels_that_are_not_interpreted_are_not_launched_either(monkeypatch):
    interpreted = tiny_estimate(*KERNELS)
    monkeypatch.setattr(kernel_support, "INTERPRETED", False)
    assert tiny_estimate(*KERNELS) == interpreted


def test_nothing_stays_replaced(monkeypatch):
    def replaced() -> tuple:
        launch = triton.KernelInterface.__getitem__
        return launch, torch.Tensor.is_cpu, kernel_support.INTERPRETED

    before = replaced()
    monkeypatch.setattr(stepping, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_estimate()
    assert replaced() == before


# ---------------------------------------------------------------- the flag


def test_the_flag_prints_the_estimate_beside_the_baselines_and_records_it(
    run_script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flags = ["--model", "tiny", "--kernels", "all", "--json", "estimate.json"]
    outcome = run_script(estimate, *flags)
    assert outcome.code == 0
    record = json.loads(Path("estimate.json").read_text())
    assert outcome.out.startswith(memory_estimate.render(record))
    # a GPU's defaults
    assert (record["kind"], record["dtype"], record["seq_len"]) == ("estimate", "bf16", 512)
    assert [e["kernels"] for e in record["estimates"]] == [[], KERNELS]
    assert "At the peak, MB" in outcome.out and KEPT in outcome.out
    assert "(estimate)" in outcome.out and "chosen: the peak is in the" in outcome.out
    assert [path.name for path in tmp_path.iterdir()] == ["estimate.json"]  # no trace


@pytest.mark.exhaustive
def test_eight_billion_parameters_need_no_gpu(run_script, monkeypatch):
    def estimated_before(config, workload):
        assert config.hidden_size == 4096 and workload.dtype == "bf16"
        return estimate_8b("bf16", workload.batch_size, workload.seq_len, workload.kernels)

    for module in (device, config_file):
        monkeypatch.setattr(module, "HAS_GPU", False)
    monkeypatch.setattr(memory_estimate, "estimate", estimated_before)
    outcome = run_script(estimate, "--random-init")
    assert outcome.code == 0
    assert re.search(r"^Total +80\.37$", outcome.out, re.MULTILINE)


def test_the_weights_are_not_needed_and_without_kernels_there_is_one_column(run_script, tmp_path):
    architecture.tiny_config().save_pretrained(tmp_path)
    flags = "--model", str(tmp_path), "--dtype", "fp32", "--seq-len", "8"
    outcome = run_script(estimate, *flags)
    assert outcome.code == 0 and "pretrained weights" in outcome.out
    assert "chosen" not in outcome.out


def test_the_moment_of_the_peak_in_words():
    stages = [("backward", None), ("backward", 0), ("backward", 3), ("forward", 3), ("loss", None)]
    assert [memory_ledger.stage_in_words(*stage, n_layers=4) for stage in stages] == [
        "backward of the loss", "backward of the embedding", "backward of layer 3 of 4",
        "forward of layer 3 of 4", "loss",
    ]  # fmt: skip


@pytest.mark.parametrize("kernels", [[], KERNELS], ids=["none", "all"])
def test_the_stages_of_a_step_come_in_order(kernels):
    ledger = tiny_step(kernels, 1, 8)
    backward = [("backward", layer) for layer in (None, 2, 1, memory_ledger.EMBEDDING)]
    forward = [("forward", layer) for layer in (None, 1, 2)]
    assert list(dict.fromkeys(sample.stage for sample in ledger.samples)) == [
        *forward,
        ("loss", None),
        *backward,
        ("optimizer", None),
    ]
