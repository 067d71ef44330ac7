"""Steps train, both scripts run the same loop, and what is saved goes on where it stopped."""

import difflib
import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from transformers import AutoConfig, AutoModelForCausalLM

import finetune_baseline
import finetune_optimized
from harness.benchmark.checking import relative_error
from harness.cli.device import DEVICE
from harness.cli.flags import FlagParser
from harness.data import dataset, samples
from harness.model import architecture, loading
from harness.model.architecture import ModelFacts
from harness.profiling import costs
from harness.profiling.kernel_facts import KERNELS
from harness.records import run_records
from harness.records.spread import spread
from harness.steps import stepping
from harness.training import run_text, training_run
from next_steps import finetune_options
from next_steps.finetuning import kernel_training
from tests.fixtures import needs_gpu
from tests.small_workloads import TINY, jsonl, tiny_workload
from tests.token_cache_test import tokenizer_of

PLAYBOOK = ["rmsnorm", "cross_entropy"]
# of a record: what clocks, meters and allocators say, and what is computed from it
MEASURED = {
    "seconds", "data_seconds", "average_seconds", "median_seconds", "p20_seconds", "p80_seconds",
    "tokens_per_second", "model_flops_utilization", "busy_ms", "power", "ceilings", "least_ms",
    "peaks", "peak_memory_bytes",
}  # fmt: skip
HERE = Path(__file__).parents[1]
PAGES = [Path(script.__file__).read_text() for script in (finetune_baseline, finetune_optimized)]


def test_both_scripts_show_the_same_loop_and_their_difference_fits_on_a_screen():
    lines = [page.splitlines() for page in PAGES]
    differing = [line for line in difflib.ndiff(*lines) if line[:2] in ("- ", "+ ")]
    assert len(differing) <= 32
    loops = [page[page.index("    for batch in run.batches():") :] for page in PAGES]
    assert loops[0] == loops[1]
    for step in ("model(input_ids", "loss.backward()", "optimizer.step()", "optimizer.zero_grad("):
        assert loops[0].count(step) == 1


@pytest.mark.exhaustive
def test_the_pages_patch_is_that_of_apply_kernels(recorded):
    """To the bit, next_steps' loop, which takes any kernels, gives the same with these two."""
    flags = ["--seq-len", "8", "--steps", "2"]
    shown = recorded(finetune_optimized, *TINY, *flags)
    workload = replace(tiny_workload(*flags), kernels=tuple(PLAYBOOK))
    applied = kernel_training.train_with_kernels(workload)
    keys = "losses", "validation_loss_before", "validation_loss_after", "kernels", "title"
    assert {key: shown[key] for key in keys} == {key: applied[key] for key in keys}


def test_both_scripts_run_the_same_loop(recorded):
    flags = ["--seq-len", "24", "--batch-size", "2", "--steps", "4"]
    baseline = recorded(finetune_baseline, *TINY, *flags)
    unpatched = recorded(finetune_optimized, *TINY, *flags, "--kernels", "none")
    assert baseline.keys() == unpatched.keys()
    assert unpatched["losses"] == pytest.approx(baseline["losses"], rel=1e-6)
    differing = {key for key in baseline if baseline[key] != unpatched[key]}
    assert differing - MEASURED <= {"title", "losses", "validation_loss_after", "printed"}


def test_validation_loss_weighs_tokens_not_batches(tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("", "abcdefghijkl"), ("abcdefgh", "i"))
    model = loading.load_model(tiny_workload())
    examples = samples.tokenize_jsonl(str(path), path.read_text(), samples.Encoder(None, []))
    batches = dataset.Batches(examples, [[0], [1]], batch_size=1)
    # nothing predicts a sequence's first token, which the empty prompt leaves to train on
    sums, counts = [], [11, 1]
    for batch in batches:
        logits = model(input_ids=batch.input_ids.to(DEVICE)).logits.detach()[0, :-1].cpu()
        loss = torch.nn.functional.cross_entropy(logits, batch.labels[0, 1:], reduction="sum")
        sums.append(loss.item())
    found = training_run.validation_loss(model, batches)
    assert found == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    wrong = sum(total / count for total, count in zip(sums, counts)) / 2
    assert found != pytest.approx(wrong, rel=1e-4), "this comparison cannot fail"
    assert model.training


def test_training_step_is_forward_backward_update_and_clean_gradients():
    workload = tiny_workload("--steps", "3")
    model, plain = loading.load_model(workload), loading.load_model(workload)
    optimizer = stepping.make_optimizer(model, 1e-3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for batch in dataset.load_data(workload, model.config, 3).train:
        batch = batch.to(DEVICE)
        loss = stepping.training_step(model, optimizer, [batch])
        plain_loss = plain(input_ids=batch.input_ids, labels=batch.labels).loss
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-6) and not loss.requires_grad
        assert all(parameter.grad is None for parameter in model.parameters())
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert relative_error(ours, theirs) < 1e-5


def test_the_steps_are_those_of_the_optimizer_that_is_given(tmp_path):
    workload = tiny_workload("--steps", "2", "--lr", "0.25")
    model = loading.load_model(workload)
    run = training_run.Run("Mine", workload, model, record_to=str(tmp_path / "run.json"))
    record = kernel_training.take_all_steps(run, torch.optim.SGD(model.parameters(), lr=1e-30))
    assert record["title"] == "Mine" and record["lr"] == 0.25
    unchanged = record["validation_loss_before"]
    assert record["validation_loss_after"] == unchanged, "a step of 1e-30 changes nothing"


class PretendedProfiler:
    """In PyTorch's place: notes how many steps came before, and has two overlapping kernels."""

    began: list[int]
    run: training_run.Run

    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA], "operations slow the host down"

    def __enter__(self):
        self.began.append(len(self.run.losses))
        return self

    def __exit__(self, *error):
        self.steps = len(self.run.losses)

    def events(self) -> list[FunctionEvent]:
        assert self.steps == self.began[-1] + 1, "a step is recorded from its start to its end"
        times = [(100, 3100), (2100, 5100)] if self.kernels else []
        on_gpu = {"device_type": DeviceType.CUDA, "use_device": "cuda"}
        return [FunctionEvent(i, "kernel", 0, *each, **on_gpu) for i, each in enumerate(times)]


def profiled_run(monkeypatch, n_steps: int, kernels: bool = True) -> tuple[dict, list[int]]:
    """Return a record as a GPU makes it, and how many steps came before each profiled one."""
    workload = tiny_workload("--steps", str(n_steps))
    model = loading.load_model(workload)
    run = training_run.Run("Mine", workload, model)
    run.profiled_steps = int(n_steps > 3)
    run.ceilings = {"matmul_tflops": 0.5, "copy_gbs": 2.0}
    made_up = {"run": run, "began": [], "kernels": kernels}
    pretended = type("Pretended", (PretendedProfiler,), made_up)
    monkeypatch.setattr(training_run, "profile", pretended)
    record = kernel_training.take_all_steps(run, torch.optim.SGD(model.parameters(), lr=1e-3))
    return record, pretended.began


def test_the_last_step_is_profiled_trains_and_does_not_count(monkeypatch):
    record, began = profiled_run(monkeypatch, 6)
    assert began == [5]
    assert len(record["losses"]) == len(record["seconds"]) == record["steps"] == 6
    counted = record["seconds"][2:5]
    assert record["average_seconds"] == pytest.approx(sum(counted) / 3)
    assert record["median_seconds"] == sorted(counted)[1]
    assert record["tokens_per_second"] == pytest.approx(3 * 16 / sum(counted))
    assert (record["p20_seconds"], record["p80_seconds"]) == spread(counted)
    assert record["busy_ms"] == pytest.approx(5.0), "the time in which two kernels run counts once"
    workload, config = tiny_workload(), architecture.tiny_config()
    flops = ModelFacts(config).flops_per_token(workload.seq_len)
    least_ms = costs.least_ms(ModelFacts(config, workload), 16, flops, record["ceilings"])
    assert record["least_ms"] == pytest.approx(least_ms)


@pytest.mark.parametrize(("n_steps", "profiled"), [(3, []), (4, [3])], ids=["no step", "no kernel"])
def test_without_a_step_to_profile_or_a_kernel_in_it_the_busy_time_is_unknown(
    monkeypatch, n_steps, profiled
):
    record, began = profiled_run(monkeypatch, n_steps, kernels=False)
    assert began == profiled and record["profiled_steps"] == len(profiled)
    assert record["average_seconds"] == record["seconds"][2] and record["busy_ms"] is None
    on_a_gpu = record | {"environment": record["environment"] | {"gpu": "Some GPU"}}
    assert block_rows(on_a_gpu)["GPU busy"] == "n/a"


def block_rows(record: dict) -> dict[str, str]:
    """Return the rows of the result block by their names."""
    rows = (line.split(":", 1) for line in run_text.result_block(record).splitlines())
    return {name: text[0].strip() for name, *text in rows if text}


GPU_RUN = {
    "title": "Mine",
    "environment": {"gpu": "Some GPU"},
    "dtype": "fp32",
    "kernels": [],
    "steps": 7,
    "warmup_steps": 2,
    "seconds": [9.0, 9.0, 0.18, 0.20, 0.21, 0.22, 9.0],
    "profiled_steps": 1,
    "average_seconds": 0.2025,
    "median_seconds": 0.205,
    "tokens_per_second": 40.0,
    "peak_memory_bytes": 4e9,
    "model_flops_utilization": None,
    "validation_loss_before": 2.0,
    "validation_loss_after": 1.0,
    "busy_ms": 82.0,
    "least_ms": 41.0,
    "ceilings": {"copy_gbs": 4000.0, "matmul_tflops": 50.0},
}


def test_the_result_block_says_the_clock_and_the_energy_of_a_token():
    rows = block_rows(GPU_RUN)
    assert rows["Average time per step"].endswith("(steps 3 to 6)")
    around = "20th to 80th percentile: 0.192 to 0.214 s"
    assert rows["Median time per step"] == f"0.205 s ({around})"
    assert rows["GPU busy"].startswith("40 % of the median step: 82.0 ms of kernels in step 7")
    assert rows["Speed of light"].startswith("20 % of the median step: 41.0 ms")
    assert "fp32 matmul 50.0 TFLOP/s" in rows["Ceilings"]
    assert rows["Times of steps"].endswith("the host is in them.")
    longer = block_rows(GPU_RUN | {"busy_ms": 206.0})
    assert longer["GPU busy"].startswith("100 % of"), "a GPU is not busier than the step is long"
    wrong = block_rows(GPU_RUN | {"least_ms": 410.0})
    assert wrong["Speed of light"].endswith("so no floor"), "a floor that is too high must be seen"
    in_fp8 = block_rows(GPU_RUN | {"opponent": "torchao-rowwise"})  # the floor is one of bf16
    assert "Speed of light" not in in_fp8
    power = {"watts": 693.0, "mhz": 1485.0, "readings": 9}
    measured = block_rows(GPU_RUN | {"power": power, "tokens_per_second": 12_600.0})
    assert measured["Energy"] == "55.0 mJ a token"
    assert "Energy" not in block_rows(GPU_RUN | {"power": None})


GRAPH = "With --cuda-graph"


@pytest.mark.parametrize(
    ("said", "possible"),
    [
        ({}, True),
        ({"lora_rank": 16, "accumulate": 2, "kernels": ["rmsnorm"], "opponent": None}, True),
        ({"opponent": "liger"}, True),
        ({"cuda_graph": True}, False),
        ({"pack": True}, False),
        ({"offload": True}, False),
        ({"world_size": 2, "parallel": "fsdp"}, False),
        ({"opponent": "compile-reduce-overhead"}, False),
        ({"environment": {"gpu": None}, "busy_ms": None}, False),
    ],
)
def test_the_result_block_says_what_a_graph_would_save(said, possible):
    saved = "up to 123 ms less a step, in which the GPU waits for the host"
    saved += "; if the step can be recorded" if said.get("opponent") else ""
    assert block_rows(GPU_RUN | said).get(GRAPH) == (saved if possible else None)


@pytest.mark.parametrize(
    ("spread_ms", "busy_ms", "saved"),
    [(20, 179.0, "21"), (20, 181.0, None), (0, 189.0, "11"), (0, 191.0, None), (0, 201.0, None)],
)
def test_what_a_graph_would_save_is_more_than_noise(spread_ms, busy_ms, saved):
    """Steps of 200 ms must wait longer than 10 ms, and longer than their times differ."""
    low, high = 0.2 - spread_ms / 2e3, 0.2 + spread_ms / 2e3
    steps = {"seconds": [9.0, 9.0, low, low, high, high, 9.0], "median_seconds": 0.2}
    row = block_rows(GPU_RUN | steps | {"busy_ms": busy_ms}).get(GRAPH, "")
    assert row.startswith(f"up to {saved} ms less") if saved else row == ""


@pytest.mark.parametrize(
    ("name", "saves"),
    [("lora_baseline_1x512", True), ("lora_all_1x512", False), ("finetune_all_4x2048", False)],
)
def test_of_the_recorded_runs_a_graph_would_save_what_the_host_costs(name, saves):
    record = json.loads((HERE / f"results/{name}.json").read_text())
    assert (GRAPH in block_rows(record)) is saves


OWN_DATA = {"data": "runs/mine.jsonl", "dtype": "bf16", "kernels": ["adamw"]}


@pytest.mark.parametrize(
    ("said", "is_advised"),
    [
        ({}, True),
        ({"kernels": []}, True),
        ({"data": "stdlib"}, False),
        ({"data": "synthetic"}, False),
        ({"dtype": "fp32"}, False),
        ({"stochastic_rounding": True}, False),
        ({"opponent": "liger"}, False),
        ({"lora_rank": 16}, False),
        ({"teacher": "tiny"}, False),
    ],
)
def test_rounding_at_random_is_advised_where_a_users_weights_are_rounded_to_the_nearest(
    said, is_advised
):
    advice = run_text.rounding_advice(GPU_RUN | OWN_DATA | said)
    assert len(advice) == is_advised
    for line in advice:
        assert run_text.result_block(GPU_RUN | OWN_DATA | said).endswith(f"\n{line}")
        words = line.split(": ")[1].split()
        flags = words[1 : words.index("keeps")]
        args = FlagParser("", finetune_options.OPTIMIZED).parse_args(flags)
        assert args.stochastic_rounding and "adamw" in args.kernels
        assert "output: moments_accuracy" in (HERE / "docs/own_data.md").read_text()


def test_older_records_have_a_result_block():
    new = ("profiled_steps", "busy_ms", "least_ms", "ceilings")
    rows = block_rows({key: value for key, value in GPU_RUN.items() if key not in new})
    assert rows["Average time per step"].endswith("(steps 3 to 7)")
    assert rows["GPU busy"] == rows["Speed of light"] == "n/a"


@needs_gpu
@pytest.mark.parametrize(
    "flags", [[], ["--kernels", "all", "--cuda-graph"]], ids=["eager", "graph"]
)
def test_on_a_gpu_a_run_knows_how_long_the_gpu_computes(recorded, flags):
    record = recorded(finetune_optimized, *TINY, "--steps", "6", *flags)
    assert record["profiled_steps"] == 1
    assert 0 < record["busy_ms"] < 1e3 * record["seconds"][-1]
    assert 0 < record["least_ms"] < 1e3 * record["median_seconds"]


def loss_differences(*records: dict) -> list[float]:
    first, second = (
        [*record["losses"], record["validation_loss_before"], record["validation_loss_after"]]
        for record in records
    )
    return [abs(a - b) / a for a, b in zip(first, second)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "kernels"), [([], PLAYBOOK), (["--kernels", "all"], KERNELS)], ids=["default", "all"]
)
def test_optimized_run_follows_the_baseline_step_by_step(recorded, flags, kernels):
    steps = 5 if "all" in flags else 10  # the interpreter is slow
    workload = ["--seq-len", "8", "--steps", str(steps)]
    baseline = recorded(finetune_baseline, *TINY, *workload)
    optimized = recorded(finetune_optimized, *TINY, *workload, *flags)
    assert optimized["kernels"] == kernels and baseline["kernels"] == []
    assert len(baseline["losses"]) == len(optimized["losses"]) == steps
    assert max(loss_differences(baseline, optimized)) < 1e-5
    assert baseline["validation_loss_after"] < baseline["validation_loss_before"], "nothing learned"


@needs_gpu
@pytest.mark.parametrize("kernels", ["rmsnorm,cross_entropy", "all"])
def test_optimized_run_follows_the_baseline_in_bf16(recorded, kernels):
    flags = ["--dtype", "bf16", "--seq-len", "256", "--batch-size", "4", "--steps", "20"]
    baseline = recorded(finetune_baseline, *TINY, *flags)
    optimized = recorded(finetune_optimized, *TINY, *flags, "--kernels", kernels)
    assert max(loss_differences(baseline, optimized)) < 1e-2


@pytest.mark.exhaustive
def test_saved_model_loads_and_goes_on_from_where_it_stopped(recorded, tmp_path):
    folder = tmp_path / "saved"
    trained = recorded(finetune_optimized, *TINY, "--steps", "2", "--save", str(folder))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    saved_config = AutoConfig.from_pretrained(folder).to_dict()
    config = architecture.tiny_config().to_dict()
    changed = {key for key in config if saved_config[key] != config[key]}
    assert changed <= {"_name_or_path", "architectures", "dtype", "transformers_version"}
    AutoModelForCausalLM.from_pretrained(folder)

    for i in range(2):
        again = ["--model", str(folder), "--steps", "2", "--save", str(tmp_path / f"saved{i}")]
        folder = tmp_path / f"saved{i}"
        resumed = recorded(finetune_baseline, *TINY, *again)
        assert resumed["weights"] == "pretrained weights"
        expected = pytest.approx(trained["validation_loss_after"], rel=1e-5)
        assert resumed["validation_loss_before"] == expected
        trained = resumed


def test_the_tokenizer_is_saved_with_the_model(own_cache, recorded, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    AutoModelForCausalLM.from_config(architecture.tiny_config()).save_pretrained(first)
    tokenizer_of("import def").save_pretrained(first)
    flags = ["--model", str(first), "--steps", "1", "--save", str(second)]
    recorded(finetune_baseline, *TINY, *flags)
    tokenizer = dataset.load_tokenizer(tiny_workload("--model", str(second)))
    assert tokenizer("def f ( ) : import os")["input_ids"] == [2, 0, 0, 0, 0, 1, 0]
    assert samples.Encoder.of(tokenizer, None)("import def").tolist() == [1, 2]


def test_a_record_says_which_libraries_were_installed(monkeypatch):
    installed = {"peft": "1.2", "torchao": "0.3"}

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert run_records.environment()["others"] == installed
