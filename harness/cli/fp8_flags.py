"""--fp8: which products are FP8's, with what it does not go, and how a record says it.

    --fp8           all products of the layers' projections, forward and backward
    --fp8 inputs    the same without the gradients of the weights, which stay in bf16

Imports no PyTorch: a wrong flag is answered at once.  What it does: next_steps/layers/fp8_layer.py.
"""

import argparse

from harness.cli.command_line import UserError

ALL, INPUTS = "all", "inputs"
MODES = ALL, INPUTS
FUSED_LAYER = "fused_layer"  # the kernel in whose place it stands


def add_fp8_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of the scripts that have kernels."""
    parser.add_argument(
        "--fp8",
        nargs="?",
        const=ALL,
        choices=MODES,
        help="with the fused layer: its matrix products in FP8, all of them or those that make "
        f"outputs and inputs' gradients (default: {ALL})",
    )


def refuse(workload, on_gpu: bool) -> None:
    """Refuse what FP8 does not go with.

    Raises:
        UserError: there is no fused layer, the weights are no plain trained ones, or a GPU is to
            compute in fp32.
    """
    if FUSED_LAYER not in workload.kernels:
        raise UserError("--fp8 computes in the fused layer's place: add --kernels all")
    if workload.lora_rank:
        flag = "--quantize" if workload.quantize else "--lora-rank and --adapter"
        given = f"--fp8 is for plain weights, {flag} for frozen ones beside adapters"
        raise UserError(f"{given}: leave one of the two out")
    if on_gpu and workload.dtype != "bf16":
        given = f"--fp8 stands for products of bf16, and --dtype is {workload.dtype}"
        raise UserError(f"{given}: leave one of the two out")


def fp8_in_words(record: dict) -> str:
    """What a record says of it, as it is listed among the kernels."""
    words = "fp8" if record["fp8"] == ALL else f"fp8 {record['fp8']}"
    if "fp8_layers" in record:
        words += " in {} of {} layers".format(*record["fp8_layers"])
    return words
