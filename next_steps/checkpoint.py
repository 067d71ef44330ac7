"""Checkpoints: a run that was ended, and goes on as if it had not been, to the bit.

    python finetune_optimized.py --kernels all --checkpoint DIR --checkpoint-every 100
    python finetune_optimized.py --kernels all --checkpoint DIR --checkpoint-every 100 --resume DIR

What a step depends on, and where a resumed run has it from:

    parameters, AdamW's moments, its count of steps    saved: tensors, here
    learning rate, betas, kernels                      the flags, which must be the same
    heads, epsilon, rotary frequencies                 --model's config.json, likewise
    frozen weights, of LoRA                            --model; their digest must be the same
    which samples are in which step                    (seed, epoch); the steps done are skipped
    the bits that round at random                      (seed, step, parameter, element)

So no state of a random generator is saved: nothing in a step draws from one.  A model with dropout
would, and is refused.

torch.distributed.checkpoint writes and reads the tensors, each process those parts that it holds.
Who reads need not hold the same parts: what two GPUs have saved, one loads, and the other way.

A checkpoint is complete or absent: it is written under another name, and renamed when it is whole;
only then the one before is removed.
"""

import contextlib
import json
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from harness.architecture import computing_fields
from harness.command_line import Ended, RunError, UserError
from harness.config_file import reading
from harness.device import DEVICE, synchronize
from harness.frozen_digest import frozen_digest
from harness.output_files import UNFINISHED
from harness.resuming import FACTS, NAMED, Checkpoints, all_in
from harness.training_run import Run
from next_steps.adamw_kernel import TritonAdamW

SIGNALS = signal.SIGINT, signal.SIGTERM


# ---------------------------------------------------------------- the tensors


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """What training changes, by the parameters' names: the tensors themselves, no copies.

    With LoRA these are the adapters: of what is frozen a checkpoint has the digest.
    """
    states = {
        name: dict(optimizer.state[p])
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    named = model.named_parameters(remove_duplicate=False)
    trained = {name for name, p in named if p.requires_grad}
    weights = {name: t for name, t in model.state_dict().items() if name in trained}
    return {"model": weights, "optimizer": states}


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """What AdamW's first step would make, for one that has taken none: to be filled.

    Moments are as their parameters: of their dtype, and parted over GPUs as they are.
    """
    for group in optimizer.param_groups:
        on_gpu = isinstance(optimizer, TritonAdamW) or group["capturable"] or group["fused"]
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), device=p.device if on_gpu else "cpu"),  # () fp32
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path, facts: dict) -> None:
    """Fill the model and its AdamW, which has taken no step, from a checkpoint.

    Raises:
        UserError: the checkpoint is damaged, or beside other frozen weights.
    """
    if facts.get("frozen_digest") != frozen_digest(model):
        given = f"{path} was trained beside other frozen weights"
        advice = "give the --model that it was started with"
        raise UserError(f"{given}, expected those of this model: {advice}")
    make_states(optimizer)
    with reading(f"the checkpoint {path}"):
        try:
            with alone_or_not():
                dcp.load(tensors_of(model, optimizer), checkpoint_id=path)
        except dcp.CheckpointException as error:  # not an Exception
            raise ValueError(cause(error)) from error
    synchronize()  # the steps may be on another stream


def save(
    folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, facts: dict
) -> Path:
    """Write the checkpoint of a step into a folder, in which it then is the only one.

    Whenever this is interrupted, the one before is still there, or the new one is whole.  All
    processes call it.

    Raises:
        RunError: it cannot be written; the one before is still there.
    """
    name = f"{NAMED}{facts['step']}"
    path = Path(folder) / name
    unfinished = Path(folder) / f"{UNFINISHED}{name}"
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if first:
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"{UNFINISHED}{NAMED}*"):  # by an interrupted save
                shutil.rmtree(left)
        wait_for_all()
        with alone_or_not():
            dcp.save(tensors_of(model, optimizer), checkpoint_id=unfinished)
        if first:
            (unfinished / FACTS).write_text(json.dumps(facts))
            unfinished.rename(path)
            for before in all_in(folder)[:-1]:
                shutil.rmtree(before)
        wait_for_all()
    except (OSError, dcp.CheckpointException) as error:
        why = cause(error) if isinstance(error, dcp.CheckpointException) else error.strerror
        kept = f"; {there[-1]} is still there" if (there := all_in(folder)) else ""
        raise RunError(f"no checkpoint could be written to {folder}: {why}{kept}") from error
    return path


@contextlib.contextmanager
def alone_or_not() -> Iterator[None]:
    """Without torchrun there is one process, as PyTorch supposes; it need not warn of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def wait_for_all() -> None:
    """Until every process is here; alone, not at all."""
    if dist.is_initialized():
        dist.barrier()


def cause(error: dcp.CheckpointException) -> str:
    """What the first process to fail says, in a line."""
    first, _ = next(iter(error.failures.values()))
    return " ".join(str(first).split()) or type(first).__name__


# ---------------------------------------------------------------- around a run's steps


def refuse_random_numbers(model: torch.nn.Module) -> None:
    """Refuse a model whose steps draw random numbers, which no checkpoint could repeat.

    Raises:
        UserError: it has dropout.
    """
    if p := model.config.attention_dropout:
        given = f"the model's attention_dropout is {p}, which draws random numbers"
        advice = "set it to 0 in its config.json, or leave --checkpoint and --resume out"
        raise UserError(f"{given} that a checkpoint cannot repeat, expected 0: {advice}")


def check_data(run: Run, facts: dict) -> None:
    """Refuse a run whose samples are not those of the checkpoint.

    Raises:
        UserError: a file, the tokenizer or Python's standard library has changed.
    """
    if facts["data_digest"] != run.data.digest():
        given = f"the samples of --data {run.workload.data} are not those of the checkpoint"
        raise UserError(f"{given}, expected the same texts and tokenizer: bring them back")


class Keeper(contextlib.AbstractContextManager):
    """Writes a run's checkpoints; in its context, SIGINT and SIGTERM end the run after its step.

    A second signal ends the process at once.  Without a folder it does nothing at all.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, checkpoints: Checkpoints):
        self.run, self.optimizer, self.checkpoints = run, optimizer, checkpoints
        self.signal = 0
        self.handlers = {}
        self.digest = run.data.digest() if checkpoints.folder else None
        frozen = frozen_digest(run.model) if checkpoints.folder else None
        self.frozen = {} if frozen is None else {"frozen_digest": frozen}

    def __enter__(self) -> "Keeper":
        if self.checkpoints.folder:
            self.handlers = {number: signal.signal(number, self.note) for number in SIGNALS}
        return self

    def __exit__(self, kind, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if kind is None and self.signal:  # in the last step, so that the run has come to its end
            self.end(self.signal)

    def note(self, number: int, frame) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def end(self, number: int) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)

    def agreed_signal(self) -> int:
        """The signal that has come, to whichever process; 0: none.  All save the same step.

        One that comes while they agree stays noted, for the next step.
        """
        if not dist.is_initialized():
            return self.signal
        signals = torch.tensor(self.signal, device=DEVICE)
        dist.all_reduce(signals, dist.ReduceOp.MAX)
        return int(signals)

    def end_step(self) -> None:
        """Save, if it is time to; then end the run, if it was asked to end.

        After the last step there is nothing to go on with: --save writes the model.
        """
        step, every = len(self.run.losses), self.checkpoints.every
        if not self.checkpoints.folder or step == self.run.workload.steps:
            return
        number = self.agreed_signal()
        if number or (every and step % every == 0):
            path = save(self.checkpoints.folder, self.run.model, self.optimizer, self.facts())
            print(f"Checkpoint written to {path}", flush=True)
        if number:
            print(f"Ended after step {step}: --resume {self.checkpoints.folder} goes on from there")
            self.end(number)

    def facts(self) -> dict:
        """What is said beside the tensors; see harness/resuming.py."""
        return {
            "step": len(self.run.losses),
            "data_digest": self.digest,
            "config": computing_fields(self.run.model.config),
            **self.frozen,
            "environment": self.run.environment,
            **self.run.described,
            **self.run.progress(),
        }
