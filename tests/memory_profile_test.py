"""Every byte of a real step is in the right part, and the parts are as high as what was measured.

The tests compare each part with something that does not come from the ledger: the tensors of the
model and the optimizer, what autograd saves, the shape of the logits, and PyTorch's own profiler
for the sum.
"""

import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import pickle
from dataclasses import dataclass

import pytest
import torch

from harness.cli import tables
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.flags import FlagParser
from harness.cli.workload import Workload
from harness.data import dataset
from harness.model import architecture
from harness.profiling.kernel_facts import KERNELS, MODEL_KERNELS, PHASES
from harness.records import run_records
from harness.steps import stepping
from next_steps.memory import memory_ledger, memory_profile, peak_attribution, profile
from next_steps.memory.memory_ledger import BATCH, GRADIENTS, LOSS, PARAMETERS, STATE, Ledger
from next_steps.memory.peak_attribution import KEPT, TEMPORARY, UNSEEN, WORKSPACES, part_of
from next_steps.patches.apply_kernels import apply_kernels, make_kernel_optimizer
from tests.conftest import tracked
from tests.fixtures import needs_gpu
from tests.memory_estimate_test import bytes_kept_in_layers, bytes_saved_by_a_real_step, estimate_of

SHAPE = 2, 9  # B, T
TINY = ["--model", "tiny", "--batch-size", "2", "--seq-len", "9", "--warmup", "1"]
SETS = pytest.mark.parametrize(
    "kernels", [[], ["adamw"], MODEL_KERNELS, KERNELS], ids=["none", "adamw", "model", "all"]
)


# ---------------------------------------------------------------- a real step in the books


@dataclass
class Observed:
    kernels: list[str]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[dataset.Batch]
    ledger: Ledger

    @property
    def parts(self) -> dict[str, list[int]]:
        return peak_attribution.history(self.ledger, 0)

    @property
    def windows(self) -> list[peak_attribution.Window]:
        return peak_attribution.windows(self.ledger, self.parts)


def observe(kernels: list[str], config=None) -> Observed:
    """The second step of a tiny model in bf16."""
    config = config or architecture.tiny_config()
    model = architecture.build_model(config, torch.bfloat16, DEVICE)
    apply_kernels(model, of_model(kernels))
    ledger = Ledger(DEVICE)
    ledger.follow_gradients(model)
    optimizer = make_kernel_optimizer(model, 1e-3, kernels)
    batches = [dataset.random_batch(SHAPE, 257, DEVICE) for _ in range(2)]
    stepping.training_step(model, optimizer, batches[:1])
    memory_profile.observed_step(model, optimizer, stepping.in_steps(batches, 1), ledger)
    return Observed(kernels, model, optimizer, batches, ledger)


def of_model(kernels: list[str]) -> list[str]:
    return [name for name in kernels if name in MODEL_KERNELS]


def rounded(*tensors: torch.Tensor) -> int:
    """Bytes of their storages in the allocator's units, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(math.ceil(size / 512) * 512 for size in storages.values())


def check_books(observed: Observed) -> None:
    """Every part against what is known without the ledger."""
    parts, ledger, model = observed.parts, observed.ledger, observed.model
    weights = rounded(*model.parameters())
    state = [t for values in observed.optimizer.state.values() for t in values.values()]
    state = [t for t in state if t.device.type == ledger.device]
    batches = [t for batch in observed.batches for t in (batch.input_ids, batch.labels)]
    assert set(parts[PARAMETERS]) == {rounded(*model.parameters(), *model.buffers())}
    assert set(parts[STATE]) == {rounded(*state)} and rounded(*state) >= 2 * weights
    assert set(parts[BATCH]) == {rounded(*batches)}

    starts = {window.sample.stage[0]: window.first for window in reversed(observed.windows)}
    gradients = parts[GRADIENTS]
    assert not any(gradients[: starts["loss"]]) and gradients[-1] == 0
    if "adamw" in observed.kernels:  # the largest is an embedding's; never two of those
        embedding = rounded(model.model.embed_tokens.weight)
        assert embedding <= max(gradients) < 2 * embedding and gradients[starts["optimizer"]] == 0
    else:
        assert max(gradients) == gradients[starts["optimizer"]] == weights

    expected = bytes_saved_by_a_real_step(of_model(observed.kernels), *SHAPE)
    assert bytes_kept_in_layers(ledger) == pytest.approx(expected, rel=1e-3 if HAS_GPU else 0)
    backward = starts["backward"]
    kept = peak_attribution.kept_blocks(ledger)
    in_layers = sum(block.n_bytes for block in kept if block.stage[1] is not None)
    assert in_layers <= parts[KEPT][backward] < 1.2 * in_layers
    assert parts[KEPT][0] == parts[KEPT][starts["optimizer"]] == 0
    assert parts[TEMPORARY][backward] == 0 < max(parts[TEMPORARY][backward:])

    tokens, vocabulary = math.prod(SHAPE), model.config.vocab_size
    assert not any(parts[LOSS][: starts["loss"]])
    logits = tokens * vocabulary * (2 if "linear_cross_entropy" in observed.kernels else 3 * 4)
    # eager: the log-softmax and two gradients in fp32
    assert logits <= max(parts[LOSS]) < 2.5 * logits


@functools.cache
def observed_once(*kernels: str) -> Observed:
    return observe(list(kernels))


@pytest.mark.exhaustive
@SETS
def test_every_part_is_what_it_is_said_to_be(kernels):
    check_books(observed_once(*kernels))


def without(part: str):
    """A ledger that never hears whose these are."""
    assign = Ledger.assign
    return lambda ledger, owner, *tensors: (
        None if owner == part else assign(ledger, owner, *tensors)
    )


def called(part: str, instead: str):
    def wrong(ledger, block) -> str:
        right = part_of(ledger, block)
        return instead if right == part else right

    return wrong


FAULTS_IN_THE_BOOKS = {
    "gradients are not assigned": (Ledger, "assign", without(GRADIENTS)),
    "the optimizer's state is not assigned": (Ledger, "assign", without(STATE)),
    "batches are not assigned": (Ledger, "assign", without(BATCH)),
    "nothing ever dies": (Ledger, "forget", lambda ledger, key: ledger.living.pop(key)),
    "nobody recognizes the logits": (
        memory_ledger,
        "KIND_OF_CODE",
        {code: kind for code, kind in memory_ledger.KIND_OF_CODE.items() if kind != LOSS},
    ),
}
FAULTS_IN_READING_THEM = {
    "parameters are state": called(PARAMETERS, STATE),
    "gradients are temporaries": called(GRADIENTS, TEMPORARY),
    "the loss is kept": called(LOSS, KEPT),
    "activations are temporaries": called(KEPT, TEMPORARY),
    "temporaries are activations": called(TEMPORARY, KEPT),
    "activations are gradients": called(KEPT, GRADIENTS),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS_IN_THE_BOOKS)
def test_wrong_books_are_noticed(monkeypatch, fault):
    monkeypatch.setattr(*FAULTS_IN_THE_BOOKS[fault])
    with pytest.raises(AssertionError):
        check_books(observe([]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", [[], KERNELS], ids=["none", "all"])
@pytest.mark.parametrize("fault", FAULTS_IN_READING_THEM)
def test_a_wrong_part_is_noticed(monkeypatch, fault, kernels):
    observed = observed_once(*kernels)
    monkeypatch.setattr(peak_attribution, "part_of", FAULTS_IN_READING_THEM[fault])
    with pytest.raises(AssertionError):
        check_books(observed)


def peak_by_the_profiler(observed: Observed) -> int:
    """A step's bytes above those before: PyTorch's profiler notes the CPU's allocations."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        stepping.training_step(observed.model, observed.optimizer, observed.batches[-1:])
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(n_bytes for _, n_bytes in changes))


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_GPU, reason="on a GPU the allocator is asked instead")
def test_the_sum_is_that_of_pytorchs_own_profiler():
    config = architecture.tiny_config()
    config.hidden_size, config.intermediate_size = 256, 640  # units of 512 bytes hardly show
    observed = observe([], config)
    heights = [sum(values) for values in zip(*observed.parts.values())]
    assert max(heights) - heights[0] == pytest.approx(peak_by_the_profiler(observed), rel=0.02)


# ---------------------------------------------------------------- the account


@pytest.mark.exhaustive
@SETS
def test_the_parts_add_up_to_the_peak_which_is_the_highest_of_phases_and_timeline(kernels):
    found = peak_attribution.account(observed_once(*kernels).ledger, 0)
    peak = found["peak_memory_bytes"]
    assert sum(found["parts"].values()) == peak
    for phase in found["phases"].values():
        assert sum(phase["parts"].values()) == phase["bytes"] <= peak
    assert found["phases"][found["phase"]]["bytes"] == peak
    stages, parts = found["timeline"]["stages"], found["timeline"]["parts"]
    assert max(map(sum, zip(*parts.values()))) == peak
    assert sum(stage["points"] for stage in stages) == len(parts[KEPT])

    there = {part for part, values in parts.items() if any(values)}  # at some time
    assert there - {UNSEEN} == set(parts) - {WORKSPACES, UNSEEN}


@pytest.mark.parametrize("where", PHASES)
def test_what_an_operation_takes_inside_lifts_the_peak_and_has_its_own_row(where, monkeypatch):
    """An allocator gives away 10**8 bytes more during one operation than its results take."""
    ledger = observed_once().ledger
    parts = peak_attribution.history(ledger, 1000)
    samples = [
        dataclasses.replace(window.sample, allocated=window.seen, reserved=10**9)
        for window in peak_attribution.windows(ledger, parts)
    ]
    of_phase = [i for i, sample in enumerate(samples) if sample.stage[0] == where]
    i = of_phase[len(of_phase) // 2]
    chosen = samples[i]
    samples[i] = dataclasses.replace(chosen, allocated=chosen.allocated + 10**8)
    monkeypatch.setattr(ledger, "samples", samples)
    lifted = peak_attribution.account(ledger, 1000)
    peak = lifted["peak_memory_bytes"]
    assert (lifted["phase"], lifted["layer"]) == chosen.stage
    assert lifted["operation"] == chosen.operation
    assert lifted["parts"][UNSEEN] == 10**8 and lifted["parts"][WORKSPACES] == 1000
    assert sum(lifted["parts"].values()) == peak == 10**9 - lifted["fragmentation_bytes"]
    assert max(map(sum, zip(*lifted["timeline"]["parts"].values()))) == peak
    assert max(lifted["timeline"]["parts"][UNSEEN]) == 10**8
    others = [phase for name, phase in lifted["phases"].items() if name != where]
    assert all(phase["parts"][UNSEEN] == 0 for phase in others)


def largest_in_the_loss(kernels: list[str]) -> list[dict]:
    """When the loss and its backward are highest."""
    observed = observed_once(*kernels)
    stages = ("loss", None), ("backward", None)
    of_loss = [window for window in observed.windows if window.sample.stage in stages]
    moment = max(of_loss, key=lambda window: window.height).highest
    return peak_attribution.groups(observed.ledger, moment)


def test_the_largest_tensors_are_named():
    eager, fused = largest_in_the_loss([]), largest_in_the_loss(KERNELS)
    (row,) = (row for row in eager if row["maker"] == "_log_softmax")
    logits = [math.prod(SHAPE), architecture.BYTE_VOCABULARY]
    assert (row["part"], row["tensors"], row["dtype"], row["shape"]) == (LOSS, 1, "float32", logits)
    # which called new_empty
    assert "linear_cross_entropy_forward" in {row["maker"] for row in fused}
    for rows in (eager, fused):
        sizes = [row["bytes"] for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        assert not {row["part"] for row in rows} & {PARAMETERS, STATE, BATCH}


# ---------------------------------------------------------------- the flag


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    """Of a run, as it is in the file."""
    file = tmp_path_factory.mktemp("memory") / "record.json"
    workload = Workload.from_flags(FlagParser("", profile.FLAGS).parse_args(TINY), HAS_GPU)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        memory_profile.report_memory(workload, record_to=str(file))
    record = run_records.read_record(str(file), "memory")
    assert memory_profile.render(record) in printed.getvalue()
    assert printed.getvalue().startswith(tables.NO_GPU_NOTE) == (not HAS_GPU)
    return record


def test_the_flag_prints_the_parts_and_leaves_no_trace(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run_script(profile, *TINY, "--json", "record.json")
    assert outcome.code == 0 and "Highest in each phase, MB" in outcome.out
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_what_is_printed_adds_up(record):
    printed = memory_profile.render(record)
    table = printed.split("At the peak, MB")[1].split("\n\n")[0].splitlines()[2:]
    lines = [line for line in table if memory_profile.FRAGMENTATION not in line]
    *parts, total = [float(line.rsplit(maxsplit=2)[1]) for line in lines]
    assert sum(parts) == pytest.approx(total, abs=0.005 * (len(parts) + 1))
    assert "(CPU: the tensors' own bytes)" in printed or HAS_GPU


def test_each_large_part_has_its_advice_and_what_is_in_use_is_not_advised(record):
    parts = dict.fromkeys(peak_attribution.MEASURED_PARTS, 10)
    large = {"parts": parts, "peak_memory_bytes": 90, "phase": "optimizer", "kernels": []}
    flags = {part: flag for part, flag, _ in memory_profile.memory_advice(large)}
    assert flags == {
        PARAMETERS: "-", STATE: "-", GRADIENTS: "--kernels adamw", KEPT: "--kernels fused_layer",
        LOSS: "--kernels linear_cross_entropy", TEMPORARY: "--kernels adamw",
    }  # fmt: skip
    in_use = memory_profile.memory_advice(large | {"kernels": KERNELS, "phase": "backward"})
    assert [flag for part, flag, _ in in_use if part == TEMPORARY] == ["in use: fused_layer"]
    assert not any("--kernels" in flag for _, flag, _ in in_use)
    assert memory_profile.memory_advice(large | {"peak_memory_bytes": 1000}) == []


@pytest.mark.exhaustive
def test_the_picture_shows_every_part_and_phase_and_the_peak(record, tmp_path, pyplot):
    memory_profile.plot(record, str(tmp_path / "memory.png"))
    (axis,) = pyplot.gcf().axes
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    texts = [text.get_text() for text in axis.texts]
    assert texts == [*PHASES, f"peak {record['peak_memory_bytes'] / 1e6:,.1f} MB"]
    areas = [text.get_text() for text in axis.get_legend().get_texts()]
    assert areas == ["other", TEMPORARY, LOSS, KEPT, GRADIENTS, STATE, PARAMETERS]
    highest = max(area.get_paths()[0].vertices[:, 1].max() for area in axis.collections)
    assert highest == pytest.approx(record["peak_memory_bytes"] / 1e6)
    stages = record["timeline"]["stages"]
    widths = [memory_profile.width(stage, record["layers"]) for stage in stages]
    assert all(wide > 0 for wide in widths)
    assert {wide for stage, wide in zip(stages, widths) if stage["layer"]} == {1.0}


# ---------------------------------------------------------------- on a GPU, and recorded there


@pytest.mark.parametrize("kernels", ["none", "all"])
def test_a_report_leaves_no_model_behind(kernels, capsys):
    """Another report in the process would find the model's memory and explain it by nothing."""

    def models() -> int:
        gc.collect()
        return sum(type(found).__name__ == "LlamaForCausalLM" for found in gc.get_objects())

    before = models()
    flags = FlagParser("", profile.FLAGS).parse_args([*TINY, "--kernels", kernels])
    memory_profile.report_memory(Workload.from_flags(flags, HAS_GPU))
    assert models() == before


@needs_gpu
@pytest.mark.parametrize("kernels", ["none", "all"])
def test_on_a_gpu_the_parts_explain_the_measured_peak(tmp_path, kernels):
    """Each large tensor is a multiple of 2 MiB, the unit of the allocator's large blocks."""
    config = architecture.tiny_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 1024, 4096, 6
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 2, 128
    config.vocab_size = 32_768
    config.save_pretrained(tmp_path)
    shape = ["--batch-size", "4", "--seq-len", "1024", "--kernels", kernels]
    snapshot, file = tmp_path / "step.pickle", tmp_path / "record.json"
    flags = ["--model", str(tmp_path), "--random-init"]
    workload = Workload.from_flags(
        FlagParser("", profile.FLAGS).parse_args([*flags, *shape]), HAS_GPU
    )
    memory_profile.report_memory(workload, record_to=str(file), snapshot_to=str(snapshot))
    record = json.loads(file.read_text())
    peak = record["peak_memory_bytes"]
    assert peak > 1e9 and record["parts"][WORKSPACES] > 0
    assert abs(record["parts"][UNSEEN]) < 0.02 * peak
    assert peak == pytest.approx(record["unobserved_peak_bytes"], rel=0.01)
    assert all(phase["fragmentation_bytes"] >= 0 for phase in record["phases"].values())
    traces = pickle.loads(snapshot.read_bytes())["device_traces"]
    assert sum(event["action"] == "alloc" for trace in traces for event in trace) > 100


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", tracked("results/memory_*.json"), ids=lambda path: path.stem)
def test_the_recorded_parts_explain_the_peak_as_the_estimate_told_it(path):
    record = json.loads(path.read_text())
    peak = record["peak_memory_bytes"]
    assert sum(record["parts"].values()) == peak and abs(record["parts"][UNSEEN]) < 0.02 * peak
    assert record["unobserved_peak_bytes"] == pytest.approx(peak, rel=1e-3)
    estimated = estimate_of(record)
    heights = {phase: record["phases"][phase]["bytes"] for phase in PHASES}
    assert heights == pytest.approx(estimated["phases"], rel=0.01)
