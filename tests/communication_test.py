"""The predicted bytes of a step are those that two processes hand to torch.distributed.

pytest tests/communication_test.py     # on two GPUs, or without any
"""

import collections
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from harness.cli.workload import Workload
from harness.data.dataset import random_batch
from harness.model import architecture
from harness.profiling.profile_tables import communication_lines
from harness.steps import communication, parallel, stepping
from harness.steps.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tests.two_processes import in_two_processes, one_gpu_is_too_few

CASES = [("fsdp", 1), ("fsdp", 3), ("fsdp-kept", 3), ("ddp", 1), ("ddp", 3)]  # micro-batches
# what is whole after an all-gather, or was before a reduce-scatter, is the larger argument
WATCHED = {"c10d::_allgather_base_": ALL_GATHER, "c10d::_reduce_scatter_base_": REDUCE_SCATTER}


class Watch(TorchDispatchMode):
    """Adds up the bytes of what is whole, by operation; DDP's reductions tell its hook."""

    def __init__(self):
        super().__init__()
        self.whole = collections.Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if name := WATCHED.get(operation._schema.name):
            self.whole[name] += max(t.numel() * t.element_size() for t in args[:2])
        return operation(*args, **(kwargs or {}))

    def hook(self, state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.whole[ALL_REDUCE] += 2 * bucket.buffer().numel() * bucket.buffer().element_size()
        return allreduce_hook(state, bucket)


def watch(rank: int, device: torch.device) -> list[tuple[dict, dict]]:
    """For each case what is expected, and the bytes that a step received."""
    os.environ["WORLD_SIZE"] = "2"
    return [watch_a_step(device, *case) for case in CASES]


def watch_a_step(device: torch.device, way: str, micro_batches: int) -> tuple[dict, dict]:
    config = architecture.tiny_config()
    config.num_hidden_layers, config.vocab_size = 3, 320  # an odd row would be padded
    model = AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16)
    workload = Workload(model="tiny", parallel=way, world_size=2, accumulate=micro_batches)
    called, watched = parallel.wrap(model, workload), Watch()
    if way == "ddp":
        called.register_comm_hook(None, watched.hook)
    optimizer = stepping.make_optimizer(model, 1e-3)
    batches = [random_batch((1, 8), config.vocab_size, device) for _ in range(micro_batches)]
    expected = communication.expected(model, workload)
    stepping.training_step(called, optimizer, batches)  # the first one is DDP's to plan
    watched.whole.clear()
    with watched:
        stepping.training_step(called, optimizer, batches)
    return expected, {name: n_bytes // 2 for name, n_bytes in watched.whole.items()}


@one_gpu_is_too_few
@pytest.mark.exhaustive
def test_a_step_receives_the_bytes_that_are_predicted(tmp_path):
    found = in_two_processes(watch, tmp_path)
    assert [[expected["bytes"] for expected, _ in process] for process in found] == [
        [seen for _, seen in process] for process in found
    ]
    for expected, _ in found[0]:
        times = [n_bytes / expected["gbs"][name] for name, n_bytes in expected["bytes"].items()]
        assert expected["ms"] == pytest.approx(sum(times) / 1e6) and expected["ms"] > 0


def test_the_prediction_is_printed_beside_what_was_measured():
    sizes = {ALL_GATHER: 30e9, REDUCE_SCATTER: 16e9}
    rates = {ALL_GATHER: 300.0, REDUCE_SCATTER: 160.0}
    record = {
        "communication": {"bytes": sizes, "gbs": rates, "ms": 200.0},
        "timeline": {"communication_us": 210e3, "exposed_us": 30e3},
        "median_step_ms": 600.0,
    }
    predicted, measured = communication_lines(record)
    assert predicted == (
        "Communication, predicted: 200.0 ms, 30.0 GB by all-gather at 300.0 GB/s, "
        "16.0 GB by reduce-scatter at 160.0 GB/s"
    )
    assert measured == (
        "Communication: 210.0 ms, of which other kernels hide 180.0; exposed: 30.0, 5.0 % of a step"
    )
    assert communication_lines({"timeline": None}) == []
