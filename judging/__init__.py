"""The judge: what every kernel must keep, whoever wrote it, and how that is seen.  May import the
subjects and what they import.

    contracts.py    all contracts of a differentiable function, and the verdicts on one
    numbers.py, autograd.py, refusals.py, on_gpu.py    these; contract.py: what a contract is
    comparing.py, circumstances.py, layouts.py    what the contracts have in common
    optimizers.py   the contracts of an optimizer
    watching.py     every address of a kernel, as Triton's interpreter sees it
    addresses.py    the contracts of these addresses
    pretended_gpu.py, compile_targets.py    the same kernels, compiled for a GPU that is not there
    processes.py, judged_file.py    what is not trusted runs apart, for a limited time
"""
