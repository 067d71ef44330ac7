"""Several processes train what one trains with all their sequences; and how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.cli import processes
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.data import dataset, loader
from harness.model.architecture import tiny_config
from harness.steps import parallel
from harness.training import checkpoint_files
from tests.small_workloads import TINY, jsonl, tiny_workload
from tests.two_processes import by, made_once, one_gpu_is_too_few
from tests.warm_processes import HERE, torchrun

STANDALONE = ["--standalone", "--nproc-per-node", "2"]
ROUNDING = 2**-24  # of a number in fp32
SECONDS = 60  # in which those end that wait for one that is gone
pytestmark = one_gpu_is_too_few
WAYS = [f"{kernels}-{accumulate}" for kernels in ("baseline", "kernels") for accumulate in (1, 3)]
MORE = ["baseline-1-norm", "baseline-1-mlp", "baseline-1-layer", "kernels-1-layer"]
# a case is named WAY-KERNELS-MICRO_BATCHES-RECOMPUTE
BY_WAY = {"ddp": WAYS, "fsdp": WAYS + MORE, "fsdp_kept": [WAYS[1], WAYS[2], MORE[3]]}
AUTO_AND_FSDP = [("auto", "ddp"), ("fsdp", "fsdp")]  # the tiny model fits
EQUAL = [f"{way}-{case}" for way, cases in BY_WAY.items() for case in cases]


def started(*command: str) -> subprocess.Popen:
    """A script in two processes that torchrun starts, as a user calls it."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *STANDALONE, *command],
        cwd=HERE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_of(n: int, *command: str) -> str:
    """What it printed; it ended well."""
    outcome = torchrun(n, *command)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return outcome.stdout


def trained(folder: Path, n: int, batch_size: int, cases: list[str]) -> None:
    command = ["-m", "tests.several_processes", "train", str(folder), str(batch_size), *cases]
    run_of(n, *command)


def way_of(case: str) -> str:
    return case.partition("-")[0].replace("_", "-")


def write_data(folder: Path) -> None:
    """Samples that differ in how many of their tokens are trained on."""
    jsonl(folder / "data.jsonl", *(("ab", "answer"[: 1 + i % 6]) for i in range(100)))


def train_by_each(folder: Path, sequences: int, cases: dict[int, list[str]]) -> None:
    """Train the cases of each number of processes, which share so many sequences; side by side."""
    write_data(folder)

    def train(n: int) -> None:
        (folder / str(n)).mkdir()
        trained(folder / str(n), n, sequences // n, cases[n])

    with ThreadPoolExecutor() as pool:
        list(pool.map(train, cases))


def train_by_one_and_two(folder: Path) -> None:
    """By one process, with two sequences a micro-batch, and by two with one each."""
    by_one = [f"one-{way}" for way in ("exact-1", "exact-3", *WAYS, *MORE)]
    train_by_each(folder, 2, {1: by_one, 2: EQUAL})


@pytest.fixture(scope="module")
def by_one_and_two(tmp_path_factory) -> Path:
    return made_once(train_by_one_and_two, tmp_path_factory)


def hold_equally_exact(one: Path, other: Path, exact: Path) -> None:
    """Parameters are on average at most twice as far from float64's as those of one process.

    Not each of them: AdamW divides by gradients that are nearly nothing, where sums in another
    order are anything.
    """
    one, other, exact = (load_file(model / "model.safetensors") for model in (one, other, exact))
    assert one.keys() == other.keys() == exact.keys()
    of_one, error = (
        torch.cat([(run[name] - exact[name]).abs().flatten() for name in exact]).mean().item()
        for run in (one, other)
    )
    assert 0 < error <= 2 * of_one, f"off by {error:.1e} on average, one process by {of_one:.1e}"


def losses_of(record: dict) -> torch.Tensor:
    keys = "validation_loss_before", "validation_loss_after"
    return torch.tensor([*record["losses"], *(record[key] for key in keys)], dtype=torch.float64)


def hold_equal(one: Path, several: Path, case: str) -> dict:
    """Losses and parameters are as exact as one process's; returns the record of several.

    A loss may be twice as far from float64's as one process's least exact one, and one rounding of
    fp32 for each part that is added to it: every process has one of each micro-batch.
    """
    runs = one / f"one-{case.partition('-')[2]}", several / case
    exact = one / f"one-exact-{case.split('-')[2]}"
    paths = (run.with_suffix(".json") for run in (*runs, exact))
    first, other, right = (json.loads(path.read_text()) for path in paths)
    of_one, off = ((losses_of(each) / losses_of(right) - 1).abs() for each in (first, other))
    parts = other["world_size"] * other.get("accumulate", 1)
    assert off.max() <= 2 * of_one.max() + ROUNDING * parts, (of_one, off)
    assert first["losses"][-1] != pytest.approx(first["losses"][0], rel=1e-3)
    assert other["tokens"] == first["tokens"]
    hold_equally_exact(*runs, exact)
    config = json.loads((several / case / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    return other


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EQUAL)
def test_two_processes_with_half_the_batch_equal_one_with_the_whole(by_one_and_two, case):
    by_one, by_two = by_one_and_two / "1", by_one_and_two / "2"
    record = hold_equal(by_one, by_two, case)
    assert (record["world_size"], record["parallel"]) == (2, way_of(case))
    assert record["tokens_per_second_per_gpu"] == record["tokens_per_second"] / 2
    one = json.loads((by_one / f"one-{case.partition('-')[2]}.json").read_text())
    assert not Workload.from_record(one).differences(Workload.from_record(record))


def train_in_fp8_by_one_and_two(folder: Path) -> None:
    """Sixteen tokens in each process: fewer have weights' gradients in no FP8."""
    train_by_each(folder, 4, {1: ["one-fp8-1"], 2: [f"{way}-fp8-1" for way in BY_WAY]})


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory) -> Path:
    return made_once(train_in_fp8_by_one_and_two, tmp_path_factory)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", BY_WAY)
def test_two_processes_in_fp8_train_what_one_trains(in_fp8, way):
    """Not to the bit: each moves its tokens' gradients to the largest scale of its own.

    The losses lie apart by far less than they fall, and in fp32 than they differ from bf16's.  In
    bf16, which a GPU's FP8 stands for, an update is rounded to 8 bits: without a GPU up to 2e-4
    were seen, of three seeds, and 2e-3 or more after the last step without any exchange.
    """
    allowed = 1e-3 if HAS_GPU else 2e-4
    one, two = (
        json.loads((in_fp8 / f"{n}" / f"{name}-fp8-1.json").read_text())
        for n, name in ((1, "one"), (2, way))
    )
    assert two["fp8_layers"] == one["fp8_layers"] == [2, 2]
    for key in ("losses", "validation_loss_after"):
        assert two[key] == pytest.approx(one[key], rel=allowed), key
    assert one["losses"][-1] != pytest.approx(one["losses"][0], rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n", "how"), [by(3, "baseline-3"), by(4, "kernels-1"), by(8, "baseline-1"), by(8, "kernels-1")]
)
def test_more_processes_equal_one_with_the_whole_batch(tmp_path, n, how):
    """Neither weights' rows nor batches for validation are multiples of 3; 8 have few rows each."""
    write_data(tmp_path)
    folder = tmp_path / "runs"
    folder.mkdir()
    cases = [f"{way}-{how}" for way in BY_WAY if n < 8 or way in ("ddp", "fsdp")]
    trained(folder, 1, n, [f"one-exact-{how[-1]}", f"one-{how}"])
    trained(folder, n, 1, cases)
    for case in cases:
        assert hold_equal(folder, folder, case)["world_size"] == n


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "said"), [("raise", "error: planted"), ("fault", "ValueError: planted"), ("die", "")]
)
def test_when_one_process_fails_all_end(how, said):
    start, command = time.perf_counter(), ["-m", "tests.several_processes", how]
    if how == "die":
        with started(*command) as several:
            out, err = several.communicate(timeout=3 * SECONDS)
        code = several.returncode
    else:
        outcome = torchrun(2, *command, timeout=3 * SECONDS)
        code, out, err = outcome.returncode, outcome.stdout, outcome.stderr
    assert code != 0 and said in err
    assert time.perf_counter() - start < 2 * SECONDS
    ours = err.partition("torch/distributed/elastic")[0]
    assert how == "fault" or "Traceback" not in ours.replace("Traceback : ", ""), ours
    assert "step 1/4" in out and "step 2/4" not in out


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "taken"), AUTO_AND_FSDP)
def test_a_profile_is_the_first_processs(way, taken, tmp_path):
    record, trace = tmp_path / "a.json", tmp_path / "trace.json"
    flags = [*TINY, "--parallel", way, "--json", str(record), "--trace", str(trace)]
    printed = run_of(2, "profile_baseline.py", *flags)
    assert printed.count("Chrome trace: ") == 1 and trace.exists()
    said = json.loads(record.read_text())
    assert (said["world_size"], said["parallel"]) == (2, taken)
    assert f"1 x 16 tokens in each of 2 processes ({taken})" in printed
    assert printed.count("--parallel auto takes ddp: ") == (way == "auto")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("way", "taken"), AUTO_AND_FSDP)
def test_an_opponent_trains_in_two_processes(way, taken, tmp_path):
    flags = [*TINY, "--steps", "3", "--opponent", "fused-adamw", "--parallel", way]
    run_of(2, "-m", "next_steps.finetuning.opponents", *flags, "--json", f"{tmp_path}/a.json")
    said = json.loads((tmp_path / "a.json").read_text())
    assert (said["opponent"], said["parallel"]) == ("fused-adamw", taken)


# ---------------------------------------------------------------- a run that goes on


THREE = [*TINY, "--seq-len", "8", "--steps", "3", "--batch-size"]
ROUNDED = ["--dtype", "bf16", "--kernels", "adamw", "--stochastic-rounding"]


def what_came_out(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the weights of a run."""
    losses = json.loads((folder / "run.json").read_text())["losses"]
    return losses, load_file(folder / "model" / "model.safetensors")


def outputs(folder: Path) -> list[str]:
    return ["--json", str(folder / "run.json"), "--save", str(folder / "model")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n", "way"), [by(2, "fsdp-kept"), by(2, "ddp"), by(4, "ddp"), by(8, "fsdp")]
)
def test_processes_go_on_to_the_bit(n, way, tmp_path):
    """bf16, rounded at random by the kernel that steps the shards."""
    flags = [*THREE, "1", *ROUNDED, "--parallel", way]
    kept = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "2"]
    script = "-m", "tests.several_processes", "small", "finetune_optimized.py"
    run_of(n, *script, *flags, *kept, *outputs(tmp_path / "straight"))
    resumed = [*flags, "--resume", str(tmp_path / "kept"), *outputs(tmp_path / "resumed")]
    said = " ".join(run_of(n, *script, *resumed).split())  # long lines are broken
    assert "steps 3 to 3" in said and "In another way" not in said
    losses, weights = what_came_out(tmp_path / "straight")
    others, resumed = what_came_out(tmp_path / "resumed")
    assert losses == others and len(losses) == 3
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("most", "before", "after"), [by(2, 1, 2), by(2, 2, 1), by(4, 4, 2), by(8, 4, 8)]
)
def test_a_checkpoint_goes_on_with_another_number_of_processes(most, before, after, tmp_path):
    kept = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "2"]
    size = {n: str(most // n) for n in (before, after)}  # the same sequences in a step
    script = "-m", "tests.several_processes", "small", "finetune_baseline.py"
    first = [*THREE, size[before], *kept, *outputs(tmp_path / "first")]
    run_of(before, *script, *first)
    then = ["--resume", str(tmp_path / "kept"), *outputs(tmp_path / "then")]
    said = " ".join(run_of(after, *script, *THREE, size[after], *then).split())
    exact = *script[:2], "exact", script[3]
    run_of(1, *exact, *THREE, str(most), *outputs(tmp_path / "exact"))
    assert "steps 3 to 3" in said and f"world_size {None if after == 1 else after} (not" in said
    runs = [tmp_path / name for name in ("first", "then", "exact")]
    losses, others = (what_came_out(run)[0] for run in runs[:2])
    assert others == pytest.approx(losses, rel=1e-6)
    hold_equally_exact(*(run / "model" for run in runs))


@pytest.mark.exhaustive
def test_a_signal_to_torchrun_ends_all_after_the_same_step(tmp_path):
    kept = ["--checkpoint", str(tmp_path / "kept")]
    flags = [*TINY, "--seq-len", "8", "--steps", "5000", *kept]
    with started("finetune_baseline.py", *flags) as several:
        for line in several.stdout:
            if line.startswith("step    3/"):
                break
        else:
            pytest.fail(several.stderr.read()[-3000:])
        several.send_signal(signal.SIGTERM)
        said = " ".join(several.stdout.read().split())  # long lines are broken
        assert several.wait(SECONDS) != 0
    (path,) = (tmp_path / "kept").glob("step-*")
    assert f"Checkpoint written to {path}" in said and path.name.startswith("step-")
    steps = json.loads((path / "run.json").read_text())["step"]
    assert f"Ended after step {steps}: --resume {tmp_path / 'kept'}" in said


@pytest.mark.exhaustive
def test_all_processes_learn_that_another_run_writes_there(tmp_path):
    """The first one asks for the folder; none waits for it, or loads a model."""
    folder = str(tmp_path / "kept")
    with checkpoint_files.locked(folder):
        outcome = torchrun(2, "finetune_baseline.py", *THREE, "1", "--checkpoint", folder)
    assert outcome.returncode != 0
    assert outcome.stdout.startswith("--parallel auto") and outcome.stdout.count("\n") == 1
    said = f"error: another run writes its checkpoints to --checkpoint {folder}, expected none"
    assert outcome.stderr.count(said) == 2


# ---------------------------------------------------------------- in this process


@pytest.fixture
def as_rank(monkeypatch):
    """as_rank(r, n): what torchrun tells process r of n."""

    def tell(rank: int, n: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(n))

    return tell


def test_processes_share_the_batches_of_one_that_takes_larger_ones(as_rank):
    flags = ["--accumulate", "2", "--steps", "3"]
    whole = dataset.load_data(tiny_workload(*flags, "--batch-size", "6"), tiny_config(), 3)
    of_each = []
    for rank in range(3):
        as_rank(rank, 3)
        workload = tiny_workload(*flags, "--batch-size", "2")
        data = dataset.load_data(workload, tiny_config(), 3)
        of_each.append([batch for step in loader.Loader(data.train, 2) for batch in step])
        n_validated = sum(len(batch.input_ids) for batch in data.validation)
        assert n_validated == sum(len(batch.input_ids) for batch in whole.validation)
    assert len(of_each[0]) == len(whole.train) == 6
    for large, *small in zip(whole.train, *of_each):
        parts = torch.cat([batch.input_ids for batch in small]).cpu()
        assert torch.equal(parts, large.input_ids)


def test_without_torchrun_there_is_one_process():
    assert (processes.world_size(), processes.rank(), processes.is_first()) == (1, 0, True)
    assert tiny_workload().parallel is None and tiny_workload().is_on_the_page
    assert parallel.gather(1.5, 2) == [(1.5, 2)]


def test_several_processes_take_what_fits_unless_told(as_rank):
    as_rank(1, 2)
    workload = tiny_workload()
    assert (workload.parallel, workload.world_size) == ("auto", 2)
    assert not workload.is_on_the_page and not processes.is_first()
    assert tiny_workload("--parallel", "ddp").parallel == "ddp"


def test_runs_of_the_same_sequences_are_compared_however_they_are_spread(as_rank):
    one = tiny_workload("--batch-size", "4")
    as_rank(0, 2)
    half, whole = (tiny_workload("--batch-size", size) for size in ("2", "4"))
    assert Workload.from_record(half.as_record()) == half and "--world-size" not in half.as_flags()
    assert tiny_workload(*half.as_flags()) == half
    assert not one.differences(half) and not half.differences(one)
    assert one.differences(whole) == ["batch_size 8 (not 4)"]
