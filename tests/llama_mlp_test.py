"""LLaMA's MLP on SwiGLU's kernels: one Function where its layers are plain, the layers where not.

What every function has to do is asked in tests/contracts_*_test.py, there under the name of
swiglu_mlp.
"""

import itertools
from unittest import mock

import pytest
import torch

from harness.benchmark.checking import DEVICE, HAS_GPU, Check, assert_all_passed, compare
from next_steps.layers.llama_mlp import SwiGLUMLPFunction, TritonLlamaMLP
from subjects.fused_layer import make_mlp
from tests.calls import Calls
from tests.fixtures import COMPILED_DTYPE, pads_rows, poisoned_outputs
from tests.small_workloads import with_adapters

SMALL = (9, 40, 112)  # N, H, I
PROJECTIONS = "gate_proj", "up_proj", "down_proj"
pytestmark = pytest.mark.usefixtures("small_tiles")
DTYPES = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}


def make_mlp_inputs(dtype=torch.float32, n_rows=SMALL[0]):
    """x (N, H), w_gate and w_up (I, H), w_down (H, I), dout (N, H)."""
    inputs, douts = make_mlp((n_rows,), SMALL[1:], dtype)
    return *inputs.values(), *douts.values()


# ---- The MLP -------------------------------------------------------------------------------------


def llama_mlp(dtype=torch.float32, hidden_act="silu"):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    _, H, I = SMALL
    sizes = {"hidden_size": H, "intermediate_size": I, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, hidden_act=hidden_act)
    torch.manual_seed(0)
    return LlamaMLP(config).to(DEVICE, dtype)


def grads_of(module, x, dout, run_module=None):
    """out, dx and the parameters' gradients, by name."""
    x = x.detach().requires_grad_()
    out = (module if run_module is None else run_module)(x)
    names, parameters = zip(*module.named_parameters())
    grads = torch.autograd.grad(out, (x, *parameters), dout)
    return {"out": out.detach(), **dict(zip(("x", *names), grads))}


def compare_modules(theirs, ours, x, dout, run_ours=None) -> list[Check]:
    """A check for the output and each gradient of `ours`, which shares `theirs`' parameters."""
    eager, found = grads_of(theirs, x, dout), grads_of(ours, x, dout, run_ours)
    assert found.keys() == eager.keys()
    dtype = x.dtype
    ref64 = grads_of(theirs.double(), x.double(), dout.double())
    theirs.to(dtype)
    return [compare(name, found[name], ref64[name], eager[name]) for name in found]


def modules_and_inputs(dtype=torch.float32, change=lambda mlp: None):
    """LlamaMLP after change(mlp), ours that shares its weights, x and dout."""
    theirs = llama_mlp(dtype)
    change(theirs)
    x, *_, dout = make_mlp_inputs(dtype)
    return theirs, TritonLlamaMLP.from_llama_mlp(theirs), x, dout


def is_fused(out):
    return type(out.grad_fn).__name__ == "SwiGLUMLPFunctionBackward"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_module_replaces_llama_mlp_and_shares_its_weights(dtype):
    theirs, ours, x, dout = modules_and_inputs(dtype, torch.nn.Module.eval)
    assert ours.state_dict().keys() == theirs.state_dict().keys() and not ours.training
    assert all(getattr(ours, name) is getattr(theirs, name) for name in PROJECTIONS)
    assert is_fused(ours(x))
    assert_all_passed(compare_modules(theirs, ours, x, dout))


def test_mlp_of_another_activation_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="hidden_act is 'gelu', expected 'silu'"):
        TritonLlamaMLP.from_llama_mlp(llama_mlp(hidden_act="gelu"))


WANTED = [wanted for wanted in itertools.product([False, True], repeat=4) if any(wanted)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "wanted", WANTED, ids=lambda w: "".join("xgud"[i] for i in range(4) if w[i])
)
def test_frozen_weights_get_no_gradient_and_no_matmul(wanted):
    *inputs, dout = make_mlp_inputs()
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, wanted)]
    out = SwiGLUMLPFunction.apply(*leaves)
    with Calls() as calls, poisoned_outputs() as shapes:
        out.backward(dout)
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)
    # dy is one, dx one and one that adds; and nothing else adds
    assert (calls.counts["mm"], calls.counts["addmm_"]) == (1 + sum(wanted), wanted[0])
    assert not {"add", "add_", "addmm"} & set(calls.counts) and shapes == []


def test_mlp_backward_that_was_interrupted_cannot_be_repeated():
    *leaves, dout = (t.requires_grad_() for t in make_mlp_inputs())
    out = SwiGLUMLPFunction.apply(*leaves)
    with (
        mock.patch.object(torch.Tensor, "addmm_", side_effect=MemoryError("out of memory")),
        pytest.raises(MemoryError),
    ):
        out.backward(dout.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout.detach())


# ---- The MLP, where it is not fused --------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("names", [PROJECTIONS, ("down_proj",), ("up_proj",)])
def test_lora_around_the_projections(names, inplace):
    def adapt(mlp):
        with_adapters(mlp, target_modules=list(names)).requires_grad_()

    theirs, ours, x, dout = modules_and_inputs(change=adapt)
    ours.inplace = inplace
    assert not is_fused(ours(x))
    assert_all_passed(compare_modules(theirs, ours, x, dout))


@pytest.mark.parametrize("where", [*PROJECTIONS, "act_fn"])
@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_are_called_and_what_they_keep_is_not_overwritten(where, register):
    theirs, ours, x, dout = modules_and_inputs()
    kept = []

    def hook(module, *tensors):
        tensors = [t[0] if isinstance(t, tuple) else t for t in tensors]
        kept.extend((t, t.detach().clone()) for t in tensors)

    handle = getattr(getattr(ours, where), register)(hook)
    found = grads_of(ours, x, dout)
    handle.remove()
    assert kept and all(torch.equal(t, copy) for t, copy in kept)
    expected = grads_of(theirs, x, dout)
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


def test_global_hooks_are_called():
    _, ours, x, _ = modules_and_inputs()
    called = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: called.append(module)
    )
    ours(x)
    handle.remove()
    assert ours.gate_proj in called and ours.down_proj in called


def test_parametrized_weight_is_used():
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    theirs, ours, x, dout = modules_and_inputs(change=lambda mlp: weight_norm(mlp.up_proj))
    assert_all_passed(compare_modules(theirs, ours, x, dout))


def test_layer_that_keeps_its_output_raises_in_place():
    _, mlp, x, dout = modules_and_inputs()
    mlp.gate_proj = torch.nn.Sequential(mlp.gate_proj, torch.nn.Tanh())
    mlp.inplace = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mlp(x).backward(dout)


# ---- torch.compile -------------------------------------------------------------------------------


@pads_rows
def test_torch_compile_of_the_mlp_in_one_graph():
    """The contracts ask Inductor's numbers of its Function."""
    theirs, ours, *_ = modules_and_inputs(COMPILED_DTYPE)
    backend = "inductor" if HAS_GPU else "aot_eager"
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    for n_rows in (9, 6):
        x, *_, dout = make_mlp_inputs(COMPILED_DTYPE, n_rows)
        assert_all_passed(compare_modules(theirs, ours, x, dout, compiled))
