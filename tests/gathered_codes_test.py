"""FSDP2 that gathers FP8 codes trains, to the bit, what it trains where each process rounds.

pytest tests/gathered_codes_test.py     # on several GPUs, or without any
"""

import os

import pytest
import torch
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM

from harness.cli.device import DEVICE
from harness.cli.workload import Workload
from harness.data.dataset import random_batch
from harness.steps import communication, parallel, stepping
from harness.steps.communication import ALL_GATHER
from next_steps.finetuning import checkpoint
from next_steps.layers import fp8_layer, gathered_codes
from next_steps.lessons.fp8_kernel import quantize_stacked, quantize_transposed
from next_steps.patches.apply_kernels import apply_kernels
from next_steps.patches.projections import fp8_layers
from next_steps.patches.recompute import set_recompute
from tests.communication_test import Watch
from tests.fp8_layer_test import REFERENCES
from tests.small_workloads import smaller_config
from tests.two_processes import by, in_two_processes

MICRO_BATCHES = 1, 2, 1  # of each step
CASES = {  # of each number of processes: does it gather codes, what is computed again
    2: [(False, None), (True, None), (True, "mlp"), (True, "layer")],
    3: [(False, None), (True, None)],
}


def sharded(device, gathers_codes: bool, recompute: str | None) -> torch.nn.Module:
    """A model with rows of two sizes: what is small beside the largest is rounded differently."""
    config = smaller_config()
    config.num_hidden_layers, config.vocab_size = 2, 288
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


def train(device, n: int, folder: str, *case) -> dict:
    """Take three steps; return what came out, and what the first should and did receive."""
    model = sharded(device, *case)
    gathers_codes = bool(model.model.layers[0].casts.gathered)
    assert gathers_codes == (case[0] and case[1] != "layer")
    assert model.between_micro_batches.finds_room() == (not gathers_codes)
    optimizer, losses = stepping.make_optimizer(model, 1e-2), []
    for step, micro_batches in enumerate(MICRO_BATCHES):
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        batches = [random_batch((2, 8), 288, device) for _ in range(micro_batches)]
        if step == 2:  # goes on in another model
            share = checkpoint.share_of(checkpoint.tensors_of(model, optimizer))
            path = checkpoint.write(f"{folder}/{case}", share, {"step": step}, keep=1)
            model = sharded(device, *case)
            optimizer = stepping.make_optimizer(model, 1e-2)
            checkpoint.load_checkpoint(model, optimizer, path, {})
            with torch.no_grad():
                losses.append(model(**batches[0].inputs()).loss)
        workload = Workload(model="tiny", parallel="fsdp", world_size=n)
        expected = communication.bytes_received(model, workload)[ALL_GATHER]
        with Watch() as watched:
            losses.append(stepping.training_step(model, optimizer, batches))
        if step == 0:
            received = expected, watched.whole[ALL_GATHER] * (n - 1) // n
    shards = [p.to_local().clone() for p in model.parameters()]
    return {"losses": losses, "shards": shards, "received": received}


def train_all(rank, device, n: int, folder: str) -> list[dict]:
    os.environ |= {"WORLD_SIZE": f"{n}", "RANK": f"{rank}"}
    for module in (fp8_layer, gathered_codes):
        vars(module).update(REFERENCES)
    return [train(device, n, folder, *case) for case in CASES[n]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [by(2), by(3)])
def test_gathered_codes_train_to_the_bit_what_gathered_weights_train(n, tmp_path):
    """3 divides no matrix's rows, so shards are padded, which the prediction leaves out."""
    for folder in (kept := tmp_path / "kept", processes := tmp_path / "processes"):
        folder.mkdir()
    for expected, *others in in_two_processes(train_all, processes, n, str(kept), n=n):
        for found in others:
            assert found["losses"] == expected["losses"] and len(expected["losses"]) == 4
            assert all(map(torch.equal, found["shards"], expected["shards"]))
        weights, codes, *_ = (found["received"] for found in (expected, *others))
        assert n == 3 or (codes[0] == codes[1] and weights[0] == weights[1])
        matrices = [p for p in expected["shards"] if p.ndim == 2][1:-1]  # no embedding, no head
        saved = sum(p.nbytes // 2 - 4 * len(p) for p in matrices)
        # this process receives as much as it holds, in the forward and in the backward
        assert n == 3 or weights[1] - codes[1] == 2 * saved


def test_codes_are_for_one_pass_and_the_weight_is_never_read(as_dtensor, monkeypatch):
    """The first row of the first weight has the largest scale."""
    sizes = [torch.arange(16.0, 16.0 - n, -1, device=DEVICE).exp2() / n**2 for n in (16, 48)]
    weights = [torch.randn(len(size), 32, device=DEVICE) * size[:, None] for size in sizes]
    codes = gathered_codes.GatheredCodes([as_dtensor(weight, Shard(0)) for weight in weights])

    def gather() -> list:
        return [codes.receive(i, *codes.send(i, None), torch.float32) for i in range(2)]

    parameters = [parameter for parameter, _ in gather()]
    with pytest.raises(RuntimeError, match="are turned: False, expected True"):
        codes.turned()
    rows = quantize_stacked(*weights)
    for found, expected in zip(codes.stacked(), rows):
        assert torch.equal(found.float(), expected.float())
    for parameter, weight in zip(parameters, weights):
        assert parameter.shape == weight.shape and parameter.dtype == weight.dtype
        with pytest.raises(RuntimeError, match="storage"):
            parameter.t()

    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0)  # in a backward
    gather()
    with pytest.raises(RuntimeError, match="are turned: True, expected False"):
        codes.stacked()
    expected = quantize_transposed(*weights, scale=rows.scales.amax())
    assert torch.equal(codes.turned().codes.float(), expected.codes.float())
    assert torch.equal(codes.turned().scales, expected.scales)
