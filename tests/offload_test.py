"""What waited in the host's memory is what left, and a copy that was not waited for is noticed."""

import contextlib
import weakref
from dataclasses import replace

import pytest
import torch

from harness.cli.device import HAS_GPU
from harness.cli.flags import RECOMPUTE
from harness.cli.workload import Workload
from harness.model import architecture
from harness.profiling.kernel_facts import MODEL_KERNELS
from next_steps.memory import memory_estimate
from next_steps.memory.peak_attribution import KEPT
from next_steps.patches import offload
from next_steps.patches.recompute import set_recompute
from tests.fixtures import needs_gpu
from tests.recompute_test import (
    LEVELS,
    assert_two_backwards_give_twice_the_gradients,
    make_model,
)
from tests.small_workloads import largest_error, loss_and_gradients, tiny_batch

KERNELS = pytest.mark.parametrize("kernels", [[], ["swiglu"], MODEL_KERNELS], ids=len)


class LateStream:
    """A stream that copies when somebody waits for it: as late as a GPU's may.

    Who frees a source before that gets his sentence.
    """

    def __init__(self):
        self.queue, self.done = [], 0

    Stream = current_stream = lambda self: self

    def wait_stream(self, stream):
        """The other stream is never late."""

    def stream(self, stream):
        return contextlib.nullcontext()

    def record_event(self):
        return len(self.queue)

    def wait_event(self, event):
        for target, source in self.queue[self.done : event]:
            assert source() is not None, "its memory was used again before it was copied"
            if target() is not None:
                target().copy_(source())
        self.done = max(self.done, event)

    def transfer(self, target, source):
        target.fill_(77)  # what may be there before the copy
        self.queue.append((weakref.ref(target), weakref.ref(source)))


@pytest.fixture
def late(monkeypatch):
    stream = LateStream()
    monkeypatch.setattr(torch, "get_device_module", lambda device: stream)
    monkeypatch.setattr(offload, "transfer", stream.transfer)
    return stream


@pytest.fixture(autouse=True)
def small_tensors_leave_too(monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 256)


def offloader_of(model) -> offload.Offloader:
    return model.model.layers[0].forward.func.__self__.offloader


@LEVELS
@KERNELS
@pytest.mark.parametrize("dtype", ["bf16", "fp32"] if HAS_GPU else ["fp32"])
def test_offloaded_layers_have_the_same_gradients_to_the_last_bit(dtype, kernels, level):
    """On a GPU with its real stream, three times."""
    model, batch = make_model(kernels, dtype), tiny_batch(2, 256 if HAS_GPU else 12)
    expected = loss_and_gradients(set_recompute(model, level), batch)
    set_recompute(model, level, offload=True)
    for _ in range(3 if HAS_GPU else 1):
        assert largest_error(loss_and_gradients(model, batch), expected)[0] == 0.0
    offloader = offloader_of(model)
    assert offloader.most_bytes > 0, "nothing was offloaded: this comparison cannot fail"
    assert offloader.n_bytes == 0, "the host's memory is not given back"


@pytest.mark.skipif(HAS_GPU, reason="the stream is a pretended one")
@LEVELS
def test_nothing_is_used_before_it_has_arrived_or_freed_before_it_has_left(late, level):
    model, batch = make_model([]), tiny_batch()
    expected = loss_and_gradients(set_recompute(model, level), batch)
    set_recompute(model, level, offload=True)
    for _ in range(2):  # a second step finds what the first one left
        found = loss_and_gradients(model, batch)
        assert largest_error(found, expected)[0] == 0.0
    assert late.queue


@pytest.mark.skipif(HAS_GPU, reason="the stream is a pretended one")
@pytest.mark.parametrize("forgotten", ["the way out", "the way back"])
def test_a_copy_that_is_not_waited_for_is_noticed(late, forgotten, monkeypatch):
    model, batch = make_model([]), tiny_batch()
    expected = loss_and_gradients(model, batch)
    set_recompute(model, "mlp", offload=True)
    if forgotten == "the way out":
        nothing = property(lambda layer: [], lambda layer, value: None)
        monkeypatch.setattr(offload.Layer, "leaving", nothing, raising=False)
    else:
        monkeypatch.setattr(offload.Offloader, "wait", lambda self, event: None)
    try:
        error, _ = largest_error(loss_and_gradients(model, batch), expected)
    except AssertionError as caught:
        assert "before it was copied" in str(caught)
    else:
        assert not error < 1e-3


def test_two_backwards_through_one_graph():
    assert_two_backwards_give_twice_the_gradients(set_recompute(make_model([]), "mlp", True))


def test_parameters_and_what_layers_share_stay(monkeypatch):
    model = make_model([])
    left, transfer = [], offload.transfer

    def spy(target, source):
        left.append(source.untyped_storage().data_ptr())
        transfer(target, source)

    monkeypatch.setattr(offload, "transfer", spy)
    stay = {p.untyped_storage().data_ptr() for p in model.parameters()}
    angles = []
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, results: angles.extend(t.untyped_storage().data_ptr() for t in results)
    )
    loss_and_gradients(set_recompute(model, None, offload=True), tiny_batch())
    assert left and angles and not (stay | set(angles)) & set(left)


def refuse(n_bytes):
    raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize(
    "name, replacement, said",
    [
        ("host_memory", lambda: 10_000, "GB of the host's memory and more"),
        ("pinned", refuse, "leave --offload out"),
    ],
)
def test_a_host_without_room_is_one_sentence(monkeypatch, name, replacement, said):
    monkeypatch.setattr(offload, name, replacement)
    model = set_recompute(make_model([]), "none", offload=True)
    with pytest.raises(offload.HostMemoryError, match=said):
        loss_and_gradients(model, tiny_batch())


def test_a_containers_limit_is_the_hosts_memory(tmp_path, monkeypatch):
    whole = offload.host_memory()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(offload, "LIMITS", [limit, tmp_path / "missing"])
    limit.write_text("123456\n")
    assert offload.host_memory() == 123_456 < whole
    limit.write_text("max\n")
    assert offload.host_memory() >= whole


# ---------------------------------------------------------------- the estimate, a GPU


@pytest.mark.parametrize("kernels", [[], MODEL_KERNELS], ids=["none", "all"])
def test_the_estimate_has_no_more_than_two_layers_on_the_gpu(kernels):
    config = architecture.llama_3_1_8b_config()
    config.num_hidden_layers, config.vocab_size = 6, 512
    workload = Workload(seq_len=1024, kernels=(*kernels, "adamw"), recompute="mlp")
    kept, kept_offloaded = (
        memory_estimate.estimate(config, each)["parts"][KEPT]
        for each in (workload, replace(workload, offload=True))
    )
    assert kept_offloaded < kept * 3 / 6


@needs_gpu
@pytest.mark.parametrize("level", RECOMPUTE)
def test_offloaded_layers_are_not_on_the_gpu(level, monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 256)
    batch, kept = tiny_batch(4, 4096), []
    for offloaded in (False, True):
        model = set_recompute(make_model(MODEL_KERNELS, "bf16"), level, offloaded)
        loss_and_gradients(model, batch)  # compiled, workspaces taken
        before = torch.cuda.memory_allocated()
        loss = model(**batch.inputs()).loss
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        del loss
    assert kept[1] < kept[0]
