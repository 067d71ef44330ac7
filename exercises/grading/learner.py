"""Run the learner's file in a process of its own (judging.processes), and tell what was seen.

Nothing is judged here.  Each function takes the file, and returns the function that is served.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from exercises.grading.exercise import Inputs
from exercises.grading.grading import EXERCISES
from exercises.grading.speed import times
from harness.cli.device import DEVICE, synchronize
from harness.steps.launches import intercepted
from judging.judged_file import load_function
from judging.watching import Watch, watched

# What `launch` may ask of PyTorch beside views: memory, and to fill or copy it.
MEMORY = {"empty", "zeros", "ones", "full", "clone", "copy", "fill", "zero", "to_copy"}
MOST = 3  # addresses in the report


class Computations(TorchDispatchMode):
    """The names of what PyTorch computes meanwhile; `memories`: what it may not copy to either."""

    def __init__(self, memories: list[torch.Tensor]):
        super().__init__()
        self.storages = {t.untyped_storage().data_ptr() for t in memories}
        self.names: list[str] = []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        name = operation._schema.name.removeprefix("aten::")
        plain = name.strip("_").removeprefix("new_").removesuffix("_strided").removesuffix("_like")
        is_view = any(r.alias_info and not r.alias_info.is_write for r in operation._schema.returns)
        writes = plain == "copy" and arguments[0].untyped_storage().data_ptr() in self.storages
        if writes or not (is_view or plain in MEMORY):
            self.names.append(name)
        return operation(*arguments, **options or {})


def launching(file: str) -> Callable[[Inputs, str], dict]:
    """Serve launches: (values by name, order of the programs) -> what was seen."""
    launch = load_function(file, "launch")

    def launched(values: Inputs, order: str) -> dict:
        """Return {"findings": sentences, "tensors": those of the values after the launch}."""
        values = {n: on_device(v) if isinstance(v, torch.Tensor) else v for n, v in values.items()}
        tensors = {name: t for name, t in values.items() if isinstance(t, torch.Tensor)}
        computations = Computations(list(tensors.values()))

        def without_mode(run, kernel, grid, arguments, options):
            with _disable_current_modes():
                return run(kernel, grid)(*arguments, **options)

        # NumPy comments on the arithmetic of a wrong kernel in Triton's interpreter.
        with warnings.catch_warnings(), watched(tensors, order) as watch, intercepted(without_mode):
            warnings.simplefilter("ignore", category=RuntimeWarning)
            with computations:
                launch(**values)
            synchronize()
        # what lies outside is the cause of much else
        places = watch.of("outside") or watch.findings
        findings = no_kernel(file, watch, computations.names) + places[:MOST]
        if len(places) > MOST:
            findings.append(f"There are {len(places) - MOST} more such places.")
        tensors = {name: t.cpu() for name, t in tensors.items()}
        return {"findings": findings, "tensors": tensors}

    return launched


def on_device(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor and of the gaps between its rows."""
    n = t.untyped_storage().nbytes() // t.element_size()
    memory = t.as_strided((n,), (1,), 0).to(DEVICE, copy=True)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


def no_kernel(file: str, watch: Watch, computed: list[str]) -> list[str]:
    """Return sentences about a launch that is not the launch of a kernel of the learner's file."""
    others = {f"{name} of {Path(of).name}" for name, of in watch.kernels if of != file}
    sentences = [f"`launch` starts {name}: write the kernel in your own file." for name in others]
    if computed:
        names = ", ".join(dict.fromkeys(computed))
        sentences += [f"`launch` computes with PyTorch ({names}): the kernel is to do it."]
    elif not watch.kernels:
        sentences += ["`launch` starts no kernel."]
    return sentences


def timing(file: str, name: str) -> Callable[[], list]:
    """Serve the times of an exercise: speed.times."""
    launch = load_function(file, "launch")
    return lambda: times(EXERCISES[name], launch)
