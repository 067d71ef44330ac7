"""A workload comes back whole from flags and records; what forbids a comparison is said."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest

import profile_baseline
from harness.cli import workload
from harness.cli.flags import OF_BASELINE, FlagParser
from harness.cli.workload import PRETRAINED, RANDOM, Workload
from next_steps import finetune_options
from next_steps.finetuning import distill, opponents
from tests.conftest import tracked

WHAT = {"model": "DIR", "random_init": True, "dtype": "fp32", "data": "text.txt", "batch_size": 2}
WHAT |= {"seq_len": 24, "seed": 3, "steps": 7, "lr": 0.25, "teacher": "other/model"}
WHAT |= {"first_layers": 3, "student_layers": 2, "temperature": 2.5}
HOW = {"kernels": ("rmsnorm", "adamw"), "stochastic_rounding": True, "fp8": "all"}
HOW |= {"moments": "8bit"}
EVERYTHING = Workload(**WHAT, **HOW, cuda_graph=True, warmup=5)


def baseline(*flags: str) -> Workload:
    return Workload.from_flags(FlagParser("", OF_BASELINE).parse_args([*flags]), on_gpu=False)


def of_command(*flags: str) -> Workload:
    """What finetune_optimized.py makes of the flags, or the command that has them."""
    commands = {"--opponent": opponents.FLAGS, "--teacher": distill.FLAGS}
    table = next((commands[flag] for flag in flags if flag in commands), finetune_options.OPTIMIZED)
    return Workload.from_flags(FlagParser("", table).parse_args([*flags]), on_gpu=True)


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("on_gpu, expected", [(True, (512, "bf16")), (False, (64, "fp32"))])
def test_length_and_dtype_depend_on_the_gpu_unless_told(on_gpu, expected):
    parse = FlagParser("", OF_BASELINE).parse_args
    found = Workload.from_flags(parse([]), on_gpu)
    assert (found.seq_len, found.dtype) == expected
    told = Workload.from_flags(parse(["--seq-len", "9", "--dtype", "bf16"]), on_gpu)
    assert (told.seq_len, told.dtype) == (9, "bf16")


def test_the_learning_rate_depends_on_the_model_unless_told():
    rates = [baseline(*flags).lr for flags in ([], ["--model", "tiny"], ["--lr", "0.5"])]
    assert rates == [1e-5, 1e-3, 0.5]


def test_a_script_without_steps_has_none():
    args = profile_baseline.parse_args(["--model", "tiny", "--warmup", "2"])
    found = Workload.from_flags(args, on_gpu=False)
    assert (found.steps, found.lr, found.warmup) == (None, None, 2)


FLAGS = [
    [],
    ["--model", "tiny", "--random-init", "--data", "synthetic", "--seed", "0", "--steps", "3"],
    ["--kernels", "none", "--deterministic"],
    ["--kernels", "all", "--stochastic-rounding", "--cuda-graph", "--lr", "1e-4"],
    ["--kernels", "all", "--fp8", "--steps", "4"],
    ["--kernels", "adamw", "--moments", "8bit"],
    ["--kernels", "fused_layer", "--lora-rank", "4", "--fp8", "compact"],
    ["--opponent", "liger", "--batch-size", "4"],
    ["--lora-rank", "4", "--lora-alpha", "6", "--lora-targets", "mlp"],
    ["--opponent", "compile", "--cuda-graph"],
    ["--teacher", "tiny", "--student-layers", "1", "--temperature", "2.5", "--dtype", "fp32"],
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_flags_made_of_a_workload_give_it_again(flags):
    first = of_command(*flags)
    again = of_command(*first.as_flags())
    if first.kernels:
        assert again == first and again.kernels == first.kernels
    else:  # no flag says so, and a default may differ
        again = replace(again, kernels=())
    assert again.as_record() == first.as_record()


def test_flags_are_those_of_the_scripts_that_have_them():
    trained = baseline("--model", "tiny", "--seed", "3", "--random-init")
    assert baseline(*trained.as_flags()) == trained
    args = profile_baseline.parse_args(replace(trained, steps=None, lr=None).as_flags())
    profiled = Workload.from_flags(args, on_gpu=True)
    assert replace(profiled, warmup=None, steps=20, lr=1e-3) == trained


def test_it_cannot_be_changed_on_the_way():
    with pytest.raises(FrozenInstanceError):
        EVERYTHING.seed = 4


# ---------------------------------------------------------------- records


def test_a_record_says_all_of_it():
    again = Workload.from_record(json.loads(json.dumps(EVERYTHING.as_record())))
    assert again == EVERYTHING
    how = [each.name for each in fields(Workload) if not each.compare and each.name != "warmup"]
    assert [getattr(again, name) for name in how] == [getattr(EVERYTHING, name) for name in how]


@pytest.mark.parametrize(
    "model, teacher, random_init, expected",
    [
        ("tiny", None, False, (RANDOM, None)),
        ("DIR", None, False, (PRETRAINED, None)),
        ("DIR", None, True, (RANDOM, None)),
        ("tiny", "DIR", False, (RANDOM, PRETRAINED)),
        ("DIR", "tiny", False, (PRETRAINED, RANDOM)),
        ("DIR", "DIR", True, (RANDOM, RANDOM)),
    ],
)
def test_weights_in_words(model, teacher, random_init, expected):
    record = Workload(model=model, teacher=teacher, random_init=random_init).as_record()
    assert (record["weights"], record.get("teacher_weights")) == expected
    assert Workload.from_record(record).as_record() == record


def test_recorded_runs_are_read_whatever_their_age():
    records = [json.loads(path.read_text()) for path in tracked("results/*.json")]
    finetuned = [record for record in records if record.get("kind") == "finetune"]
    assert len(finetuned) > 20
    for record in finetuned:
        said = Workload.from_record(record).as_record()
        assert {key: record[key] for key in said} == said
        assert set(record["kernels"]) <= {*workload.kernels_in_words(record).split(", ")}


def test_only_what_is_trained_is_compared():
    other = replace(EVERYTHING, kernels=(), cuda_graph=False, stochastic_rounding=False)
    assert not EVERYTHING.differences(other)
    assert other == EVERYTHING
    changed = replace(other, batch_size=4, random_init=False)
    assert EVERYTHING.differences(changed) == [
        "weights pretrained weights (not random weights)",
        "batch_size 4 (not 2)",
        "teacher_weights pretrained weights (not random weights)",
    ]


@pytest.mark.parametrize("name", ["model", "teacher", "data", "adapter"])
def test_the_same_place_by_another_path_is_no_difference(tmp_path, name):
    """Else a run that was started with DIR is not resumed with DIR/."""
    (tmp_path / "linked").symlink_to(tmp_path / "there")
    first = replace(EVERYTHING, **{name: str(tmp_path / "there")})
    for way in ("there/", "./there", "linked"):
        assert not first.differences(replace(first, **{name: f"{tmp_path}/{way}"})), way
    other = f"{tmp_path}/there2"
    (said,) = first.differences(replace(first, **{name: other}))
    assert said == f"{name} {other} (not {tmp_path}/there)"


def test_a_folder_named_tiny_is_not_the_tiny_model():
    folder = replace(EVERYTHING, model="./tiny")
    assert replace(EVERYTHING, model="tiny").differences(folder) == ["model ./tiny (not tiny)"]


def test_a_teacher_that_the_other_lacks_is_a_difference():
    labels = replace(EVERYTHING, teacher=None, student_layers=None, temperature=None)
    assert labels.differences(EVERYTHING) == [
        "teacher other/model (not None)",
        "teacher_weights random weights (not None)",
        "student_layers 2 (not None)",
        "temperature 2.5 (not None)",
    ]


# ---------------------------------------------------------------- in words


def test_a_model_without_all_of_its_layers_is_named_so():
    record = EVERYTHING.as_record() | {"parameters": 1234}
    assert workload.model_line(record).startswith("Model: DIR, 3 of its layers, 1,234 parameters,")
    whole = replace(EVERYTHING, first_layers=None).as_record() | {"parameters": 1234}
    assert workload.model_line(whole).startswith("Model: DIR, 1,234 parameters,")


def test_what_a_run_used_is_named_in_new_and_in_older_records():
    new = replace(EVERYTHING, fp8=None, moments=None).as_record()
    older = {"kernels": ["rmsnorm", "adamw", "stochastic_rounding", "cuda_graph"]}
    expected = "rmsnorm, adamw, stochastic_rounding, cuda_graph"
    assert workload.kernels_in_words(new) == workload.kernels_in_words(older) == expected
    assert new["kernels"] == ["rmsnorm", "adamw"]
    coded = Workload(kernels=("adamw",), moments="8bit").as_record()
    assert workload.kernels_in_words(coded) == "adamw, 8bit moments"
    opponent = Workload(opponent="liger").as_record()
    assert workload.kernels_in_words(opponent) == "Liger-Kernel, fused AdamW"
    assert opponent["kernels"] == []
    assert workload.kernels_in_words(Workload().as_record()) == "none"
