"""One process loads a checkpoint of two, each with half of every tensor, and the other way."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from harness.cli.device import DEVICE
from harness.training import resuming
from next_steps.finetuning import checkpoint
from tests.two_processes import in_two_processes, one_gpu_is_too_few


def training(
    steps: int = 0, optimizer_class: type = torch.optim.AdamW, device=DEVICE, world: int = 1
) -> tuple:
    """Return a model and its optimizer after some steps.

    Two processes shard the model's five rows into three and two.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))
    model.to(device)
    if world > 1:
        mesh = init_device_mesh(torch.device(device).type, (world,))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.arange(6.0, device=device).view(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_checkpoint(folder, model, optimizer, step: int) -> Path:
    """Write all that training changes as the checkpoint of a step; all processes call it."""
    share = checkpoint.share_of(checkpoint.tensors_of(model, optimizer))
    return checkpoint.write(str(folder), share, {"step": step}, keep=1)


def load_newest(folder: Path, **options) -> tuple:
    """Return a model and its optimizer that have taken no step and were filled from a folder."""
    model, optimizer = training(**options)
    checkpoint.load_checkpoint(model, optimizer, resuming.newest(folder), {})
    return model, optimizer


def whole(model, optimizer) -> dict[str, torch.Tensor]:
    """Return copies of all that training changes, put together; all processes call it."""
    tensors = checkpoint.tensors_of(model, optimizer)
    found = dict(tensors["model"])
    for name, state in tensors["optimizer"].items():
        found |= {f"{name}.{key}": t for key, t in state.items()}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).cpu().clone()
        for name, t in found.items()
    }


def equal(found: dict, expected: dict) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def save(rank, device, folder: Path) -> dict[str, torch.Tensor]:
    trained = training(2, device=device, world=2)
    save_checkpoint(folder, *trained, 2)
    return whole(*trained)


def load(rank, device, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = load_newest(folder, device=device, world=2)
    states = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(isinstance(t, DTensor) for t in (*model.parameters(), *states))
    return whole(model, optimizer)


@one_gpu_is_too_few
@pytest.mark.exhaustive
def test_what_two_processes_saved_one_loads_and_two_load_what_one_saved(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("two", "one", "a", "b", "c")]
    of_two, of_one, *stores = folders
    two, other = in_two_processes(save, stores[0], of_two)
    path = resuming.newest(of_two)
    assert path.name == "step-2" and json.loads((path / resuming.FACTS_FILE).read_text()) == {
        "step": 2
    }
    assert len(list(path.glob("*.distcp"))) == 2, "each wrote its part"
    assert not equal(two, whole(*training(1))), "this comparison cannot fail"
    for found in (other, *in_two_processes(load, stores[1], of_two), whole(*load_newest(of_two))):
        assert equal(found, two)

    one = training(3)
    save_checkpoint(of_one, *one, 3)
    for found in in_two_processes(load, stores[2], of_one):
        assert equal(found, whole(*one))
