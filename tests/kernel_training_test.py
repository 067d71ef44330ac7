"""The further kernels' flags, the opponents, and a step as one CUDA graph."""

import contextlib
import functools
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import finetune_baseline
import finetune_optimized
from harness.cli import command_line, device
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.flags import OPPONENTS, WARMUP_STEPS
from harness.data.dataset import Batch
from harness.model import architecture, loading
from harness.profiling.kernel_facts import PLAYBOOK_KERNELS
from harness.steps import stepping
from next_steps.finetuning import kernel_training, opponent_models, opponents
from next_steps.patches import apply_kernels
from tests.conftest import assert_refused
from tests.fixtures import needs_gpu
from tests.small_workloads import SMALL, small_workload

# ---------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("script", "expected"),
    [(finetune_baseline, ("Baseline", ())), (finetune_optimized, ("Optimized", PLAYBOOK_KERNELS))],
)
def test_a_graph_of_a_pages_own_step_is_handed_over(run_script, monkeypatch, script, expected):
    started = []

    def take_steps(run, optimizer, *more):
        started.append((run.name, run.workload.kernels))
        assert run.workload.cuda_graph and optimizer.param_groups[0]["capturable"]

    monkeypatch.setattr(device, "HAS_GPU", True)  # for the flags alone
    monkeypatch.setattr(
        kernel_training, "Run", lambda n, w, *rest, **more: SimpleNamespace(name=n, workload=w)
    )
    monkeypatch.setattr(kernel_training, "take_all_steps", take_steps)
    outcome = run_script(script, *SMALL, "--cuda-graph")
    assert (outcome.code, outcome.err) == (0, "") and started == [expected]


# ---------------------------------------------------------------- opponents


def test_every_opponent_has_a_recipe():
    assert list(opponent_models.RECIPES) == list(OPPONENTS)


@pytest.mark.parametrize(
    "name, module, title, package",
    [
        ("liger", "liger_kernel.transformers", "Liger-Kernel", "liger-kernel"),
        ("torchao-tensorwise", "torchao.float8", "torchao", "torchao"),
        ("torchao-rowwise", "torchao.float8", "torchao", "torchao"),
        ("unsloth", "unsloth", "Unsloth", "unsloth"),
        ("flashoptim", "flashoptim", "FlashOptim", "flashoptim"),
    ],
)
def test_an_opponent_that_is_not_installed_is_refused_before_the_model_is_loaded(
    run_script, monkeypatch, name, module, title, package
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(opponent_models, "HAS_GPU", True)
    monkeypatch.setattr(
        opponent_models.patched_model, "load_with_adapters", lambda workload: pytest.fail("loaded")
    )
    outcome = run_script(opponents, *SMALL, "--opponent", name)
    assert_refused(outcome, f"error: {title} is not installed: pip install {package}")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchaos_float8_is_in_the_layers_projections_alone(monkeypatch, small_model, recipe):
    float8 = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    workload = replace(small_workload(), opponent=f"torchao-{recipe}")
    model, called, _ = opponent_models.prepare_opponent(workload)
    found = [name for name, module in model.named_modules() if isinstance(module, float8)]
    assert len(found) == 7 * len(model.model.layers)
    assert all(name.startswith("model.layers.") and name.endswith("_proj") for name in found)
    assert compiled == list(model.model.layers) and called is model
    ids = torch.arange(16, device=DEVICE)[None]
    plain = loading.load_model(small_workload())
    losses = [each(input_ids=ids[:, :12], labels=ids[:, :12]).loss for each in (model, plain)]
    if DEVICE == "cpu":  # a GPU has no such products of fp32
        assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.1


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchaos_float8_leaves_adapters_alone_and_trains_them(monkeypatch, small_model, recipe):
    float8 = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    adapters = "--lora-rank", "4", "--lora-targets", "attention"
    plain = small_workload(*adapters)
    model, *_ = opponent_models.prepare_opponent(replace(plain, opponent=f"torchao-{recipe}"))
    found = [name for name, module in model.named_modules() if isinstance(module, float8)]
    beside = [name for name in found if name.endswith("_proj.base_layer")]
    n_layers = len(model.model.layers)
    assert (len(beside), len(found)) == (4 * n_layers, 7 * n_layers), "and those without adapters"
    called = []
    for name in beside:
        model.get_submodule(name).register_forward_hook(lambda *of_call: called.append(of_call[0]))
    ids = torch.arange(12, device=DEVICE)[None]
    if DEVICE != "cpu":  # a GPU has no such products of fp32
        return
    loss = model(input_ids=ids, labels=ids).loss
    assert len(called) == len(beside), "peft calls what stands in its base layer"
    unlike = opponent_models.patched_model.load_with_adapters(plain)(input_ids=ids, labels=ids).loss
    assert loss != unlike and abs(loss - unlike) < 0.1
    loss.backward()
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert graded == trained and all(".lora_" in name for name in trained) and trained


def test_torchaos_float8_is_refused_where_it_cannot_be(monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(opponent_models, "fp8_support", lambda: "Old GPU is of sm_80: leave it.")
    with pytest.raises(UserError, match="--opponent torchao-rowwise: Old GPU is of sm_80"):
        opponent_models.with_float8(replace(small_workload(), opponent="torchao-rowwise"))


@pytest.mark.parametrize(
    "name",
    [
        "fused-adamw",
        "rms-norm",
        pytest.param("compile", marks=pytest.mark.exhaustive),
        pytest.param("compile-reduce-overhead", marks=pytest.mark.exhaustive),
    ],
)
def test_an_opponent_trains_the_same(recorded, monkeypatch, small_model, name):
    make_optimizer = mock.Mock(wraps=stepping.make_optimizer)
    compiled = mock.Mock(wraps=torch.compile)
    if name == "compile-reduce-overhead" and not HAS_GPU:  # Inductor does the same in both modes
        traced = functools.partial(torch.compile, backend="aot_eager")
        compiled = mock.Mock(wraps=lambda model, mode: traced(model))
    monkeypatch.setattr(stepping, "make_optimizer", make_optimizer)
    monkeypatch.setattr(torch, "compile", compiled)
    baseline = recorded(finetune_baseline, *SMALL)
    opponent = recorded(opponents, *SMALL, "--opponent", name)
    assert opponent["losses"] == pytest.approx(baseline["losses"], rel=1e-5)
    assert baseline["losses"][0] != pytest.approx(baseline["losses"][2], rel=1e-3)
    assert (opponent["title"], opponent["kernels"]) == (OPPONENTS[name], [])
    assert make_optimizer.call_args.kwargs == {"fused": True, "capturable": False}
    expected = {"compile": ["default"], "compile-reduce-overhead": ["reduce-overhead"]}
    modes = [call.kwargs["mode"] for call in compiled.call_args_list]
    assert make_optimizer.call_count == 1 and modes == expected.get(name, [])


@pytest.mark.parametrize(
    ("flags", "calls"), [([], [None, "released"]), (["--accumulate", "2"], [None])]
)
def test_flashoptim_trains_the_same_and_steps_in_the_backward_if_it_can(
    recorded, small_model, flashoptim, flags, calls
):
    baseline = recorded(finetune_baseline, *SMALL, *flags)
    opponent = recorded(opponents, *SMALL, *flags, "--opponent", "flashoptim")
    assert opponent["losses"] == pytest.approx(baseline["losses"], rel=1e-5)
    # in fp32 it refuses to add bits to weights
    assert flashoptim == calls and opponent["title"] == "FlashOptim"
    assert "no-op" not in opponent["printed"]


def test_flashoptim_adds_eight_bits_to_weights_in_bf16_and_needs_a_gpu(
    run_script, monkeypatch, small_model, flashoptim
):
    in_bf16 = replace(small_workload("--dtype", "bf16"), opponent="flashoptim", world_size=2)
    opponent_models.flash_adamw(loading.load_model(in_bf16), in_bf16)
    assert flashoptim == [24], "gradients of two processes are averaged first"
    monkeypatch.setattr(opponent_models, "HAS_GPU", False)
    outcome = run_script(opponents, *SMALL, "--opponent", "flashoptim")
    assert_refused(outcome, "error: --opponent flashoptim needs a CUDA GPU and none was found")


def test_the_rms_norm_opponent_leaves_no_norm_as_it_was_and_shares_the_weights(small_model):
    model, plain = (
        opponent_models.with_rms_norm(small_workload()),
        loading.load_model(small_workload()),
    )
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert "LlamaRMSNorm" not in kinds.values() and kinds["model.norm"] == "RMSNorm"
    assert model.model.norm.eps == plain.model.norm.variance_epsilon
    states = model.state_dict(), plain.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())


def test_a_compiled_opponent_keeps_causal_attention_and_is_compiled_once(small_model):
    """Without the mask that transformers makes where it cannot look at the positions."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    ids = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    model = loading.load_model(small_workload())
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        compiled = torch.compile
        patch.setattr(torch, "compile", lambda model, mode: compiled(model, backend=backend))
        call = opponent_models.compiled(model, "default")
    for _ in range(3):
        call(input_ids=ids, labels=ids)
    (graph,) = graphs
    attention = torch.nn.functional.scaled_dot_product_attention
    (node,) = (node for node in graph.graph.nodes if node.target is attention)
    assert node.kwargs["attn_mask"] is None and node.kwargs["is_causal"]


@pytest.mark.exhaustive
def test_stochastic_rounding_reaches_the_optimizer_and_the_record(
    monkeypatch, recorded, small_model
):
    made, real = [], apply_kernels.triton_adamw

    def triton_adamw(*args, **options):
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(apply_kernels, "triton_adamw", triton_adamw)
    flags = ["--dtype", "bf16", "--kernels", "adamw", "--stochastic-rounding"]
    record = recorded(finetune_optimized, *SMALL, *flags)
    assert made[-1].param_groups[0]["stochastic_rounding"]  # the first is of a trial step
    assert record["kernels"] == ["adamw"] and record["stochastic_rounding"] is True
    assert "Custom kernels: adamw, stochastic_rounding;" in record["printed"]


# ---------------------------------------------------------------- the captured step


def attention_masks(model, monkeypatch) -> list:
    """What attention is told about the mask in one forward: None where it is only causal."""
    attend = mock.Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    ids = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        model(input_ids=ids, labels=ids)
    return [call.kwargs["attn_mask"] for call in attend.call_args_list]


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


@contextlib.contextmanager
def broken_graph(graph, stream):
    """In the place of torch.cuda.graph: a capture in which something failed fails at its end."""
    try:
        yield
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: not permitted\nwhen capturing"), command_line.RunError),
        (RuntimeError("CUDA out of memory"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_step_that_cannot_be_recorded_is_one_sentence(monkeypatch, error, expected):
    def model(**inputs):
        raise error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", broken_graph)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(expected) as caught:
        stepping.captured_step(model, None, [Batch(ids, ids, 4, n_targets=3)], None)
    if expected is command_line.RunError:
        given = "this step cannot be recorded as a CUDA graph (RuntimeError: CUDA error: not "
        assert str(caught.value) == f"{given}permitted): leave --cuda-graph out"
    else:
        assert caught.value is error


@needs_gpu
@pytest.mark.parametrize("dtype", architecture.TORCH_DTYPES)
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (finetune_baseline, []),
        (finetune_optimized, []),
        (finetune_optimized, ["--kernels", "all"]),
        (finetune_baseline, ["--accumulate", "3"]),
        (finetune_optimized, ["--kernels", "all", "--accumulate", "3"]),
        (opponents, ["--opponent", "fused-adamw"]),
        (opponents, ["--opponent", "rms-norm"]),
        (opponents, ["--opponent", "compile"]),
    ],
)
def test_captured_steps_are_the_same_steps(recorded, dtype, script, flags):
    flags = [*SMALL, "--batch-size", "2", "--seq-len", "64", "--steps", "6", *flags]
    plain, captured = (
        recorded(script, *flags, "--dtype", dtype, *graph)["losses"]
        for graph in ([], ["--cuda-graph"])
    )
    assert plain[5] != plain[2], "this comparison cannot fail"
    # PyTorch's AdamW computes in other roundings where it can be captured, ours in the same
    bf16 = 1e-3 if "all" in flags else 1e-2
    assert captured == pytest.approx(plain, rel=1e-5 if dtype == "fp32" else bf16)


@needs_gpu
def test_batch_of_another_shape_is_refused_by_the_graph():
    model = apply_kernels.apply_kernels(loading.load_model(small_workload("--dtype", "bf16")))
    optimizer, stream = apply_kernels.triton_adamw(model, 1e-3), torch.cuda.Stream()

    def batch(n_tokens):
        ids = torch.randint(architecture.BYTE_VOCABULARY, (1, n_tokens), device=DEVICE)
        return Batch(ids, ids, n_tokens, n_targets=n_tokens - 1)

    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            stepping.training_step(model, optimizer, [batch(16)])
        step = stepping.captured_step(model, optimizer, [batch(16)], stream)
        before = model.lm_head.weight.clone()
        step(model, optimizer, [batch(16)])
        assert not torch.equal(model.lm_head.weight, before)
        said = r"the shape \(1, 8\), but the CUDA graph was recorded with \(1, 16"
        with pytest.raises(command_line.UserError, match=said):
            step(model, optimizer, [batch(8)])
