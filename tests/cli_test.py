"""Bad input gets one clear sentence and an exit code; good input the playbook's result block."""

import io
import logging
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors as hub_errors
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import command_line, tables
from harness.cli.device import HAS_GPU
from harness.cli.flags import DEFAULT_MODEL
from harness.data import dataset
from harness.model import architecture, config_file
from harness.records import run_records
from harness.training import run_text, training_run
from next_steps.finetuning import distill, opponents
from next_steps.memory import profile
from next_steps.studies import frontier
from tests.conftest import Outcome, assert_refused, tracked
from tests.files_test import contents
from tests.small_workloads import change_json, tiny_workload
from tests.token_cache_test import tokenizer_of

HERE = Path(__file__).parents[1]  # the project's folder
TINY = ["--model", "tiny", "--seq-len", "16", "--steps", "3"]
LESSONS = "rmsnorm_test", "cross_entropy_test"  # tests that are a step of the playbook
GOOD_LINE = '{"prompt": "question", "completion": "answer"}'
FULL_LINE = f'{{"prompt": "{"p" * 16}", "completion": "cut away"}}'  # fills a sequence


@pytest.fixture
def cli(run_script):
    """cli("--model", "tiny") -> Outcome, of the baseline unless told."""
    return lambda *flags, script=finetune_baseline: run_script(script, *flags)


def raising(error: BaseException) -> Callable:
    """A function that raises an error, whatever its arguments."""

    def fail(*args, **kwargs):
        raise error

    return fail


def change_config(checkpoint: Path, **values) -> None:
    change_json(checkpoint / "config.json", **values)


# ---------------------------------------------------------------- flags

REFUSED = {  # flags of finetune_optimized.py: words of the sentence
    **{
        f"--steps={value}": ["--steps", "at least 1", repr(str(value))]
        for value in ("0", "1.5", 2**70)
    },
    "--seed=-1": ["--seed", "at least 0", "'-1'"],
    **{f"--lr={text}": ["--lr", "above 0", f"'{text}'"] for text in ("0", "nan", "1e38")},
    "--kernels rmsnorm,flash": ["unknown kernel 'flash'", "choose from rmsnorm, cross_entropy, "],
    "--kernels=": ["unknown kernel ''", "choose from rmsnorm, cross_entropy, swiglu, rope"],
    "--frobnicate": ["--help lists the flags", "--frobnicate"],
    "--seq-len 1": ["--seq-len 1", "at least 2"],
    "--seq-len 8193": ["--seq-len 8193", "8192 positions of tiny"],
    "--model /": ["the directory / holds no config.json"],
    "--data wikipedia": ["--data wikipedia", "stdlib, synthetic, a .txt file or"],
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_no_run_can_follow_is_refused_in_one_line(cli, flags):
    assert_refused(cli(*TINY, *flags.split(), script=finetune_optimized), *REFUSED[flags])


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("local", [False, True])
def test_a_large_model_without_a_gpu_is_refused_before_any_download(
    cli, monkeypatch, tmp_path, local
):
    monkeypatch.setattr(config_file, "HAS_GPU", False)
    monkeypatch.setattr(config_file, "hf_hub_download", lambda *args: pytest.fail("a download"))
    if local:
        architecture.llama_3_1_8b_config().save_pretrained(tmp_path)
        assert_refused(cli("--model", str(tmp_path)), "CUDA GPU", str(tmp_path))
    else:
        for flags in ([], ["--random-init"]):
            assert_refused(cli(*flags), DEFAULT_MODEL, "CUDA GPU", "--model tiny")


def hub_error(name: str, status: int) -> Exception:
    """The error as huggingface_hub constructs it from an answer of the hub."""
    answer = SimpleNamespace(headers={}, request=None, status_code=status)
    return getattr(hub_errors, name)("the hub's own long text\n\nin paragraphs", response=answer)


def not_cached(cause: Exception) -> Exception:
    """As the client raises it that knows neither the hub's file nor one in its cache."""
    error = hub_errors.LocalEntryNotFoundError("not cached")
    error.__cause__ = cause
    return error


WITHOUT_ACCESS = (
    "access to org/model was refused",
    "Accept the license at https://huggingface.co/org/model",
    "export HF_TOKEN=",
    "valid token",
)
UNREACHABLE = ["could not be reached", "--model tiny", "--random-init"]
HUB_ERRORS = [  # what the client raises, and words of the sentence
    (hub_error("GatedRepoError", 403), WITHOUT_ACCESS),
    (not_cached(hub_error("HfHubHTTPError", 401)), WITHOUT_ACCESS),
    (hub_error("RepositoryNotFoundError", 401), ["knows no model 'org/model'", "HF_TOKEN"]),
    (hub_error("RemoteEntryNotFoundError", 404), ["org/model has no config.json"]),
    (hub_error("HfHubHTTPError", 503), UNREACHABLE),
    (hub_errors.OfflineModeIsEnabled("offline"), UNREACHABLE),
    (hub_errors.HTTPError("the proxy is broken"), UNREACHABLE),
    (hub_errors.HFValidationError("bad"), ["neither a directory nor a Hugging Face model id"]),
]


@pytest.mark.parametrize(
    ("error", "words"), HUB_ERRORS, ids=[type(error).__name__ for error, _ in HUB_ERRORS]
)
def test_errors_of_the_hubs_client_have_their_sentences(cli, monkeypatch, error, words):
    monkeypatch.setattr(config_file, "hf_hub_download", raising(error))
    assert_refused(cli("--model", "org/model"), *words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2"}, ["'gpt2' model", "train models of llama, mistral"]),
        ({"model_type": "never_heard_of", "auto_map": {"AutoConfig": "code.Config"}}, []),
        ({"hidden_size": "wide"}, []),
    ],
    ids=str,
)
def test_a_config_that_is_no_llamas_is_refused(cli, checkpoint, values, words):
    change_config(checkpoint, **values)
    outcome = cli("--model", str(checkpoint))
    assert_refused(outcome, str(checkpoint), *words)
    assert outcome.out == "", "a question about running the model's own code, for one"


HALF = b"the first half"


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        (
            "config.json",
            [b'{"model_type": ', b"[]", b"{}", b"[" * 100_000],
            "the configuration of {} could not be loaded",
        ),
        ("model.safetensors", [None, HALF], "the weights of {} could not be load"),
        ("tokenizer.json", [b'{"damaged'], "the tokenizer of {} could not be loaded"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_a_damaged_file_of_a_model_is_refused(cli, checkpoint, name, contents, said):
    whole = (checkpoint / name).read_bytes() if (checkpoint / name).exists() else b""
    for content in contents:
        if content is None:
            (checkpoint / name).unlink()
        else:
            (checkpoint / name).write_bytes(
                whole[: len(whole) // 2] if content is HALF else content
            )
        assert_refused(cli(*TINY, "--model", str(checkpoint)), said.format(checkpoint))


def test_an_adapter_beside_the_model_is_refused_before_the_weights_are_loaded(
    cli, monkeypatch, checkpoint
):
    (checkpoint / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raising(AssertionError))
    outcome = cli(*TINY, "--model", str(checkpoint))
    assert_refused(outcome, f"{checkpoint} holds an adapter beside the model", "--adapter")


def test_bytes_are_no_tokens_for_pretrained_weights(cli, checkpoint):
    """But they are for random ones, and where the vocabulary is theirs: `checkpoint` itself."""
    change_config(checkpoint, vocab_size=300)
    outcome = cli(*TINY, "--model", str(checkpoint))
    assert_refused(outcome, f"{checkpoint} has pretrained weights and no tokenizer")
    assert cli(*TINY, "--model", str(checkpoint), "--random-init").code == 0


ENDS = {  # eos_token_id in config.json: the token that ends a text
    "one": (2, "b"),
    "several": ([3, 1], "c"),
    "empty": ([], None),
    "unknown": (200, None),
    "none": (None, None),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_the_texts_of_a_tokenizer_that_does_not_say_it(checkpoint, capsys, case):
    given, token = ENDS[case]
    change_config(checkpoint, eos_token_id=given)
    tokenizer_of("a b c").save_pretrained(checkpoint)
    tokenizer = dataset.load_tokenizer(tiny_workload("--model", str(checkpoint)))
    assert tokenizer.eos_token == token
    said = f"texts end with {token}, as config.json says" if token else "end in nothing"
    assert said in capsys.readouterr().out


def test_a_tokenizer_of_another_model_is_refused(own_cache, cli, checkpoint):
    words = Tokenizer(
        models.WordLevel({"import": 5, "[unknown]": architecture.BYTE_VOCABULARY}, "[unknown]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(checkpoint)
    outcome = cli(*TINY, "--model", str(checkpoint))
    assert_refused(outcome, "token id 257", "vocabulary of 257", "does not belong to this model")


# ---------------------------------------------------------------- the data


WAYS_TO_LOAD = {
    "page": (finetune_baseline, ["--data"]),
    "kernels": (finetune_baseline, ["--lora-rank", "2", "--data"]),
    "opponent": (opponents, ["--opponent", "fused-adamw", "--data"]),
    "student": (distill, ["--teacher", "tiny", "--data"]),
    "profile": (profile_baseline, ["--data"]),
    "memory": (profile, ["--data"]),
}


@pytest.mark.parametrize("way", WAYS_TO_LOAD)
def test_unusable_data_are_refused_before_the_model_is_loaded(cli, monkeypatch, checkpoint, way):
    script, flags = WAYS_TO_LOAD[way]
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raising(AssertionError))
    tiny = TINY[:4] if script in (profile_baseline, profile) else TINY
    given = [*tiny, "--model", str(checkpoint), *flags]
    outcome = cli(*given, "nowhere.jsonl", script=script)
    assert_refused(outcome, "cannot read nowhere.jsonl", "No such file")
    file = checkpoint / "keys.jsonl"
    file.write_text(f'{GOOD_LINE}\n{{"instruction": "a", "output": "b"}}')
    outcome = cli(*given, str(file), script=script)
    assert_refused(outcome, f"{file}, line 2", 'strings "prompt" and "completion"')


MALFORMED = (
    "prompt and completion",
    '{"prompt": "a"}',
    '{"prompt": "a", "completion": 7}',
    '["prompt", "completion"]',
    '{"prompt": "a", "completion": "\\ud800"}',
    "[" * 100_000,  # without end
)
DATA = [  # a file's name, its content, words of the sentence
    ("a.txt", None, ["cannot read", "directory"]),
    ("a.txt", b" \n\n", ["a.txt is empty"]),
    ("a.txt", b"abc\xff", ["a.txt is not UTF-8 text", "byte 3"]),
    ("a.txt", b"too short", ["too short for one sequence of --seq-len 16"]),
    ("a.jsonl", b"", ["a.jsonl is empty"]),
    ("a.jsonl", GOOD_LINE.encode(), ["a.jsonl holds 1 example; at least 2 are needed"]),
    (
        "a.jsonl",
        f"\n{FULL_LINE}".encode(),
        ["a.jsonl, line 2: no completion token is left", "1 skipped: ", "--seq-len 16"],
    ),
    (
        "a.jsonl",
        f"{FULL_LINE}\n{GOOD_LINE}".encode(),
        ["holds 1 example, 1 skipped: ", "within --seq-len 16", "at least 2"],
    ),
    *(
        (
            "a.jsonl",
            "\n".join([GOOD_LINE, "", GOOD_LINE, line, GOOD_LINE]).encode(),
            ["a.jsonl, line 4: ", 'strings "prompt" and "completion"'],
        )
        for line in MALFORMED
    ),
]


@pytest.mark.parametrize("name, content, words", DATA, ids=range(len(DATA)))
def test_unusable_data_files_are_refused(cli, tmp_path, name, content, words):
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    assert_refused(cli(*TINY, "--data", str(path)), *words)


def test_a_prompt_that_fills_the_sequence_is_skipped_and_counted(cli, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([GOOD_LINE, FULL_LINE, GOOD_LINE, FULL_LINE, GOOD_LINE]))
    outcome = cli(*TINY, "--data", str(path))
    said = "2 examples to train on, 1 held out, 2 skipped: no completion token within --seq-len 16,"
    assert outcome.code == 0 and said in outcome.out


# ---------------------------------------------------------------- failures while running


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_says_what_to_lower_in_order(cli, monkeypatch, error):
    monkeypatch.setattr(training_run.Run, "end_step", raising(error))
    outcome = cli(*TINY)
    assert_refused(outcome, "ran out of memory", "nvidia-smi", code=1)
    lowered = [outcome.err.index(flag) for flag in ("--batch-size", "--seq-len", "--model")]
    assert lowered == sorted(lowered)


def test_out_of_memory_while_loading_is_not_called_a_damaged_file(cli, monkeypatch, checkpoint):
    fail = raising(torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert_refused(cli(*TINY, "--model", str(checkpoint)), "ran out of memory", code=1)


def test_a_bug_is_not_dressed_up_as_the_users_fault(monkeypatch):
    fail = raising(RuntimeError("shapes cannot be multiplied"))
    monkeypatch.setattr(training_run.Run, "end_step", fail)
    monkeypatch.setattr("sys.argv", ["finetune_baseline.py", *TINY])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        command_line.run_main(finetune_baseline.main)


def test_a_loss_that_is_no_number_saves_nothing(cli, monkeypatch, checkpoint, tmp_path):
    before = contents(checkpoint)
    real, calls = training_run.Run.end_step, []

    def third_step_fails(run, found):
        calls.append(found)
        real(run, torch.full_like(found, math.nan) if len(calls) == 3 else found)

    monkeypatch.setattr(training_run.Run, "end_step", third_step_fails)
    record = tmp_path / "run.json"
    outcome = cli(*TINY, "--steps", "5", "--save", str(checkpoint), "--json", str(record))
    assert_refused(outcome, "the loss became nan at step 3", "nothing was saved", "--lr", code=1)
    assert len(calls) == 3 and "step 2/5" in outcome.out and "step 3/5" not in outcome.out
    assert contents(checkpoint) == before and not record.exists()


def test_an_update_that_ruins_the_weights_in_the_last_step_saves_nothing(cli, checkpoint):
    before = contents(checkpoint)
    outcome = cli(*TINY, "--dtype=fp32", "--steps=1", "--lr=1e20", "--save", str(checkpoint))
    assert_refused(outcome, "validation loss became nan after step 1", "nothing was saved", code=1)
    assert contents(checkpoint) == before


def test_ctrl_c_leaves_no_traceback(cli, monkeypatch):
    monkeypatch.setattr(training_run.Run, "end_step", raising(KeyboardInterrupt()))
    outcome = cli(*TINY)
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


@pytest.mark.skipif(HAS_GPU, reason="a GPU's memory ends the search")
def test_the_longest_sequence_has_an_end_on_a_cpu(cli, tmp_path):
    path = str(tmp_path / "longest.json")
    flags = "--model", "tiny", "--seq-len", "2", "--longest", "--json", path
    outcome = cli(*flags, script=frontier)
    assert outcome.code == 0, outcome.err
    assert run_records.read_record(path, "longest")["lengths"] == [16, 32, 64]
    said = "(in steps of 16; stopped by the 3 lengths that are tried without a GPU)"
    assert f"64 tokens {said}" in outcome.out


# ---------------------------------------------------------------- real processes


def in_here() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE), "CUDA_VISIBLE_DEVICES": ""}


def run(*command: str, **environment: str) -> Outcome:
    """Run a command that finds the project's modules and no GPU."""
    env = in_here() | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=HERE)
    return Outcome(done.returncode, done.stdout, done.stderr)


def process(*flags: str, script: str = "finetune_baseline.py", **environment: str) -> Outcome:
    return run(sys.executable, str(HERE / script), *flags, **environment)


@pytest.mark.exhaustive
def test_a_process_says_one_sentence_and_nothing_else(checkpoint, tmp_path):
    """Without a GPU and flags, without a network, and where libraries would warn."""
    assert_refused(process(), "needs a CUDA GPU", "--model tiny")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert_refused(process("--model", "some/model", **offline), "some/model", "be reached")
    change_config(checkpoint, num_hidden_layers=3, bos_token_id=999)
    assert_refused(process(*TINY, "--model", str(checkpoint)), "do not fit its config.json")


# less than a buffer, which reaches the file when the script ends, and more, which reaches it at
# once
SCRIPT = "from harness.cli import command_line\ncommand_line.run_main(lambda: {})\n"
PRINTS = {"at the end": "print('x')", "at once": "print('x' * 99_999)"}


@pytest.fixture(params=PRINTS)
def printing(request, tmp_path) -> list[str]:
    """The command of a script that prints."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(PRINTS[request.param]))
    return [sys.executable, str(path)]


def unread(command: list[str]) -> tuple[int, bytes]:
    """Run a command and close its output, as `| head -1` does when it has its line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=in_here()) as started:
        started.stdout.close()
        said = started.stderr.read()
    return started.returncode, said


def test_output_that_nobody_takes_is_no_traceback(printing):
    """A reader has gone, the disk is full, or the output is closed."""
    assert unread(printing) == (141, b"")
    full, closed = (run("sh", "-c", shlex.join(printing) + to) for to in (" > /dev/full", " >&-"))
    said = "error: cannot write: No space left on device\n"
    assert (full.code, full.err) == (1, said) and (closed.code, closed.err) == (0, "")


def test_help_that_nobody_reads_ends_quietly():
    code, said = unread([sys.executable, str(HERE / "compare_runs.py"), "--help"])
    assert code in (0, 141) and said == b"", "argparse passes over a pipe that nobody reads"


def test_a_terminal_that_knows_ascii_alone_shows_the_rest(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format("print('2 × 3 — done')"))
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    outcome = run(sys.executable, str(tmp_path / "script.py"), **environment)
    assert (outcome.code, outcome.out, outcome.err) == (0, "2 ? 3 ? done\n", "")


SCRIPTS = sorted(
    path.name
    for path in tracked("*.py")
    if path.parent == HERE
    and "command_line.run_main(main)" in path.read_text()
    and (not path.name.endswith("_test.py") or path.stem in LESSONS)
)


MODULES = sorted(
    ".".join(path.relative_to(HERE).with_suffix("").parts)
    for floor in ("exercises", "next_steps", "tools")
    for path in tracked(f"{floor}/*.py")
    if '__name__ == "__main__"' in path.read_text()
)
HEAVY = "torch", "transformers", "triton"
HELP = """
import runpy, sys
name = sys.argv.pop(1)
run = runpy.run_path if name.endswith(".py") else runpy.run_module
try:
    run(name, run_name="__main__")
except SystemExit as stop:
    print(stop.code, *sys.modules.keys() & {heavy}, file=sys.stderr)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags, code", [(["--help"], 0), (["--frobnicate"], 2)], ids=["help", "wrong"]
)
@pytest.mark.parametrize("script", [*SCRIPTS, *MODULES])
def test_flags_are_answered_before_pytorch_is_imported(script, flags, code):
    """It takes seconds.  Counted is what was imported: a clock would depend on the machine."""
    name = str(HERE / script) if script.endswith(".py") else script
    outcome = run(sys.executable, "-c", HELP.format(heavy={*HEAVY}), name, *flags)
    assert outcome.out.startswith("usage: ") == (code == 0)
    assert outcome.err.splitlines()[-1] == str(code), outcome.err


INTERRUPTED = """
import signal
# a shell's background job ignores Ctrl-C, and so would this process
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "script", [each for each in SCRIPTS if each not in ("compare_runs.py", "judge.py")]
)
def test_ctrl_c_during_the_imports_leaves_no_traceback(tmp_path, script):
    """Importing PyTorch takes seconds; here it takes as long as Ctrl-C needs to come."""
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    outcome = process(script=script, PYTHONPATH=str(tmp_path))
    is_lesson = script.removesuffix(".py") in LESSONS
    expected = (-signal.SIGINT, "", "") if is_lesson else (130, "", "interrupted\n")
    assert (outcome.code, outcome.out, outcome.err) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "flags"),
    [("next_steps.studies.ladder", TINY), ("tools.make_records", ["checks", "--into"])],
)
def test_a_signal_ends_the_processes_that_run_and_wait(tmp_path, script, flags):
    number = signal.SIGTERM
    wait = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w').close(); time.sleep(999)"
    code = f"""
import importlib
from harness.cli import command_line
from next_steps.studies import prepared
prepared.WAIT = {wait!r}
command_line.run_main(importlib.import_module({script!r}).main)
"""
    command = [sys.executable, "-c", code, *flags]
    command += [str(tmp_path / "records")] if flags[-1] == "--into" else []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=in_here()
    ) as run:
        deadline = time.monotonic() + 300
        while len(found := [each for each in tmp_path.iterdir() if each.name.isdigit()]) < 3:
            assert run.poll() is None and time.monotonic() < deadline, run.stderr.read()
            time.sleep(0.05)
        run.send_signal(number)
        said = run.stderr.read()
    assert (run.returncode, said) == (128 + number, f"ended by {number.name}\n")
    for each in found:
        with pytest.raises(ProcessLookupError):
            os.kill(int(each.name), 0)


# ---------------------------------------------------------------- what a good run prints


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [finetune_baseline, finetune_optimized])
def test_a_run_prints_every_step_and_the_result_block(cli, tmp_path, script):
    title = {finetune_baseline: "Baseline Results", finetune_optimized: "Optimized Results"}[script]
    path = tmp_path / "run.json"
    outcome = cli(*TINY, "--json", str(path), script=script)
    assert outcome.code == 0, outcome.err
    record = run_records.read_record(str(path), "finetune")
    if not HAS_GPU:
        assert outcome.out.startswith(tables.NO_GPU_NOTE)
    speed = r"[\d.]+ s +[\d,]+ tokens/sec  peak +[\d.]+ GB  " if HAS_GPU else ""
    line = rf"^step (\d)/3  loss +([\d.]+) +{speed}ETA +\d+ s$"
    steps = re.findall(line, outcome.out, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    assert [float(loss) for _, loss in steps] == pytest.approx(record["losses"], abs=1e-4)

    block = run_text.result_block(record)
    assert block in outcome.out and f"\n{title}\n" in block
    assert ("Peak GPU memory:" in block) == ("tokens/sec" in block) == HAS_GPU


# ---------------------------------------------------------------- lines and messages


def test_long_lines_are_broken_at_blanks_and_others_are_left_alone():
    path, row = "/x" * 60, "a  " * 33
    assert command_line.fitted(f"short\n{path}\n{row}\n\n") == f"short\n{path}\n{row}\n\n"
    sentence = "  " + "some words " * 20
    lines = command_line.fitted(f"{sentence}\n").split("\n")
    assert " ".join(lines).split() == sentence.split() and lines[-1] == ""
    assert max(map(len, lines)) <= command_line.TERMINAL
    assert lines[0].startswith("  some") and lines[1].startswith("    ")


MESSAGES = (
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. ",
    "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction.",
    "Warning: Profiler clears events at the end of each cycle.Only events from the current",
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0",
    "invalid value encountered in subtract",
)


def test_messages_that_ask_nothing_of_a_user_are_dropped_and_ours_stay(recwarn):
    """Each as PyTorch, Inductor or NumPy writes it."""
    logger = logging.getLogger("torch._inductor.utils")

    def main():
        for message in (*MESSAGES, "a setting is ignored"):
            warnings.warn(message, stacklevel=1)
        for text in (*command_line.NOT_FOR_USERS_LOGGED.values(), "another line"):
            logger.warning(text)

    handler = logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    try:
        with pytest.raises(SystemExit):
            command_line.run_main(main)
    finally:
        logger.removeHandler(handler)
    assert [str(each.message) for each in recwarn] == ["a setting is ignored"]
    assert handler.stream.getvalue() == "another line\n"
