"""The next step's batches are fetched while a step runs; the device's waiting is counted."""

import time
from dataclasses import replace

import pytest
import torch

from harness.cli.device import DEVICE
from harness.data import dataset, loader
from harness.model import architecture, loading
from harness.records import spread
from harness.training import run_text, training_run
from next_steps.finetuning import kernel_training
from tests.fixtures import needs_gpu
from tests.small_workloads import tiny_workload


def data(*flags: str, steps: int = 3):
    workload = tiny_workload("--steps", str(steps), *flags)
    return dataset.load_data(workload, architecture.tiny_config(), steps)


def test_a_loader_hands_out_every_batch_once_and_in_order():
    batches = data("--accumulate", "2", "--batch-size", "2").train
    ahead, found = loader.Loader(batches, per_step=2), []
    while step := ahead.take():
        assert len(step) == 2
        found += step
        ahead.fetch()
    assert len(found) == len(batches) == 6
    for ours, theirs in zip(found, batches):
        assert ours.input_ids.device.type == DEVICE
        assert torch.equal(ours.input_ids.cpu(), theirs.input_ids)
        assert torch.equal(ours.labels.cpu(), theirs.labels)


class SlowBatches(dataset.Batches):
    SECONDS = 0.05

    def __getitem__(self, i):
        time.sleep(self.SECONDS)
        return super().__getitem__(i)


@pytest.mark.parametrize("slow", [False, True])
def test_waiting_for_slow_data_is_in_the_steps_time_and_said(slow):
    workload = tiny_workload("--steps", "6")
    model = loading.load_model(workload)
    run = training_run.Run("Slow", workload, model)
    if slow:
        run.data = replace(run.data, train=SlowBatches(**vars(run.data.train)))
    record = kernel_training.take_all_steps(run, torch.optim.SGD(model.parameters(), lr=1e-30))
    assert len(record["data_seconds"]) == 6 and record["data_seconds"][-1] < SlowBatches.SECONDS
    for waited, seconds in zip(record["data_seconds"], record["seconds"]):
        assert 0 <= waited < seconds
    rows = run_text.times_of(record)
    line = f"Waiting for data: {rows['Waiting for data:']}"
    assert float(line.split()[5]) == pytest.approx(100 * spread.waited(record), abs=0.01)
    # one at least was built in no time, whatever else the machine did
    assert (min(record["data_seconds"][:-1]) >= SlowBatches.SECONDS) == slow


def test_a_batch_says_how_it_travels():
    batch = dataset.random_batch((1, 4), 10, "cpu")
    packed = replace(batch, position_ids=batch.labels, cu_seq_lens=torch.tensor([0, 4]))
    moved = packed.with_tensors(lambda tensor: tensor + 1)
    for name in ("input_ids", "labels", "position_ids", "cu_seq_lens"):
        assert torch.equal(getattr(moved, name), getattr(packed, name) + 1)
    assert moved.n_tokens == 4 and moved.position_ids is not None
    assert batch.with_tensors(lambda tensor: tensor).position_ids is None


@needs_gpu
def test_the_copy_does_not_wait_for_the_step():
    ahead = loader.Loader(data().train, per_step=1)
    torch.cuda.synchronize()
    (batch,) = ahead.take()
    torch.cuda._sleep(200_000_000)  # cycles of the stream that computes: a tenth of a second
    done = torch.cuda.Event()
    done.record()
    waited = ahead.fetch()
    ahead.stream.synchronize()
    assert not done.query(), "the copy is behind the step"
    assert waited == 0 and ahead.next[0].input_ids.is_cuda
    torch.cuda.synchronize()
    assert batch is ahead.taken[0]
