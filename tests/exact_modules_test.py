"""Who computes in a module's place is told whether the module is exactly what it was written as."""

import peft
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from harness.cli.device import DEVICE
from harness.model.exact_modules import class_of, is_as_written, is_matrix, is_unchanged
from next_steps.layers.llama_mlp import TritonLlamaMLP

REGISTER = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


class Doubled(torch.nn.Linear):
    """Somebody's subclass."""

    def forward(self, x):
        return 2 * super().forward(x)


class Quantized(torch.Tensor):
    """A weight whose product may be another."""


def linear(cls=torch.nn.Linear, bias=False) -> torch.nn.Linear:
    return cls(8, 8, bias=bias, device=DEVICE)


def test_a_linear_layer_without_a_bias_is_a_matrix():
    assert is_matrix(linear()) and is_unchanged(linear(bias=True))
    assert not is_matrix(linear(bias=True)) and not is_matrix(linear(Doubled))
    assert not is_matrix(torch.nn.Identity())
    quantized = linear()
    quantized.weight = torch.nn.Parameter(quantized.weight.detach().as_subclass(Quantized))
    assert not is_matrix(quantized)


@pytest.mark.parametrize("register", REGISTER)
def test_a_hook_of_somebody_changes_a_module(register):
    module = linear()
    handle = getattr(module, register)(lambda *_: None)
    assert not is_unchanged(module) and not is_matrix(module)
    handle.remove()
    assert is_matrix(module)


def test_a_forward_of_its_own_changes_a_module():
    module = linear()
    module.forward = module.forward
    assert not is_unchanged(module)


@pytest.mark.parametrize("cls", [torch.nn.Linear, peft.tuners.lora.Linear, TritonLlamaMLP])
def test_a_forward_that_another_package_put_into_a_class_changes_it(cls, monkeypatch):
    assert is_as_written(cls)
    monkeypatch.setattr(cls, "forward", lambda self, x: x)
    assert not is_as_written(cls)


def recorder(module, args, output):
    """A hook that transformers leaves behind."""


def test_what_transformers_leaves_behind_changes_nothing(monkeypatch):
    monkeypatch.setattr(recorder, "__module__", "transformers.utils.output_capturing")
    module = linear()
    module.register_forward_hook(recorder)
    assert is_matrix(module)
    # LlamaMLP's own list of hooks took those of transformers and fully_shard for somebody's
    assert is_fused(TritonLlamaMLP(linear(), module, linear())(torch.randn(3, 8, device=DEVICE)))


@pytest.fixture
def mlp(as_dtensor):  # with it a process group of this one process
    return TritonLlamaMLP(*(linear() for _ in range(3))).train()


def is_fused(out: torch.Tensor) -> bool:
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [after for after, _ in node.next_functions if after is not None]
    return "SwiGLUMLPFunctionBackward" in names


def test_a_unit_of_fully_shard_is_unchanged_and_its_weight_is_no_matrix(mlp):
    """Whoever takes the weight without a call finds a share of it."""
    fully_shard(mlp.up_proj)
    assert class_of(mlp.up_proj) is torch.nn.Linear and is_unchanged(mlp.up_proj)
    assert not is_matrix(mlp.up_proj) and is_matrix(mlp.gate_proj)


@pytest.mark.parametrize("unit", ["mlp", "projection"])
def test_llama_mlp_under_fully_shard(mlp, unit):
    """The Function where the MLP is the unit; the projections' calls where one of them is."""
    x = torch.randn(3, 8, device=DEVICE)
    expected = mlp(x)
    assert is_fused(expected)
    fully_shard(mlp if unit == "mlp" else mlp.up_proj)
    found = mlp(x)
    assert is_fused(found) == (unit == "mlp")
    torch.testing.assert_close(found, expected)
