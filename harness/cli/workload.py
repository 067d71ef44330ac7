"""What is trained, on what and how: one type, made from the flags, written into records, compared.

    workload = Workload.from_flags(args, HAS_GPU)    # once; everything that runs it gets it whole
    workload.as_record()                             # the part of a record that says what was run
    Workload.from_record(record)                     # what a record says was run
    workload.differences(other)                      # what forbids comparing the losses of two runs
    workload.as_flags()                              # for a script that starts another

Imports no PyTorch: `--help` and the comparison of records need none.
"""

import argparse
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from harness.cli import adapter_flags, fp8_flags, processes
from harness.cli.command_line import (
    Parser,
    UserError,
    flag_name,
    positive_float,
    positive_int,
    whole_number,
)

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
TINY = "tiny"  # a small random LLaMA of bytes
DTYPES = "bf16", "fp32"
RECOMPUTE = "none", "norm", "mlp", "layer"  # each saves more memory than the one before
PATHS = "model", "teacher", "data", "adapter"  # settings that may be one
RANDOM, PRETRAINED = "random weights", "pretrained weights"
WARMUP_STEPS = 2  # not averaged: the first steps compile kernels and fill the allocator's cache
# by the words of --opponent; how each of them is made: next_steps/finetuning/opponents.py
OPPONENTS = {
    "fused-adamw": "fused AdamW",
    "rms-norm": "F.rms_norm, fused AdamW",
    "compile": "torch.compile, fused AdamW",
    "compile-reduce-overhead": "torch.compile reduce-overhead, fused AdamW",
    "liger": "Liger-Kernel, fused AdamW",
    "unsloth": "Unsloth, fused AdamW",
    "torchao-tensorwise": "torchao float8 tensorwise, compiled layers, fused AdamW",
    "torchao-rowwise": "torchao float8 rowwise, compiled layers, fused AdamW",
}
FLOAT8_OPPONENTS = "torchao-tensorwise", "torchao-rowwise"
# of --seq-len and --dtype, with a GPU and without: Triton's interpreter is slow
SEQ_LEN = {True: 512, False: 64}
DTYPE = {True: "bf16", False: "fp32"}


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that mean the same thing in every script."""
    add = parser.add_argument
    add(
        "--model",
        default=DEFAULT_MODEL,
        metavar="ID|DIR|tiny",
        help="Hugging Face id, local directory, or 'tiny': a small random LLaMA, no download "
        "(default: %(default)s)",
    )
    add(
        "--random-init",
        action="store_true",
        help="the model's real architecture with random weights; nothing is downloaded for the "
        "default model",
    )
    add(
        "--data",
        default="stdlib",
        metavar="stdlib|synthetic|FILE.txt|FILE.jsonl",
        help="stdlib: the source of Python's standard library; synthetic: random tokens; a text "
        "file; or jsonl with 'prompt' and 'completion', or 'messages' (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=positive_int,
        default=1,
        help="sequences per step, or per micro-batch (default: %(default)s)",
    )
    add(
        "--seq-len",
        type=positive_int,
        help=f"tokens per sequence (default: {SEQ_LEN[True]}; {SEQ_LEN[False]} without a GPU)",
    )
    add(
        "--seed",
        type=whole_number,
        default=0,
        help="of weights and data order (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights, activations and optimizer state "
        f"(default: {DTYPE[True]}; {DTYPE[False]} without a GPU)",
    )
    add(
        "--accumulate",
        type=positive_int,
        metavar="N",
        help="micro-batches in a step, whose gradients are added up (default: 1)",
    )
    add(
        "--pack",
        action="store_true",
        help="fill each sequence with several samples, which do not see one another",
    )
    add(
        "--recompute",
        choices=RECOMPUTE,
        help="what the backward computes again instead of keeping it: nothing, the norms' outputs, "
        "SwiGLU's product too, or whole layers",
    )
    add(
        "--offload",
        action="store_true",
        help="what a layer keeps for the backward waits in the host's memory; needs a GPU",
    )
    add(
        "--cuda-graph",
        action="store_true",
        help="record a step once and replay it, so that each is one launch; needs a GPU",
    )
    add(
        "--parallel",
        choices=processes.PARALLEL,
        help="with several processes, which torchrun starts: fsdp gives each a share of every "
        "parameter (the default there), ddp all of them",
    )
    adapter_flags.add_adapter_flags(parser)
    add("--json", metavar="FILE", help="write the run as a JSON record")


def finetune_parser(doc: str) -> Parser:
    """The flags of both fine-tuning scripts."""
    parser = Parser(doc)
    add_workload_flags(parser)
    add = parser.add_argument
    add("--steps", type=positive_int, default=20, help="optimizer steps (default: %(default)s)")
    add(
        "--lr",
        type=positive_float,
        help="learning rate (default: 1e-5; 1e-3 for tiny; with LoRA ten times that)",
    )
    add("--save", metavar="DIR", help="write the trained model; from_pretrained(DIR) loads it")
    add(
        "--merge",
        action="store_true",
        help="with LoRA: --save adds the adapters to the weights and writes an ordinary model",
    )
    add(
        "--checkpoint",
        metavar="DIR",
        help="where checkpoints go: one when Ctrl-C or SIGTERM ends the run, after its step",
    )
    add(
        "--checkpoint-every",
        type=positive_int,
        metavar="N",
        help="also one after every N steps",
    )
    add(
        "--keep",
        type=positive_int,
        metavar="K",
        help="how many checkpoints stay, the newest ones (default: 1)",
    )
    add("--resume", metavar="DIR", help="go on from the newest checkpoint in DIR, to the bit")
    return parser


@dataclass(frozen=True)
class Workload:
    """One training run as the flags describe it; a flag's default where a script lacks the flag.

    The first fields are what is trained, and equal in two runs whose losses may be compared.  The
    last ones are how it is done, which is what such runs differ in.
    """

    model: str = DEFAULT_MODEL  # Hugging Face id, directory, or TINY
    random_init: bool = False
    dtype: str = DTYPE[True]  # of DTYPES
    data: str = "stdlib"
    batch_size: int = 1  # sequences per micro-batch, in each process
    seq_len: int = SEQ_LEN[True]  # tokens per sequence
    accumulate: int | None = None  # micro-batches in a step, if several
    pack: bool = False  # several samples in a sequence, each as if it were alone
    seed: int = 0
    steps: int | None = None  # None: the script takes as many as it needs
    lr: float | None = None
    teacher: str | None = None  # what is distilled into the model; the next two come with it
    student_layers: int | None = (
        None  # None: as many as the model has, or half of its own teacher's
    )
    temperature: float | None = None
    lora_rank: int | None = None  # None: all weights are trained; the next two come with it
    lora_alpha: float | None = None
    lora_targets: str | None = None  # of adapter_flags.TARGETS
    quantize: str | None = None  # of adapter_flags.QUANTIZED: the frozen weights
    adapter: str | None = None  # the folder of the adapters that are trained further
    world_size: int | None = None  # processes, if several: torchrun's, and no flag

    kernels: tuple[str, ...] = field(default=(), compare=False)
    stochastic_rounding: bool = field(default=False, compare=False)
    fp8: str | None = field(default=None, compare=False)  # of fp8_flags.MODES; None: none
    recompute: str | None = field(default=None, compare=False)  # of RECOMPUTE; None: as ever
    offload: bool = field(default=False, compare=False)
    cuda_graph: bool = field(default=False, compare=False)
    opponent: str | None = field(default=None, compare=False)  # of OPPONENTS, in place of kernels
    warmup: int | None = field(default=None, compare=False)  # steps before a profiled one
    parallel: str | None = field(default=None, compare=False)  # if several processes: how
    merge: bool = field(default=False, compare=False)  # adapters are saved as part of the weights

    @property
    def micro_batches(self) -> int:
        """How many of them one step takes."""
        return self.accumulate or 1

    @property
    def sequences(self) -> int:
        """How many of them all processes take as a micro-batch."""
        return self.batch_size * (self.world_size or 1)

    @property
    def is_on_the_page(self) -> bool:
        """Is its step the one that finetune_baseline.py shows?"""
        ways = self.micro_batches > 1, self.pack, self.recompute, self.offload, self.cuda_graph
        return not any((*ways, self.parallel, self.lora_rank))

    @classmethod
    def from_flags(cls, args: argparse.Namespace, on_gpu: bool) -> "Workload":
        """What the flags say.

        Args:
            args: of a parser with `add_workload_flags`, and any of the other fields' flags.
            on_gpu: is it to run on a GPU?  Decides the length and dtype that were not given.

        Raises:
            UserError: there is no GPU for a CUDA graph or to offload from, no step that would be a
                graph, nothing that could be packed, or what the `settings` of processes and
                adapter_flags refuse.
        """
        given = {each.name: getattr(args, each.name, None) for each in fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("accumulate") == 1:  # as if it were not there, also in the record
            del given["accumulate"]
        defaults = {"seq_len": SEQ_LEN[on_gpu], "dtype": DTYPE[on_gpu]}
        shared = processes.settings(args)
        adapters = adapter_flags.settings(args, shared.get("parallel"))
        if hasattr(args, "lr"):
            # two thin matrices, of which one begins as 0, bear a larger step than weights do
            defaults["lr"] = (1e-3 if args.model == TINY else 1e-5) * (10 if adapters else 1)
        values = defaults | given | shared | adapters
        workload = cls(**values | {"kernels": tuple(values.get("kernels", ()))})
        if workload.cuda_graph and workload.steps and workload.steps <= WARMUP_STEPS:
            raise UserError(
                f"--cuda-graph starts after {WARMUP_STEPS} steps, so with --steps "
                f"{workload.steps} it does nothing: take more steps"
            )
        if workload.offload and not on_gpu:
            raise UserError("--offload needs a CUDA GPU and none was found: leave it out")
        if workload.offload and workload.cuda_graph:
            raise UserError(
                "--offload asks for the host's memory in each step, which a CUDA graph cannot: "
                "leave --offload or --cuda-graph out"
            )
        if workload.cuda_graph and not on_gpu:
            raise UserError("--cuda-graph needs a CUDA GPU and none was found")
        if workload.pack:
            refuse_packing(workload)
        if workload.fp8:
            fp8_flags.refuse(workload, on_gpu)
        return workload

    def as_flags(self) -> list[str]:
        """What `from_flags` makes this from, for a script that has the flags of all it sets."""
        flags = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "world_size" or value is None or value is False or value == ():
                continue
            flags.append(flag_name(each.name))
            if value is not True:
                flags.append(",".join(value) if isinstance(value, tuple) else str(value))
        return flags

    @classmethod
    def from_record(cls, record: dict) -> "Workload":
        """What a record says; it may be older than some of the keys."""
        known = {each.name for each in fields(cls)}
        said = {name: value for name, value in record.items() if name in known}
        models = {record["model"]: record["weights"]}
        if "teacher" in record:
            models[record["teacher"]] = record.get("teacher_weights")
        drawn = any(words == RANDOM and name != TINY for name, words in models.items())
        return cls(**said | {"random_init": drawn, "kernels": tuple(record["kernels"])})

    def as_record(self) -> dict:
        """The part of a record that says what was run; what is None or unused has no key."""
        record = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "random_init":
                record["weights"] = weights_in_words(self.model, self)
            elif each.name != "warmup" and value is not None and value is not False:
                record[each.name] = list(value) if isinstance(value, tuple) else value
            if each.name == "teacher" and value is not None:
                record["teacher_weights"] = weights_in_words(value, self)
        return record

    def differences(self, other: "Workload", how: bool = False) -> list[str]:
        """Sentences naming each setting of `other` that forbids comparing its losses with this.

        The same sequences may be spread over any number of processes.

        how: those naming the settings that do not, in place of them.
        """
        of_how = {each.name for each in fields(self) if not each.compare} | {"world_size"}
        mine, theirs = (each.as_record() | {"batch_size": each.sequences} for each in (self, other))
        keys = [key for key in dict.fromkeys([*mine, *theirs]) if (key in of_how) == how]
        pairs = {key: (mine.get(key), theirs.get(key)) for key in keys}
        return [
            f"{key} {other} (not {one})"
            for key, (one, other) in pairs.items()
            if not (same_place(one, other) if key in PATHS else one == other)
        ]


def same_place(one: str | None, other: str | None) -> bool:
    """Return whether two values of a setting in PATHS name the same, by whichever path."""
    if one == other or None in (one, other) or TINY in (one, other):
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)


def refuse_packing(workload: Workload) -> None:
    """Refuse --pack beside what has no samples to pack, or repeats one step's boundaries.

    Raises:
        UserError: it does.
    """
    if workload.data == "synthetic" or workload.data.endswith(".txt"):
        given = f"--pack fills sequences with several samples, and --data {workload.data} has none"
        raise UserError(f"{given}: take stdlib or a .jsonl file, or leave --pack out")
    if workload.cuda_graph:
        raise UserError(
            "--cuda-graph repeats one step to the byte, and with --pack samples end elsewhere in "
            "each: leave one of the two out"
        )


def draws_weights(model: str, workload: Workload) -> bool:
    """Does it get random weights?  `model` is the workload's or its teacher's."""
    return model == TINY or workload.random_init


def weights_in_words(model: str, workload: Workload) -> str:
    return RANDOM if draws_weights(model, workload) else PRETRAINED


# ---------------------------------------------------------------- in words


def kernels_in_words(record: dict) -> str:
    """The kernels of a record, and what else differs from PyTorch as it ships."""
    names = [*record["kernels"]]
    names += [fp8_flags.fp8_in_words(record)] if "fp8" in record else []
    names += [name for name in ("stochastic_rounding", "cuda_graph") if record.get(name)]
    if "recompute" in record:
        names.append(f"recompute {record['recompute']}")
    if "offload" in record:
        names.append("offload")
    if "opponent" in record:
        names.append(OPPONENTS[record["opponent"]])
    return ", ".join(names) or "none"


def model_line(record: dict) -> str:
    """The model of a record with `as_record` and the number of parameters."""
    size = f"{record['parameters']:,} parameters"
    lora = adapter_flags.lora_in_words(record)
    words = f"Model: {record['model']}, {size}, {record['weights']}, {record['dtype']}"
    return f"{words}; {lora}" if lora else words


def size_in_words(record: dict) -> str:
    """How many tokens a step of a record takes."""
    size = f"{record['batch_size']} x {record['seq_len']} tokens"
    if "accumulate" in record:
        size = f"{record['accumulate']} micro-batches of {size}"
    if "world_size" in record:
        size += f" in each of {record['world_size']} processes ({record['parallel']})"
    return size


def workload_line(record: dict) -> str:
    """The model, the size of a step and the kernels."""
    size = size_in_words(record)
    return f"{model_line(record)}; {size}; custom kernels: {kernels_in_words(record)}"


def teacher_line(record: dict) -> str:
    return (
        f"Distilled from: {record['teacher']}, {record['teacher_parameters']:,} parameters, "
        f"{record['teacher_weights']}; the student's layers: {record['student_layers']}; "
        f"loss: reverse KL at temperature {record['temperature']:g}, in place of cross-entropy"
    )


def read_file(path: str) -> str:
    """Return the text of --data's file.

    Raises:
        UserError: it is no .txt or .jsonl, cannot be read, is not UTF-8 or has no text.
    """
    if not path.endswith((".txt", ".jsonl")):
        expected = "stdlib, synthetic, a .txt file or a .jsonl file"
        raise UserError(f"--data {path}: expected {expected}")
    try:
        # without the mark that Windows editors put first
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text
