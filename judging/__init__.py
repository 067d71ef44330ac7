"""The judge: what every kernel must keep, whoever wrote it, and how that is seen.  May import the
subjects and what they import.

    contracts.py    the register: what a contract is, and its verdict
    numbers.py, autograd.py, refusals.py    the contracts of a differentiable function
    comparing.py, circumstances.py, layouts.py    what these contracts have in common
    optimizers.py   the contracts of an optimizer
    watching.py     every address of a kernel, as Triton's interpreter sees it
    pretended_gpu.py, compile_targets.py    the same kernels, compiled for a GPU that is not there
    processes.py    what is not trusted runs in a process of its own, for a limited time
"""

import importlib

for _name in ("numbers", "autograd", "refusals"):  # in the order in which a subject is asked
    importlib.import_module(f"{__name__}.{_name}")
