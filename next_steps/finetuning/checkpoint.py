"""Checkpoints: a run that was ended goes on as if it had not been, to the bit (docs/resume.md).

What is saved: parameters, AdamW's moments and its count of steps.  All else that a step depends on
comes from the flags and from --model, which must be the same.  No state of a random generator is
saved: nothing in a step draws from one.

torch.distributed.checkpoint writes and reads the tensors: each process writes the parts that it
holds.  Training waits until the tensors are copied into the host's memory, and goes on while a
thread writes the copy to the disk (`Keeper`).  The copy has to be whole before the next step:
AdamW's kernel and CUDA graphs write into the same tensors.

A checkpoint is complete or absent: harness/training/checkpoint_files.py.
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

# not staging.DefaultStager around it, which in PyTorch 2.11 forgets its memory after each copy
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from harness.cli.command_line import Ended, RunError, UserError
from harness.cli.device import DEVICE, HAS_GPU, synchronize
from harness.cli.output_files import UNFINISHED, require_room
from harness.model.adapters import frozen_digest
from harness.model.architecture import computing_fields
from harness.model.config_file import reading
from harness.steps.parallel import TIMEOUT
from harness.training import checkpoint_files
from harness.training.resuming import Checkpoints
from harness.training.training_run import Run
from next_steps.lessons.adamw_optimizer import TritonAdamW, new_state
from next_steps.patches.offload import OF_THE_HOST, host_memory

ONE_PROCESS = "torch.distributed is disabled"  # PyTorch's warning: without torchrun that is so


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return what training changes, by the parameters' names: the tensors, no copies."""
    state = optimizer.state
    states = {name: dict(state[p]) for name, p in model.named_parameters() if p in state}
    named = model.named_parameters(remove_duplicate=False)
    trained = {name for name, p in named if p.requires_grad}
    weights = {name: t for name, t in model.state_dict().items() if name in trained}
    return {"model": weights, "optimizer": states}


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give an AdamW that has taken no step the states of a first step, to be filled."""
    for group in optimizer.param_groups:
        on_gpu = group["capturable"] or group["fused"]
        for p in group["params"]:
            if isinstance(optimizer, TritonAdamW):
                optimizer.state[p] = new_state(p, group["moments_dtype"])
                continue
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device if on_gpu else "cpu"),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path, facts: dict) -> None:
    """Fill the model and its AdamW, which has taken no step, from a checkpoint."""
    if facts.get("frozen_digest") != frozen_digest(model):
        given = f"{path} was trained beside other frozen weights"
        advice = "give the --model that it was started with"
        raise UserError(f"{given}, expected those of this model: {advice}")
    make_states(optimizer)
    with reading(f"the checkpoint {path}"):
        try:
            warnings.filterwarnings("ignore", ONE_PROCESS)
            dcp.load(tensors_of(model, optimizer), checkpoint_id=path)
        except dcp.CheckpointException as error:  # not an Exception
            raise ValueError(cause(error)) from error
    synchronize()  # the steps may be on another stream


def share_of(tensors: dict) -> dict:
    """Return what this process writes of `tensors_of`: its shards, and a part of the rest."""
    if not dist.is_initialized():
        return tensors
    n, rank = dist.get_world_size(), dist.get_rank()
    return {
        part: {
            name: given
            for i, (name, given) in enumerate(named.items())
            if i % n == rank or any(isinstance(t, DTensor) for t in tree_leaves(given))
        }
        for part, named in tensors.items()
    }


def write(
    folder: str, tensors: dict, facts: dict, keep: int, group: dist.ProcessGroup | None = None
) -> Path:
    """Write tensors and facts as the checkpoint of a step, and remove those before it.

    All processes call this function, each with its `share_of` the tensors.  The processes talk by
    `group`; a thread needs one that nothing else uses.
    """
    path = Path(folder) / f"{checkpoint_files.NAMED}{facts['step']}"
    unfinished = path.with_name(f"{UNFINISHED}{path.name}")
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if first:
            checkpoint_files.remove_unfinished(folder)
            unfinished.mkdir(parents=True)
        wait_for_all(group)
        warnings.filterwarnings("ignore", ONE_PROCESS)
        dcp.save(tensors, storage_writer=Writer(unfinished), process_group=group)
        if first:
            checkpoint_files.complete(unfinished, path, json.dumps(facts), keep)
        wait_for_all(group)
    except (OSError, dcp.CheckpointException) as error:
        if first:  # a full disk has room for other files again
            shutil.rmtree(unfinished, ignore_errors=True)
        why = cause(error) if isinstance(error, dcp.CheckpointException) else error.strerror
        kept = f"; {there[-1]} is still there" if (there := checkpoint_files.all_in(folder)) else ""
        raise RunError(f"no checkpoint could be written to {folder}: {why}{kept}") from error
    return path


class Writer(dcp.FileSystemWriter):
    """Raises what the system says if a file cannot be written; PyTorch raises a consequence."""

    def __init__(self, path: Path):
        # Nothing is copied ahead.  So, with tensors in the host's memory, the thread makes no call
        # to CUDA, which would fail while the main thread records a graph.
        super().__init__(path, per_thread_copy_ahead=0)

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


def wait_for_all(group: dist.ProcessGroup | None) -> None:
    """Wait until every process is here; a process alone does not wait."""
    if dist.is_initialized():
        dist.barrier(group)


def cause(error: dcp.CheckpointException) -> str:
    """Return what the first process to fail says, in a line."""
    first, _ = next(iter(error.failures.values()))
    said = first.strerror if isinstance(first, OSError) else str(first)
    return " ".join(str(said).split()) or type(first).__name__


def refuse_random_numbers(model: torch.nn.Module) -> None:
    """Refuse a model whose steps draw random numbers, which no checkpoint could repeat."""
    if p := model.config.attention_dropout:
        given = f"the model's attention_dropout is {p}, which draws random numbers"
        advice = "set it to 0 in its config.json, or leave --checkpoint and --resume out"
        raise UserError(f"{given} that a checkpoint cannot repeat, expected 0: {advice}")


def check_data(run: Run, facts: dict) -> None:
    """Refuse a run whose samples are not those of the checkpoint."""
    if facts["data_digest"] != run.data.digest():
        given = f"the samples of --data {run.workload.data} are not those of the checkpoint"
        raise UserError(f"{given}, expected the same texts and tokenizer: bring them back")


def available_memory() -> int:
    """Return the bytes of the host's memory that each of its processes can still take."""
    here, taken = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), psutil.Process().memory_info().rss
    return min(psutil.virtual_memory().available // here, host_memory() // here - taken)


class Keeper(contextlib.AbstractContextManager):
    """Writes a run's checkpoints; in its context, SIGINT and SIGTERM end the run after its step.

    The next checkpoint, and the end of the run, wait for the one under way.  When a signal ends the
    run, its checkpoint is written at once.  A second signal ends the process.  Without a folder the
    keeper does nothing.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, checkpoints: Checkpoints):
        self.run, self.optimizer, self.checkpoints = run, optimizer, checkpoints
        self.signal = 0
        self.handlers = {}
        self.thread, self.group = ThreadPoolExecutor(1), None
        self.stager: StateDictStager | None = None  # made with the first copy
        self.has_room = True  # in the host's memory for the copy
        self.under_way: Future | None = None
        self.seconds: list[float] = []  # that training has waited, for each checkpoint
        if checkpoints.folder is None:
            return
        self.require_room()
        self.digest = run.data.digest()
        self.frozen = frozen_digest(run.model)
        run.described["checkpoint_seconds"] = self.seconds
        if dist.is_initialized():
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def require_room(self) -> None:
        """Refuse a disk without room for the checkpoints that will be there at one time."""
        folder, every, keep = (getattr(self.checkpoints, n) for n in ("folder", "every", "keep"))
        trained = [p for p in self.run.model.parameters() if p.requires_grad]
        wide = self.run.workload.moments is None  # are the two moments as wide as p?
        n_bytes = sum(p.nbytes + 2 * (p.nbytes if wide else p.numel()) for p in trained)
        last, taken = self.run.workload.steps - 1, len(self.run.losses)
        to_come = last // every - taken // every if every else 1
        n = min(to_come, keep + 1 - min(keep, len(checkpoint_files.all_in(folder))))
        advice = "lower --keep or name another folder"
        require_room("--checkpoint", folder, n, n_bytes, advice)

    def __enter__(self) -> "Keeper":
        if self.checkpoints.folder:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, kind, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.thread.shutdown()  # whatever ends the run, a checkpoint that was begun becomes whole
        if self.under_way:
            error = self.under_way.exception()
            print(error or f"Checkpoint written to {self.under_way.result()}", flush=True)
        if kind is None and self.signal:  # in the last step, so that the run has come to its end
            self.end(self.signal)

    def note(self, number: int, frame) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def end(self, number: int) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)

    def agreed_signal(self) -> int:
        """Return the signal that has come to any process, so that all save one step; 0: none."""
        if not dist.is_initialized():
            return self.signal
        signals = torch.tensor(self.signal, device=DEVICE, dtype=torch.int64)
        dist.all_reduce(signals, dist.ReduceOp.MAX)
        return int(signals)

    def end_step(self) -> None:
        """Save if a checkpoint is due; then end the run if a signal asked for that.

        After the last step there is nothing to go on with: --save writes the model.
        """
        step, every = len(self.run.losses), self.checkpoints.every
        if not self.checkpoints.folder:
            return
        last = step == self.run.workload.steps
        number = 0 if last else self.agreed_signal()
        due = number or (every and step % every == 0 and not last)
        if due:
            self.seconds.append(0.0)
        if due or (self.under_way and (last or self.under_way.done())):
            start = time.perf_counter()
            self.finish_writing()
            if due:
                self.begin_writing(may_copy=not number)
            self.seconds[-1] += time.perf_counter() - start  # of the checkpoint begun last
        if number:
            print(f"Ended after step {step}: --resume {self.checkpoints.folder} goes on from there")
            self.end(number)

    def begin_writing(self, may_copy: bool) -> None:
        """Have a thread write this step's checkpoint; without a copy, wait until it is written."""
        tensors = share_of(tensors_of(self.run.model, self.optimizer))
        copied = self.copied(tensors) if may_copy else None
        facts = copy.deepcopy(self.facts())  # the run adds to its lists
        given = self.checkpoints.folder, copied or tensors, facts, self.checkpoints.keep
        self.under_way = self.thread.submit(write, *given, self.group)
        if copied is None:
            self.finish_writing()

    def finish_writing(self) -> None:
        """Wait for the checkpoint that is being written, if one is, and print where it is."""
        if self.under_way:
            future, self.under_way = self.under_way, None
            print(f"Checkpoint written to {future.result()}", flush=True)

    def copied(self, tensors: dict) -> dict | None:
        """Copy the tensors to the host's memory, the same each time.

        If the host has no room, return None.  Then training waits for the disk from now on.
        """
        if not self.has_room:
            return None
        try:
            if self.stager is None:
                held = (t.to_local() if isinstance(t, DTensor) else t for t in tree_leaves(tensors))
                n_bytes, room = sum(t.nbytes for t in held), available_memory()
                if n_bytes > OF_THE_HOST * room:
                    needed = f"a copy of what is saved takes {n_bytes / 1e9:,.3g} GB"
                    raise RuntimeError(f"{needed} and the host has {room / 1e9:,.3g}")
                self.stager = StateDictStager(pin_memory=HAS_GPU)
            return self.stager.stage(tensors)
        except RuntimeError as error:  # or the host cannot allocate or pin so much
            why = str(error).partition("\n")[0]
            print(f"Training waits until each checkpoint is written: {why}", flush=True)
            self.has_room, self.stager = False, None
            return None

    def facts(self) -> dict:
        """Return what is written beside the tensors; see harness/training/resuming.py."""
        return {
            "step": len(self.run.losses),
            "begun_in": os.getcwd(),
            "data_digest": self.digest,
            "config": computing_fields(self.run.model.config),
            "frozen_digest": self.frozen,
            "environment": self.run.environment,
            **self.run.described,
            **self.run.progress(),
        }
