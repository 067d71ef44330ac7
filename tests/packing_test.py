"""A sample in a packed sequence is trained on as if it were alone, and nothing is lost."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli.device import DEVICE
from harness.data import dataset, packing
from harness.data.dataset import IGNORE_INDEX as IGNORE
from harness.model import architecture, loading, packed_attention
from harness.profiling.kernel_facts import MODEL_KERNELS, PLAYBOOK_KERNELS
from harness.steps import stepping
from next_steps.finetuning import distill, distillation, opponents
from next_steps.patches import apply_kernels
from tests.conftest import assert_refused
from tests.fixtures import HAS_GPU, needs_gpu
from tests.small_workloads import (
    TINY,
    assert_a_step_does_not_wait,
    jsonl,
    largest_error,
    tiny_workload,
    uneven_norms,
)

SIZE = 24  # of a sequence
EXAMPLES = [("a", "bcdefg"), ("hij", "klm"), ("no", "pqrstuvw"), ("x", "yz"), ("", "abcdefgh")]
LONGEST = 2  # of them
ALLOWED = 1e-5
STEPS = "--steps", "3"


@pytest.fixture
def file(tmp_path) -> str:
    return str(jsonl(tmp_path / "data.jsonl", *EXAMPLES, ("held", "out")))


@pytest.fixture
def samples(file) -> dataset.Samples:
    """The samples that are trained on: all but the last, which is held out."""
    data = dataset.load_data(packed("--data", file), architecture.tiny_config(), 1)
    return data.train.samples


def packed(*flags: str):
    flags = "--seq-len", str(SIZE), "--batch-size", "2", "--pack", *flags
    return tiny_workload(*flags)


def packed_batch(samples) -> dataset.Batch:
    """Return all samples in two sequences that both end in padding."""
    sequences = packing.first_fit(samples.lengths, range(len(samples)), SIZE, 2)
    assert sorted(i for each in sequences for i in each) == [*range(len(EXAMPLES))]
    (batch,) = dataset.Batches(samples, sequences, 2, packed_to=SIZE)
    return batch.to(DEVICE)


def gradients(model, *losses: tuple[dataset.Batch, float]) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients of a sum of batches with these weights."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch, weight in losses:
        loss = weight * model(**batch.inputs()).loss
        loss.backward()
        total += loss.detach()
    return {"loss": total} | {name: p.grad for name, p in model.named_parameters()}


def one_by_one(samples, model) -> dict[str, torch.Tensor]:
    """Return the same without packing: each sample in a batch of its own, and padded."""
    batches = []
    for i in range(len(samples)):
        (batch,) = dataset.Batches(samples, [[i], [LONGEST]], 2)
        batch.labels[1] = IGNORE  # it is there for the padding
        batches.append(replace(batch, n_targets=int((batch.labels[0, 1:] != IGNORE).sum())))
    n_targets = sum(batch.n_targets for batch in batches)
    return gradients(model, *((b.to(DEVICE), b.n_targets / n_targets) for b in batches))


def models(names) -> list[torch.nn.Module]:
    """Return two equal models: for packed batches with these kernels, and transformers' own."""
    ours, theirs = (uneven_norms(loading.load_model(w)) for w in (packed(), tiny_workload()))
    return [apply_kernels.apply_kernels(ours, names), theirs]


@pytest.mark.parametrize(
    "names",
    [(), PLAYBOOK_KERNELS, ("rope",), pytest.param(MODEL_KERNELS, marks=pytest.mark.exhaustive)],
    ids=["none", "playbook", "rope", "all"],
)
def test_packed_samples_train_as_one_by_one(samples, names):
    ours, theirs = models(names)
    expected = one_by_one(samples, theirs)
    found = gradients(ours, (packed_batch(samples), 1.0))
    error, name = largest_error(found, expected)
    assert error < ALLOWED, name


def with_targets(batch, places):
    labels = batch.labels.clone()
    labels[0, places] = batch.input_ids[0, places]
    return replace(batch, labels=labels)


WHOLE = SIZE * torch.arange(3, dtype=torch.int32, device=DEVICE)
FAULTS = {
    # positions that never restart would be no fault: RoPE knows only distances of tokens
    "positions restart one late": lambda b: replace(b, position_ids=b.position_ids.roll(1)),
    "samples see each other": lambda b: replace(b, sample_lengths=(SIZE,) * 2, cu_seq_lens=WHOLE),
    "first tokens are targets": lambda b: with_targets(b, b.cu_seq_lens[:-1].long()),
    "padding is a target": lambda b: with_targets(b, 2 * SIZE - 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_rejects(samples, fault):
    ours, theirs = models(())
    expected = one_by_one(samples, theirs)
    error, _ = largest_error(gradients(ours, (FAULTS[fault](packed_batch(samples)), 1.0)), expected)
    assert error > 100 * ALLOWED


def test_a_packed_batch_is_laid_out_token_by_token(samples):
    batches = dataset.Batches(samples, [[3, 1], [0]], 2, packed_to=12)
    assert batches.keys_of_a_token() == pytest.approx((4 * 4 + 7 * 7 + 8 * 8) / (4 + 7 + 8))
    assert batches.padding() == pytest.approx(1 - 19 / 24)
    batch = batches[0]
    assert batch.input_ids.tolist() == [
        [*b"xyz", 256, *b"hijklm", 256, 0, *b"abcdefg", 256, 0, 0, 0, 0]
    ]
    out = IGNORE
    expected = [out, *b"yz", 256, out, out, out, *b"klm", 256, out]
    expected += [out, *b"bcdefg", 256, out, out, out, out]
    assert batch.labels.tolist() == [expected]
    assert batch.position_ids.tolist() == [[*range(4), *range(7), 0, *range(8), *range(4)]]
    assert batch.cu_seq_lens.tolist() == [0, 4, 11, 12, 20, 24]
    assert batch.cu_seq_lens.dtype == torch.int32
    assert batch.sample_lengths == (4, 7, 1, 8, 4)
    assert (batch.n_tokens, batch.n_targets) == (19, 3 + 4 + 7)
    # the empty prompt's first token is in the completion, and would be a target
    batch = dataset.Batches(samples, [[3, 4]], 1, packed_to=SIZE)[0]
    assert batch.labels[0, 4] == IGNORE and batch.n_targets == 3 + 8


def test_first_fit_uses_the_room_that_is_left_and_nothing_twice():
    lengths = np.array([5, 6, 3, 4, 1, 8])
    assert packing.first_fit(lengths, range(6), 8, n=10) == [[0, 2], [1, 4], [3], [5]]
    # it ends at the first that finds no room
    assert packing.first_fit(lengths, range(6), 8, n=2) == [[0, 2], [1]]


@pytest.mark.parametrize("seq_len, left", [(16, 0.12), (64, 0.03)])
def test_every_sample_comes_once_an_epoch_and_none_is_cut(tmp_path, seq_len, left):
    texts = [("p" * (i % 7), "c" * (1 + i * 5 % 11)) for i in range(200)]
    path = jsonl(tmp_path / "data.jsonl", *texts)
    workload = packed("--data", str(path), "--seq-len", str(seq_len), "--batch-size", "1")
    train = dataset.load_data(workload, architecture.tiny_config(), 100).train
    drawn = [i for sequence in train.sequences for i in sequence]
    lengths = train.samples.lengths
    assert all(lengths[sequence].sum() <= seq_len for sequence in train.sequences)
    assert len(train) == 100 and all(b.input_ids.shape == (1, seq_len) for b in train)
    counts = np.bincount(drawn, minlength=len(train.samples))
    # an open sequence may wait for its last sample while the next epoch has begun
    assert counts.max() - counts.min() <= 2
    assert train.padding() < left
    padded = dataset.load_data(replace(workload, pack=False), architecture.tiny_config(), 100).train
    assert dataset.Batches(padded.samples, padded.sequences, 4).padding() > 0.2


def test_texts_are_cut_where_a_sequence_is_full_and_lose_no_token():
    encode = dataset.samples.Encoder(None, [256])
    texts = ["first text", "second, longer text", "3", ""]
    whole = dataset.samples.tokenize_texts(texts, encode)
    pieces = whole.in_pieces(7)
    found = [ids.tolist() for ids, _ in pieces]
    assert [len(ids) for ids in found] == [7, 4, 7, 7, 6, 2]  # the end alone teaches nothing
    assert [token for ids in found for token in ids] == whole.tokens.tolist()[:-1]


# ---------------------------------------------------------------- in a run


@pytest.mark.parametrize(
    "script, flags",
    [
        (finetune_baseline, [*STEPS, "--save", "model"]),
        (finetune_optimized, [*STEPS, "--kernels", "rope"]),
        (opponents, [*STEPS, "--opponent", "fused-adamw"]),
        (distill, [*STEPS, "--teacher", "tiny", "--kernels", "none"]),
        (profile_baseline, ["--trace", "trace.json"]),
    ],
    ids=["baseline", "optimized", "opponent", "teacher", "profile"],
)
def test_scripts_take_packed_steps(run_script, tmp_path, monkeypatch, file, script, flags):
    monkeypatch.chdir(tmp_path)
    outcome = run_script(script, *TINY, "--data", file, "--pack", *flags)
    assert outcome.code == 0, outcome.err
    if script is not profile_baseline:
        assert "packed: " in outcome.out and "Padding: " in outcome.out
        assert ("Waiting for data: " in outcome.out) == HAS_GPU
    if "--save" in flags:  # what was trained so serves any attention
        assert (
            packed_attention.ATTENTION_NAME not in (tmp_path / "model" / "config.json").read_text()
        )


@pytest.mark.parametrize("pack", [[], ["--pack"]], ids=["padded", "packed"])
def test_useful_tokens_are_counted_and_padding_is_recorded(recorded, file, pack):
    flags = *TINY, "--batch-size", "2", "--steps", "4", "--data", file
    found = recorded(finetune_baseline, *flags, *pack)
    batches = dataset.load_data(tiny_workload(*flags, *pack), architecture.tiny_config(), 4).train
    # no token of a sample is the padding's 0
    useful = [int((batch.input_ids != 0).sum()) for batch in batches]
    places = [batch.input_ids.numel() for batch in batches]
    assert found["tokens"] == useful
    assert found["padding"] == pytest.approx(1 - sum(useful) / sum(places)) and found["padding"] > 0
    assert found.get("pack", False) == bool(pack)


def test_a_distilled_step_is_packed_too(samples):
    student, teacher = (loading.load_model(packed("--seed", seed)) for seed in "12")
    distillation.learn_from(student, teacher.eval(), fused=False)
    batch = packed_batch(samples)
    found = gradients(student, (batch, 1.0))
    alone = [dataset.Batches(samples, [[i]], 1, packed_to=SIZE)[0] for i in range(len(samples))]
    weights = [b.n_targets / batch.n_targets for b in alone]
    expected = gradients(student, *((b.to(DEVICE), w) for b, w in zip(alone, weights)))
    error, name = largest_error(found, expected)
    assert error < ALLOWED, name


def test_gradient_checkpointing_keeps_the_boundaries(samples):
    model, _ = models(())
    batch = packed_batch(samples)
    expected = gradients(model, (batch, 1.0))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    error, _ = largest_error(gradients(model, (batch, 1.0)), expected)
    assert error < 1e-6


def test_samples_that_do_not_fit_are_skipped_and_counted(run_script, tmp_path):
    path = jsonl(tmp_path / "data.jsonl", ("ab", "c"), ("p" * 99, "too long"), ("cd", "e"))
    flags = *TINY, "--steps", "1", "--data", str(path), "--pack"
    outcome = run_script(finetune_baseline, *flags)
    assert outcome.code == 0 and "1 skipped" in outcome.out
    assert_refused(run_script(finetune_baseline, *flags, "--seq-len", "1"), "--seq-len 1")


# ---------------------------------------------------------------- on a GPU


@needs_gpu
@pytest.mark.parametrize("names", [(), MODEL_KERNELS], ids=["none", "all"])
def test_a_packed_step_does_not_wait_for_the_gpu(samples, names):
    workload = packed("--dtype", "bf16")
    model = apply_kernels.apply_kernels(loading.load_model(workload), names)
    optimizer = stepping.make_optimizer(model, 1e-5)
    assert_a_step_does_not_wait(model, optimizer, [packed_batch(samples)])


@needs_gpu
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["equal", "grouped"])
def test_the_gpus_packed_attention_is_that_of_the_loop(heads):
    """In bf16, at most twice as far from fp32 as the loop over the samples."""
    lengths = (5, 130, 1, 64)
    shapes = [(1, n, sum(lengths), 64) for n in (*heads, heads[1])]
    inputs = [torch.randn(shape, device=DEVICE) for shape in shapes]
    upstream = torch.randn(1, sum(lengths), heads[0], 64, device=DEVICE)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)
    keys = {"cu_seq_lens_q": ends, "max_length_q": max(lengths), "sample_lengths": lengths}

    def attended(dtype, dropout):
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in inputs)
        # a dropout of next to nothing takes the loop
        arguments = keys | {"scaling": 0.125, "dropout": dropout}
        out, _ = packed_attention.packed_attention(None, q, k, v, None, **arguments)
        out.backward(upstream.to(dtype))
        return [x.float() for x in (out.detach(), q.grad, k.grad, v.grad)]

    expected = attended(torch.float32, 0.0)
    errors = [
        [(x - y).norm() / y.norm() for x, y in zip(attended(torch.bfloat16, dropout), expected)]
        for dropout in (0.0, 1e-12)
    ]
    for ours, loops in zip(*errors):
        assert ours <= 2 * loops + 1e-3
