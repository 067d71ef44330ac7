"""The repository for Hugging Face's package `kernels`: what is in the folder, and models with it.

The models need a transformers that takes the installed `kernels`.
"""

import contextlib
import json
import types

import pytest
import torch
import transformers
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.utils import is_kernels_available

from harness.benchmark.checking import assert_all_passed, compare
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU
from next_steps.hugging_face import kernel_layers, kernel_repository
from next_steps.hugging_face.kernel_repository import make_repository, with_relative_imports
from rmsnorm_kernel import rmsnorm_forward
from tests.apply_kernels_test import SIZES
from tests.conftest import assert_refused
from tests.small_workloads import in_float64, loss_and_gradients, tiny_batch, uneven_norms

with contextlib.suppress(ImportError):
    import kernels
    from kernels import LocalLayerRepository, Mode

with_kernels = pytest.mark.skipif(
    not is_kernels_available(),
    reason=f"transformers {transformers.__version__} finds no package `kernels` that it takes",
)
# configuration, class of the norms, how many of them
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}, LlamaRMSNorm, 5),
    "llama with biases": (transformers.LlamaConfig, {"mlp_bias": True}, LlamaRMSNorm, 5),
    "llama with gelu": (transformers.LlamaConfig, {"hidden_act": "gelu"}, LlamaRMSNorm, 5),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}, Qwen3RMSNorm, 9),  # of q and k too
    "granite": (transformers.GraniteConfig, {}, GraniteRMSNorm, 5),
    "olmo2": (transformers.Olmo2Config, {}, Olmo2RMSNorm, 9),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "repository"
    make_repository(folder)
    return folder


def small_model(family: str) -> torch.nn.Module:
    config, options, *_ = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config(**SIZES | {"vocab_size": 257} | options), dtype=torch.float32
    )
    return uneven_norms(model).train().to(DEVICE)


def mapping(folder) -> dict:
    """Every layer of the folder for its name, whatever the mode."""
    return {
        name: {DEVICE: LocalLayerRepository(folder, layer_name=name)}
        for name in kernel_layers.__all__
    }


@contextlib.contextmanager
def kernelized(model, folder, mode, monkeypatch):
    """The model with all layers, and as it was afterwards: its rotary function is the family's."""
    mlp = type(model.model.layers[0].mlp)
    monkeypatch.setattr(mlp, "kernel_layer_name", "SwiGLUMLP", raising=False)
    with kernels.use_kernel_mapping(mapping(folder), inherit_mapping=False):
        kernels.kernelize(model, mode=mode, device=DEVICE)
    package = kernels.get_local_kernel(folder)
    model.loss_function = package.layers.ForCausalLMLoss().forward
    try:
        yield model
    finally:
        with kernels.use_kernel_mapping({}, inherit_mapping=False):
            kernels.kernelize(model, mode=mode, device=DEVICE)
        del model._loss_function


def replaced(model) -> dict[str, int]:
    """How many modules and functions of a model have the forward of a layer, by the layer."""
    functions = {f for m in model.modules() for f in getattr(m, "_kernel_funcs", {}).values()}
    counts = dict.fromkeys(("RMSNorm", "SwiGLUMLP", "rotary_pos_emb"), 0)
    for module in (*model.modules(), *functions):
        name, _, rest = module.forward.__qualname__.partition(".")
        if module.forward.__module__.startswith("_finetuning_kernels_") and rest == "forward":
            counts[name] += 1
    return counts


# ---- The folder


def files_of(folder) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_the_same_sources_make_the_same_folder(folder, tmp_path):
    make_repository(tmp_path / "again")
    files = files_of(folder)
    assert files_of(tmp_path / "again") == files
    assert {name.split("/")[1] for name in files if "/" in name} == {
        "torch-cpu",
        "torch-cuda",
        "torch-rocm",
    }
    for name, text in files.items():
        assert kernel_repository.NAMESPACE not in text, name


def test_another_version_backend_or_source_has_another_id(folder, tmp_path, monkeypatch):
    def identity(backend, version=1):
        files = kernel_repository.package_files(backend, version, "unknown")
        return json.loads(files["metadata.json"])["id"]

    ids = {identity("cpu"), identity("cuda"), identity("cpu", 2)}
    monkeypatch.setattr(kernel_repository, "INIT", kernel_repository.INIT + "\n# changed\n")
    assert len(ids | {identity("cpu")}) == 4


def test_an_import_that_cannot_become_relative_is_refused():
    for line in ("import sys, rmsnorm_kernel", "import kernel_support as s; import rmsnorm_kernel"):
        with pytest.raises(ValueError, match="rmsnorm_kernel: expected one import a line"):
            with_relative_imports(f"{line}\n", ["kernel_support", "rmsnorm_kernel"])


def test_a_folder_that_holds_something_is_refused(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for taken in (folder, tmp_path / "file"):
        with pytest.raises(UserError, match="is not empty: name a new folder"):
            make_repository(taken)


@pytest.mark.parametrize("name", ["file/new", "loop", "n" * 300])
def test_a_folder_that_cannot_be_made_is_refused(name, run_script, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    path = str(tmp_path / name)
    assert_refused(run_script(kernel_repository, path), f"cannot write to {path}: ")


def test_a_dangling_link_creates_what_it_points_at(run_script, tmp_path):
    (tmp_path / "link").symlink_to("new")
    assert run_script(kernel_repository, str(tmp_path / "link")).code == 0
    assert (tmp_path / "new" / "README.md").is_file()


@pytest.mark.parametrize(
    "flags", [("--version", "0"), ("--version", "-1"), ("--license", "mit\na: b")]
)
def test_a_flag_that_the_card_cannot_hold_is_refused(flags, run_script, tmp_path):
    assert_refused(run_script(kernel_repository, str(tmp_path / "new"), *flags), flags[0])
    assert not (tmp_path / "new").exists()


def test_the_model_card_names_every_layer(folder):
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: unknown\n---\n")
    assert all(f"`{name}`" in card for name in kernel_layers.__all__)


@with_kernels
def test_the_package_reads_the_metadata_and_its_digest(folder):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    for backend in kernel_repository.BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        assert (str(metadata.name), metadata.version) == ("finetuning-kernels", 1)


# ---- Models


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Olmo2RMSNorm])
def test_a_wider_weight_gives_the_dtype_that_the_replaced_norm_gives(norm):
    """As where norms stay in fp32 beside bf16: OLMo 2's rounds to x's dtype, LLaMA's does not."""
    plain = norm(32).to(DEVICE)
    x = torch.randn(2, 3, 32, device=DEVICE, dtype=torch.bfloat16)
    expected = plain(x)
    plain.forward = types.MethodType(kernel_layers.RMSNorm.forward, plain)  # as kernelize does
    for call in (plain, torch.compile(plain, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(call(x), expected, rtol=2**-7, atol=0)


@with_kernels
@every_family
def test_training_gives_the_plain_models_loss_and_gradients(family, folder, monkeypatch):
    norm, n_norms = FAMILIES[family][2:]
    model = small_model(family)
    eager = loss_and_gradients(model)
    ref64 = loss_and_gradients(in_float64(small_model(family), norm))
    with kernelized(model, folder, Mode.TRAINING, monkeypatch):
        assert replaced(model) == {"RMSNorm": n_norms, "SwiGLUMLP": 2, "rotary_pos_emb": 1}
        ours = loss_and_gradients(model)
    assert ours.keys() == eager.keys()
    assert_all_passed([compare(name, ours[name], ref64[name], eager[name]) for name in eager])
    assert not any(replaced(model).values())


@with_kernels
@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_gives_the_plain_models_logits(family, dtype, folder, monkeypatch):
    model, ids = small_model(family).to(dtype).eval(), tiny_batch().input_ids
    wide = in_float64(small_model(family).to(dtype), FAMILIES[family][2]).eval()
    with torch.no_grad():
        eager, ref64 = model(ids).logits, wide(ids).logits
        with kernelized(model, folder, Mode.INFERENCE, monkeypatch):
            ours = model(ids).logits
    assert_all_passed([compare(f"{family} logits", ours, ref64, eager)])


@with_kernels
def test_the_loss_counts_the_items_of_all_micro_batches(folder):
    loss = kernels.get_local_kernel(folder).layers.ForCausalLMLoss()
    batch = tiny_batch()
    logits = torch.randn(*batch.labels.shape, 257, device=DEVICE)
    plain = small_model("llama").loss_function
    shifted = {"shift_labels": torch.roll(batch.labels, -1, 1)}
    items = ({"num_items_in_batch": n} for n in (37, torch.tensor(37)))
    for options in ({}, shifted, *items):
        expected = plain(logits, batch.labels, 257, **options)
        torch.testing.assert_close(loss(logits, batch.labels, 257, **options), expected)


@with_kernels
def test_a_compiled_model_makes_the_same_step(folder, monkeypatch):
    mode = Mode.TRAINING | Mode.TORCH_COMPILE
    batch = tiny_batch()
    model = small_model("qwen3")
    with kernelized(model, folder, mode, monkeypatch):
        assert replaced(model) == {"RMSNorm": 9, "SwiGLUMLP": 2, "rotary_pos_emb": 1}
        eager = loss_and_gradients(model)
        torch.compiler.reset()
        model.compile(fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
        compiled = loss_and_gradients(model, batch)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-6)


@with_kernels
def test_float64_runs_without_the_kernels(folder, monkeypatch):
    model = small_model("llama").double()
    expected = loss_and_gradients(model)
    with kernelized(model, folder, Mode.TRAINING, monkeypatch):
        ours = loss_and_gradients(model)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@with_kernels
def test_two_versions_and_the_tutorial_are_loaded_beside_each_other(folder, tmp_path):
    make_repository(tmp_path / "second", version=2)
    packages = [kernels.get_local_kernel(path) for path in (folder, tmp_path / "second")]
    x = torch.randn(3, 32, device=DEVICE, dtype=torch.bfloat16)
    norm = LlamaRMSNorm(32).to(DEVICE, torch.bfloat16)
    expected, _ = rmsnorm_forward(x, norm.weight, norm.variance_epsilon)
    layers = [package.layers.RMSNorm for package in packages]
    operators = torch._C._dispatch_get_all_op_names()
    names = {"tutorial", *(package.__name__ for package in packages)}
    assert len(names) == 3
    assert {f"{name}::rmsnorm_forward" for name in names} <= set(operators)
    for layer in layers:
        torch.compiler.reset()
        assert torch.equal(layer.forward(norm, x), expected)
        assert torch.equal(torch.compile(layer.forward, fullgraph=True)(norm, x), expected)


# ---- transformers' own way


@pytest.fixture
def saved(tmp_path):
    small_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def afterwards_plain():
    """The family's rotary function is one for the process: give it its own forward back."""
    yield
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(small_model("llama"), mode=Mode.INFERENCE)


ALL = {"RMSNorm": 5, "SwiGLUMLP": 0, "rotary_pos_emb": 1}  # nothing marks an MLP


@with_kernels
def test_from_pretrained_takes_a_registered_mapping(folder, saved, afterwards_plain):
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(saved, dtype=torch.float32).to(DEVICE).train()
    expected = loss_and_gradients(plain)
    with kernels.use_kernel_mapping(mapping(folder)):
        model = load(saved, dtype=torch.float32, use_kernels=True, device_map=DEVICE)
        assert replaced(model) == ALL
        assert replaced(model.train()) == replaced(model.eval()) == ALL
        ours = loss_and_gradients(model.train())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@with_kernels
def test_a_kernel_config_is_for_the_mode_that_the_model_is_in(
    folder, saved, monkeypatch, afterwards_plain
):
    """The page warns of it: what from_pretrained has put in, train() takes out."""
    from transformers.utils import kernel_config

    if DEVICE == "cpu":
        if not hasattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES"):
            pytest.skip("KernelConfig of this transformers has no list that a CPU can be added to")
        devices = [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
        monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", devices)
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/finetuning-kernels={folder}")
    names = {"RMSNorm", "rotary_pos_emb"}
    options = {"revision": "main", "trust_remote_code": True}
    config = {name: (f"someone/finetuning-kernels:{name}", options) for name in names}
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(
        saved, use_kernels=True, kernel_config=transformers.KernelConfig(config), device_map=DEVICE
    )
    assert replaced(model) == ALL
    assert not any(replaced(model.train()).values())

    config = {name: f"{folder}:{name}" for name in names}
    config = transformers.KernelConfig(config, use_local_kernel=True)
    model.set_use_kernels(True, config)
    assert replaced(model) == replaced(model.eval()) == replaced(model.train()) == ALL
