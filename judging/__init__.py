"""The judge: what every kernel must keep, whoever wrote it, and how that is seen.  May import the
subjects and what they import.

    contracts.py    the register: what a contract is, and its verdict
    numbers.py, autograd.py, refusals.py    the contracts of a differentiable function
    optimizers.py   the contracts of an optimizer
    watching.py     every address of a kernel, as Triton's interpreter sees it
    addresses.py    the contracts of these addresses
    compiling.py    the same kernels, compiled for a GPU that is not there
    processes.py    what is not trusted runs in a process of its own, for a limited time
"""
