"""From which checkpoint a run goes on, and whether it may: flags, facts, refusals.

checkpoint_files.py reads and writes the files.  A checkpoint that does not fit is refused before a
model is loaded.  The flags alone import no PyTorch.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.cli.command_line import UserError
from harness.cli.workload import PATHS, Workload, changes, same_place
from harness.training import checkpoint_files
from harness.training.checkpoint_files import FACTS, newest

# lists in a run's facts that have an entry for each step
COLUMNS = "losses", "seconds", "tokens", "peaks", "data_seconds"
# facts besides the workload that the bits of a result depend on
MACHINE = "gpu", "cpu", "torch", "cuda", "triton", "transformers"


@dataclass(frozen=True)
class Checkpoints:
    """What a run's flags say about checkpoints; by default there are none."""

    folder: str | None = None  # to write checkpoints to
    every: int | None = None  # steps; None: only when a signal ends the run
    resume: str | None = None  # the folder whose newest checkpoint the run goes on from
    keep: int = 1  # how many checkpoints stay, the newest ones

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> "Checkpoints":
        """Return what the flags say."""
        asked = cls(args.checkpoint, args.checkpoint_every, args.resume, args.keep or 1)
        asked.refuse_another_runs()
        return asked

    def refuse_another_runs(self) -> None:
        """Refuse to write beside a checkpoint that this run does not go on from."""
        if self.folder and (others := checkpoint_files.in_the_way(self.folder)):
            given = f"--checkpoint {self.folder} holds {others[0].name}, which is no checkpoint"
            raise UserError(f"{given}, expected none of this name: move it, or name another folder")
        if self.folder and (there := newest(self.folder)):
            resumed = self.resume and newest(self.resume)
            if not (resumed and os.path.samefile(there, resumed)):
                given = f"--checkpoint {self.folder} holds {there.name} of another run"
                advice = f"add --resume {self.folder} to go on from there, or name another folder"
                raise UserError(f"{given}, expected none: {advice}")

    @contextlib.contextmanager
    def folder_locked(self) -> Iterator[None]:
        """Hold the folder, if there is one, so that no other run writes there meanwhile."""
        if self.folder is None:
            yield
            return
        with checkpoint_files.locked(self.folder):
            self.refuse_another_runs()  # which may have written since the flags were read
            yield

    @property
    def is_asked(self) -> bool:
        """Return True if there is a folder to write to or to go on from."""
        return self.folder is not None or self.resume is not None


def read(folder: str, workload: Workload) -> tuple[Path, dict]:
    """Return the newest checkpoint in a folder and its facts, if the workload may go on from it.

    Prints where the run goes on, and what it does in another way than before.
    """
    from harness.model.architecture import computing_differences
    from harness.model.config_file import load_config

    path = newest(folder) if folder else None
    if path is None:
        given = f"--resume {folder!r} holds no checkpoint"
        expected = "a folder that --checkpoint DIR has written to"
        raise UserError(f"{given}, expected {expected}: name another")
    try:
        facts = json.loads((path / FACTS).read_text())
        saved, step = Workload.from_record(facts), facts["step"]
        if {len(facts[column]) for column in COLUMNS} != {step}:
            raise ValueError(f"it does not list {step} steps")
        machine = {name: facts["environment"][name] for name in MACHINE}
        config, _, _ = (facts[name] for name in ("config", "data_digest", "day"))
        for name in PATHS:  # relative ones lead from the folder in which the run began
            there, here = getattr(saved, name), getattr(workload, name)
            if there and same_place(os.path.join(facts["begun_in"], there), here):
                saved = replace(saved, **{name: here})
    except checkpoint_files.UNREADABLE as error:
        given = f"{path / FACTS} is damaged ({type(error).__name__}: {error})"
        raise UserError(f"{given}, expected what --checkpoint wrote: resume another") from error
    if workload.steps <= step:
        given = f"{path} is of step {step}, and --steps {workload.steps} leaves none to take"
        raise UserError(f"{given}: give the --steps of the whole run, {saved.steps}")
    different = refused_differences(saved, workload)
    if different := different or computing_differences(config, load_config(workload)):
        given = f"{path} is of another training: {'; '.join(different)}"
        advice = "give the flags and the model's config.json that it was started with"
        raise UserError(f"{given}: {advice}, or name another")
    checkpoint_files.require_undamaged(path)  # last: it reads all of a large checkpoint
    print(f"Resuming from {path}: steps {step + 1} to {workload.steps}")
    for note in notes(saved, machine, workload):
        print(note)
    print()
    return path, facts


def refused_differences(saved: Workload, workload: Workload) -> list[str]:
    """Return words for each setting that makes the workload another training than the saved one.

    A step's sequences may be laid out in another way: 8 at once, in two micro-batches of 4, or 4 on
    each of two GPUs.  The number of steps must stay, because it decides which samples are read.
    """
    without_layout = {"batch_size": 1, "accumulate": None, "world_size": None}
    before, now = replace(saved, **without_layout), replace(workload, **without_layout)
    different = before.differences(now)
    for name in ("fp8", "moments"):  # which round otherwise
        before, now = getattr(saved, name), getattr(workload, name)
        if now != before:
            different.append(f"{name} {now} (not {before})")
    expected, given = (each.sequences * each.micro_batches for each in (saved, workload))
    if given != expected:
        different.append(f"sequences in a step {given} (not {expected})")
    return different


def notes(saved: Workload, machine: dict, workload: Workload) -> list[str]:
    """Return a line for all that changed but gives the same bits, and one for the rest."""
    from harness.records.run_records import environment

    here = environment()
    before = machine | {"batch_size": saved.batch_size, "accumulate": saved.accumulate}
    now = {name: here[name] for name in machine}
    now |= {"batch_size": workload.batch_size, "accumulate": workload.accumulate}
    changed = changes(before, now)
    exact = []
    for difference in saved.differences(workload, how=True):
        name = difference.split()[0]
        # PyTorch's AdamW computes in another order where a graph may record it; ours does not
        stays = name == "offload" or (name == "cuda_graph" and "adamw" in workload.kernels)
        (exact if stays else changed).append(difference)
    endings = {"with the same result to the bit": exact, "so that last bits may differ": changed}
    return [
        f"In another way, {words}: {'; '.join(each)}" for words, each in endings.items() if each
    ]
