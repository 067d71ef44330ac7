"""FSDP2 that gathers FP8 codes trains, to the bit, what it trains where each process rounds.

pytest tests/gathered_codes_test.py     # on several GPUs, or without any
"""

import os

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from harness.cli.workload import Workload
from harness.data.dataset import random_batch
from harness.steps import communication, parallel, stepping
from harness.steps.communication import ALL_GATHER
from next_steps.finetuning import checkpoint
from next_steps.layers import fp8_layer, gathered_codes
from next_steps.patches.apply_kernels import apply_kernels
from next_steps.patches.projections import fp8_layers
from next_steps.patches.recompute import set_recompute
from tests.communication_test import Watch
from tests.fp8_layer_test import REFERENCES
from tests.small_workloads import smaller_config
from tests.two_processes import by, in_two_processes

MICRO_BATCHES = 1, 2, 2  # of each step


def sharded(device, gathers_codes: bool, recompute: str | None) -> torch.nn.Module:
    """A model whose rows differ in size, so that what is small beside the largest is rounded so."""
    for module in (fp8_layer, gathered_codes):
        vars(module).update(REFERENCES)
    config = smaller_config()
    config.num_hidden_layers, config.vocab_size = 2, 320
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device, torch.bfloat16)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight[1::2] /= 64
    model = set_recompute(fp8_layers(apply_kernels(model)), recompute)
    for layer in model.model.layers if not gathers_codes else ():
        layer.when_sharded = lambda: None
    parallel.shard(model)
    return model


def train(rank, device, n: int, gathers_codes: bool, recompute: str | None, folder=None) -> dict:
    """Train and evaluate; return what came out, and what a step should and did receive."""
    os.environ |= {"WORLD_SIZE": f"{n}", "RANK": f"{rank}"}
    model = sharded(device, gathers_codes, recompute)
    optimizer = stepping.make_optimizer(model, 1e-2)
    losses, received = [], []
    for step, micro_batches in enumerate(MICRO_BATCHES):
        if folder and step == 2:  # goes on in another model
            share = checkpoint.share_of(checkpoint.tensors_of(model, optimizer))
            path = checkpoint.write(folder, share, {"step": step}, keep=1)
            model = sharded(device, gathers_codes, recompute)
            optimizer = stepping.make_optimizer(model, 1e-2)
            checkpoint.load_checkpoint(model, optimizer, path, {})
        torch.manual_seed(10 * step + rank)
        batches = [random_batch((2, 8), 320, device) for _ in range(micro_batches)]
        with torch.no_grad():
            losses.append(model(**batches[0].inputs()).loss)
        workload = Workload(model="tiny", parallel="fsdp", world_size=n, accumulate=micro_batches)
        expected = communication.bytes_received(model, workload)[ALL_GATHER]
        with Watch() as watched:
            losses.append(stepping.training_step(model, optimizer, batches))
        received.append((expected, watched.whole[ALL_GATHER] * (n - 1) // n))
    whole = parallel.whole_weights(model)
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return {"losses": losses, "received": received, "whole": whole, "shards": shards}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("n", "recompute"), [by(2, None), by(2, "mlp"), by(2, "layer"), by(3, None)]
)
def test_gathered_codes_train_to_the_bit_what_gathered_weights_train(n, recompute, tmp_path):
    """Rows are no multiples of 3."""
    folders = [tmp_path / name for name in ("codes", "weights", "kept")]
    for folder in folders:
        folder.mkdir()
    kept = str(folders[2])
    found = in_two_processes(train, folders[0], n, True, recompute, kept, n=n)
    expected = in_two_processes(train, folders[1], n, False, recompute, n=n)
    for one, other in zip(found, expected):
        assert one["losses"] == other["losses"]
        assert all(map(torch.equal, one["shards"], other["shards"]))
    print([[r["received"] for r in x] for x in (found, expected)])
