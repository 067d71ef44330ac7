"""Another version of transformers has other code: do the kernels leave it where it is?"""

import inspect
import textwrap
from types import FunctionType

import pytest
import transformers
from transformers.activations import SiLUActivation
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from harness.model.families import FAMILIES
from harness.model.known_texts import is_known_text, source_digest
from harness.profiling.kernel_facts import MODEL_KERNELS
from next_steps.patches.apply_kernels import apply_kernels, stands_for
from next_steps.patches.recompute import set_recompute
from tests.apply_kernels_test import assert_same_step, make_model

NEW = {  # what has a new text: a text in it, twice in the new one
    "LlamaRMSNorm": "self.weight *",
    "LlamaMLP": "self.act_fn(",
    "SiLUActivation": "nn.functional.silu(",
    "LlamaAttention": "self.o_proj(",
    "rotate_half": "torch.cat(",
    "LlamaDecoderLayer": "self.mlp(",
    "LlamaForCausalLM": "self.lm_head(",
    "fixed_cross_entropy": "nn.functional.cross_entropy(",
}
OWNERS = {"fixed_cross_entropy": loss_utils, "rotate_half": modeling_llama}
OWNERS["SiLUActivation"] = SiLUActivation


def new_version(function, old: str, new: str, folder) -> FunctionType:
    """Return a function of transformers as a version has it where `new` stands for `old`."""
    function = inspect.unwrap(function)
    # that decorator knows transformers' own classes alone
    source = textwrap.dedent(inspect.getsource(function)).replace("@auto_docstring\n", "")
    assert source.count(old) == 1
    file = folder / "new.py"
    file.write_text(source.replace(old, new))
    names = dict(function.__globals__)
    exec(compile(file.read_text(), str(file), "exec"), names)
    names[function.__name__].__qualname__ = function.__qualname__
    return names[function.__name__]


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_installed_versions_texts_are_known(kind):
    for kernel in MODEL_KERNELS:
        assert all(map(is_known_text, stands_for(FAMILIES[kind], kernel))), kernel


@pytest.mark.parametrize("name", NEW)
def test_a_new_text_keeps_its_own_code_and_a_line_says_so(name, tmp_path, monkeypatch, capsys):
    owner = OWNERS.get(name) or getattr(modeling_llama, name)
    attribute = name if inspect.ismodule(owner) else "forward"
    theirs = new_version(getattr(owner, attribute), NEW[name], f"2 * {NEW[name]}", tmp_path)
    monkeypatch.setattr(owner, attribute, theirs)
    model = apply_kernels(make_model())
    said = f"transformers {transformers.__version__} has a {name} that the kernels were not"
    assert capsys.readouterr().out.count(said) == 1
    assert_same_step(model, make_model())


def test_a_new_mlp_is_not_forgotten(tmp_path, monkeypatch):
    mlp = modeling_llama.LlamaMLP
    monkeypatch.setattr(
        mlp, "forward", new_version(mlp.forward, "return ", "return 2 * ", tmp_path)
    )
    assert_same_step(set_recompute(make_model(), "mlp"), make_model())


def test_a_kernel_named_alone_is_left_out_too(tmp_path, monkeypatch):
    norm = modeling_llama.LlamaRMSNorm
    theirs = new_version(norm.forward, "self.weight *", "2 * self.weight *", tmp_path)
    monkeypatch.setattr(norm, "forward", theirs)
    assert_same_step(apply_kernels(make_model(), ["rmsnorm"]), make_model())


def test_another_layout_is_no_new_text(tmp_path):
    forward = modeling_llama.LlamaMLP.forward
    again = new_version(forward, "return ", '"""Said."""\n\n    return  ', tmp_path)
    assert source_digest(again) != source_digest(forward)  # a text that is no docstring
    again = new_version(
        forward, "(self, x):", '(\n  self, x\n):\n    """Said."""  # no more', tmp_path
    )
    assert source_digest(again) == source_digest(forward)
