"""The ladder predicts, runs and prints what it says; the same for the longest sequence and for the captured step."""

import argparse
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness import architecture, command_line, dataset, loading, run_records, stepping, tables, training_run
from harness.workload import finetune_parser
from harness.checking import DEVICE
from harness.kernel_facts import CATEGORIES, KERNELS
from next_steps import apply_kernels, ladder
from tests.fixtures import needs_gpu

# a dozen rows are all that Triton's interpreter gets through in a tenth of a second
TINY = ["--model", "tiny", "--dtype", "fp32"]
SMALL = [*TINY, "--batch-size", "1", "--seq-len", "8", "--steps", "3"]  # the third may be a CUDA graph
GPU = {"gpu": "Made Up", "torch": "0", "triton": "0", "transformers": "0", "date": "-", "commit": "-", "cpu": "x86_64"}
SCRIPTS = {f"{s.__name__}.py": s for s in (finetune_baseline, finetune_optimized, profile_baseline)}


@pytest.fixture
def small_model(monkeypatch):
    """tiny, but smaller."""
    config = architecture.tiny_config()
    config.hidden_size, config.intermediate_size, config.head_dim, config.num_hidden_layers = 32, 48, 8, 1
    config.max_position_embeddings = 12
    monkeypatch.setattr(architecture, "tiny_config", lambda: config)
    return config


def arguments(*flags: str) -> argparse.Namespace:
    parser = finetune_parser("")
    ladder.add_flags(parser)
    return parser.parse_args([*SMALL, *flags])


def made_up_rung(name, predicted_ms, step_ms, loss=2.0) -> dict:
    return {
        "name": name, "predicted_ms": predicted_ms, "step_ms": step_ms, "losses": [2.0, loss],
        "tokens_per_second": 8e3 / step_ms, "peak_memory_bytes": 1e8 * step_ms, "kernels": [],
        "validation_loss_after": 2.0,
    }  # fmt: skip


def made_up_record(gpu: str | None) -> dict:
    rungs = [
        made_up_rung("baseline", None, 100.0), made_up_rung("adamw", 70.0, 80.0), made_up_rung("rmsnorm", 75.0, 60.0),
        made_up_rung("Liger-Kernel, fused AdamW", None, 90.0, loss=2.02),
    ]  # fmt: skip
    return {
        "kind": "ladder", "environment": GPU | {"gpu": gpu}, "copy_gbs": 4321.0, "busy_ms": 95.5, "rungs": rungs,
        "absent": ["somebody failed: a sentence"], "model": "tiny", "weights": "random weights", "parameters": 1234,
        "dtype": "bf16", "data": "stdlib", "batch_size": 4, "seq_len": 2, "steps": 2, "seed": 0, "lr": 1e-5,
    }  # fmt: skip


# ---------------------------------------------------------------- what is printed


def rows(text: str) -> dict[str, list[str]]:
    """Name of each rung -> its other columns."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("-----")) + 1
    cells = [re.split(r"  +", line.strip()) for line in lines[first:] if not line.startswith("Not measured")]
    return {name: others for name, *others in cells}


@pytest.mark.parametrize("gpu", ["Made Up", None])
def test_the_table_from_a_record(gpu):
    text = ladder.render(made_up_record(gpu))
    assert rows(text) == {
        "baseline": ["n/a", "n/a", "100.0", "80", "1.00", "10.0", "1.00", "0.0e+00"],
        "+ adamw": ["30.0", "20.0", "80.0", "100", "1.25", "8.0", "0.80", "0.0e+00"],
        "+ rmsnorm": ["5.0", "20.0", "60.0", "133", "1.67", "6.0", "0.60", "0.0e+00"],
        "Liger-Kernel, fused AdamW": ["n/a", "n/a", "90.0", "89", "1.11", "9.0", "0.90", "1.0e-02"],
    }
    assert "Not measured: somebody failed: a sentence" in text.splitlines()[-1]
    assert "Model: tiny, 1,234 parameters, random weights, bf16; 4 x 2 tokens, 2 steps, data stdlib" in text
    assert f"Copy rate measured in this run: 4,321 GB/s; the baseline keeps the {'GPU' if gpu else 'CPU'} busy" in text
    assert (tables.NOT_MEANINGFUL in text) == (gpu is None)


def test_the_picture_has_every_rung_and_what_was_predicted(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    record, path = made_up_record("Made Up"), tmp_path / "ladder.png"
    ladder.plot([record, record | {"seq_len": 3}], str(path))
    times, memory, second, _ = pyplot.gcf().axes
    assert path.read_bytes().startswith(b"\x89PNG")
    names = [label.get_text() for label in times.get_yticklabels()]
    assert names == ["Liger-Kernel, fused AdamW", "+ rmsnorm", "+ adamw", "baseline"]
    assert [text.get_text() for text in times.texts] == ["90.0", "60.0", "80.0", "100.0"]
    assert [text.get_text() for text in memory.texts] == ["9.0", "6.0", "8.0", "10.0"]
    assert times.lines[0].get_xdata().tolist() == [75.0, 70.0]
    assert (times.get_title("left"), second.get_title("left")) == ("4 x 2 tokens", "4 x 3 tokens")
    monkeypatch.undo()
    pyplot.close("all")


def test_a_picture_without_a_ladder_is_refused(run_script, tmp_path):
    outcome = run_script(finetune_optimized, *SMALL, "--plot", str(tmp_path / "x.png"))
    assert outcome.code == 2 and "draws the ladder: add --ladder" in outcome.err and not list(tmp_path.iterdir())


def test_the_longest_sequence_from_a_record():
    record = {
        "kind": "longest", "environment": GPU, "model": "tiny", "weights": "random weights", "parameters": 1234,
        "dtype": "bf16", "kernels": ["rmsnorm", "adamw"], "lengths": [1024, 2048], "peaks": [1, 2],
        "length_step": 1024, "stopped_by": "the GPU's memory",
    }  # fmt: skip
    text = ladder.render_longest(record)
    assert "Longest sequence that fits, batch 1: 2,048 tokens (in steps of 1,024" in text
    assert "stopped by the GPU's memory" in text and "custom kernels: rmsnorm, adamw" in text
    nothing = ladder.render_longest(record | {"lengths": [], "first_length": 4096, "kernels": []})
    assert "less than 4,096 tokens" in nothing and "custom kernels: none" in nothing


# ---------------------------------------------------------------- the prediction


def test_sizes_are_bytes_of_one_pass():
    config = architecture.llama_3_1_8b_config()
    sizes = ladder.sizes_of(config, arguments("--dtype", "bf16", "--batch-size", "2", "--seq-len", "512"))
    tokens = 1024
    assert sizes.weights == 2 * 8_030_261_248
    assert sizes.stream == 2 * 32 * tokens * 4096
    assert sizes.heads == 2 * 32 * tokens * (32 + 8) * 128
    assert sizes.inner == 2 * 32 * tokens * 14_336
    assert sizes.logits == 2 * tokens * 128_256
    fp32 = ladder.sizes_of(config, arguments("--dtype", "fp32", "--batch-size", "2", "--seq-len", "512"))
    assert fp32.inner == 2 * sizes.inner


def test_every_category_that_a_rung_replaces_is_one_of_the_profile():
    assert {rung.category for rung in ladder.RUNGS} - {None} <= set(CATEGORIES)
    names = [rung.name for rung in ladder.RUNGS]
    assert len(set(names)) == len(names)
    assert set(names) == set(KERNELS) - {"cross_entropy"}  # linear_cross_entropy takes its place


def climb_in_a_made_up_world(monkeypatch, step_ms: list[float], has_gpu: bool, liger: bool, tmp_path) -> tuple:
    """(record, calls of run_script): each run takes the next of these times, and nothing is really run."""
    calls, times = [], iter(step_ms)
    categories = {name: {"us": 1e3 * i, "launches": 1} for i, name in enumerate(CATEGORIES)}

    def run_script(script, args, *flags, steps=True):
        calls.append((script, *flags))
        if script == "profile_baseline.py":
            return {"categories": categories, "busy_us": 80e3, "ceilings": {"copy_gbs": 0.5}}
        if "--opponent" in flags and not liger:
            raise command_line.RunError("it is not installed")
        workload = {key: getattr(args, key) for key in ("model", "dtype", "data", "batch_size", "seq_len", "seed")}
        seconds = next(times) / 1e3
        return workload | {
            "weights": "random weights", "parameters": 7, "warmup_steps": 0, "steps": 2, "lr": 1e-3,
            "losses": [2.0, 1.5], "median_seconds": seconds, "tokens_per_second": 8 / seconds, "kernels": [],
            "peak_memory_bytes": 10**9, "validation_loss_after": 1.0,
        }  # fmt: skip

    monkeypatch.setattr(ladder, "run_script", run_script)
    monkeypatch.setattr(ladder, "HAS_GPU", has_gpu)
    path = tmp_path / "ladder.json"
    ladder.climb(arguments("--json", str(path)))
    return run_records.read_record(str(path), "ladder"), calls


def test_a_gain_is_predicted_from_the_profile_and_the_copy_rate(monkeypatch, tmp_path):
    """What a category takes, less the time that its remaining bytes need at 0.5 GB/s, that is 500,000 bytes/ms."""
    times = [100.0, 90.0, 85.0, 84.0, 83.0, 82.0, 81.0, 60.0, 95.0]
    record, _ = climb_in_a_made_up_world(monkeypatch, times, True, True, tmp_path)
    tokens, width = 8, 4
    stream, heads = 2 * tokens * 64 * width, 2 * tokens * (4 + 2) * 16 * width
    inner, logits, weights = 2 * tokens * 160 * width, tokens * 257 * width, 119_232 * width
    taken = {name: float(i) for i, name in enumerate(CATEGORIES)}
    gains = [
        taken["optimizer"] - 7 * weights / 5e5, taken["normalization"] - 10 * stream / 5e5,
        taken["rotary"] - 4 * heads / 5e5, taken["activation"] - 9 * inner / 5e5, taken["loss"] - 2 * logits / 5e5,
        2 * stream / 5e5,
    ]  # fmt: skip
    assert [rung["step_ms"] for rung in record["rungs"]] == pytest.approx(times)
    predicted = [rung["predicted_ms"] for rung in record["rungs"]]
    assert predicted[0] is None and predicted[-1] is None
    assert predicted[1:7] == pytest.approx([before - gain for before, gain in zip(times, gains)])
    assert predicted[7] == pytest.approx(80.0 - sum(gains))  # a graph leaves the time in which the GPU is busy
    assert record["busy_ms"] == 80.0 and record["categories_ms"] == taken


def test_a_graph_is_not_predicted_to_be_slower(monkeypatch, tmp_path):
    times = [100.0, 90.0, 85.0, 84.0, 83.0, 82.0, 5.0, 4.0, 95.0]
    record, _ = climb_in_a_made_up_world(monkeypatch, times, True, True, tmp_path)
    assert record["rungs"][7]["name"] == "cuda_graph" and record["rungs"][7]["predicted_ms"] == pytest.approx(5.0)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_each_rung_adds_one_kernel(monkeypatch, tmp_path, has_gpu, capsys):
    record, calls = climb_in_a_made_up_world(monkeypatch, [50.0] * 9, has_gpu, False, tmp_path)
    names = [rung.name for rung in ladder.RUNGS]
    assert [script for script, *_ in calls[:2]] == ["profile_baseline.py", "finetune_baseline.py"]
    rungs = [("finetune_optimized.py", "--kernels", ",".join(names[: n + 1])) for n in range(len(names))]
    graph = [("finetune_optimized.py", "--kernels", "all", "--cuda-graph")] if has_gpu else []
    assert calls[2:] == [*rungs, *graph, ("finetune_optimized.py", "--opponent", "liger")]
    printed = capsys.readouterr().out
    assert record["absent"] == ["it is not installed"] and "Not measured: it is not installed" in printed
    assert ladder.render(record) in printed
    assert printed.startswith(tables.NO_GPU_NOTE) == (not has_gpu)


# ---------------------------------------------------------------- real runs


def absent_opponent(args):
    raise command_line.RunError("not run here")


def test_a_real_ladder(monkeypatch, tmp_path, capsys, small_model):
    """All scripts as they are, but in this process: nine of their own would import PyTorch for most of a minute."""

    def run_script(script, args, *flags, steps=True):
        path = tmp_path / "record.json"
        workload = SMALL if steps else SMALL[: SMALL.index("--steps")]
        monkeypatch.setattr("sys.argv", [script, *workload, *flags, "--json", str(path)])
        SCRIPTS[script].main()
        return json.loads(path.read_text())

    monkeypatch.setattr(ladder, "run_script", run_script)
    # Liger-Kernel would stay patched into transformers for every test after this one
    monkeypatch.setattr(ladder, "train_opponent", absent_opponent)
    path = tmp_path / "ladder.json"
    monkeypatch.setattr("sys.argv", ["finetune_optimized.py", *SMALL, "--ladder", "--json", str(path)])
    finetune_optimized.main()
    record = run_records.read_record(str(path), "ladder")
    assert ladder.render(record) in capsys.readouterr().out
    names = ["baseline", *(rung.name for rung in ladder.RUNGS)]
    assert [rung["name"] for rung in record["rungs"]][: len(names)] == names
    assert set(record["rungs"][len(ladder.RUNGS)]["kernels"]) == set(names[1:])
    assert record["absent"] == ["not run here"]
    losses = [rung["losses"] for rung in record["rungs"][: len(names)]]
    assert len(losses[0]) == 3 and all(other == pytest.approx(losses[0], rel=1e-4) for other in losses)
    assert record["categories_ms"]["normalization"] > 0 and record["busy_ms"] > 0


def test_a_script_is_run_in_a_process_of_its_own_with_the_same_workload():
    args = arguments("--data", "synthetic", "--seed", "3", "--lr", "0.5")
    record = ladder.run_script("finetune_baseline.py", args)
    expected = {"model": "tiny", "dtype": "fp32", "data": "synthetic", "batch_size": 1, "seq_len": 8, "steps": 3}
    assert {key: record[key] for key in expected} == expected
    assert record["seed"] == 3 and record["lr"] == 0.5 and record["kind"] == "finetune"


def test_a_script_that_fails_is_one_sentence_with_its_own_message():
    args = arguments("--model", "/nowhere/at/all")
    with pytest.raises(command_line.RunError) as caught:
        ladder.run_script("finetune_optimized.py", args, "--kernels", "none")
    assert str(caught.value) == (
        "finetune_optimized.py --kernels none failed: error: the directory /nowhere/at/all does not exist"
    )


def test_a_script_that_dies_without_a_word_is_one_sentence_too(monkeypatch):
    died = argparse.Namespace(returncode=-9, stdout="", stderr="\n")
    monkeypatch.setattr(command_line, "run_child", lambda command: died)
    with pytest.raises(command_line.RunError, match=r"^profile_baseline\.py failed: exit code -9$"):
        ladder.run_script("profile_baseline.py", arguments(), steps=False)


def test_a_flag_reaches_only_the_scripts_that_know_it(monkeypatch):
    commands = []

    def run(command):
        commands.append(command)
        Path(command[-1]).write_text("{}")
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(command_line, "run_child", run)
    args = arguments("--random-init", "--lr", "0.25")
    ladder.run_script("profile_baseline.py", args, "--trace", "x", steps=False)
    ladder.run_script("finetune_baseline.py", args)
    profile, finetune = ([str(part) for part in command[2:-1]] for command in commands)
    assert "--random-init" in profile and "--random-init" in finetune
    assert "--steps" not in profile and "--lr" not in profile
    assert profile_baseline.parse_args([*profile, "FILE"]).trace == "x"
    assert finetune_parser("").parse_args([*finetune, "FILE"]).lr == 0.25


# ---------------------------------------------------------------- --longest


def test_the_longest_sequence_is_limited_by_the_models_positions(monkeypatch, tmp_path, run_script, small_model):
    monkeypatch.setattr(ladder, "LONGEST_STEP", 4)
    path = tmp_path / "longest.json"
    outcome = run_script(
        finetune_optimized, *TINY, "--seq-len", "6", "--longest", "--kernels", "rmsnorm,adamw", "--json", str(path)
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    record = run_records.read_record(str(path), "longest")
    assert record["lengths"] == [8, 12] and len(record["peaks"]) == 2  # from the next multiple of 4 on
    assert record["kernels"] == ["rmsnorm", "adamw"] and record["stopped_by"] == "the model's positions"
    assert "12 tokens (in steps of 4; stopped by the model's positions)" in outcome.out
    assert ladder.render_longest(record) in outcome.out


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def longest_until(error: Exception, fails_at: int, monkeypatch, run_script, *flags):
    monkeypatch.setattr(ladder, "LONGEST_STEP", 4)
    real = stepping.timed_step

    def timed_step(model, optimizer, batch):
        if batch.input_ids.shape[1] == fails_at:
            raise error
        return real(model, optimizer, batch)

    monkeypatch.setattr(stepping, "timed_step", timed_step)
    return run_script(finetune_optimized, *TINY, "--seq-len", "4", "--longest", "--kernels", "none", *flags)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["PyTorch", "Triton", "cuBLAS"])
def test_the_longest_sequence_is_limited_by_memory(error, monkeypatch, tmp_path, run_script, small_model):
    path = tmp_path / "longest.json"
    outcome = longest_until(error, 12, monkeypatch, run_script, "--json", str(path))
    assert outcome.code == 0 and "8 tokens (in steps of 4; stopped by the GPU's memory)" in outcome.out
    assert run_records.read_record(str(path), "longest")["lengths"] == [4, 8]


def test_not_even_the_shortest_sequence_fits(monkeypatch, run_script, small_model):
    outcome = longest_until(OUT_OF_MEMORY[0], 4, monkeypatch, run_script)
    assert outcome.code == 0 and "less than 4 tokens" in outcome.out


def test_another_failure_is_not_called_a_lack_of_memory(monkeypatch, run_script, small_model):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        longest_until(RuntimeError("shapes cannot be multiplied"), 8, monkeypatch, run_script)


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("flag", ["--cuda-graph", "--stochastic-rounding"])
@pytest.mark.parametrize("kernels", [[], ["--kernels", "none"], ["--kernels", "rmsnorm,swiglu"]], ids=str)
def test_flags_of_the_adamw_kernel_are_refused_without_it(run_script, flag, kernels):
    outcome = run_script(finetune_optimized, *SMALL, flag, *kernels)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: {flag} needs the adamw kernel: --kernels all\n"


def test_a_graph_without_a_gpu_is_refused(run_script, monkeypatch):
    monkeypatch.setattr(finetune_optimized, "HAS_GPU", False)
    outcome = run_script(finetune_optimized, *SMALL, "--cuda-graph", "--kernels", "all")
    assert (outcome.code, outcome.err) == (2, "error: --cuda-graph needs a CUDA GPU and none was found\n")


def test_an_opponent_that_is_not_installed_is_refused_before_the_model_is_loaded(run_script, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    monkeypatch.setattr(loading, "load_model", lambda args: pytest.fail("loaded"))
    outcome = run_script(finetune_optimized, *SMALL, "--opponent", "liger")
    assert (outcome.code, outcome.err) == (2, "error: Liger-Kernel is not installed: pip install liger-kernel\n")


def test_an_unknown_opponent_is_refused(run_script):
    outcome = run_script(finetune_optimized, *SMALL, "--opponent", "nobody")
    assert outcome.code == 2 and "nobody" in outcome.err and outcome.err.count("\n") == 1


def test_stochastic_rounding_reaches_the_optimizer_and_the_record(monkeypatch, tmp_path, run_script, small_model):
    made, path = [], tmp_path / "run.json"
    real = apply_kernels.triton_adamw

    def triton_adamw(*args, **options):
        made.append(real(*args, **options))
        return made[-1]

    monkeypatch.setattr(apply_kernels, "triton_adamw", triton_adamw)
    flags = ["--dtype", "bf16", "--kernels", "adamw", "--stochastic-rounding", "--json", str(path)]
    outcome = run_script(finetune_optimized, *SMALL, *flags)
    assert outcome.code == 0, outcome.err
    assert made[0].param_groups[0]["stochastic_rounding"]
    assert run_records.read_record(str(path), "finetune")["kernels"] == ["adamw", "stochastic_rounding"]


# ---------------------------------------------------------------- the captured step


def attention_masks(model, monkeypatch) -> list:
    """What attention is told about the mask in one forward: None where it is causal and nothing else."""
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    ids = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        model(input_ids=ids, labels=ids)
    return masks


def test_attention_is_causal_in_a_capture_too(monkeypatch, small_model):
    """Not by a mask, which transformers makes where it cannot look at the positions."""
    model = loading.load_model(arguments())
    assert attention_masks(model, monkeypatch) == [None]
    find = architecture.masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(architecture.masking_utils, "is_tracing", lambda tensor=None: True)  # as it finds in a capture
    assert attention_masks(model, monkeypatch) != [None], "transformers needs no help any more"
    with architecture.unpacked_sequences():
        assert attention_masks(model, monkeypatch) == [None]
    assert architecture.masking_utils.find_packed_sequence_indices is find


def losses_of_six_steps(run_script, path, *flags) -> list[float]:
    workload = ["--model", "tiny", "--batch-size", "2", "--seq-len", "64", "--steps", "6", "--kernels", "all"]
    outcome = run_script(finetune_optimized, *workload, *flags, "--json", str(path))
    assert outcome.code == 0, outcome.err
    return run_records.read_record(str(path), "finetune")["losses"]


@needs_gpu
@pytest.mark.parametrize("dtype", architecture.TORCH_DTYPES)
def test_captured_steps_are_the_same_steps(run_script, tmp_path, dtype):
    plain, captured = (
        losses_of_six_steps(run_script, tmp_path / "run.json", "--dtype", dtype, *flags)
        for flags in ([], ["--cuda-graph"])
    )
    assert plain[5] != plain[2], "this comparison cannot fail"
    assert captured == pytest.approx(plain, rel=1e-5 if dtype == "fp32" else 1e-3)


@needs_gpu
def test_batch_of_another_shape_is_refused_by_the_graph():
    model = apply_kernels.apply_kernels(loading.load_model(arguments("--dtype", "bf16")))
    optimizer, stream = apply_kernels.triton_adamw(model, 1e-3), torch.cuda.Stream()

    def batch(n_tokens):
        ids = torch.randint(architecture.BYTE_VOCABULARY, (1, n_tokens), device=DEVICE)
        return dataset.Batch(ids, ids, n_tokens)

    with torch.cuda.stream(stream):
        for _ in range(training_run.WARMUP_STEPS):
            stepping.training_step(model, optimizer, batch(16))
        step = stepping.captured_step(model, optimizer, batch(16), stream)
        before = model.lm_head.weight.clone()
        step(model, optimizer, batch(16))
        assert not torch.equal(model.lm_head.weight, before)
        with pytest.raises(
            command_line.UserError, match=r"the shape \(1, 8\), but the CUDA graph was recorded with \(1, 16"
        ):
            step(model, optimizer, batch(8))
