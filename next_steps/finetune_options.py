"""The flags of both fine-tuning scripts, and the training that their pages do not show.

This module imports no PyTorch before the flags are read.
"""

import argparse

from harness.cli.flags import OF_KERNELS, OF_OPTIMIZED, Parser, finetune_parser
from harness.cli.workload import Workload
from harness.profiling.kernel_facts import KERNELS, PLAYBOOK_KERNELS
from harness.training.resuming import Checkpoints

PAGES = {"Baseline": (), "Optimized": PLAYBOOK_KERNELS}  # a script's run: the kernels on its page
BASELINE, OPTIMIZED = PAGES


def parse_args(doc: str, name: str = OPTIMIZED) -> argparse.Namespace:
    """Return the arguments of a run's script."""
    parser = finetune_parser(doc)
    if name == OPTIMIZED:
        add_flags(parser)
    return parser.parse_args()


def add_flags(parser: Parser) -> None:
    """Add the flags that finetune_baseline.py does not have."""
    parser.add_kernels(KERNELS, default=",".join(PLAYBOOK_KERNELS))
    parser.add_flags(OF_KERNELS, OF_OPTIMIZED)


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

    kernel_training.train(workload, args.json, args.save, name, checkpoints)
    return True
