"""Two processes that share the parameters step as one does, on the CPU or on two GPUs.

Where bits are compared, both get the same batches: the mean of two equal gradients is exact.
"""

from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.nn.parallel import DistributedDataParallel

from harness.cli.device import DEVICE
from next_steps.lessons import adamw_kernel
from next_steps.lessons.adamw_optimizer import TritonAdamW
from tests.fixtures import is_freed
from tests.two_processes import in_two_processes, made_once, one_gpu_is_too_few, results_of_two

pytestmark = [
    pytest.mark.exhaustive,
    one_gpu_is_too_few,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
FP32, BF16 = torch.float32, torch.bfloat16
VOCAB, WIDTH = 300, 9  # half of them begin in the second block, at a place that 8 does not divide


class Net(torch.nn.Module):
    """Of an odd number of rows, which two processes share unevenly, and of one row."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(WIDTH, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 1)]
        )
        self.to(DEVICE if DEVICE == "cpu" else torch.device("cuda"), dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def tokens_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (64,), generator=generator).to(DEVICE)


def shared(model, parallel):
    """What is called of the model, which fully_shard shares in place."""
    if parallel == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return DistributedDataParallel(model) if parallel == "ddp" else model


def take_steps(call, optimizer, steps, micro_batches=1, seed=lambda i: i):
    """Of each step all micro-batches but the last are accumulated."""
    for step in steps:
        first = step * micro_batches
        with optimizer.accumulating():
            for i in range(first, first + micro_batches - 1):
                call(tokens_of(seed(i))).backward()
        call(tokens_of(seed(first + micro_batches - 1))).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu()


def outcome(model, optimizer):
    """Every parameter, its moments and its steps, whole."""
    return {
        name: [whole(p), *(whole(t) for _, t in sorted(optimizer.state[p].items()))]
        for name, p in model.named_parameters()
    }


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


class Watched:
    """The kernel, which is handed nothing but plain tensors that hold as much as it will touch."""

    def __init__(self):
        self.kernel, self.launches = adamw_kernel._adamw_kernel, 0

    def __getitem__(self, grid):
        def launch(p, g, m, v, steps_done, *args, **options):
            n, _ = args[5]
            for t in (p, g, m, v):
                assert type(t) in (torch.Tensor, torch.nn.Parameter) and t.numel() == n > 0
                assert t.untyped_storage().nbytes() >= n * t.itemsize and t.device == p.device
            self.launches += 1
            self.kernel[grid](p, g, m, v, steps_done, *args, **options)

        return launch


KINDS = {  # dtype, options, micro-batches
    "fp32": (FP32, {}, 1),
    "bf16, stochastic": (BF16, {"stochastic_rounding": True, "seed": 5}, 1),
    "in the backward": (BF16, {"stochastic_rounding": True, "step_in_backward": True}, 1),
    "fp32 moments, accumulated": (BF16, {"stochastic_rounding": True, "moments_dtype": FP32}, 2),
    "accumulated, in the backward": (FP32, {"step_in_backward": True}, 3),
}


def train(kind, parallel=None):
    dtype, options, micro_batches = KINDS[kind]
    model = Net(dtype)
    call = shared(model, parallel)
    optimizer = TritonAdamW(model.parameters(), lr=0.05, **options)
    take_steps(call, optimizer, range(2), micro_batches)
    return model, optimizer


def train_all(rank, folder, parallel):
    results = {}
    for kind in KINDS:
        model, optimizer = train(kind, parallel)
        results[kind] = outcome(model, optimizer)
        for p in model.parameters():
            assert isinstance(p, DTensor) == (parallel == "fsdp")
            for key in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[p][key]
                assert getattr(moment, "placements", None) == getattr(p, "placements", None)
            assert type(optimizer.state[p]["step"]) is torch.Tensor
    if parallel == "fsdp":
        sizes = [p.to_local().shape[0] for p in model.parameters()]
        assert sizes == [VOCAB // 2, *((4, 4, 2, 2, 1, 1) if rank == 0 else (3, 3, 1, 1, 0, 0))]
    return results


def train_on_own_batches(rank, folder, parallel, in_backward):
    """Each process has its own batches."""
    model = Net(FP32)
    call = shared(model, parallel)
    options = {"lr": 0.01, "eps": 1e-4, "step_in_backward": in_backward}
    optimizer = TritonAdamW(model.parameters(), **options)
    for step in range(4):
        call(tokens_of(2 * step + rank)).backward()
        stepped = [is_freed(p) for p in model.parameters()]
        at_once = in_backward and parallel == "fsdp"
        assert stepped == [at_once] * 7, "DDP's gradient is used in step(), FSDP2's at once"
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, optimizer)


def make(parallel, in_backward):
    model = Net(BF16)
    call = shared(model, parallel)
    options = {"stochastic_rounding": True, "step_in_backward": in_backward, "seed": 3}
    return model, call, TritonAdamW(model.parameters(), lr=0.05, **options)


def resume_in(folder, parallel, in_backward):
    """A new model and optimizer with what the folder holds."""
    model, call, optimizer = make(parallel, in_backward)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, call, optimizer


def save_and_resume(rank, folder, in_backward):
    folder = folder / f"checkpoint {in_backward}"
    model, call, optimizer = make("fsdp", in_backward)
    take_steps(call, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    take_steps(call, optimizer, range(2, 4))
    straight = outcome(model, optimizer)
    model, call, optimizer = resume_in(folder, "fsdp", in_backward)
    take_steps(call, optimizer, range(2, 4))
    return straight, outcome(model, optimizer)


def sum_gradients(rank, folder):
    """[a parameter after a step with a gradient that is still a sum to be made], by placement."""
    mesh, stepped = init_device_mesh(DEVICE.partition(":")[0], (2,)), []
    for placement in (Replicate(), Shard(0)):
        p = torch.nn.Parameter(distribute_tensor(torch.ones(3, 5), mesh, [placement]))
        part = torch.full((3, 5), 3.0 - 4 * rank, device=p.device)  # 3 here and -1 there: 2
        p.grad = DTensor.from_local(part, mesh, [Partial()])
        optimizer = TritonAdamW([p], lr=0.5, eps=1.0)
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].placements == (placement,)
        stepped.append(whole(p))
    return stepped


WAYS, BOOLS = ("fsdp", "ddp"), (False, True)
WORKS = {  # what two processes do: a function of (rank, folder), and what else it is given
    **{f"train, {way}": (train_all, way) for way in WAYS},
    **{f"own batches, {way}, {b}": (train_on_own_batches, way, b) for way in WAYS for b in BOOLS},
    **{f"resume, {in_backward}": (save_and_resume, in_backward) for in_backward in BOOLS},
    "sums": (sum_gradients,),
}


def all_works(rank, device, folder):
    """Of one of the two: {name of a work: (what it returns, launches)}."""
    results = {}
    for name, (work, *arguments) in WORKS.items():
        with mock.patch.object(adamw_kernel, "_adamw_kernel", Watched()) as kernel:
            results[name] = work(rank, folder, *arguments), kernel.launches
    return results


def do_all_works(folder):
    (folder / "checkpoints").mkdir()
    in_two_processes(all_works, folder, folder / "checkpoints")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes have left, which are started once for all tests."""
    return made_once(do_all_works, tmp_path_factory)


@pytest.fixture(scope="module")
def left(folder):
    """left(name): of one of WORKS what each of the two processes returned, and its launches."""
    results = results_of_two(folder)
    return lambda name: [each[name] for each in results]


@pytest.mark.parametrize("parallel", WAYS)
def test_two_processes_come_to_the_bits_of_one(parallel, left):
    """Uneven and empty shards too, in the backward and after it; and only plain memory is touched,
    where a kernel that was handed a DTensor's pointer ended in an illegal memory access.
    """
    alone = {kind: outcome(*train(kind)) for kind in KINDS}
    (first, launches), (second, other_launches) = left(f"train, {parallel}")
    for kind in KINDS:
        assert same(first[kind], alone[kind]) and same(second[kind], alone[kind]), kind
    steps = 2 * len(KINDS)
    assert launches == 7 * steps
    assert other_launches == (5 if parallel == "fsdp" else 7) * steps  # two of its shards are empty


@pytest.mark.parametrize("parallel", WAYS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_are_averaged_before_they_are_used(parallel, in_backward, left):
    (ours, _), (other, _) = left(f"own batches, {parallel}, {in_backward}")
    assert same(ours, other), "both processes have the same weights"
    model = Net(FP32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    for step in range(4):
        (0.5 * sum(model(tokens_of(2 * step + rank)) for rank in (0, 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = outcome(model, optimizer)
    for name in ours:
        torch.testing.assert_close(ours[name], alone[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("in_backward", [False, True])
def test_state_goes_through_a_distributed_checkpoint_to_two_processes_and_one(
    in_backward, left, folder
):
    for (straight, resumed), _ in left(f"resume, {in_backward}"):
        assert same(straight, resumed)
    model, call, optimizer = resume_in(
        folder / "checkpoints" / f"checkpoint {in_backward}", None, in_backward
    )
    take_steps(call, optimizer, range(2, 4))
    assert same(outcome(model, optimizer), straight)


def test_a_gradient_that_is_a_sum_to_be_made_is_made(left):
    p = torch.nn.Parameter(torch.ones(3, 5, device=DEVICE))
    p.grad = torch.full_like(p, 2.0)
    TritonAdamW([p], lr=0.5, eps=1.0).step()
    for stepped, _ in left("sums"):
        assert all(torch.equal(each, p.detach().cpu()) for each in stepped)
