"""What docs/limits.md, glossary.md and troubleshooting.md say of the code is true.

Each claim is a phrase that must stand in its page, and a check of what the phrase says, or the
name of the test that checks it.  readme_test.py checks the figures that come from records.
"""

import inspect
import itertools
import json
import re

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import harness
from cross_entropy_kernel import TritonCrossEntropyLoss, cross_entropy_reference
from harness.benchmark.checking import DEVICE, FLOOR, HAS_GPU
from harness.cli.command_line import UserError
from harness.cli.flags import DEFAULT_MODEL
from harness.cli.workload import Workload
from harness.data.samples import IGNORE_INDEX
from harness.model import architecture, config_file
from harness.steps import timing
from next_steps.lessons.rope_kernel import rope_reference, triton_apply_rotary_pos_emb
from next_steps.lessons.swiglu_kernel import TritonSwiGLUFunction
from next_steps.patches.apply_kernels import apply_kernels
from rmsnorm_kernel import TritonRMSNormFunction, rmsnorm_reference
from tools.page_records import HERE, RESULTS

CLAIMS = {}  # phrase: (page, check)


def says(page: str, *phrases: str):
    """The page has each of these phrases, and the function checks what they say."""

    def keep(check):
        CLAIMS.update(dict.fromkeys(phrases, (page, check)))
        return check

    return keep


def logits_and_targets(dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    return logits.requires_grad_(), torch.tensor([0, 3, 10, -100, 7, 7], device=DEVICE)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- limits.md


@says("limits", "`(loss * weight[targets]).sum() / weight[targets].sum()`, with ignored rows left")
def class_weights():
    (logits, targets), weight = logits_and_targets(), torch.rand(11, device=DEVICE) + 0.5
    loss = TritonCrossEntropyLoss(reduction="none")(logits, targets)
    counted = targets != -100
    weights = weight[targets[counted]]
    close(
        (loss[counted] * weights).sum() / weights.sum(),
        F.cross_entropy(logits, targets, weight=weight),
    )


@says("limits", "before `TritonCrossEntropyLoss` it gives the right loss and gradient")
def soft_caps():
    found = []
    for loss in (TritonCrossEntropyLoss(), cross_entropy_reference):
        logits, targets = logits_and_targets()
        value = loss(2.0 * torch.tanh(logits / 2.0), targets)
        found.append((value, *torch.autograd.grad(value, logits)))
    for mine, theirs in zip(*found):
        close(mine, theirs)


@says("limits", "`TritonRMSNormFunction.apply(x, 1 + weight, eps)` is the same formula")
def weight_offset():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    normalized = rmsnorm_reference(x, torch.ones_like(weight), 1e-5)
    close(TritonRMSNormFunction.apply(x, 1 + weight, 1e-5), normalized * (1 + weight))


def turned(head_dim: int = 8) -> tuple[torch.Tensor, ...]:
    """q (2, 3, 5, D), k (2, 1, 5, D), and cos and sin as Hugging Face's LLaMA makes them."""
    config = architecture.tiny_config()
    config.update({"head_dim": head_dim})
    positions = torch.arange(5, device=DEVICE)[None]
    q, k = (torch.randn(2, heads, 5, head_dim, device=DEVICE) for heads in (3, 1))
    return q, k, *LlamaRotaryEmbedding(config).to(DEVICE)(q, positions)


@says("limits", "here they are `(T, D)`, `(1, T, D)` or `(B, T, D)`", "`torch.cat((cos, cos), -1)`")
def shapes_of_angles():
    q, k, cos, sin = turned()
    assert cos.shape == sin.shape == (1, 5, 8), "what LlamaRotaryEmbedding returns"
    expected = rope_reference(q, k, cos, sin)
    for change in (lambda t: t[0], lambda t: t, lambda t: t.expand(2, 5, 8)):
        found = triton_apply_rotary_pos_emb(q, k, change(cos), change(sin))
        for mine, theirs in zip(found, expected):
            close(mine, theirs)
    half_cos, half_sin = cos[..., :4], sin[..., :4]
    with pytest.raises(ValueError, match=r"cos has shape .*torch\.cat\(\(cos, cos\), -1\)"):
        triton_apply_rotary_pos_emb(q, k, half_cos, half_sin)
    whole = (torch.cat((half, half), -1) for half in (half_cos, half_sin))
    close(triton_apply_rotary_pos_emb(q, k, *whole)[0], expected[0])


@says("limits", "turn `q[..., :R]` and `k[..., :R]`, which are views")
def partial_rotation():
    q, k, cos, sin = turned(4)
    wide = torch.randn(2, 3, 5, 10, device=DEVICE)
    wide[..., :4] = q
    part = wide[..., :4]
    close(triton_apply_rotary_pos_emb(part, k, cos, sin)[0], rope_reference(q, k, cos, sin)[0])


@says("limits", "`create_graph=True` is refused with a sentence that names the function")
def second_derivative():
    logits, targets = logits_and_targets()
    x, weight = (torch.randn(*s, device=DEVICE, requires_grad=True) for s in ((3, 8), (8,)))
    q, k, cos, sin = turned()
    losses = {
        "TritonCrossEntropyLoss": TritonCrossEntropyLoss()(logits, targets),
        "RMSNorm": TritonRMSNormFunction.apply(x, weight, 1e-5).sum(),
        "RoPE": triton_apply_rotary_pos_emb(q.requires_grad_(), k, cos, sin)[0].sum(),
        "SwiGLU": TritonSwiGLUFunction.apply(x, x * 2, False).sum(),
    }
    for name, loss in losses.items():
        with pytest.raises(RuntimeError, match=f"{name}.*no second derivative"):
            loss.backward(create_graph=True)
    loss = cross_entropy_reference(logits, targets)
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), logits)[0].abs().sum() > 0


@says("limits", "| class weights | PyTorch", "| label smoothing | PyTorch", "| logit soft caps |")
def arguments_that_peers_have():
    taken = inspect.signature(TritonCrossEntropyLoss).parameters
    assert list(taken) == ["ignore_index", "reduction", "inplace"]


# ---------------------------------------------------------------- glossary.md


@says("glossary", "2e-6 in fp32, 2e-4 in fp16, 1e-3 in bf16 |")
def floor_of_the_allowance():
    expected = {torch.float32: 2e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}
    assert expected == FLOOR


@says("glossary", "of a plain copy of 2 GiB")
def size_of_the_copy():
    assert timing.COPIED_BYTES == 2 * 2**30


@says("glossary", "the target, -100, of tokens that are not trained on")
def ignored_target():
    parameters = inspect.signature(TritonCrossEntropyLoss).parameters
    assert IGNORE_INDEX == -100 == parameters["ignore_index"].default


@says("troubleshooting", "eps is 1e-5 for LLaMA 3.1")
@says(
    "glossary", "LLaMA 3.1's `rms_norm_eps` is 1e-5, not 1e-6, and there are 65 norms per forward"
)
def norms_of_llama():
    config = architecture.llama_3_1_8b_config()
    assert config.rms_norm_eps == 1e-5 and 2 * config.num_hidden_layers + 1 == 65


# ---------------------------------------------------------------- troubleshooting.md


@says("troubleshooting", "| a model needs a CUDA GPU | more than a billion parameters |")
def largest_model_without_a_gpu():
    assert config_file.CPU_PARAMETER_LIMIT == 1e9
    if not HAS_GPU:
        with pytest.raises(UserError, match="needs a CUDA GPU"):
            config_file.load_config(Workload(model=DEFAULT_MODEL, random_init=True))


@says(
    "troubleshooting",
    "| `logits` is None | in training a kernel computed the loss | `model.eval()`",
)
def logits_of_a_model():
    config = architecture.tiny_config()
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    model = apply_kernels(model.train(), ["linear_cross_entropy"])
    ids = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    assert model(input_ids=ids, labels=ids).logits is None
    assert model(input_ids=ids).logits is not None
    assert model.eval()(input_ids=ids, labels=ids).logits is not None


@says("troubleshooting", "lie in `/tmp/kernel-dev-ft-UID` | `HOME` cannot be written")
def home_of_a_user_without_one():
    """When it is one: home_test.py."""
    assert 'f"kernel-dev-ft-{os.getuid()}"' in inspect.getsource(harness.own_folder)


SENTENCES = ["no GPU kernel was recorded", "cannot be recorded as a CUDA graph"]


@says("troubleshooting", *SENTENCES)
def quoted_sentences():
    """A script says them."""
    sources = [*(HERE / "harness").rglob("*.py"), *(HERE / "next_steps").rglob("*.py")]
    source = re.sub(r'"\s*f?"', "", "".join(path.read_text() for path in sources))
    for sentence in SENTENCES:
        assert sentence in source, sentence


# ---------------------------------------------------------------- the ladder's predictions


@says("ladder", "the predictions of the first four rungs are good to a sixth")
@says("../README", "predictions of the first four kernels are good to a sixth")
def first_rungs():
    for predicted, gained in ladder_gains()[:4]:
        assert abs(predicted - gained) <= predicted / 6


@says("ladder", "The prediction of `linear_cross_entropy` is half as large again as its gain")
@says("../README", "that of the fifth is half as large again as what was gained")
def fifth_rung():
    predicted, gained = ladder_gains()[4]
    assert 1.4 < predicted / gained < 1.6


def ladder_gains() -> list[tuple[float, float]]:
    """What was predicted, and gained, of each rung at 4 x 2,048."""
    rungs = json.loads((RESULTS / "ladder_4x2048.json").read_text())["rungs"]
    names = ["adamw", "rmsnorm", "rope", "swiglu", "linear_cross_entropy"]
    assert [rung["name"] for rung in rungs[1:6]] == names
    return [
        (before["step_ms"] - rung["predicted_ms"], before["step_ms"] - rung["step_ms"])
        for before, rung in itertools.pairwise(rungs[:6])
    ]


# ---------------------------------------------------------------- what other tests check


def checked_in(file: str, test: str):
    """Return a check that this test exists: it checks what the phrase says."""

    def exists():
        assert f"def {test}(" in (HERE / "tests" / f"{file}.py").read_text()

    return exists


says("limits", "leaves the logits as they are")(
    checked_in("contracts_autograd_test", "test_inputs_and_upstream_gradients_are_never_changed")
)
says("limits", "the logits hold their gradient afterwards")(
    checked_in("cross_entropy_more_test", "test_inplace_writes_the_gradient_over_the_logits")
)
says("limits", "so fp16 logits are never overwritten")(
    checked_in("cross_entropy_more_test", "test_inplace_in_fp16_waits_for_the_loss_scale")
)
says("limits", "`TritonAdamW` refuses it, in its arguments")(
    checked_in("adamw_optimizer_test", "test_bad_options_are_refused_with_a_sentence")
)
says("limits", "`TritonAdamW` refuses it, in its arguments and in a loaded state")(
    checked_in(
        "adamw_optimizer_test", "test_state_that_does_not_fit_is_refused_and_changes_nothing"
    )
)
says("limits", "`apply_kernels` takes models of [five families]")(
    checked_in("apply_kernels_test", "test_something_else_than_a_known_model_is_refused")
)
says("glossary", "a fifth of a run's steps are shorter than the 20th, four fifths than the 80th")(
    checked_in("spread_test", "test_percentiles_are_pytorchs")
)
says("glossary", "of two runs whose ranges, 20th to 80th percentile, overlap")(
    checked_in("spread_test", "test_ranges_that_touch_are_no_difference")
)
says("troubleshooting", "its target is outside the vocabulary")(
    checked_in(
        "cross_entropy_more_test", "test_target_outside_the_vocabulary_gives_nan_for_its_row_only"
    )
)
says("troubleshooting", "its target is outside the vocabulary | -100 marks what does not count")(
    checked_in("cross_entropy_more_test", "test_ignored_rows_are_neither_counted_nor_trained")
)
says("troubleshooting", "| NaN or inf in the input |")(
    checked_in("rmsnorm_more_test", "test_nan_stays_in_its_row")
)
says("troubleshooting", "| a second backward raises | in place, its input is gone |")(
    checked_in("cross_entropy_more_test", "test_inplace_any_other_use_of_the_logits_raises")
)


@pytest.mark.parametrize("phrase", CLAIMS)
def test_what_a_page_states_is_so(phrase):
    page, check = CLAIMS[phrase]
    text = " ".join((HERE / "docs" / f"{page}.md").read_text().split())
    assert " ".join(phrase.split()).lower() in text.lower(), f"{page}.md says something else"
    check()
