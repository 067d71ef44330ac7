"""A step of several micro-batches is the step of one large batch: loss, gradients, parameters."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import compare_runs
import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.benchmark.checking import DEVICE, relative_error
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.data.dataset import IGNORE_INDEX, Batch
from harness.model import architecture, loading
from harness.model.architecture import ModelFacts
from harness.profiling import costs
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS, RUNGS
from harness.steps import stepping
from next_steps.finetuning import distillation, opponents
from next_steps.lessons.adamw_optimizer import TritonAdamW
from next_steps.memory import memory_estimate, profile
from next_steps.memory.memory_ledger import BATCH, GRADIENTS
from next_steps.patches.apply_kernels import apply_kernels, make_optimizer, model_kernels
from next_steps.studies import frontier
from tests.fixtures import needs_gpu
from tests.small_workloads import (
    TINY,
    assert_a_step_does_not_wait,
    largest_error,
    tiny_workload,
    uneven_norms,
)

pytestmark = pytest.mark.usefixtures("small_model", "little_validation")
T = 8
MASKED = 2, T, 6  # tokens without a label at each micro-batch's beginning: the second is without
every_kernel_set = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param((), id="none"),
        pytest.param(PLAYBOOK_KERNELS, id="the playbook's", marks=pytest.mark.exhaustive),
        pytest.param(tuple(KERNELS), id="all", marks=pytest.mark.exhaustive),
    ],
)


def micro_batch(masked: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(100 * seed + masked)
    ids = torch.randint(architecture.BYTE_VOCABULARY, (1, T), generator=generator)
    labels = ids.clone()
    labels[:, :masked] = IGNORE_INDEX
    return Batch(ids, labels, T, n_targets=T - max(1, masked)).to(DEVICE)


def micro_batches(seed: int = 0) -> list[Batch]:
    return [micro_batch(masked, seed) for masked in MASKED]


def one_large(batches: list[Batch]) -> list[Batch]:
    ids, labels = (torch.cat(each) for each in zip(*((b.input_ids, b.labels) for b in batches)))
    n_tokens, n_targets = map(sum, zip(*((b.n_tokens, b.n_targets) for b in batches)))
    return [Batch(ids, labels, n_tokens, n_targets)]


def assert_close(found: dict, expected: dict, allowed: float) -> None:
    error, name = largest_error(found, expected)
    assert error < allowed, f"{name} is off by {error:.1e}"


def assert_same_parameters(models, allowed: float) -> None:
    assert_close(*(dict(model.named_parameters()) for model in models), allowed)


def make_model(kernels=(), dtype="fp32") -> torch.nn.Module:
    model = uneven_norms(loading.load_model(tiny_workload("--seq-len", "8", "--dtype", dtype)))
    return apply_kernels(model, model_kernels(kernels))


class Recorder:
    """An optimizer that leaves the parameters as they are, and remembers their gradients."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def step(self) -> None:
        self.gradients = {name: p.grad for name, p in self.model.named_parameters()}

    def zero_grad(self, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none)


def loss_and_gradients(model, batches: list[Batch], take_step=stepping.training_step) -> dict:
    recorder = Recorder(model)
    loss = take_step(model, recorder, batches)
    assert not loss.requires_grad and all(g is not None for g in recorder.gradients.values())
    return {"loss": loss, **recorder.gradients}


def mean_of_means(model, optimizer, batches: list[Batch]) -> torch.Tensor:
    """What is wrong: every micro-batch counts the same, however few tokens it trains on."""
    losses = [model(**batch.inputs()).loss for batch in batches]
    (sum(losses) / len(losses)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sum(losses).detach() / len(losses)


def test_a_mean_of_means_would_be_noticed():
    model = make_model()
    batches = [batch for batch in micro_batches() if batch.n_targets]
    wrong = loss_and_gradients(model, batches, mean_of_means)
    right = loss_and_gradients(model, one_large(batches))
    assert min(relative_error(wrong[name], right[name]) for name in right) > 1e-3
    equal = [micro_batch(3, seed) for seed in range(3)]  # where it is right
    wrong = loss_and_gradients(model, equal, mean_of_means)
    assert largest_error(wrong, loss_and_gradients(model, one_large(equal)))[0] < 1e-5


@every_kernel_set
def test_gradients_are_those_of_one_large_batch(kernels):
    model = make_model(kernels)
    expected = loss_and_gradients(model, one_large(micro_batches()))
    assert_close(loss_and_gradients(model, micro_batches()), expected, 1e-6)


@pytest.mark.exhaustive
@every_kernel_set
def test_in_bf16_gradients_are_at_most_twice_as_wrong_as_one_large_batch_s(kernels):
    exact_model = make_model(dtype="bf16").float()
    exact = loss_and_gradients(exact_model, one_large(micro_batches()))
    plain = loss_and_gradients(make_model(dtype="bf16"), one_large(micro_batches()))
    found = loss_and_gradients(make_model(kernels, "bf16"), micro_batches())
    for name, value in exact.items():
        allowed = 2 * relative_error(plain[name], value) + 5e-3
        assert relative_error(found[name], value) <= allowed, name


@every_kernel_set
def test_three_steps_leave_the_parameters_of_three_large_ones(kernels):
    """PyTorch's AdamW against itself, or against ours in the backward."""
    models = make_model(kernels), make_model()
    optimizers = make_optimizer(models[0], 1e-3, kernels), make_optimizer(models[1], 1e-3, ())
    assert isinstance(optimizers[0], TritonAdamW) == ("adamw" in kernels)
    for seed in range(3):
        batches = micro_batches(seed)
        losses = [
            stepping.training_step(model, optimizer, each)
            for model, optimizer, each in zip(models, optimizers, (batches, one_large(batches)))
        ]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        assert all(p.grad is None for p in models[0].parameters())
    assert_same_parameters(models, 1e-5)
    assert {int(state["step"]) for state in optimizers[0].state.values()} == {3}


@every_kernel_set
def test_without_any_target_the_loss_is_nan_and_no_gradient_is(kernels):
    model, batches = make_model(kernels), [micro_batch(T, seed) for seed in range(2)]
    for each in (batches, one_large(batches)):
        found = loss_and_gradients(model, each)
        assert found.pop("loss").isnan()
        assert all(torch.equal(g, torch.zeros_like(g)) for g in found.values())


def test_one_micro_batch_is_called_as_ever(monkeypatch):
    model, calls = make_model(), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: calls.append(given) or forward(**given))
    loss_and_gradients(model, [micro_batch(2)])
    loss_and_gradients(model, micro_batches())
    ever = {"input_ids", "labels"}
    assert list(map(set, calls)) == [ever, *[ever | {"num_items_in_batch"}] * len(MASKED)]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_distilled_student_s_gradients_are_those_of_one_large_batch(fused):
    teacher = make_model().eval().requires_grad_(False)
    student = uneven_norms(loading.load_model(tiny_workload("--seq-len", "8", "--seed", "1")))
    distillation.learn_from(student, teacher, 2.0, fused)
    found = loss_and_gradients(student, micro_batches())
    expected = loss_and_gradients(student, one_large(micro_batches()))
    # 0.003, a mean of differences of log-probabilities near -6, whose last bit in fp32 is 5e-7
    assert found.pop("loss").item() == pytest.approx(expected.pop("loss").item(), abs=5e-7)
    # a GPU multiplies batches of other shapes by other kernels, which add up in other orders
    assert_close(found, expected, 4e-6 if HAS_GPU else 1e-6)
    empty = [micro_batch(T, seed) for seed in range(2)]
    for each in (empty, one_large(empty)):
        found = loss_and_gradients(student, each)
        assert found.pop("loss").isnan() and not any(g.any() for g in found.values())


# ---------------------------------------------------------------- as a CUDA graph


class Recording(contextlib.nullcontext):
    """In place of a CUDA graph: a replay takes the step again that was recorded, on its tensors."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.real = stepping.training_step
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: graph)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(stepping, "training_step", self.record)

    def record(self, *step) -> torch.Tensor:
        self.step, self.loss = step, torch.zeros((), device=DEVICE)
        return self.loss

    def replay(self) -> None:
        self.loss.copy_(self.real(*self.step))


def test_a_replay_trains_on_every_micro_batch_and_counts_its_targets(monkeypatch):
    """As the number of targets changes from step to step, it must not be the recorded one."""
    models = make_model(), make_model()
    optimizers = [make_optimizer(model, 1e-3, ()) for model in models]
    graph = Recording(monkeypatch)
    replay = stepping.captured_step(models[0], optimizers[0], micro_batches(), None)
    for masked in (MASKED, (1, 1, 1), (T, 3, T)):
        batches = [micro_batch(n) for n in masked]
        found = replay(models[0], optimizers[0], batches).item()
        expected = graph.real(models[1], optimizers[1], batches).item()
        assert found == pytest.approx(expected, rel=1e-6)
    assert_same_parameters(models, 1e-6)


@needs_gpu
@every_kernel_set
def test_no_step_waits_for_the_gpu(kernels):
    model = make_model(kernels, "bf16")
    optimizer = make_optimizer(model, 1e-3, kernels, fused=True)
    assert_a_step_does_not_wait(model, optimizer, micro_batches())


# ---------------------------------------------------------------- what a step takes


def test_sizes_launches_and_speed_of_light_are_those_of_the_tokens_together():
    config = architecture.llama_3_1_8b_config()
    several = Workload(batch_size=2, seq_len=64, accumulate=3)
    large = replace(several, batch_size=6, accumulate=None)
    facts = [ModelFacts(config, workload) for workload in (several, large)]
    sizes, of_large = map(costs.sizes_of, facts)
    # quantized weights are written out for each of them
    assert sizes.projection == pytest.approx(3 * of_large.projection)
    assert sizes == replace(of_large, micro_batches=3, projection=sizes.projection)
    assert [r.floor_bytes(sizes) for r in RUNGS] == [r.floor_bytes(of_large) for r in RUNGS]
    ceilings = {"matmul_tflops": 800, "copy_gbs": 4000}
    light = [costs.least_ms(each, 6 * 64, 1e10, ceilings) for each in facts]
    assert light[0] == light[1]
    one = costs.sizes_of(ModelFacts(config, replace(several, accumulate=None)))
    for kernel, launches in (("_rmsnorm_fwd", 65), ("_swiglu_bwd", 32), ("_cross_entropy_fwd", 1)):
        of_one = costs.cost_of_kernel(kernel, launches, one)
        assert costs.cost_of_kernel(kernel, 3 * launches, sizes) == of_one, kernel
    # once a step
    assert costs.cost_of_kernel("_adamw", 291, sizes) == costs.cost_of_kernel("_adamw", 291, one)


@every_kernel_set
def test_the_estimate_has_all_gradients_at_the_peak_and_keeps_one_micro_batch_s_activations(
    kernels,
):
    config = architecture.tiny_config()
    workload = Workload(batch_size=2, seq_len=64, kernels=tuple(kernels))
    one, three, five = (
        memory_estimate.estimate(config, replace(workload, accumulate=n)) for n in (1, 3, 5)
    )
    assert three["parts"][GRADIENTS] >= 2 * ModelFacts(config).parameters
    assert three["kept_in_layers"] == one["kept_in_layers"]
    assert three["kept_outside"] == one["kept_outside"]
    batch = one["parts"][BATCH]
    assert three["parts"][BATCH] == 3 * batch
    # the fourth and the fifth only wait on the GPU
    assert five["peak_memory_bytes"] == three["peak_memory_bytes"] + 2 * batch
    assert five["parts"] == three["parts"] | {BATCH: 5 * batch}


# ---------------------------------------------------------------- the scripts

SCRIPTS = {
    "baseline": (finetune_baseline, []),
    "two kernels": (finetune_optimized, []),
    "all kernels": (finetune_optimized, ["--kernels", "all"]),
    "opponent": (opponents, ["--opponent", "rms-norm"]),
}


EIGHT = [*TINY, "--seq-len", "8"]
SEVERAL, LARGE = ["--accumulate", "3"], ["--batch-size", "3"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("script, flags", SCRIPTS.values(), ids=SCRIPTS)
def test_a_run_of_micro_batches_is_the_run_of_large_batches(recorded, script, flags):
    flags = [*EIGHT, *flags, "--steps", "2"]
    several, large = (recorded(script, *flags, *size) for size in (SEVERAL, LARGE))
    assert several["losses"] == pytest.approx(large["losses"], rel=1e-5)
    assert several["tokens"] == large["tokens"] == [24] * 2
    assert several["accumulate"] == 3 and "accumulate" not in large


@pytest.mark.exhaustive
def test_a_profile_counts_every_micro_batch(recorded, tmp_path):
    flags = [*EIGHT, "--warmup", "1", "--trace", str(tmp_path / "trace.json")]
    one, three = (recorded(profile_baseline, *flags, *size) for size in ([], SEVERAL))
    assert "; 3 micro-batches of 1 x 8 tokens; " in three["printed"]
    for count in ("bytes", "flops", "launches"):
        old, new = (record["categories"]["matmul"][count] for record in (one, three))
        assert new == pytest.approx(3 * old)
    optimizers = [record["categories"]["optimizer"] for record in (one, three)]
    assert optimizers[0]["bytes"] == optimizers[1]["bytes"]  # once a step


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["none", "all"])
def test_the_measured_memory_has_all_gradients_in_the_last_forward(recorded, tmp_path, kernels):
    flags = [*EIGHT, "--warmup", "1", "--kernels", kernels]
    flags += ["--accumulate", "2", "--plot", str(tmp_path / "memory.png")]
    record = recorded(profile, *flags)
    assert record["phases"]["forward"]["parts"][GRADIENTS] >= 4 * record["parameters"]
    phases = [stage["phase"] for stage in record["timeline"]["stages"]]
    order = [phase for phase, before in zip(phases, [None, *phases]) if phase != before]
    assert order == [*["forward", "loss", "backward"] * 2, "optimizer"]


def test_the_longest_sequence_is_that_of_a_step_of_micro_batches(recorded, monkeypatch):
    real, steps = stepping.timed_step, []
    timed_step = lambda *step: steps.append(len(step[2])) or real(*step)  # noqa: E731
    monkeypatch.setattr(stepping, "timed_step", timed_step)
    monkeypatch.setitem(frontier.LENGTH_STEP, HAS_GPU, 6)
    flags = ["--longest", "--kernels", "none", "--seq-len", "6", "--accumulate", "2"]
    record = recorded(frontier, *TINY[:4], *flags)
    assert steps == [2] * 4 and record["accumulate"] == 2
    assert "batch 1, 2 micro-batches a step: 12 tokens" in record["printed"]


def test_records_say_how_many_micro_batches_and_do_not_compare_with_one(run_script, tmp_path):
    """Records of before the flag are those without it."""
    paths = [str(tmp_path / f"{n}.json") for n in (1, 2)]
    for n, path in enumerate(paths, start=1):
        flags = ["--seq-len", "8", "--steps", "3", "--accumulate", str(n), "--json", path]
        assert run_script(finetune_baseline, *TINY, *flags).code == 0
    assert "accumulate" not in json.loads(Path(paths[0]).read_text())
    outcome = run_script(compare_runs, *paths[::-1])
    assert outcome.code == 0, outcome.err
    assert "2 micro-batches of 1 x 8 tokens, 3 steps" in outcome.out
    assert "losses are not compared: accumulate None (not 2)" in outcome.out


def test_one_micro_batch_is_the_workload_without_the_flag():
    one = tiny_workload("--accumulate", "1")
    assert one == tiny_workload() and one.as_record() == tiny_workload().as_record()
    assert one.is_on_the_page and not tiny_workload("--accumulate", "2").is_on_the_page
    (difference,) = tiny_workload().differences(tiny_workload("--accumulate", "2"))
    assert difference.startswith("accumulate 2 ")
