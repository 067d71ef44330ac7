"""The flags of both fine-tuning scripts, and the training that their pages do not show.

This module imports no PyTorch before the flags are read.
"""

import argparse

from harness.cli.flags import OF_BASELINE, OF_OPTIMIZED, of_kernels
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS
from harness.training.resuming import Checkpoints

PAGES = {"Baseline": (), "Optimized": PLAYBOOK_KERNELS}  # a script's run: the kernels on its page
OPTIMIZED = OF_BASELINE | of_kernels(KERNELS, default=",".join(PLAYBOOK_KERNELS)) | OF_OPTIMIZED
FLAGS = {"Baseline": OF_BASELINE, "Optimized": OPTIMIZED}


def trains_otherwise(args: argparse.Namespace, workload: Workload, name: str) -> bool:
    """Train with kernel_training.py if the flags ask for what the page does not show.

    If they do not, return False, and what the page would find too late has been refused.
    """
    checkpoints = Checkpoints.from_flags(args)
    on_the_page = workload.kernels == PAGES[name] and workload.is_on_the_page
    if on_the_page and not checkpoints.is_asked:
        if workload.kernels:
            from next_steps.memory.memory_estimate import try_kernels

            try_kernels(workload)
        from harness.data.dataset import look_at_data

        look_at_data(workload)
        return False
    from next_steps.finetuning import kernel_training

    kernel_training.train_with_kernels(workload, args.json, args.save, name, checkpoints)
    return True
