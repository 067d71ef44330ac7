"""The workload does what its docstrings say: model, data, loss, patching, training, saving."""

import json
import math
from pathlib import Path

import pytest
import torch

import finetune_baseline
import finetune_optimized
from harness import architecture, command_line, dataset, loading, patching, saving, stepping, training_run
from harness.checking import DEVICE, relative_error
from harness.workload import finetune_parser
from rmsnorm_kernel import TritonRMSNorm
from tests.fixtures import needs_gpu

# isort: split
# after `measure`, which decides how triton (imported by these) will run
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama.modeling_llama import LlamaRMSNorm

IGNORE = dataset.IGNORE_INDEX
END = 256  # the tiny model's end-of-text token
PLAYBOOK = finetune_optimized.PLAYBOOK_KERNELS.split(",")
# A few hundred rows are all that Triton's interpreter gets through in a second.
TINY = ["--model", "tiny", "--dtype", "fp32", "--seq-len", "16", "--batch-size", "1"]


def arguments(*flags: str):
    """The scripts' own parsing; a later flag wins over TINY's."""
    return finetune_parser("").parse_args([*TINY, *flags])


def run(script, monkeypatch, tmp_path: Path, *flags: str) -> dict:
    """The record of script.main() with these flags."""
    record = tmp_path / f"{script.__name__}.json"
    monkeypatch.setattr("sys.argv", [script.__name__, *TINY, *flags, "--json", str(record)])
    script.main()
    return json.loads(record.read_text())


def jsonl(path: Path, *examples: tuple[str, str]) -> Path:
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in examples]
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_batch(batch_size: int = 2, seq_len: int = 12) -> dataset.Batch:
    """Random tokens, the first third of the labels masked as a prompt is."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(architecture.BYTE_VOCABULARY, (batch_size, seq_len), generator=generator)
    labels = ids.clone()
    labels[:, : seq_len // 3] = IGNORE
    return dataset.Batch(ids, labels, ids.numel()).to(DEVICE)


def uneven_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Norm weights away from their initial 1, where a kernel that forgets them would pass."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
    return model


def loss_and_gradients(model: torch.nn.Module, batch: dataset.Batch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
    loss.backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, grad in named.items() if grad is None]
    assert not missing, f"no gradient for {missing}"
    return {"loss": loss.detach(), **named}


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error of any entry, and whose it is."""
    assert found.keys() == expected.keys()
    return max((relative_error(found[name], expected[name]), name) for name in expected)


# ---------------------------------------------------------------- model


def test_the_8b_config_is_llama_3_1():
    config = architecture.llama_3_1_8b_config()
    published = {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 128_000, "eos_token_id": 128_001,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in published} == published
    assert config.rope_parameters == {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert architecture.parameter_count(config) == 8_030_261_248


def test_rope_scaling_reaches_the_frequencies():
    config = architecture.llama_3_1_8b_config()
    config.num_hidden_layers, config.intermediate_size, config.vocab_size = 1, 8, 8
    frequencies = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    unscaled = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    wavelengths = 2 * math.pi / unscaled
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192 / 1
    torch.testing.assert_close(frequencies[fast], unscaled[fast])  # high frequencies stay
    torch.testing.assert_close(frequencies[slow], unscaled[slow] / 8)  # low ones are slowed 8 times
    between = frequencies[~fast & ~slow] / unscaled[~fast & ~slow]
    assert len(between) > 0 and (between > 1 / 8).all() and (between < 1).all()


def test_weights_depend_on_the_seed_and_on_nothing_else():
    first, again, other = (loading.load_model(arguments("--seed", seed)).state_dict() for seed in "778")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_both_scripts_run_the_same_loop(monkeypatch, tmp_path):
    flags = ["--seq-len", "24", "--batch-size", "2", "--steps", "4"]
    baseline = run(finetune_baseline, monkeypatch, tmp_path, *flags)
    unpatched = run(finetune_optimized, monkeypatch, tmp_path, *flags, "--kernels", "none")
    assert baseline.keys() == unpatched.keys()
    assert unpatched["losses"] == pytest.approx(baseline["losses"], rel=1e-6)
    differing = {key for key in baseline if baseline[key] != unpatched[key]}
    assert differing <= {
        "title", "seconds", "average_seconds", "median_seconds", "tokens_per_second", "peaks",
        "peak_memory_bytes", "losses", "validation_loss_after",
    }  # fmt: skip


# ---------------------------------------------------------------- data


def test_packing_loses_and_repeats_no_token():
    texts = ["first text", "second, longer text", "third"]
    tokens = [token for text in texts for token in [*text.encode(), END]]
    rows = dataset.pack(texts, lambda text: list(text.encode()), [END], seq_len=7, n_wanted=100)
    assert len(rows) == len(tokens) // 7
    assert all(ids.shape == (7,) and torch.equal(ids, labels) for ids, labels in rows)
    assert torch.cat([ids for ids, _ in rows]).tolist() == tokens[: 7 * len(rows)]
    assert len(dataset.pack(texts, lambda text: list(text.encode()), [END], seq_len=7, n_wanted=2)) == 2


def test_no_stdlib_file_is_both_trained_on_and_held_out():
    train, validation = dataset.read_texts("stdlib")
    assert len(train) > 50 and len(validation) > 5
    assert not {text for text in train if text} & {text for text in validation if text}


def test_held_out_part_of_a_text_file_is_not_trained_on(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{i:07d}\n" for i in range(500)))  # every 8 bytes occur once
    data = dataset.load_data(
        arguments("--data", str(path), "--seq-len", "8", "--steps", "1000"), architecture.tiny_config(), 1000
    )
    train = {tuple(batch.input_ids[0].tolist()) for batch in data.train}
    validation = {tuple(batch.input_ids[0].tolist()) for batch in data.validation}
    assert len(train) == 450 and len(validation) == dataset.VALIDATION_BATCHES
    assert not train & validation


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
def test_no_batch_is_repeated_within_a_run(source):
    args = arguments("--data", source, "--batch-size", "2", "--steps", "20")
    data = dataset.load_data(args, architecture.tiny_config(), 20)
    assert len(data.train) == 20 and len(data.validation) == dataset.VALIDATION_BATCHES
    assert all(batch.input_ids.shape == (2, 16) and batch.n_tokens == 32 for batch in data.train)
    assert len({tuple(batch.input_ids.flatten().tolist()) for batch in data.train + data.validation}) == 24


def test_data_depends_on_the_seed_and_on_nothing_else():
    def tokens(seed: str) -> list[list]:
        data = dataset.load_data(arguments("--seed", seed, "--steps", "8"), architecture.tiny_config(), 8)
        return [batch.input_ids.tolist() for batch in data.train]

    assert tokens("3") == tokens("3")
    assert tokens("3") != tokens("4")
    assert sorted(tokens("3")) == sorted(tokens("4"))  # only the order is drawn


def test_every_epoch_covers_every_sequence_once():
    order = list(dataset.epochs(n_sequences=7, n_wanted=24, seed=0))
    assert len(order) == 24
    for start in (0, 7, 14):
        assert sorted(order[start : start + 7]) == list(range(7))
    assert len(set(order[21:])) == 3
    assert order[:7] != order[7:14]


def test_prompt_and_padding_are_masked_token_by_token(tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("ab", "cd"), ("a", "bcdef"), ("x", "y"))
    data = dataset.load_data(arguments("--data", str(path), "--batch-size", "2"), architecture.tiny_config(), 1)
    (batch,) = data.train
    rows = sorted(zip(batch.input_ids.tolist(), batch.labels.tolist()), key=lambda row: row[0][1:])
    assert rows == [
        (list(b"abcdef") + [END], [IGNORE, *b"bcdef", END]),
        (list(b"abcd") + [END, 0, 0], [IGNORE, IGNORE, *b"cd", END, IGNORE, IGNORE]),
    ]
    assert batch.n_tokens == 7 + 5
    (held_out,) = data.validation
    assert held_out.input_ids.tolist() == [[*b"xy", END]]
    assert held_out.labels.tolist() == [[IGNORE, *b"y", END]]


def test_long_example_is_cut_at_its_end(tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("ab", "cdef"), ("a", "b"))
    examples, n_skipped = dataset.read_jsonl(str(path), lambda text: list(text.encode()), [END], seq_len=4)
    (ids, labels), _ = examples
    assert n_skipped == 0
    assert ids.tolist() == list(b"abcd")
    assert labels.tolist() == [IGNORE, IGNORE, *b"cd"]


@pytest.mark.parametrize("example", [("abcdefgh", "completion cut away"), ("", "")])
def test_example_with_nothing_to_train_on_is_skipped(tmp_path, example):
    path = jsonl(tmp_path / "data.jsonl", ("a", "b"), example, ("c", "d"))
    examples, n_skipped = dataset.read_jsonl(str(path), lambda text: list(text.encode()), [END], seq_len=8)
    assert [ids.tolist() for ids, _ in examples] == [[*b"ab", END], [*b"cd", END]]
    assert n_skipped == 1
    jsonl(path, example, example)
    with pytest.raises(command_line.UserError, match="line 1: no completion token is left to train on"):
        dataset.read_jsonl(str(path), lambda text: list(text.encode()), [END], seq_len=8)


def test_jsonl_may_hold_line_separators_a_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '\ufeff{"prompt": "a\u2028b", "completion": "c\u0085d"}\r\n\r\n{"prompt": "", "completion": "e\\u2029f"}'
    )
    examples, _ = dataset.read_jsonl(str(path), lambda text: list(text.encode()), [], seq_len=64)
    assert [bytes(ids.tolist()).decode() for ids, _ in examples] == ["a\u2028bc\u0085d", "e\u2029f"]


def test_padding_changes_no_loss(tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("ab", "cd"), ("a", "bcdefghij"), ("x", "y"))
    model = loading.load_model(arguments())
    examples, _ = dataset.read_jsonl(str(path), lambda text: list(text.encode()), [END], seq_len=16)
    together = training_run.validation_loss(model, dataset.make_batches(examples, batch_size=3))
    one_by_one = training_run.validation_loss(model, dataset.make_batches(examples, batch_size=1))
    assert together == pytest.approx(one_by_one, rel=1e-6)


# ---------------------------------------------------------------- loss


def shifted_cross_entropy(logits, targets, ignore_index):
    rows, targets = logits.flatten(0, -2), targets.flatten()
    return torch.nn.functional.cross_entropy(rows, targets, ignore_index=ignore_index)


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 9, 50, generator=generator) + 1
    labels = torch.randint(50, (3, 9), generator=generator)
    labels[0, :4], labels[1, -2:], labels[2] = IGNORE, IGNORE, IGNORE  # prompt, padding, a whole row
    return logits.to(DEVICE), labels.to(DEVICE)


@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)])
def test_loss_and_gradient_are_hugging_faces(items):
    logits, labels = logits_and_labels()
    results = []
    for loss_function in (ForCausalLMLoss, patching.causal_lm_loss(shifted_cross_entropy)):
        leaf = logits.clone().requires_grad_()
        loss = loss_function(logits=leaf, labels=labels, vocab_size=50, num_items_in_batch=items)
        loss.backward()
        results.append({"loss": loss.detach(), "gradient": leaf.grad})
    assert largest_error(results[1], results[0])[0] < 1e-6
    off_by_one = patching.causal_lm_loss(shifted_cross_entropy)(logits, None, shift_labels=labels)
    assert relative_error(off_by_one, results[0]["loss"]) > 1e-3, "this comparison cannot fail"


@pytest.mark.parametrize("n_targets", [1, 3, 7, 41, 49])
def test_a_single_micro_batch_is_scaled_by_exactly_one(n_targets):
    """n / n is 1, but loss * n / n is not always the loss; a fused loss scales its gradients by anything but 1."""
    loss, scales = torch.tensor(0.1, requires_grad=True), []
    loss.register_hook(lambda gradient: scales.append(gradient.item()))
    labels = torch.full((1, 60), IGNORE)
    labels[0, 1 : 1 + n_targets] = 5
    loss_function, logits = patching.causal_lm_loss(lambda *_: loss.clone()), torch.zeros(1, 60, 7)
    for items in (n_targets, torch.tensor(n_targets)):
        scaled = loss_function(logits, labels, num_items_in_batch=items)
        scaled.backward()
        assert torch.equal(scaled, loss)
    assert scales == [1.0, 1.0]
    assert loss_function(logits, labels, num_items_in_batch=2 * n_targets) == loss / 2


def test_a_micro_batch_without_targets_adds_nothing():
    logits = torch.randn(1, 4, 50, requires_grad=True)
    labels = torch.full((1, 4), dataset.IGNORE_INDEX)
    loss_function = patching.causal_lm_loss(shifted_cross_entropy)
    loss = loss_function(logits, labels, num_items_in_batch=torch.tensor(7))
    loss.backward()
    assert loss == 0 and not logits.grad.any()


@pytest.mark.parametrize("items", [None, 17, torch.tensor([17])])
@pytest.mark.parametrize("shifted", [False, True])
def test_another_ignore_index_is_hugging_faces(items, shifted):
    logits, labels = logits_and_labels()
    options = {"vocab_size": 50, "num_items_in_batch": items, "ignore_index": 0}
    labels = labels.clamp_min(0)
    if shifted:
        options["shift_labels"] = labels.flip(1)
    results = []
    for loss_function in (ForCausalLMLoss, patching.causal_lm_loss(shifted_cross_entropy)):
        leaf = logits.clone().requires_grad_()
        loss = loss_function(leaf, labels, **options)
        loss.sum().backward()
        results.append({"loss": loss.detach(), "gradient": leaf.grad})
    assert results[0]["loss"].shape == results[1]["loss"].shape
    assert largest_error(results[1], results[0])[0] < 1e-6
    everything_counts = ForCausalLMLoss(logits, labels, **options | {"ignore_index": IGNORE})
    assert relative_error(everything_counts, results[0]["loss"]) > 1e-3, "this comparison cannot fail"


def test_arguments_come_in_hugging_faces_order():
    logits, labels = logits_and_labels()
    labels = labels.clamp_min(0)
    arguments = logits, labels, 50, 17, 0, labels.flip(1)
    found = patching.causal_lm_loss(shifted_cross_entropy)(*arguments)
    assert relative_error(found, ForCausalLMLoss(*arguments)) < 1e-6


def test_another_vocabulary_than_the_logits_is_refused():
    logits, labels = logits_and_labels()
    for vocab_size in (49, 100):
        with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}, expected 50, the logits' last size"):
            patching.causal_lm_loss(shifted_cross_entropy)(logits, labels, vocab_size)


def test_a_subclass_and_what_make_gives_back_stay():
    class TheirNorm(LlamaRMSNorm):
        pass

    model = loading.load_model(arguments())
    theirs, final = TheirNorm(128).to(DEVICE), model.model.norm
    model.model.layers[0].input_layernorm = theirs

    def make(norm):
        return norm if norm is final else torch.nn.Identity()

    n_replaced = patching.replace_modules(model, LlamaRMSNorm, make)
    assert n_replaced == 2 * model.config.num_hidden_layers - 1
    assert model.model.norm is final and model.model.layers[0].input_layernorm is theirs


def test_labels_that_come_shifted_are_not_shifted_again():
    logits, labels = logits_and_labels()
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
    loss_function = patching.causal_lm_loss(shifted_cross_entropy)
    assert torch.equal(loss_function(logits, labels), loss_function(logits, None, shift_labels=shifted))


def test_the_shift_copies_no_logits():
    model = loading.load_model(arguments())
    produced, received = [], []
    model.lm_head.register_forward_hook(lambda module, inputs, output: produced.append(output))

    def cross_entropy(logits, targets, ignore_index):
        received.append(logits)
        return shifted_cross_entropy(logits, targets, ignore_index)

    model.loss_function = patching.causal_lm_loss(cross_entropy)
    batch = tiny_batch()
    model(input_ids=batch.input_ids, labels=batch.labels)
    assert received[0].shape == produced[0].shape == (2, 12, architecture.BYTE_VOCABULARY)
    assert received[0].data_ptr() == produced[0].data_ptr()


def test_validation_loss_weighs_tokens_not_batches(tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("", "abcdefghijkl"), ("abcdefgh", "i"))
    model = loading.load_model(arguments())
    examples, _ = dataset.read_jsonl(str(path), lambda text: list(text.encode()), [], seq_len=16)
    batches = dataset.make_batches(examples, batch_size=1)
    sums, counts = [], [11, 1]  # nothing predicts a sequence's first token, which the empty prompt leaves to train on
    for batch in batches:
        logits = model(input_ids=batch.input_ids.to(DEVICE)).logits.detach()[0, :-1].cpu()
        sums.append(torch.nn.functional.cross_entropy(logits, batch.labels[0, 1:], reduction="sum").item())
    found = training_run.validation_loss(model, batches)
    assert found == pytest.approx(sum(sums) / sum(counts), rel=1e-5)
    wrong = sum(total / count for total, count in zip(sums, counts)) / 2
    assert found != pytest.approx(wrong, rel=1e-4), "this comparison cannot fail"
    assert model.training


# ---------------------------------------------------------------- floating-point operations


def test_flops_per_token_is_what_pytorch_counts():
    config = architecture.tiny_config()
    config._attn_implementation = "eager"  # its matrix products are visible to the counter
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    # eager attention also multiplies the half of the scores that the causal mask throws away
    masked_half = 6.0 * config.num_hidden_layers * config.hidden_size * 64
    expected = ids.numel() * (architecture.flops_per_token(config, 64) + masked_half)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)  # RoPE's angles are 3e-5 of it


def test_flops_per_token_of_the_8b_model():
    config = architecture.llama_3_1_8b_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    assert architecture.flops_per_token(config, 2048) == 6 * matrices + 6 * 32 * 4096 * 2048


# ---------------------------------------------------------------- patching


def test_every_norm_is_replaced_and_no_weight_copied():
    model = uneven_norms(loading.load_model(arguments()))
    before, config = dict(model.named_parameters()), model.config
    values = {name: weight.clone() for name, weight in before.items()}
    n_replaced = patching.replace_modules(model, LlamaRMSNorm, TritonRMSNorm.from_llama_rmsnorm)
    norms = [module for module in model.modules() if type(module) is TritonRMSNorm]
    assert n_replaced == len(norms) == 2 * config.num_hidden_layers + 1
    assert not any(type(module) is LlamaRMSNorm for module in model.modules())
    assert all(norm.variance_epsilon == config.rms_norm_eps and norm.training for norm in norms)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)


@pytest.mark.parametrize("names", [[], ["rmsnorm"], ["cross_entropy"], ["rmsnorm", "cross_entropy"]])
def test_each_named_kernel_is_patched_in_and_no_other(names):
    """Equal numbers prove nothing about a kernel that does not run."""
    batch = tiny_batch(batch_size=1, seq_len=6)
    model = uneven_norms(loading.load_model(arguments()))
    expected = loss_and_gradients(model, batch)
    finetune_optimized.apply_kernels(model, names)
    n_norms = sum(type(module) is TritonRMSNorm for module in model.modules())
    assert n_norms == (5 if "rmsnorm" in names else 0)
    loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
    assert (loss.grad_fn.name() == "FusedCrossEntropyFunctionBackward") == ("cross_entropy" in names)
    assert largest_error(loss_and_gradients(model, batch), expected)[0] < 1e-5


def test_patched_model_has_the_unpatched_loss_and_gradients():
    batch = tiny_batch()
    model = uneven_norms(loading.load_model(arguments()))
    expected = loss_and_gradients(model, batch)
    finetune_optimized.apply_kernels(model, PLAYBOOK)
    error, name = largest_error(loss_and_gradients(model, batch), expected)
    assert error < 1e-5, f"{name} is off by {error:.1e}"


def test_a_wrong_kernel_changes_loss_or_gradients():
    def wrong_eps(module):
        norm = TritonRMSNorm.from_llama_rmsnorm(module)
        norm.variance_epsilon = 1e-6
        return norm

    def only_the_target_entries(model):
        def cross_entropy(logits, targets, ignore_index):
            keep = torch.nn.functional.one_hot(targets.clamp_min(0), logits.shape[-1])
            logits.register_hook(lambda gradient: gradient * keep)
            return shifted_cross_entropy(logits, targets, ignore_index)

        model.loss_function = patching.causal_lm_loss(cross_entropy)

    batch = tiny_batch()
    for spoil in (
        lambda model: patching.replace_modules(model, LlamaRMSNorm, wrong_eps),
        lambda model: patching.replace_modules(model, LlamaRMSNorm, lambda m: TritonRMSNorm(64).to(DEVICE)),
        only_the_target_entries,
    ):
        model = uneven_norms(loading.load_model(arguments()))
        expected = loss_and_gradients(model, batch)
        spoil(model)
        norms = [m for m in model.modules() if type(m) is TritonRMSNorm]
        found = loss_and_gradients(model, batch)
        assert largest_error(found, expected)[0] > 1e-4, f"not noticed: {norms[:1] or 'masked gradient'}"


def test_gradient_accumulation_adds_up_to_one_large_batch():
    model = uneven_norms(loading.load_model(arguments()))
    batch = tiny_batch(batch_size=2)
    batch.labels[1, :9] = IGNORE  # so that the two halves weigh differently
    expected = loss_and_gradients(model, batch)
    n_targets = int((batch.labels[:, 1:] != IGNORE).sum())

    finetune_optimized.apply_kernels(model, PLAYBOOK)
    model.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=DEVICE)
    for row in range(2):
        ids, labels = batch.input_ids[row : row + 1], batch.labels[row : row + 1]
        part = model(input_ids=ids, labels=labels, num_items_in_batch=n_targets).loss
        part.backward()
        loss += part.detach()
    found = {"loss": loss, **{name: p.grad for name, p in model.named_parameters()}}
    error, name = largest_error(found, expected)
    assert error < 1e-5, f"{name} is off by {error:.1e}"


# ---------------------------------------------------------------- training


def test_training_step_is_forward_backward_update_and_clean_gradients():
    args = arguments("--steps", "3")
    model, plain = loading.load_model(args), loading.load_model(args)
    optimizer = stepping.make_optimizer(model, 1e-3)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for batch in dataset.load_data(args, model.config, 3).train:
        batch = batch.to(DEVICE)
        loss = stepping.training_step(model, optimizer, batch)
        plain_loss = plain(input_ids=batch.input_ids, labels=batch.labels).loss
        plain_loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-6) and not loss.requires_grad
        assert all(parameter.grad is None for parameter in model.parameters())
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert relative_error(ours, theirs) < 1e-5


def test_finetune_trains_with_the_optimizer_that_it_is_given(monkeypatch, tmp_path):
    made = []

    def make_optimizer(model, lr):
        made.append((model, lr, torch.optim.SGD(model.parameters(), lr=1e-30)))
        return made[-1][2]

    args = arguments("--steps", "2", "--lr", "0.25", "--json", str(tmp_path / "run.json"))
    model = loading.load_model(args)
    record = llama.finetune(model, args, title="Mine", kernels=["mine"], make_optimizer=make_optimizer)
    ((its_model, lr, _),) = made
    assert its_model is model and lr == record["lr"] == 0.25 and record["kernels"] == ["mine"]
    assert record["validation_loss_after"] == record["validation_loss_before"], "a step of 1e-30 changes nothing"


def loss_differences(baseline: dict, optimized: dict) -> list[float]:
    first = [*baseline["losses"], baseline["validation_loss_before"], baseline["validation_loss_after"]]
    second = [*optimized["losses"], optimized["validation_loss_before"], optimized["validation_loss_after"]]
    return [abs(a - b) / a for a, b in zip(first, second)]


KERNEL_FLAGS = {"default": ([], PLAYBOOK), "all": (["--kernels", "all"], finetune_optimized.KERNELS)}


@pytest.mark.parametrize("flags, kernels", KERNEL_FLAGS.values(), ids=KERNEL_FLAGS)
def test_optimized_run_follows_the_baseline_step_by_step(monkeypatch, tmp_path, flags, kernels):
    steps = 5 if "all" in flags else 10  # the interpreter is slow
    workload = ["--seq-len", "8", "--steps", str(steps)]
    baseline = run(finetune_baseline, monkeypatch, tmp_path, *workload)
    optimized = run(finetune_optimized, monkeypatch, tmp_path, *workload, *flags)
    assert optimized["kernels"] == kernels and baseline["kernels"] == []
    assert len(baseline["losses"]) == len(optimized["losses"]) == steps
    assert max(loss_differences(baseline, optimized)) < 1e-5
    assert baseline["validation_loss_after"] < baseline["validation_loss_before"], "nothing was learned"


@needs_gpu
@pytest.mark.parametrize("kernels", ["rmsnorm,cross_entropy", "all"])
def test_optimized_run_follows_the_baseline_in_bf16(monkeypatch, tmp_path, kernels):
    flags = ["--dtype", "bf16", "--seq-len", "256", "--batch-size", "4", "--steps", "20"]
    baseline = run(finetune_baseline, monkeypatch, tmp_path, *flags)
    optimized = run(finetune_optimized, monkeypatch, tmp_path, *flags, "--kernels", kernels)
    assert max(loss_differences(baseline, optimized)) < 1e-2


def test_saved_model_loads_and_goes_on_from_where_it_stopped(monkeypatch, tmp_path):
    folder = tmp_path / "saved"
    trained = run(finetune_optimized, monkeypatch, tmp_path, "--steps", "2", "--save", str(folder))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    saved_config, config = AutoConfig.from_pretrained(folder).to_dict(), architecture.tiny_config().to_dict()
    changed = {key for key in config if saved_config[key] != config[key]}
    assert changed <= {"_name_or_path", "architectures", "dtype", "transformers_version"}
    AutoModelForCausalLM.from_pretrained(folder)

    again = ["--model", str(folder), "--steps", "2", "--save", str(folder)]  # over the file it was read from
    resumed = run(finetune_baseline, monkeypatch, tmp_path, *again)
    assert resumed["weights"] == "pretrained weights"
    assert resumed["validation_loss_before"] == pytest.approx(trained["validation_loss_after"], rel=1e-5)
    third = run(finetune_baseline, monkeypatch, tmp_path, *again)
    assert third["validation_loss_before"] == pytest.approx(resumed["validation_loss_after"], rel=1e-5)


def test_saving_leaves_no_shard_of_an_older_model(tmp_path):
    args = arguments("--save", str(tmp_path))
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").write_text("older")
    (tmp_path / "notes.txt").write_text("the user's own")
    model = loading.load_model(args)
    saving.save_model(model, args)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "notes.txt",
    ]  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value.cpu()) for name, value in model.state_dict().items())


def test_the_tokenizer_is_saved_with_the_model(monkeypatch, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    AutoModelForCausalLM.from_config(architecture.tiny_config()).save_pretrained(first)
    words = Tokenizer(models.WordLevel({"[unknown]": 0, "import": 7, "def": 8}, "[unknown]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unknown]").save_pretrained(first)
    run(finetune_baseline, monkeypatch, tmp_path, "--model", str(first), "--steps", "1", "--save", str(second))
    args = arguments("--model", str(second))
    assert dataset.load_tokenizer(args)("def f ( ) : import os")["input_ids"] == [8, 0, 0, 0, 0, 7, 0]
    (ids, _), *_ = dataset.pack(["import def"], *dataset.text_encoder(dataset.load_tokenizer(args), None), 2, 1)
    assert ids.tolist() == [7, 8]
