"""LoRA: the adapters alone are trained, in every way that all weights are, and saved as by peft."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import compare_runs
import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.benchmark.checking import DEVICE
from harness.cli import adapter_config
from harness.cli.adapter_config import ATTENTION, CONFIG, MLP, TARGETS, WEIGHTS
from harness.cli.command_line import UserError
from harness.cli.device import HAS_GPU
from harness.cli.workload import Workload
from harness.model import adapters, architecture, loading
from harness.model.adapters import checksum, frozen_digest
from harness.model.architecture import ModelFacts
from harness.profiling.kernel_facts import ADAPTERS, KERNELS, MODEL_KERNELS
from harness.steps import stepping
from harness.training import saving
from next_steps.finetuning import opponents
from next_steps.memory import estimate, memory_estimate
from next_steps.patches import patched_model
from next_steps.patches.apply_kernels import apply_kernels, make_optimizer
from tests.conftest import assert_refused
from tests.files_test import killed_before_change
from tests.parallel_test import run_of
from tests.small_workloads import (
    SMALL,
    TINY,
    change_json,
    tiny_batch,
    tiny_workload,
    uneven_norms,
)
from tests.two_processes import one_gpu_is_too_few

pytestmark = pytest.mark.usefixtures("own_cache")
RANK = ["--lora-rank", "4", "--lora-alpha", "6"]
NAMED = "q_proj,v_proj", "o_proj", "k_proj,down_proj"
SCRIPTS = finetune_baseline, finetune_optimized


def without_zeros(model: torch.nn.Module) -> torch.nn.Module:
    """B away from 0, where neither A's gradient nor a wrong scaling would be seen."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    return model


def adapted(*flags: str) -> torch.nn.Module:
    return without_zeros(uneven_norms(patched_model.load(tiny_workload(*RANK, *flags))))


# ---------------------------------------------------------------- what is trained


@pytest.mark.parametrize("targets", [*TARGETS, *NAMED])
def test_adapters_alone_are_trained_and_change_nothing_at_first(targets):
    workload = tiny_workload("--lora-rank", "4", "--lora-targets", targets)
    model, plain = patched_model.load(workload), loading.load_model(tiny_workload())
    names = {n.split(".")[-4] for n, p in model.named_parameters() if p.requires_grad}
    assert names == set(adapter_config.projections(targets))
    n_trained = sum(p.numel() for p in stepping.trained(model))
    assert n_trained == ModelFacts(model.config, workload).trained
    n = sum(p.numel() for p in model.parameters())
    assert ModelFacts(model.config, workload).counts() == {
        "parameters": n,
        "trained_parameters": n_trained,
    }
    ids = tiny_batch().input_ids
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adapters_have_the_models_dtype_and_are_the_same_for_a_seed(dtype):
    first, again, other = (
        patched_model.load(tiny_workload(*RANK, "--dtype", dtype, "--seed", seed)) for seed in "778"
    )
    assert {p.dtype for p in first.parameters()} == {architecture.TORCH_DTYPES[dtype]}
    names = [n for n, p in first.named_parameters() if "lora_A" in n]
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in names)
    assert not any(torch.equal(states[0][name], states[2][name]) for name in names)


def test_equal_sets_of_targets_are_equal():
    texts = ",".join(reversed(MLP)), "v_proj,q_proj,v_proj", "all"
    assert [*map(adapter_config.lora_targets, texts)] == ["mlp", "q_proj,v_proj", "all"]


def test_the_learning_rate_is_ten_times_that_of_full_fine_tuning():
    assert tiny_workload(*RANK).lr == pytest.approx(10 * tiny_workload().lr)
    assert tiny_workload(*RANK, "--lr", "0.5").lr == 0.5
    assert tiny_workload("--lora-rank", "7").lora_alpha == 7.0
    assert not tiny_workload(*RANK).is_on_the_page


@pytest.mark.parametrize("targets", [*TARGETS, *NAMED])
def test_flops_are_what_pytorch_counts(targets):
    workload = tiny_workload("--lora-rank", "4", "--lora-targets", targets)
    model = patched_model.load(workload)
    model.config._attn_implementation = "eager"  # its products are visible to the counter
    ids = torch.zeros(2, 64, dtype=torch.int64, device=DEVICE)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # eager attention multiplies the half of the scores too that the mask throws away: all of T
    expected = ids.numel() * ModelFacts(model.config, workload).flops_per_token(2 * 64)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)  # RoPE's angles


def test_a_step_of_the_8b_model_has_two_thirds_of_the_flops():
    config, full = architecture.llama_3_1_8b_config(), Workload()
    workload = replace(full, lora_rank=16, lora_alpha=16.0, lora_targets="all")
    assert ModelFacts(config, workload).trained == 41_943_040
    shares = [ModelFacts(config, w).flops_per_token(512) for w in (workload, full)]
    assert 2 / 3 < shares[0] / shares[1] < 0.68


# ---------------------------------------------------------------- with kernels


@pytest.mark.parametrize("kernels", [[], KERNELS], ids=["eager", "kernels"])
def test_the_optimizer_holds_moments_of_adapters_alone(kernels):
    model = apply_kernels(adapted(), [name for name in kernels if name in MODEL_KERNELS])
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(model, 1e-2, kernels)
    stepping.training_step(model, optimizer, [tiny_batch(), tiny_batch()])
    now = dict(model.named_parameters())
    assert set(optimizer.state) == {now[name] for name in trained}
    assert all(torch.equal(now[name], frozen[name]) for name in frozen)
    assert not any(torch.equal(now[name], trained[name]) for name in trained)


# ---------------------------------------------------------------- runs


RUNS = {  # flags of both runs, those of the second, and how far apart they may be
    "accumulate": (["--accumulate", "2"], ["--kernels", "all"], 1e-5),
    "pack": (["--pack"], ["--kernels", "all"], 1e-5),
    "layer": (["--recompute", "layer"], ["--kernels", "all"], 1e-5),
    "bf16": (["--dtype", "bf16"], [], 1e-2),
    "an opponent": ([], ["--opponent", "rms-norm"], 1e-5),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", RUNS)
def test_runs_with_kernels_follow_those_without(small_model, little_validation, recorded, case):
    flags, more, allowed = RUNS[case]
    flags = [*SMALL, *RANK, *flags]
    baseline = recorded(finetune_baseline, *flags)
    script = opponents if "--opponent" in more else finetune_optimized
    optimized = recorded(script, *flags, *more)
    for key in ("losses", "validation_loss_after"):
        assert optimized[key] == pytest.approx(baseline[key], rel=allowed)
    assert len(set(baseline["losses"])) == 3
    assert optimized["trained_parameters"] == baseline["trained_parameters"]
    assert baseline["trained_parameters"] < baseline["parameters"] / 2


def test_losses_of_another_rank_are_not_compared(small_model, run_script, tmp_path):
    paths = [tmp_path / f"{rank}.json" for rank in (2, 4)]
    for rank, path in zip("24", paths):
        flags = [*SMALL, "--lora-rank", rank, "--json", str(path)]
        assert run_script(finetune_baseline, *flags).code == 0
    outcome = run_script(compare_runs, *map(str, paths))
    assert "LoRA of rank 2, alpha 2" in outcome.out
    assert "not the same workload" in outcome.out and "lora_rank 4 (not 2)" in outcome.out


@pytest.mark.exhaustive
@one_gpu_is_too_few
def test_two_processes_train_the_adapters_that_one_does(tmp_path):
    flags = [*TINY, *RANK, "--steps", "3", "--data", "synthetic"]
    found = {}
    for name, n, *more in (
        ("one", 1, "--batch-size", "2"),
        ("fsdp", 2, "--parallel", "fsdp"),
        ("ddp", 2, "--parallel", "ddp"),
    ):
        folder, path = tmp_path / name, tmp_path / f"{name}.json"
        outputs = ["--save", str(folder), "--json", str(path), "--checkpoint", str(tmp_path / "c")]
        saving = ["--checkpoint-every", "2", *(["--resume", str(tmp_path / "c")] if found else [])]
        run_of(n, "finetune_baseline.py", *flags, *more, *outputs, *saving)
        record = json.loads(path.read_text())
        found[name] = record["losses"], load_file(folder / WEIGHTS)
    losses, weights = found.pop("one")
    base = adapters.said_of_base(tmp_path / "one")
    for name, (others_losses, others) in found.items():
        assert others_losses == pytest.approx(losses, rel=1e-6)
        assert others.keys() == weights.keys()
        assert adapters.said_of_base(tmp_path / name) == base
        assert max((others[name] - weights[name]).abs().max() for name in weights) < 1e-5


# ---------------------------------------------------------------- saved and loaded


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tiny_batch().input_ids).logits


@pytest.fixture
def base(tmp_path) -> str:
    """A saved model, as --model takes it."""
    folder = tmp_path / "base"
    uneven_norms(loading.load_model(tiny_workload("--seed", "5"))).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def adapter(base, tmp_path) -> Path:
    """The folder of adapters beside that model."""
    folder, workload = tmp_path / "adapter", tiny_workload("--model", base, *RANK)
    saving.save_model(without_zeros(patched_model.load(workload)), workload, str(folder))
    return folder


@pytest.fixture
def train_further(base, adapter, run_script):
    """train_further("--merge"): what becomes of a run that trains the adapters further."""

    def train(*flags: str, model: str = base):
        flags = [*SMALL, "--data", "synthetic", "--model", model, "--adapter", str(adapter), *flags]
        return run_script(finetune_baseline, *flags)

    return train


@pytest.fixture
def saved(base, recorded, tmp_path):
    """saved("--merge"): the folder and record of a run that has trained that model's adapters."""

    def train(*flags: str, name: str = "saved") -> tuple[Path, dict]:
        folder = tmp_path / name
        flags = [*SMALL, "--model", base, "--data", "synthetic", *flags, "--save", str(folder)]
        return folder, recorded(finetune_baseline, *flags)

    return train


@pytest.mark.parametrize("targets", ["all", "mlp", "v_proj,q_proj"])
def test_peft_loads_what_is_saved_and_a_merged_model_is_the_same(base, saved, targets):
    flags = [*RANK, "--lora-targets", targets, "--lr", "0.05"]
    (folder, _), (merged, _) = saved(*flags), saved(*flags, "--merge", name="merged")
    assert sorted(os.listdir(folder)) == [CONFIG, WEIGHTS]
    plain = AutoModelForCausalLM.from_pretrained(base).to(DEVICE)
    keys, without = plain.state_dict().keys(), logits_of(plain)
    with_adapters = logits_of(PeftModel.from_pretrained(plain, folder).to(DEVICE))
    assert (with_adapters - without).abs().max() > 1e-2
    ordinary = AutoModelForCausalLM.from_pretrained(merged).to(DEVICE)
    torch.testing.assert_close(logits_of(ordinary), with_adapters, rtol=1e-4, atol=1e-5)
    assert ordinary.state_dict().keys() == keys
    assert CONFIG not in os.listdir(merged)


def test_an_adapter_is_trained_further(base, saved, recorded):
    folder, first = saved(*RANK)
    flags = [*SMALL, "--model", base, "--data", "synthetic", "--adapter", str(folder)]
    again = recorded(finetune_baseline, *flags)
    assert again["validation_loss_before"] == pytest.approx(first["validation_loss_after"])
    settings = "lora_rank", "lora_alpha", "lora_targets", "lr"
    assert [again[key] for key in settings] == [first[key] for key in settings]
    assert again["adapter"] == str(folder)
    assert recorded(finetune_baseline, *flags, *RANK)["losses"] == again["losses"]


@pytest.mark.parametrize(
    "targets, said", [([*ATTENTION], "attention"), (["v_proj", "q_proj"], "q_proj,v_proj")]
)
def test_an_adapter_that_peft_saved_is_loaded(base, tmp_path, targets, said, capsys):
    """Its file has the names that peft's own code gives."""
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, lora_dropout=0.1)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).to(DEVICE)
    without_zeros(theirs).save_pretrained(tmp_path / "theirs")
    workload = tiny_workload("--model", base, "--adapter", str(tmp_path / "theirs"))
    assert (workload.lora_rank, workload.lora_alpha) == (3, 5.0)
    assert workload.lora_targets == said
    torch.testing.assert_close(logits_of(patched_model.load(workload)), logits_of(theirs))
    assert "Note" not in capsys.readouterr().out
    change_json(tmp_path / "theirs" / CONFIG, of_a_newer_peft=True)
    patched_model.load(workload)
    assert "has of_a_newer_peft, which this version of peft does not" in capsys.readouterr().out


# ---------------------------------------------------------------- beside which weights


def of_same_shapes(tmp_path, seed: str = "6") -> str:
    """Another saved model, which any adapter of `base` fits."""
    folder = tmp_path / f"other-{seed}"
    uneven_norms(loading.load_model(tiny_workload("--seed", seed))).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("more", [[], ["--merge"]], ids=["trained further", "merged"])
def test_an_adapter_of_another_model_of_the_same_shapes_is_refused(
    base, adapter, train_further, tmp_path, more
):
    """W + B A of the one's W and the other's B A is no model that anybody trained."""
    other, into = of_same_shapes(tmp_path), tmp_path / "into"
    outcome = train_further("--save", str(into), *more, model=other)
    assert outcome.code == 2 and "step 1" not in outcome.out
    given = f"error: --adapter {adapter} was trained beside other weights than {other} has"
    assert f"{given}, those of {base}: give the --model that it was trained with" in outcome.err
    assert not list(into.glob("*.safetensors"))


def test_an_adapter_of_other_random_weights_is_refused(small_model, run_script, tmp_path):
    folder = str(tmp_path / "adapter")
    flags = [*SMALL, "--data", "synthetic"]
    assert run_script(finetune_baseline, *flags, *RANK, "--save", folder).code == 0
    again = run_script(finetune_baseline, *flags, "--adapter", folder)
    assert again.code == 0 and "Note" not in again.out
    outcome = run_script(finetune_baseline, *flags, "--adapter", folder, "--seed", "5")
    assert_refused(outcome, "beside other weights than tiny has", "and the --seed of random")
    # drawn in bf16 they are other numbers, which no digest can be compared with
    outcome = run_script(finetune_baseline, *flags, "--adapter", folder, "--dtype", "bf16")
    assert "nothing tells whether tiny has the same" in outcome.out


def test_a_model_that_has_moved_keeps_its_adapters(base, train_further):
    outcome = train_further(model=shutil.move(base, f"{base}-moved"))
    assert outcome.code == 0 and "Note" not in outcome.out


def test_an_adapter_of_another_config_is_refused_by_its_field(base, train_further):
    """Before the weights are loaded, of which a bar tells."""
    change_json(Path(base, "config.json"), rms_norm_eps=0.1)
    said = "was trained with another config.json of its model: rms_norm_eps 0.1 (not 1e-05)"
    assert_refused(train_further(), said)


@pytest.mark.parametrize(
    ("named", "noted"), [("itself", False), ("another path", True), ("a revision", True)]
)
def test_what_peft_saved_is_judged_by_the_models_name(base, tmp_path, capsys, named, noted):
    config = LoraConfig(r=3, lora_alpha=5, target_modules=list(ATTENTION))
    config.revision = "v2" if named == "a revision" else None
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = of_same_shapes(tmp_path) if named == "another path" else base
    capsys.readouterr()
    patched_model.load(tiny_workload("--model", model, "--adapter", str(tmp_path / "theirs")))
    said = capsys.readouterr().out
    assert (f"and nothing tells whether {model} has the same\n" in said) == noted
    assert noted or not said


def test_an_adapter_of_4_bit_weights_goes_onto_the_model_they_were_made_of(base, saved, capsys):
    """Merged with them it is what QLoRA is for: the path has to do."""
    folder, _ = saved(*RANK, "--quantize", "nf4", "--steps", "1")
    capsys.readouterr()
    flags = ["--model", base, "--adapter", str(folder)]
    for how in ([], ["--quantize", "nf4"]):
        patched_model.load(tiny_workload(*flags, *how))
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match="beside other weights"):
        other = of_same_shapes(folder.parent)
        patched_model.load(tiny_workload("--model", other, *flags[2:], "--quantize", "nf4"))


@pytest.mark.parametrize("targets", [*TARGETS, *NAMED])
def test_the_base_has_one_digest_with_kernels_and_with_any_adapters(targets):
    model = adapted()
    expected = frozen_digest(model)
    assert frozen_digest(adapted("--lora-targets", targets)) == expected
    assert frozen_digest(apply_kernels(model)) == expected
    model.model.rotary_emb.inv_freq.add_(1e-7)  # as another machine may compute it
    assert frozen_digest(model) == expected


# ---------------------------------------------------------------- complete or absent


def test_a_save_is_the_old_or_the_new_adapter_or_none(tmp_path):
    """Whenever it is killed; of another rank, the old settings must not meet the new weights."""
    folder = tmp_path / "saved"

    def adapted_model(rank: str, seed: str) -> tuple[Workload, torch.nn.Module]:
        workload = tiny_workload("--lora-rank", rank, "--seed", seed)
        return workload, patched_model.load(workload).cpu()  # a forked process cannot use the GPU

    old, new, more = adapted_model("2", "0"), adapted_model("3", "0"), adapted_model("2", "1")
    for (workload, model), expected in ((new, {2, 3, None}), (more, {2})):
        seen = set()
        for number in range(1, 60):
            saving.save_model(old[1], old[0], str(folder))
            ended = killed_before_change(
                number, lambda m=model, w=workload: saving.save_model(m, w, str(folder))
            )
            if not (folder / CONFIG).exists():
                seen.add(None)
            else:
                rank = adapter_config.read_config(str(folder))["lora_rank"]
                loaded = replace(old[0], lora_rank=rank, adapter=str(folder))
                adapters.read_adapters(loaded, old[1].config)
                seen.add(rank)
            assert ended in ("killed", "done")
            if ended == "done":
                break
        assert seen == expected
        assert sorted(os.listdir(folder)) == [CONFIG, WEIGHTS]


# ---------------------------------------------------------------- resumed


def test_a_resumed_run_is_the_run_that_was_not_ended(base, saved, run_script, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    folder, straight = saved(*RANK, "--checkpoint", str(checkpoints), "--checkpoint-every", "2")
    size = sum(p.stat().st_size for p in checkpoints.rglob("*") if p.is_file())
    assert size < (Path(base) / "model.safetensors").stat().st_size  # the frozen are not in it
    again, resumed = saved(*RANK, "--resume", str(checkpoints), name="resumed")
    assert resumed["losses"] == straight["losses"]
    one, other = (load_file(each / WEIGHTS) for each in (folder, again))
    assert all(torch.equal(one[name], other[name]) for name in one)

    # one number of one frozen weight, and it is another base
    weights = load_file(f"{base}/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-4
    save_file(weights, f"{base}/model.safetensors", metadata={"format": "pt"})
    flags = [*SMALL, "--model", base, "--data", "synthetic", *RANK]
    outcome = run_script(finetune_baseline, *flags, "--resume", str(checkpoints))
    assert outcome.code == 2  # after the weights were loaded, of which a bar tells
    assert "step-2 was trained beside other frozen weights, expected those of" in outcome.err
    flags += ["--lora-targets", "mlp"]
    outcome = run_script(finetune_baseline, *flags, "--resume", str(checkpoints))
    assert_refused(outcome, "is of another training: lora_targets mlp (not all)")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16, torch.float32])
def test_a_checksum_sees_every_number_and_its_place(dtype):
    t = torch.arange(30, device=DEVICE).view(5, 6).to(dtype)
    expected = checksum(t)
    for i in range(5):
        changed = t.clone()
        changed[i, i] += 1
        assert checksum(changed) != expected
    assert checksum(t.roll(1, 1)) != expected and checksum(t.t().contiguous()) != expected
    assert checksum(t.t().contiguous().t()) == expected  # however it lies in memory


def test_the_digest_is_of_what_is_frozen_and_of_buffers():
    assert frozen_digest(loading.load_model(tiny_workload())) is None
    model = adapted()
    expected = frozen_digest(model)
    with torch.no_grad():
        stepping.trained(model)[0].add_(1)
    assert frozen_digest(model) == expected
    model.model.register_buffer("packed", torch.zeros(3, dtype=torch.uint8, device=DEVICE))
    with_buffer = frozen_digest(model)
    model.model.packed[1] = 1
    assert len({expected, with_buffer, frozen_digest(model)}) == 3


# ---------------------------------------------------------------- profile and estimate


@pytest.mark.parametrize("kernels", ["none", pytest.param("all", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("targets", ["all", "mlp"])
def test_a_profile_tells_adapters_from_projections(
    recorded, monkeypatch, tmp_path, targets, kernels
):
    monkeypatch.setattr(profile_baseline, "TIMED_STEPS", 1)
    tokens = 16
    flags = ["--model", "tiny", "--seq-len", str(tokens), "--warmup", "1"]
    flags += ["--lora-rank", "4", "--lora-targets", targets]
    more = ["--kernels", kernels, "--trace", str(tmp_path / "trace.json")]
    record = recorded(profile_baseline, *flags, *more)
    config, workload = architecture.tiny_config(), tiny_workload(*flags[-4:])
    thin = tokens * 6 * ModelFacts(config, workload).trained
    hidden, inner = config.hidden_size, config.intermediate_size
    # the first layer's inputs need no gradient
    first = {"all": 3 * hidden, "mlp": 2 * hidden}[targets]
    thin -= tokens * 2 * 4 * first
    all_thin = thin
    if kernels == "all" and HAS_GPU:  # bf16: SwiGLU has three of the thin products
        thin -= 3 * tokens * 2 * 4 * config.intermediate_size * config.num_hidden_layers
    part = record["categories"][ADAPTERS]
    others = 2 * tokens * 2 * (2 * inner + hidden)  # scaling, addition: a FLOP for each number
    assert thin <= part["flops"] < thin + 8 * others
    whole = tokens * ModelFacts(config, workload).flops_per_token(0)
    angles = tokens * config.head_dim if HAS_GPU else 0  # positions @ frequencies
    found = record["categories"]["matmul"]["flops"]
    assert found == pytest.approx(whole - all_thin + angles, rel=1e-6)
    assert record["trained_parameters"] == ModelFacts(config, workload).trained


def test_an_estimate_has_no_gradients_of_frozen_weights_and_keeps_less():
    config, full = architecture.llama_3_1_8b_config(), Workload(batch_size=1, seq_len=512)
    config.num_hidden_layers = 2
    workload = replace(full, lora_rank=16, lora_alpha=16.0, lora_targets="all")
    before, after = (memory_estimate.estimate(config, each) for each in (full, workload))
    n = ModelFacts(config, workload).trained
    assert after["parts"]["optimizer state"] == pytest.approx(2 * 2 * n, rel=1e-3)
    added = after["parts"]["parameters"] - before["parts"]["parameters"]
    assert added == pytest.approx(2 * n, rel=1e-3)
    # neither gradients nor two moments, in bf16
    saved = before["peak_memory_bytes"] - after["peak_memory_bytes"]
    assert saved > 5 * ModelFacts(config).parameters
    # what a frozen projection without an adapter reads is not kept for it
    attention = replace(workload, lora_targets="attention")
    kept = [memory_estimate.estimate(config, w)["kept_in_layers"] for w in (workload, attention)]
    inputs = config.num_hidden_layers * 512 * 2 * config.intermediate_size  # down_proj's
    assert kept[0]["MLP"] - kept[1]["MLP"] >= inputs


def test_an_estimate_of_quantized_weights_has_half_a_byte_for_each():
    config = architecture.llama_3_1_8b_config()
    config.num_hidden_layers = 2
    kernels = tuple(KERNELS)
    lora = Workload(kernels=kernels, lora_rank=16, lora_alpha=16.0, lora_targets="all")
    before, after = (
        memory_estimate.estimate(config, each)["parts"]["parameters"]
        for each in (lora, replace(lora, quantize="nf4"))
    )
    n = ModelFacts(config).layer_weights * config.num_hidden_layers
    assert before - after == pytest.approx((2 - 0.516) * n, rel=1e-3)


def test_the_estimate_of_a_script_names_adapters(recorded):
    record = recorded(estimate, "--model", "tiny", *RANK)
    assert record["trained_parameters"] == 8960 and record["parameters"] == 119_232 + 8960


# ---------------------------------------------------------------- bad input


REFUSED = {
    "rank 0": (["--lora-rank", "0"], "at least 1"),
    "alpha 0": ([*RANK[:2], "--lora-alpha", "0"], "must be a number above 0"),
    "unknown targets": (
        [*RANK, "--lora-targets", "q_proj,conv"],
        "'conv': expected all, attention, mlp, or names of q_proj,k_proj",
    ),
    "no adapter": (["--adapter", "nowhere"], "--adapter nowhere cannot be read (No such file"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_values_that_cannot_be_are_refused(run_script, monkeypatch, tmp_path, script, case):
    monkeypatch.chdir(tmp_path)
    flags, said = REFUSED[case]
    assert_refused(run_script(script, *SMALL, *flags), said)


def test_without_peft_a_sentence_says_how_to_install_it(run_script, monkeypatch):
    monkeypatch.setattr(adapter_config.importlib.util, "find_spec", lambda name: None)
    assert_refused(run_script(finetune_baseline, *SMALL, *RANK), "pip install peft")


def change(folder: Path, **values) -> None:
    change_json(folder / CONFIG, **values)


def change_weights(folder: Path, edit) -> None:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS)


DAMAGED = {
    "no config": (lambda f: (f / CONFIG).unlink(), "cannot be read (No such file"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "is damaged (JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "is damaged (ValueError"),
    "rank 0": (lambda f: change(f, r=0), "is damaged (ArgumentTypeError"),
    "rank null": (lambda f: change(f, r=None), "is damaged"),
    "no targets": (lambda f: change(f, target_modules=[]), "adapts nothing"),
    "targets 5": (lambda f: change(f, target_modules=5), "is damaged (TypeError"),
    "other targets": (
        lambda f: change(f, target_modules=["query_key_value"]),
        "adapts query_key_value, expected some of these projections: q_proj",
    ),
    "DoRA": (lambda f: change(f, use_dora=True), "use_dora = true, expected plain LoRA"),
    "rsLoRA": (lambda f: change(f, use_rslora=True), "use_rslora = true"),
    "biases": (lambda f: change(f, bias="all"), 'bias = "all"'),
    "changed weights": (lambda f: change(f, init_lora_weights="pissa"), '= "pissa"'),
    "no LoRA": (lambda f: change(f, peft_type="IA3"), 'peft_type = "IA3"'),
    "another rank": (lambda f: change(f, r=2), "28 of another shape"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "could not be loaded"),
    "half the weights": (lambda f: os.truncate(f / WEIGHTS, 1000), "could not be loaded"),
    "a missing tensor": (
        lambda f: change_weights(f, lambda w: w.pop(min(w))),
        "1 missing, base_model.model.model.layers.0",
    ),
    "a tensor too many": (
        lambda f: change_weights(f, lambda w: w.update(more=torch.ones(1))),
        "1 not part of that model, more among them",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_an_adapter_that_does_not_fit_is_refused(adapter, train_further, case):
    damage, said = DAMAGED[case]
    damage(adapter)
    assert_refused(train_further(), said)


def test_an_adapter_of_another_model_is_refused(train_further, small_model):
    said = "does not fit tiny: 14 not part of that model", "give the --model"
    assert_refused(train_further(model="tiny"), *said)


@pytest.mark.parametrize(
    "flags", [["--lora-rank", "2"], ["--lora-alpha", "7"], ["--lora-targets", "mlp"]], ids=str
)
def test_flags_that_contradict_the_adapter_are_refused(train_further, flags):
    assert_refused(train_further(*flags), f"{flags[0]} is ", "but in --adapter")


def test_adapters_and_models_are_not_saved_into_one_folder(adapter, base, run_script):
    into_model = run_script(finetune_baseline, *SMALL, *RANK, "--save", base)
    assert_refused(into_model, "holds a model (config.json), and an adapter would be loaded")
    for flags in ([], [*RANK, "--merge"]):
        outcome = run_script(finetune_baseline, *SMALL, *flags, "--save", str(adapter))
        assert_refused(outcome, "holds an adapter (adapter_config.json)")
    assert set(TARGETS["all"]) == {*ATTENTION, *MLP}
