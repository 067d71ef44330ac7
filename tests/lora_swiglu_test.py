"""SwiGLU that adds its neighbours' adapters: when it is taken, and that products give the same.

What every function has to do is asked in tests/contracts_*_test.py, of lora_swiglu.
"""

from unittest import mock

import peft
import pytest
import torch

from harness.benchmark.checking import DEVICE, relative_error
from next_steps.layers import fused_layer, lora_swiglu
from next_steps.layers.fused_layer import norm_mlp
from next_steps.layers.lora_swiglu import LARGEST_RANK, lora_swiglu_backward, lora_swiglu_forward
from next_steps.lessons.swiglu_kernel import swiglu_backward, swiglu_forward
from rmsnorm_kernel import TritonRMSNorm

H, INNER, N = 24, 40, 21
PROJECTIONS = "gate_proj", "up_proj", "down_proj"


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(H, INNER, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(INNER, H, bias=False)

    def projections(self):
        return [getattr(self, name) for name in PROJECTIONS]


def adapted(dtype=torch.bfloat16, targets=PROJECTIONS, **options) -> MLP:
    torch.manual_seed(0)
    model = MLP().requires_grad_(False)
    options = {"r": 4, "lora_alpha": 6, "rank_pattern": {"up_proj": 5}} | options
    config = peft.LoraConfig(target_modules=list(targets), init_lora_weights=False, **options)
    return peft.inject_adapter_in_model(config, model).to(DEVICE, dtype)


def run(model: MLP, dtype=torch.bfloat16, **options) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether the kernels added the adapters; result and gradients by their names."""
    torch.manual_seed(1)
    norm = TritonRMSNorm(H, eps=1e-5).to(DEVICE, dtype)
    x = torch.randn(3, 7, H, device=DEVICE).to(dtype).requires_grad_()
    kernel = fused_layer.lora_swiglu_forward
    with mock.patch.object(fused_layer, "lora_swiglu_forward", wraps=kernel) as forward:
        residual, out = norm_mlp(x, norm, *model.projections(), **options)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    leaves = {"x": x, "norm": norm.weight} | parameters
    gradients = torch.autograd.grad((residual + out).square().sum(), list(leaves.values()))
    return forward.called, {"out": out.detach(), **dict(zip(leaves, gradients))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_has_the_numbers_of_products_that_add(monkeypatch, dtype):
    model = adapted(dtype)
    ours, found = run(model, dtype)
    assert ours
    monkeypatch.setattr(fused_layer, "LARGEST_RANK", 0)
    ours, expected = run(model, dtype)
    assert not ours and found.keys() == expected.keys()
    for key in expected:
        assert relative_error(found[key], expected[key]) < 1e-2, key


def test_the_same_bits_where_norm_and_product_are_kept():
    model = adapted()
    _, expected = run(model)
    ours, found = run(model, keep_norm=True, keep_product=True)
    assert ours
    assert all(torch.equal(found[key], expected[key]) for key in expected)


OTHERS = {
    "one projection has none": lambda: run(adapted(targets=PROJECTIONS[:2])),
    "fp32": lambda: run(adapted(torch.float32), torch.float32),
    "a rank too large": lambda: run(adapted(rank_pattern={"up_proj": LARGEST_RANK + 1})),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_elsewhere_the_products_add(call):
    ours, _ = call()
    assert not ours


def operands(n=N):
    torch.manual_seed(0)
    shapes = {
        "dy": (n, INNER), "gate": (n, INNER), "up": (n, INNER), "h": (n, 7),
        "b_gate": (INNER, 3), "b_up": (INNER, 4), "dh": (n, 2), "a": (2, INNER),
    }  # fmt: skip
    return {n: torch.randn(s, device=DEVICE, dtype=torch.bfloat16) for n, s in shapes.items()}


def backward(t: dict, **options):
    of_forward = t["gate"], t["up"], t["h"], (2.0, 0.5), t["b_gate"], t["b_up"]
    return lora_swiglu_backward(t["dy"], *of_forward, t["dh"], t["a"], **options)


def test_the_numbers_are_those_of_products_that_add(monkeypatch):
    monkeypatch.setattr(lora_swiglu, "STEPS", 2)  # one strip and a part of a second
    t = operands(n=43)
    h, scales = t["h"].split([3, 4], 1), (2.0, 0.5)
    gate = t["gate"].addmm(h[0], t["b_gate"].t(), alpha=scales[0])
    up = t["up"].addmm(h[1], t["b_up"].t(), alpha=scales[1])
    dy = t["dy"].addmm(t["dh"], t["a"])
    expected = swiglu_backward(dy, gate, up, need_y=True)
    for found, right in zip(backward(t), expected):
        assert relative_error(found, right) < 2e-2
    found = lora_swiglu_forward(t["gate"], t["up"], t["h"], scales, t["b_gate"], t["b_up"])
    assert relative_error(found, swiglu_forward(gate, up)) < 2e-2


def test_results_may_lie_over_dy_gate_and_up(monkeypatch):
    monkeypatch.setattr(lora_swiglu, "BLOCK_COLS", 16)  # several strips, of several tiles
    t = operands()
    expected = backward(t)
    found = backward(t, inplace=True)
    for name, one, other in zip(("dy", "gate", "up"), found, expected):
        assert torch.equal(one, other) and one.data_ptr() == t[name].data_ptr()
    assert t["gate"]._version == t["up"]._version == t["dy"]._version == 1


def test_the_backward_has_the_forwards_y():
    t = operands()
    y = lora_swiglu_forward(t["gate"], t["up"], t["h"], (2.0, 0.5), t["b_gate"], t["b_up"])
    assert torch.equal(backward(t)[2], y)


def test_y_is_written_only_if_it_is_needed():
    t = operands()
    expected = backward(t)
    for inplace in (False, True):
        found = backward({n: x.clone() for n, x in t.items()}, inplace=inplace, need_y=False)
        assert all(map(torch.equal, found[:2], expected)) and found[2] is None


BAD = {
    "h": (lambda t: t[:, 1:], ValueError, r"h has shape \(21, 6\), expected \(21, 7\)"),
    "b_up": (lambda t: t.float(), TypeError, "b_up is torch.float32, expected torch.bfloat16"),
    "dh": (lambda t: t[1:], ValueError, r"dh has shape \(20, 2\), expected \(21, 2\)"),
    "a": (lambda t: t.t(), ValueError, r"a has shape \(40, 2\), expected \(40, 40\)"),
    "dy": (lambda t: t[1:], ValueError, r"dy has shape \(20, 40\), expected \(21, 40\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name):
    t, (change, error, sentence) = operands(), BAD[name]
    with pytest.raises(error, match=sentence):
        backward(t | {name: change(t[name])})


def test_a_rank_too_large_is_refused():
    t = operands()
    rank = LARGEST_RANK + 1
    a, dh = t["a"].new_ones(rank, INNER), t["dh"].new_ones(N, rank)
    with pytest.raises(ValueError, match=rf"ranks are .*'R_DOWN': {rank}\}}, expected at most"):
        backward(t | {"a": a, "dh": dh})
