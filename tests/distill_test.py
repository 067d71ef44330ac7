"""The student learns what the teacher says, at the positions that count; nothing else changes.

The loss and its gradients are held against F.kl_div, which no code here shares.
"""

import functools
import json
import os
import shutil
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import finetune_baseline
from harness.cli import tables
from harness.cli.device import HAS_GPU
from harness.cli.flags import FlagParser
from harness.cli.workload import Workload, teacher_line
from harness.data import dataset
from harness.model import architecture, loading
from harness.model.architecture import ModelFacts
from harness.profiling.kernel_facts import KERNELS, LOSS_KERNELS
from harness.steps import stepping, timing
from harness.training import run_text, training_run
from next_steps.finetuning import distill, distillation
from next_steps.patches import apply_kernels
from tests.apply_kernels_test import (
    assert_equal,
    counted_batch,
    loss_and_gradients,
    make_batch,
    make_model,
)
from tests.conftest import assert_refused
from tests.fixtures import needs_gpu
from tests.small_workloads import TINY, assert_a_step_does_not_wait, change_json
from tests.token_cache_test import tokenizer_of

IGNORE = dataset.IGNORE_INDEX
ALL = apply_kernels.model_kernels(
    distillation.replace_loss(KERNELS)
)  # those that go into both models
# A row of logits takes Triton's interpreter some hundredths of a second.
SMALL = ["--dtype", "fp32", "--batch-size", "1", "--seq-len", "8", "--steps", "2"]
EAGER = ["--kernels", "none"]
TEACHER = ["--teacher", "tiny"]


def confident_model(names=(), dtype=torch.float32, **values) -> torch.nn.Module:
    """The same weights each time, and logits of which some stand out."""
    model = make_model(names, dtype, **values)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)
    return model


def pair(names=(), dtype=torch.float32, **options) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(student of one layer, its teacher of three)."""
    teacher = confident_model(names, dtype, num_hidden_layers=3).eval().requires_grad_(False)
    student = confident_model(names, dtype, num_hidden_layers=1)
    return distillation.learn_from(student, teacher, **options), teacher


def plain_student(teacher, temperature: float):
    """Return a student like `pair`'s, with KL(student || teacher) by PyTorch alone."""

    def forward(self, input_ids, labels):
        counts = labels[:, 1:] != IGNORE
        outputs = type(self).forward(self, input_ids=input_ids), teacher(input_ids=input_ids)
        log_p, log_q = ((x.logits[:, :-1][counts] / temperature).log_softmax(-1) for x in outputs)
        # F.kl_div(input, target) is KL(target || input)
        loss = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
        return types.SimpleNamespace(loss=loss)

    student = confident_model(num_hidden_layers=1)
    student.forward = types.MethodType(forward, student)
    return student


# ---------------------------------------------------------------- the loss


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(
    "names, fused", [([], False), ([], True), (ALL, True)], ids=["eager", "loss", "all"]
)
def test_loss_and_gradients_are_pytorchs(names, fused, temperature):
    expected = loss_and_gradients(plain_student(pair()[1], temperature))
    student, teacher = pair(names, temperature=temperature, fused=fused)
    assert expected["loss"] > 0.1
    assert_equal(loss_and_gradients(student), expected)
    assert all(p.grad is None for p in teacher.parameters())


def test_the_validation_loss_is_that_of_the_labels():
    models = pair()[0].eval(), confident_model(num_hidden_layers=1).eval()
    with torch.no_grad():
        assert torch.equal(*(model(**make_batch()).loss for model in models))


def test_the_teacher_stays_as_it_is_and_outside_of_the_student():
    student, teacher = pair()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    alone = confident_model(num_hidden_layers=1)
    assert student.state_dict().keys() == alone.state_dict().keys()
    assert list(dict(student.named_modules())) == list(dict(alone.named_modules()))
    stepping.training_step(student, stepping.make_optimizer(student, 1e-2), [counted_batch()])
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert not torch.equal(student.lm_head.weight, alone.lm_head.weight)


@pytest.mark.exhaustive
def test_the_teacher_runs_once_per_step_and_keeps_nothing_for_a_backward():
    # the kernel would refuse a teacher's logits that are part of a graph
    student, teacher = pair(ALL, fused=False)
    seen = []
    teacher.lm_head.register_forward_hook(lambda _, inputs, output: seen.append((*inputs, output)))
    teacher.requires_grad_(True)  # so that only no_grad stands between it and a graph
    loss_and_gradients(student)
    ((hidden, logits),) = seen
    assert hidden.grad_fn is None and logits.grad_fn is None and not logits.requires_grad


@pytest.mark.exhaustive
def test_the_kernels_named_run_in_both_models(monkeypatch, launches):
    students = [pair(ALL, fused=fused)[0] for fused in (True, False)]
    module, name = modeling_llama.LlamaMLP, "forward"
    monkeypatch.setattr(module, name, lambda *args: pytest.fail("Hugging Face's MLP ran"))
    for student in students:  # of which only the first has the kernel
        loss_and_gradients(student)
        assert launches["reverse_kl_fwd"] == 1


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([], []),
        (["rmsnorm", "adamw"], ["rmsnorm", "adamw"]),
        (["rmsnorm", "cross_entropy"], ["rmsnorm", "reverse_kl"]),
        (["linear_cross_entropy"], ["reverse_kl"]),
        (["cross_entropy", "linear_cross_entropy", "adamw"], ["adamw", "reverse_kl"]),
    ],
)
def test_reverse_kl_takes_the_place_of_the_kernels_for_labels(kernels, expected):
    assert distillation.replace_loss(kernels) == expected


# ---------------------------------------------------------------- the script


@pytest.fixture
def small_model(monkeypatch):
    """tiny, but smaller, with three layers that count beside the embedding."""

    def config(real=architecture.tiny_config):
        small = real()
        small.hidden_size, small.intermediate_size, small.head_dim = 32, 48, 8
        small.num_hidden_layers, small.initializer_range = 3, 0.1
        return small

    monkeypatch.setattr(architecture, "tiny_config", config)


@pytest.fixture
def distilled(recorded, small_model):
    """distilled(*flags): the record of a run, of --teacher tiny unless told."""
    return functools.partial(recorded, distill, *TEACHER, *SMALL)


@pytest.mark.exhaustive
def test_a_run_says_who_taught_whom(distilled):
    record = distilled("--temperature", "2", "--student-layers", "2")
    expected = {
        "title": "Distillation",
        "model": "tiny",
        "teacher": "tiny",
        "teacher_weights": "random weights",
        "student_layers": 2,
        "temperature": 2.0,
        "kernels": ["rmsnorm", "reverse_kl"],
    }
    assert {key: record[key] for key in expected} == expected
    n = ModelFacts(architecture.tiny_config()).parameters
    assert record["teacher_parameters"] == n > record["parameters"]
    printed = record["printed"]
    assert "Custom kernels: rmsnorm, reverse_kl;" in printed
    assert printed.count(teacher_line(record)) == 2 and run_text.result_block(record) in printed
    first, last = record["losses"]
    assert f"Distillation loss:        {first:.4f} in step 1, {last:.4f} in step 2" in printed
    if not HAS_GPU:
        assert printed.startswith(tables.NO_GPU_NOTE)


def workload_of(*flags: str) -> Workload:
    """What the command makes of these flags."""
    return Workload.from_flags(FlagParser("", distill.FLAGS).parse_args([*SMALL, *flags]), HAS_GPU)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "model", "n_layers"),
    [
        ([], "tiny", 1),
        (["--student-layers", "2"], "tiny", 2),
        (["--model", "tiny"], "tiny", 1),
        (["--model", "OTHER"], "OTHER", 2),
        (["--model", "OTHER", "--student-layers", "1"], "OTHER", 1),
    ],
    ids=str,
)
def test_which_student_and_how_many_layers(
    small_model, tmp_path, monkeypatch, flags, model, n_layers
):
    monkeypatch.chdir(tmp_path)
    config = architecture.tiny_config()
    config.num_hidden_layers = 2
    AutoModelForCausalLM.from_config(config).save_pretrained("OTHER")
    workload = workload_of("--teacher", "tiny", *EAGER, *flags)
    assert workload.model == model
    student, workload, more = distillation.load_student(workload)
    layers = len(student.model.layers), student.config.num_hidden_layers, workload.student_layers
    assert set(layers) == {n_layers}
    if model == "tiny":
        teacher = loading.load_model(workload).state_dict()
        assert all(torch.equal(t, teacher[name]) for name, t in student.state_dict().items())
    assert more["teacher_parameters"] == ModelFacts(architecture.tiny_config()).parameters


@pytest.mark.parametrize("way", ["{}/", "{}/../{}", "linked", "relative"])
def test_the_teachers_own_model_by_another_path_is_halved_too(tmp_path, way):
    """A student of all its layers would have nothing to learn: a loss of 0 in each step."""
    folder = tmp_path / "model"
    config = AutoConfig.from_pretrained(saved_config(folder))
    (tmp_path / "linked").symlink_to(folder)
    ways = {"linked": str(tmp_path / "linked"), "relative": os.path.relpath(folder)}
    other = ways.get(way) or f"{tmp_path}/{way.format('model', 'model')}"
    for names in ((str(folder), other), (other, str(folder))):
        workload = workload_of("--teacher", names[0], "--model", names[1], *EAGER)
        assert (
            distillation.layers_to_keep(workload, config, config) == config.num_hidden_layers // 2
        )


@pytest.mark.exhaustive
def test_the_loss_falls_on_real_text_and_labels_become_likelier(distilled, recorded, tmp_path):
    teacher = str(tmp_path / "teacher")
    flags = [*TINY, "--batch-size", "8", "--seq-len", "32", "--steps", "60", "--lr", "1e-2"]
    recorded(finetune_baseline, *flags, "--save", teacher)
    flags = ["--seq-len", "64", "--steps", "40", "--lr", "3e-3", *EAGER]
    record = distilled("--teacher", teacher, *flags)
    losses = record["losses"]
    assert record["data"] == "stdlib" and record["teacher_weights"] == "pretrained weights"
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert record["validation_loss_after"] < record["validation_loss_before"] - 0.05


@pytest.mark.exhaustive
def test_all_kernels_train_the_same_student(distilled):
    eager = distilled(*EAGER)
    fused = distilled("--kernels", "all")
    assert eager["kernels"] == []
    assert set(fused["kernels"]) == {*KERNELS, "reverse_kl"} - {*LOSS_KERNELS}
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-4) and eager["losses"][0] > 0.01
    for key in ("validation_loss_before", "validation_loss_after"):
        assert fused[key] == pytest.approx(eager[key], rel=1e-5)


def test_the_saved_student_is_an_ordinary_model(distilled, recorded, tmp_path):
    folder = tmp_path / "student"
    record = distilled(*EAGER, "--student-layers", "2", "--save", str(folder))
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    again = recorded(finetune_baseline, *SMALL, "--model", str(folder))
    after = record["validation_loss_after"]
    assert again["validation_loss_before"] == pytest.approx(after, rel=1e-5)
    assert again["parameters"] == record["parameters"] and "teacher" not in again


def test_utilization_counts_the_teachers_forward(distilled, monkeypatch):
    monkeypatch.setattr(training_run, "peak_tflops", lambda gpu: 2.0)
    record = distilled("--dtype", "bf16", *EAGER)
    teacher, student = architecture.tiny_config(), architecture.tiny_config()
    student.num_hidden_layers = 1
    flops = ModelFacts(student).flops_per_token(8) + ModelFacts(teacher).flops_per_token(8) / 3
    expected = flops * record["tokens_per_second"] / 2e12
    assert record["model_flops_utilization"] == pytest.approx(expected)


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def refused(run_script, monkeypatch):
    """refused(*flags): the sentence with which they are refused, before a model is loaded."""

    def run(*flags: str) -> str:
        outcome = run_script(distill, *SMALL, *flags)
        assert_refused(outcome)
        assert outcome.out == ""
        return outcome.err.removeprefix("error: ").rstrip("\n")

    monkeypatch.setattr(distillation, "load_model", lambda workload: pytest.fail("loaded"))
    return run


SAME = "name two models with the same"
NO_MODEL = "the directory  holds no config.json, so it is not a saved model"
REFUSED = [  # an empty name is not taken for no name
    ([*TEACHER, "--student-layers", "2"], ["--student-layers 2 is not fewer than the 2 of tiny"]),
    (["--teacher", ""], [NO_MODEL]),
    ([*TEACHER, "--model", ""], [NO_MODEL]),
    ([*TEACHER, "--student-layers", "0"], ["--student-layers", "'0'"]),
    ([*TEACHER, "--temperature", "nan"], ["--temperature", "'nan'"]),
    ([], ["required: --teacher"]),
]


@pytest.mark.parametrize("flags, words", REFUSED)
def test_flags_without_a_model_to_learn_are_refused(refused, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    assert all(word in refused(*flags) for word in words)


def saved_config(folder, **values) -> str:
    """The folder of tiny's config.json with these values."""
    architecture.tiny_config().save_pretrained(folder)
    change_json(folder / "config.json", **values)
    return str(folder)


ONE_LAYER = "a single layer, which cannot be halved; name a smaller --model"
VOCABULARIES = "tiny has a vocabulary of 257 tokens and the teacher {} one of 300"
UNSUITABLE = {  # a value in the teacher's config.json: what is said of its folder
    ("num_hidden_layers", 1): f"{{}} has {ONE_LAYER}",
    ("vocab_size", 300): f"{VOCABULARIES}; {SAME}",
    ("max_position_embeddings", 4): "--seq-len 8 is longer than the 4 positions of {}",
    ("model_type", "gpt2"): "{} is a 'gpt2' model with packed projections (c_attn); these scripts "
    "train models of llama, mistral, qwen2, qwen3, smollm3",
}


@pytest.mark.parametrize("field, value", UNSUITABLE)
def test_an_unsuitable_teacher_is_refused_by_its_name(refused, tmp_path, field, value):
    folder = saved_config(tmp_path, **{field: value})
    flags = [] if field == "num_hidden_layers" else ["--model", "tiny"]
    assert refused("--teacher", folder, *flags) == UNSUITABLE[field, value].format(folder)


def test_another_tokenizer_with_as_many_tokens_is_refused(refused, tmp_path):
    teacher, student = (saved_config(tmp_path / name) for name in ("teacher", "student"))
    for folder, words in ((teacher, "a b c d"), (student, "a c b e")):
        tokenizer_of(words, eos_token="b").save_pretrained(folder)
    said = f"the tokenizers of {student} and the teacher {teacher} differ in 4 tokens"
    assert refused("--teacher", teacher, "--model", student) == f"{said}, 'b' among them; {SAME}"


def test_a_tokenizer_in_one_of_two_models_is_refused(refused, tmp_path):
    teacher = saved_config(tmp_path / "teacher")
    tokenizer_of("a b", eos_token="b").save_pretrained(teacher)
    said = f"of tiny and the teacher {teacher} only one has a tokenizer; {SAME}"
    assert refused("--teacher", teacher, "--model", "tiny") == said


def test_tokenizers_may_differ_in_tokens_that_were_added_to_one(tmp_path):
    plain, extended, renumbered = (tokenizer_of("a b c") for _ in range(3))
    extended.add_tokens(["<pad>"])
    renumbered.add_tokens(["<other>", "<pad>"])
    assert distillation.differing_tokens(plain, extended) == []
    assert distillation.differing_tokens(extended, renumbered) == ["<pad>"]


def test_a_copy_of_the_teacher_has_nothing_to_learn(run_script, checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    flags = [*SMALL, "--teacher", str(checkpoint), "--model", str(copy)]
    outcome = run_script(distill, *flags)
    assert_refused(outcome, f"{copy} has the weights of its teacher {checkpoint}")
    assert run_script(distill, *flags, *EAGER, "--student-layers", "1").code == 0


# ---------------------------------------------------------------- on a GPU


@needs_gpu
@pytest.mark.parametrize("dtype", architecture.TORCH_DTYPES)
def test_captured_steps_are_the_same_steps(distilled, dtype):
    flags = ["--dtype", dtype, "--batch-size", "2", "--seq-len", "64", "--steps", "6"]
    flags += ["--kernels", "all"]
    plain, captured = (distilled(*flags, *more)["losses"] for more in ([], ["--cuda-graph"]))
    assert plain[5] != plain[2], "this comparison cannot fail"
    assert captured == pytest.approx(plain, rel=1e-4 if dtype == "fp32" else 2e-2)


@needs_gpu
def test_a_step_does_not_wait_for_the_gpu():
    student, _ = pair(ALL, torch.bfloat16)
    optimizer = apply_kernels.triton_adamw(student, 1e-3)
    assert_a_step_does_not_wait(student, optimizer, [counted_batch()])


@needs_gpu
def test_teacher_and_student_logits_exist_once_each():
    """With the student's gradient: the two models add at most 3 x (B, T, V) to small layers."""
    config = architecture.tiny_config()
    config.vocab_size = 65_536
    with torch.device("cuda"):
        models = [AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16) for _ in range(2)]
    student = distillation.learn_from(models[0].train(), models[1].eval().requires_grad_(False))
    ids = torch.randint(config.vocab_size, (4, 512), device="cuda")
    logits = 2 * ids.numel() * config.vocab_size  # bytes

    def step():
        loss = student(input_ids=ids, labels=ids).loss
        loss.backward()
        student.zero_grad(set_to_none=True)

    assert 3 * logits <= timing.peak_extra_bytes(step) < 3.6 * logits
