"""A run that is ended and resumed equals, to the bit, a run that was not; checkpoints are whole."""

import json
import os
import re
import signal
from dataclasses import replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import finetune_baseline
import finetune_optimized
from harness.cli.command_line import Ended, UserError
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.data import dataset, token_cache
from harness.data.loader import Loader
from harness.model import architecture, loading
from harness.model.families import FAMILIES
from harness.profiling.kernel_facts import KERNELS
from harness.training import resuming, training_run
from harness.training.checkpoint_files import LOCK
from harness.training.resuming import Checkpoints
from next_steps.finetuning import checkpoint, kernel_training
from next_steps.layers import fp8_layer
from next_steps.lessons.adamw_optimizer import TritonAdamW
from tests.chat_test import TALK, TURNS, WORDS
from tests.cli_test import change_config
from tests.conftest import assert_refused
from tests.files_test import in_child, killed_at_each_change
from tests.fixtures import needs_gpu
from tests.fp8_layer_test import REFERENCES
from tests.resume_shards_test import equal, load_newest, save_checkpoint, training, whole
from tests.small_workloads import TINY, jsonl, tiny_workload
from tests.token_cache_test import tokenizer_of

STEPS = 6
SMALL = ["--seq-len", "8", "--steps", str(STEPS)]


def names_in(folder: Path | str) -> list[str]:
    """Return the names in a folder of checkpoints, except the lock."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name != LOCK)


pytestmark = pytest.mark.usefixtures("small_model", "own_cache")


@pytest.fixture
def examples(tmp_path) -> str:
    """Four examples to train on and one held out: six steps of one reach the next epoch."""
    words = "abcde", "fgh", "ijklmn", "op", "qrst"
    return str(jsonl(tmp_path / "data.jsonl", *((word[0], word[1:]) for word in words)))


@pytest.fixture
def ended_after(monkeypatch):
    """ended_after(n): from now on a run gets a signal in its n-th step; None: none does."""
    end_step, when = training_run.Run.end_step, {"step": None, "signal": signal.SIGTERM}

    def end_step_and_perhaps_be_ended(run, loss):
        if len(run.losses) + 1 == when["step"]:
            os.kill(os.getpid(), when["signal"])
        end_step(run, loss)

    monkeypatch.setattr(training_run.Run, "end_step", end_step_and_perhaps_be_ended)
    return lambda step, number=signal.SIGTERM: when.update(step=step, signal=number)


@pytest.fixture
def trained(monkeypatch, little_validation):
    """trained(workload, checkpoints): the record of a training, and all that it changed."""
    made, optimizer_for = [], kernel_training.optimizer_for

    def remember(model, workload):
        made[:] = model, optimizer_for(model, workload)
        return made[1]

    monkeypatch.setattr(kernel_training, "optimizer_for", remember)

    def train(
        workload: Workload, checkpoints: Checkpoints = kernel_training.NO_CHECKPOINTS
    ) -> dict:
        record = kernel_training.train_with_kernels(workload, checkpoints=checkpoints)
        tensors = checkpoint.tensors_of(*made)
        states = {
            f"{name}.{key}": t
            for name, state in tensors["optimizer"].items()
            for key, t in state.items()
        }
        each = 4 if workload.moments else 3  # scales, too
        assert len(states) == each * len(list(made[0].parameters()))
        return {"record": record, **tensors["model"], **states}

    return train


def differing(found: dict, expected: dict) -> list[str]:
    """Return the names of the tensors and of the record's entries that are not equal."""
    assert found.keys() == expected.keys()
    names = [name for name in expected if name != "record"]
    wrong = [name for name in names if not torch.equal(found[name], expected[name])]
    wrong += [name for name in names if found[name].dtype != expected[name].dtype]
    said = "losses", "tokens", "validation_loss_before", "validation_loss_after", "parameters"
    records = found["record"], expected["record"]
    return wrong + [key for key in said if records[0][key] != records[1][key]]


@pytest.fixture
def differing_in_pieces(trained, ended_after, tmp_path):
    """differing_in_pieces(workload): what differs if the run is ended and resumed, once or twice.

    Twice, so that what the first end changes shows in the results too.
    """

    def names(workload: Workload, ends: tuple[int, ...] = (2, 3)) -> list[str]:
        straight, folder, resume = trained(workload), str(tmp_path / "checkpoints"), None
        for end in ends:
            ended_after(end)
            with pytest.raises(Ended, match="SIGTERM"):
                trained(workload, Checkpoints(folder, None, resume))
            assert names_in(folder) == [f"step-{end}"]
            resume = folder
        ended_after(None)
        return differing(trained(workload, Checkpoints(resume=resume)), straight)

    return names


ADAMW = {"kernels": ("adamw",)}
ALL = {"kernels": tuple(KERNELS)}
WAYS = [  # flags, changes of the workload
    ("", {}),
    ("--accumulate 3", {}),
    ("--accumulate 2 --steps 4", ADAMW),
    ("--recompute layer", {}),
    ("--pack", {}),
    ("--dtype bf16 --steps 4", ADAMW | {"stochastic_rounding": True}),
    pytest.param(
        "--dtype bf16 --steps 4",
        ADAMW | {"stochastic_rounding": True, "moments": "8bit"},
        marks=pytest.mark.exhaustive,
    ),
    *(
        pytest.param(f"--data {data}", ALL, marks=pytest.mark.exhaustive)
        for data in ("stdlib", "synthetic")
    ),
    # there is no history of scales to save
    pytest.param("--batch-size 2", ALL | {"fp8": "all"}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("flags", "changes"), WAYS, ids=str)
def test_a_resumed_run_is_the_run_that_was_not_ended(
    differing_in_pieces, examples, monkeypatch, flags, changes
):
    """Across an epoch's edge: step 5 of one sample each begins the second one."""
    if "fp8" in changes and not HAS_GPU:  # Triton's interpreter is slow: see fp8_layer_test.py
        for name, reference in REFERENCES.items():
            monkeypatch.setattr(fp8_layer, name, reference)
    workload = tiny_workload(*SMALL, "--data", examples, *flags.split())
    assert differing_in_pieces(replace(workload, **changes)) == []


def test_conversations_with_the_date_keep_that_of_the_first_day(
    differing_in_pieces, monkeypatch, tmp_path
):
    """Else a resumed run has other tokens and is refused; the cache of tokens may be missing."""
    file, template = tmp_path / "talk.jsonl", "{{ strftime_now('%A') }} " + TURNS
    talks = [{"messages": [TALK[i], TALK[1]]} for i in (0, 2, 4)]
    file.write_text("\n".join(map(json.dumps, talks)))
    tokenizer = tokenizer_of(f"{WORDS} Monday Tuesday Wednesday", chat_template=template)
    monkeypatch.setattr(dataset, "load_tokenizer", lambda workload: tokenizer)
    monkeypatch.setattr(token_cache, "cached", lambda data, texts, encode, tokenize: tokenize())
    here, first = training_run.environment(), date(2026, 2, 2)
    # of one run, and of one that is resumed twice
    days = iter(first + timedelta(days=n) for n in (0, 0, 1, 2))
    monkeypatch.setattr(training_run, "environment", lambda: here | {"date": str(next(days))})
    assert differing_in_pieces(tiny_workload(*SMALL, "--data", str(file))) == []


@needs_gpu
@pytest.mark.parametrize("kernels", [(), tuple(KERNELS)], ids=["none", "all"])
@pytest.mark.parametrize("flags", [[], ["--accumulate", "2"]], ids=["one", "micro-batches"])
def test_a_graph_that_is_recorded_later_takes_the_same_steps(differing_in_pieces, kernels, flags):
    workload = tiny_workload(*SMALL, "--dtype", "bf16", *flags)
    changes = {"kernels": kernels, "stochastic_rounding": "adamw" in kernels}
    assert differing_in_pieces(replace(workload, **changes, cuda_graph=True)) == []


@needs_gpu
def test_a_graph_goes_on_where_single_launches_ended(trained, ended_after, tmp_path):
    workload = replace(tiny_workload(*SMALL), kernels=tuple(KERNELS))
    straight, folder = trained(workload), str(tmp_path / "checkpoints")
    ended_after(2)
    with pytest.raises(Ended):
        trained(workload, Checkpoints(folder))
    ended_after(None)
    resumed = trained(replace(workload, cuda_graph=True), Checkpoints(resume=folder))
    assert resumed["record"]["losses"] == straight["record"]["losses"]


def forget_moments(monkeypatch):
    load = checkpoint.load_checkpoint
    monkeypatch.setattr(
        checkpoint,
        "load_checkpoint",
        lambda *given: load(*given) or checkpoint.make_states(given[1]),
    )


def begin_the_data_again(monkeypatch):
    monkeypatch.setattr(training_run, "Loader", lambda batches, n, done: Loader(batches, n))


@pytest.mark.parametrize(
    "mistake", [forget_moments, begin_the_data_again], ids=lambda f: f.__name__
)
def test_what_is_not_resumed_would_be_noticed(differing_in_pieces, examples, monkeypatch, mistake):
    mistake(monkeypatch)
    assert differing_in_pieces(tiny_workload(*SMALL, "--data", examples), (2,))


# ---------------------------------------------------------------- what a run says and writes


def flags_of(folder, *more: str) -> list[str]:
    return [*TINY, *SMALL, "--checkpoint", str(folder), *more]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_step(run_script, ended_after, tmp_path, number, code):
    script = finetune_optimized if number == signal.SIGINT else finetune_baseline
    folder, record = tmp_path / "checkpoints", tmp_path / "run.json"
    before = signal.getsignal(number)
    ended_after(3, number)
    outcome = run_script(script, *flags_of(folder, "--checkpoint-every", "2"))
    assert outcome.code == code and signal.getsignal(number) is before
    assert f"Ended after step 3: --resume {folder} goes on from there" in outcome.out
    assert "step 3/6" in outcome.out and "step 4/6" not in outcome.out
    assert names_in(folder) == ["step-3"]
    ended_after(None)
    again = ["--checkpoint-every", "2", "--resume", str(folder), "--json", str(record)]
    outcome = run_script(script, *flags_of(folder, *again))
    assert outcome.code == 0 and f"Resuming from {folder / 'step-3'}: steps 4 to 6" in outcome.out
    assert "In another way" not in outcome.out
    assert names_in(folder) == ["step-4"], "the last step is not saved"
    said = json.loads(record.read_text())
    assert said["resumed_from"] == 3 and len(said["losses"]) == len(said["seconds"]) == STEPS
    # the other process's three, and its own first two; a GPU's last is profiled
    assert said["warmup_steps"] == 5 and ("(steps 6 to 6)" in outcome.out) == HAS_GPU


def test_a_signal_in_the_last_step_ends_after_the_results(run_script, ended_after, tmp_path):
    ended_after(STEPS)
    outcome = run_script(finetune_baseline, *flags_of(tmp_path / "checkpoints"))
    assert outcome.code == 143 and "Validation loss:" in outcome.out
    assert names_in(tmp_path / "checkpoints") == []


def test_a_signal_that_comes_while_processes_agree_is_for_the_next_step(monkeypatch):
    keeper = checkpoint.Keeper(SimpleNamespace(), None, Checkpoints())

    def comes_meanwhile(signals, op):
        keeper.signal = signal.SIGTERM

    monkeypatch.setattr(checkpoint.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(checkpoint.dist, "all_reduce", comes_meanwhile)
    assert [keeper.agreed_signal() for _ in range(2)] == [0, signal.SIGTERM]


def test_which_changes_leave_the_bits_and_which_are_refused():
    plain = tiny_workload(*SMALL)
    environment = dict.fromkeys(resuming.MACHINE)
    for kernels, exact in ((("adamw",), True), ((), False)):
        before, now = (replace(plain, kernels=kernels, cuda_graph=graph) for graph in (False, True))
        lines = resuming.notes(before, {}, now)
        assert len(lines) == 1 and ("same result to the bit" in lines[0]) == exact
    of_two = replace(plain, world_size=2, parallel="fsdp")
    lines = resuming.notes(of_two, environment | {"torch": "1.0"}, plain)
    for said in ("world_size None (not 2)", "parallel None (not fsdp)", "(not 1.0)"):
        assert said in lines[0]
    wide, coded = (replace(plain, kernels=("adamw",), moments=each) for each in (None, "8bit"))
    assert resuming.refused_differences(wide, coded) == ["moments 8bit (not None)"]
    assert resuming.refused_differences(coded, coded) == []


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def resumed(run_script, ended_after, tmp_path, examples):
    """resumed("--lr", "0.5"): how a run goes on with these flags, after two of its six steps.

    Args:
        begun: flags of both runs.
        change: is called in between with the checkpoint.
    """
    folder = tmp_path / "checkpoints"

    def run(*more: str, begun=("--data", examples), change=lambda path: None):
        flags = [*TINY, *SMALL, *begun]
        if not folder.exists():
            ended_after(2)
            first = run_script(finetune_baseline, *flags, "--checkpoint", str(folder))
            assert first.code == 143, first.err
            ended_after(None)
        change(folder / "step-2")
        return run_script(finetune_baseline, *flags, *more, "--resume", str(folder))

    return run


TENSORS = "__0_0.distcp"
NONE = "holds no checkpoint, expected a folder that --checkpoint DIR has written to"
DIFFERS = "is damaged: its checksum differs, expected what --checkpoint wrote"
DAMAGES = {  # what becomes of step-2, and what the sentence says
    "half written": (lambda path: path.rename(path.with_name(".unfinished-step-2")), NONE),
    "no tensors": (lambda path: (path / TENSORS).unlink(), f"{TENSORS} {DIFFERS}"),
    "no checksums": (
        lambda path: (path / "checksums.json").unlink(),
        "checksums.json is missing or damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_folder_is_refused(resumed, damage):
    change, said = DAMAGES[damage]
    outcome = resumed(change=change)
    assert_refused(outcome, said)
    assert outcome.out == ""


def test_other_flags_that_change_the_result_are_refused(resumed):
    """Among them each that the page calls another training."""
    page = (Path(__file__).parents[1] / "docs" / "resume.md").read_text()
    (row,) = [line for line in page.splitlines() if "| refused: that is another training" in line]
    others = {"--model": ["/other"], "--data": ["synthetic"], "--seq-len": ["7"], "--lr": ["0.5"]}
    others |= {"--seed": ["1"], "--dtype": ["bf16"], "--pack": []}
    assert set(re.findall(r"`(--[\w-]+)`", row)) == others.keys()
    refused = {
        (flag, *value): f"step-2 is of another training: {flag[2:].replace('-', '_')} "
        for flag, value in others.items()
    }
    refused |= {
        ("--steps", "7"): "step-2 is of another training: steps 7 (not 6)",
        ("--steps", "2"): "is of step 2, and --steps 2 leaves none to take",
        ("--batch-size", "3"): "sequences in a step 3 (not 1)",
        ("--seed", "1", "--pack"): "seed 1 (not 0); pack True (not None)",
    }
    for flags, said in refused.items():
        outcome = resumed(*flags)
        assert_refused(outcome, said)
        assert outcome.out == "", flags


def test_what_is_done_in_another_way_is_said(resumed):
    layout = ["--batch-size", "1", "--accumulate", "2", "--recompute", "layer"]
    outcome = resumed(*layout, begun=("--batch-size", "2"))
    assert outcome.code == 0
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("In another way")]
    for said in ("batch_size 1 (not 2)", "accumulate 2 (not None)", "recompute layer (not None)"):
        assert said in line
    assert "last bits may differ" in line


def test_the_same_files_by_other_names_are_no_other_training(
    run_script, ended_after, examples, checkpoint, monkeypatch, tmp_path
):
    """A run is begun with relative paths in one folder, and resumed in another."""
    saved, here, there = tmp_path / "checkpoints", [], []
    for flag, path in (("--model", checkpoint), ("--data", examples), ("--checkpoint", saved)):
        here += [flag, os.path.relpath(path, tmp_path)]
        there += [flag, os.path.relpath(path, checkpoint)]
    monkeypatch.chdir(tmp_path)
    ended_after(2)
    assert run_script(finetune_baseline, *TINY, *SMALL, *here).code == 143
    ended_after(None)
    monkeypatch.chdir(checkpoint)
    outcome = run_script(finetune_baseline, *TINY, *SMALL, *there, "--resume", str(saved))
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_samples_that_have_changed_are_refused(resumed, examples, tmp_path, kind):
    """Also in the held-out part: the first validation loss was that of the old text."""
    file, old, new = Path(examples), '"gh"', '"gi"'
    if kind == "text":
        file, old, new = tmp_path / "text.txt", ".", "#"
        file.write_text("The quick brown fox jumps over the lazy dog " * 20 + old)
    text = file.read_text().replace(old, new)
    outcome = resumed(begun=("--data", str(file)), change=lambda path: file.write_text(text))
    assert outcome.code == 2 and "are not those of the checkpoint" in outcome.err


ANOTHER = "step-2 is of another training: "
CONFIGS = {  # what becomes of config.json, and the sentence
    "eps": ({"rms_norm_eps": 0.1}, f"{ANOTHER}rms_norm_eps 0.1 (not 1e-05)"),
    "scaling": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        f"{ANOTHER}rope_parameters.rope_type linear (not default); "
        "rope_parameters.factor 4.0 (not None)",
    ),
    "what does not matter": (
        {
            **{"transformers_version": "4.0", "use_cache": False, "torch_dtype": "float16"},
            **{"architectures": None, "initializer_range": 0.5, "eos_token_id": 7},
        },
        None,
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_model_that_computes_otherwise_is_refused(resumed, tmp_path, case):
    """Path, shapes and number of parameters are the same, but the loss would be another."""
    (changed, said), folder = CONFIGS[case], tmp_path / "model"
    loading.load_model(tiny_workload("--seq-len", "8")).save_pretrained(folder)
    outcome = resumed(
        begun=("--model", str(folder)), change=lambda path: change_config(folder, **changed)
    )
    if said is None:
        assert outcome.code == 0, outcome.err
    else:
        assert_refused(outcome, said, "config.json")


def test_each_field_of_a_config_was_judged():
    """A step depends on a new field of transformers', or it does not: somebody has to say."""
    besides = {"initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pretraining_tp"}
    besides |= {"attention_dropout"}  # refused by itself
    # a window is refused; the interval is spelt out in no_rope_layers
    besides |= {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    besides |= {"no_rope_layer_interval"}
    fields = (family.part("Config").__annotations__.keys() for family in FAMILIES.values())
    assert {*architecture.COMPUTING, *besides} == set().union(*fields)


def test_dropout_is_refused():
    model = SimpleNamespace(config=SimpleNamespace(attention_dropout=0.1))
    with pytest.raises(UserError, match=r"attention_dropout is 0\.1, .* expected 0: set it"):
        checkpoint.refuse_random_numbers(model)


# ---------------------------------------------------------------- complete or absent


@pytest.mark.skipif(HAS_GPU, reason="a process that has used a GPU cannot be forked")
def test_a_save_that_is_killed_leaves_the_checkpoint_before_it(tmp_path):
    """It is killed before each change of the file system; there are at least half a dozen."""
    first, folder, left = tmp_path / "first", tmp_path / "folder", []
    expected = {f"step-{step}": whole(*training(step)) for step in (1, 2)}
    save_checkpoint(first, *training(1), 1)
    save = partial(save_checkpoint, folder, *training(2))
    for _ in killed_at_each_change(first, folder, partial(save, 2)):
        path = resuming.newest(folder)
        assert path.name == f"step-{json.loads((path / resuming.FACTS_FILE).read_text())['step']}"
        assert equal(whole(*load_newest(folder)), expected[path.name])
        left.append(path.name)
        # the next save finds nothing in its way, and leaves nothing else
        assert in_child(partial(save, 3)) == "done"
        assert names_in(folder) == ["step-3"]
    assert left == sorted(left) and left.count("step-1") >= 6 and left.count("step-2") >= 2


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, TritonAdamW])
def test_the_states_to_fill_are_those_of_a_first_step(optimizer_class):
    model, optimizer = training(1, optimizer_class)
    other, fresh = training(0, optimizer_class)
    checkpoint.make_states(fresh)
    for p, q in zip(model.parameters(), other.parameters()):
        made, expected = fresh.state[q], optimizer.state[p]
        assert made.keys() == expected.keys()
        for key, t in made.items():
            same = expected[key]
            assert (t.shape, t.dtype, t.device) == (same.shape, same.dtype, same.device)
            assert not t.any() and not t.requires_grad
