"""Two processes with half of the weights each, by PyTorch's fully_shard, are one with all of them.

pytest tests/fully_shard_test.py     # on two GPUs, or without any
"""

import os

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from harness.benchmark.checking import relative_error
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import MODEL_KERNELS
from harness.steps import parallel
from harness.training import saving
from next_steps.patches import apply_kernels, llama_losses
from tests.apply_kernels_test import VOCABULARY, B, T, small_config
from tests.small_workloads import with_adapters
from tests.two_processes import in_two_processes, made_once, one_gpu_is_too_few, results_of_two

# What is a unit of its own beside the layers: gathered when it is called, and no earlier.
UNITS = {
    "norm and head": lambda model: [model.model.norm, model.lm_head],
    "head": lambda model: model.lm_head,
    "root": None,
}


def make_model(
    names: list[str], device: torch.device, tied: bool = False, adapters: bool = False
) -> LlamaForCausalLM:
    config = small_config(tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device, torch.float32)
    if adapters:
        model = with_adapters(model).requires_grad_(True)
    return apply_kernels.apply_kernels(model.train(), names)


def shard(model: LlamaForCausalLM, unit: str) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    if UNITS[unit]:
        fully_shard(UNITS[unit](model), reshard_after_forward=False)
    fully_shard(model)


def batch(rows: slice, device: torch.device) -> dict:
    """Rows of a batch of B, each with as many targets."""
    ids = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids[rows].to(device), "labels": labels[rows].to(device)}


def train(model: LlamaForCausalLM, inputs: dict, steps: int = 2) -> dict[str, torch.Tensor]:
    """The last step's loss and gradients, and whether there were logits; the weights are moved."""
    for _ in range(steps):
        model.zero_grad()
        output = model(**inputs)
        output.loss.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    has_logits = torch.tensor(output.logits is not None)
    return {"loss": output.loss.detach(), "logits": has_logits, **found}


def train_half(rank, device, names, unit, tied, adapters=False) -> dict[str, torch.Tensor]:
    model = make_model(names, device, tied, adapters)
    keys = list(model.state_dict())
    shard(model, unit)
    assert list(model.state_dict()) == keys
    found = train(model, batch(slice(rank * B // 2, (rank + 1) * B // 2), device))
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in found.items()
    }


CASES = [  # kernels, units, tied embeddings, and whether there are adapters
    (MODEL_KERNELS, "norm and head", False),
    (MODEL_KERNELS, "norm and head", False, True),
    (MODEL_KERNELS, "head", False),
    (MODEL_KERNELS, "root", False),
    (MODEL_KERNELS, "root", True),
    (["linear_cross_entropy"], "norm and head", False),
    (["cross_entropy"], "norm and head", False),
]


def train_all_halves(rank, device) -> list[dict[str, torch.Tensor]]:
    return [train_half(rank, device, *case) for case in CASES]


def halves_in(folder) -> None:
    in_two_processes(train_all_halves, folder)


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> list[tuple[dict, dict]]:
    """For each case, what both processes have found."""
    return list(zip(*results_of_two(made_once(halves_in, tmp_path_factory))))


@one_gpu_is_too_few
@pytest.mark.exhaustive
@pytest.mark.parametrize("index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_two_halves_of_the_weights_and_of_the_batch_are_the_whole(index, halves):
    names, _, *options = CASES[index]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    expected = train(make_model(names, device, *options), batch(slice(None), device))
    found, other = halves[index]
    assert not (expected.pop("logits") or found.pop("logits") or other.pop("logits")), (
        "the loss comes from another than one process's kernel"
    )
    losses = found.pop("loss"), other.pop("loss")
    assert losses[0] != losses[1], "both have had the same half of the batch"
    assert relative_error(sum(losses) / 2, expected.pop("loss").cpu()) < 1e-6
    for half in (found, other):
        assert half.keys() == expected.keys()
        errors = {name: relative_error(half[name], expected[name].cpu()) for name in expected}
        # with these adapters q's gradients are small differences, as one process's halves are too
        assert max(errors.values()) < (2e-5 if any(options[1:]) else 1e-6), errors


def train_with_the_weight_outside(rank, device) -> None:
    def loss(hidden_states, head, labels, max_targets=None, **kwargs):
        return llama_losses.Linear.forward(head, hidden_states, labels)

    apply_kernels.linear_cross_entropy_loss = loss
    train_half(rank, device, ["linear_cross_entropy"], "head", False)


@one_gpu_is_too_few
@pytest.mark.exhaustive
def test_weight_outside_of_a_forward_is_half_of_it_and_refused(tmp_path):
    raised = torch.multiprocessing.ProcessRaisedException
    with pytest.raises(raised, match="weight is a DTensor, expected a plain tensor"):
        in_two_processes(train_with_the_weight_outside, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("as_dtensor")  # with it a process group of this one process
def test_kernels_come_before_fully_shard():
    model = make_model([], torch.device("cpu"))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="fully_shard has spread the model over processes"):
        apply_kernels.apply_kernels(model)


def save_half(rank: int, device: torch.device, folder: str, tied: bool) -> dict[str, torch.Tensor]:
    """Save a model of which each process has half, and return what one process has of the whole."""
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
    model = make_model([], device, tied)
    whole = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    parallel.shard(model)
    saving.save_model(model, Workload(model="tiny"), folder)
    return whole


@one_gpu_is_too_few
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_is_saved_as_a_whole_one_is(tmp_path, tied):
    """A head that is the embedding is one tensor in the file, as `save_pretrained` has it."""
    (tmp_path / "processes").mkdir()
    whole, _ = in_two_processes(save_half, tmp_path / "processes", str(tmp_path / "saved"), tied)
    make_model([], torch.device("cpu"), tied).save_pretrained(tmp_path / "plain")
    saved, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "plain"))
    assert saved.keys() == plain.keys() == whole.keys() and len(whole) == 21 - tied
    assert all(torch.equal(saved[name], whole[name]) for name in whole)
