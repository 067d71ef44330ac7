"""What is trained, on what and how: one type, made from the flags, written into records, compared.

A script makes the Workload once, and every function gets the whole Workload.  This module imports
no PyTorch: `--help` and the comparison of records need none.
"""

import argparse
import os
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

from harness.cli import adapter_config, flags
from harness.cli.command_line import UserError, flag_name
from harness.cli.flags import (
    DEFAULT_MODEL,
    DTYPE,
    FP8_ALL,
    FP8_COMPACT,
    OPPONENTS,
    SEQ_LEN,
    TINY_MODEL,
)
from harness.cli.output_files import check_outputs
from harness.cli.processes import FSDP, world_size

PATHS = "model", "teacher", "data", "adapter"  # settings whose value may be a path
RANDOM, PRETRAINED = "random weights", "pretrained weights"


class Frozen(Enum):
    """How frozen weights are kept, if not in the model's dtype; a value is what a user reads."""

    NF4 = "nf4"
    FP8 = "fp8 all"
    FP8_COMPACT = "fp8 compact"


@dataclass(frozen=True)
class Workload:
    """One training run as the flags describe it, with a flag's default where a script lacks it.

    The first fields say what is trained.  They are equal in two runs whose losses may be compared.
    The last fields say how; there such runs may differ.
    """

    model: str = DEFAULT_MODEL  # Hugging Face id, directory, or TINY_MODEL
    random_init: bool = False
    first_layers: int | None = None  # the model's first ones alone; None: all of them
    dtype: str = DTYPE[True]  # of flags.DTYPES
    data: str = "stdlib"
    batch_size: int = 1  # sequences per micro-batch, in each process
    seq_len: int = SEQ_LEN[True]  # tokens per sequence
    accumulate: int | None = None  # micro-batches in a step, if several
    pack: bool = False  # several samples in a sequence, each as if it were alone
    seed: int = 0
    steps: int | None = None  # None: the script takes as many as it needs
    lr: float | None = None
    teacher: str | None = None  # the model that is distilled; the next two come with it
    student_layers: int | None = None  # None: the model's, or half of them if it is the teacher
    temperature: float | None = None
    lora_rank: int | None = None  # None: all weights are trained; the next two come with it
    lora_alpha: float | None = None
    lora_targets: str | None = None  # as adapter_config.lora_targets returns it
    quantize: str | None = None  # of flags.QUANTIZED: the frozen weights
    adapter: str | None = None  # the folder of adapters that are trained further
    world_size: int | None = None  # processes, if torchrun started several; no flag

    kernels: tuple[str, ...] = field(default=(), compare=False)
    moments: str | None = field(default=None, compare=False)  # of flags.MOMENT_WORDS
    stochastic_rounding: bool = field(default=False, compare=False)
    fp8: str | None = field(default=None, compare=False)  # FP8_ALL or FP8_COMPACT
    recompute: str | None = field(default=None, compare=False)  # of flags.RECOMPUTE
    offload: bool = field(default=False, compare=False)
    cuda_graph: bool = field(default=False, compare=False)
    deterministic: bool = field(default=False, compare=False)
    opponent: str | None = field(default=None, compare=False)  # of flags.OPPONENTS
    warmup: int | None = field(default=None, compare=False)  # steps before the profiled one
    parallel: str | None = field(default=None, compare=False)  # of processes.PARALLEL
    merge: bool = field(default=False, compare=False)  # save adapters as part of the weights

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches one step takes."""
        return self.accumulate or 1

    @property
    def sequences(self) -> int:
        """Return how many sequences a micro-batch of all processes has."""
        return self.batch_size * (self.world_size or 1)

    @property
    def frozen_as(self) -> Frozen | None:
        """Return how frozen weights are kept; None: as they are, or all weights are trained."""
        if self.lora_rank is None:
            return None
        if self.quantize:
            return Frozen.NF4
        return {FP8_ALL: Frozen.FP8, FP8_COMPACT: Frozen.FP8_COMPACT}.get(self.fp8)

    @property
    def is_unsloths(self) -> bool:
        """Return True if Unsloth makes the model."""
        return (self.opponent or "").startswith("unsloth")

    @property
    def is_on_the_page(self) -> bool:
        """Return True if a step is the one that finetune_baseline.py shows."""
        ways = self.micro_batches > 1, self.pack, self.recompute, self.offload, self.cuda_graph
        return not any((*ways, self.parallel, self.lora_rank))

    @classmethod
    def from_flags(cls, args: argparse.Namespace, on_gpu: bool) -> "Workload":
        """Return what the flags say.

        Args:
            args: a script's arguments; it may lack the flags of some fields.
            on_gpu: will the run be on a GPU?  This decides --seq-len and --dtype if not given.

        Raises:
            UserError: the flags break a rule of flags.py, or `adapter_config` refuses an adapter.
        """
        defaults = {"seq_len": SEQ_LEN[on_gpu], "dtype": DTYPE[on_gpu]}
        given = {each.name: getattr(args, each.name, None) for each in fields(cls)}
        given = defaults | {name: value for name, value in given.items() if value is not None}
        if "teacher" in given:
            given.setdefault("model", given["teacher"])
        values = vars(args) | {"dtype": given["dtype"]}
        flags.refuse(values, getattr(args, "given", None), on_gpu)
        adapters = adapter_config.settings(args)
        if getattr(args, "lr", 0) is None:
            # adapters, of which one matrix begins as 0, bear a larger step than weights do
            given["lr"] = (1e-3 if given["model"] == TINY_MODEL else 1e-5) * (10 if adapters else 1)
        if world_size() > 1:
            given |= {"parallel": given.get("parallel", FSDP), "world_size": world_size()}
        given["kernels"] = tuple(given.get("kernels", ()))
        return cls(**given | adapters)

    @classmethod
    def read(
        cls, doc: str, table: dict[str, dict], on_gpu: bool | None = None
    ) -> tuple[argparse.Namespace, "Workload"]:
        """Return the arguments of a command with the table's flags, and what they describe.

        on_gpu: None: as this machine is; only then PyTorch is imported, after the flags.
        """
        args = flags.FlagParser(doc, table).parse_args()
        check_outputs(args)
        if on_gpu is None:
            from harness.cli.device import HAS_GPU as on_gpu
        return args, cls.from_flags(args, on_gpu)

    def as_flags(self) -> list[str]:
        """Return the command line from which `from_flags` makes this workload."""
        line = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "world_size" or value is None or value is False or value == ():
                continue
            line.append(flag_name(each.name))
            if value is not True:
                line.append(",".join(value) if isinstance(value, tuple) else str(value))
        return line

    @classmethod
    def from_record(cls, record: dict) -> "Workload":
        """Return the workload of a record."""
        known = {each.name for each in fields(cls)}
        said = {name: value for name, value in record.items() if name in known}
        models = {record["model"]: record["weights"]}
        if "teacher" in record:
            models[record["teacher"]] = record["teacher_weights"]
        drawn = any(words == RANDOM and name != TINY_MODEL for name, words in models.items())
        return cls(**said | {"random_init": drawn, "kernels": tuple(record["kernels"])})

    def as_record(self) -> dict:
        """Return the part of a record that says what was run; an unused setting has no key."""
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
        """Return words for each setting of `other` that forbids comparing its losses with these.

        The same sequences may be spread over any number of processes.  With `how`, return words
        for the settings that may differ instead.
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
    """Return True if two values of a setting in PATHS name the same model or file."""
    if one == other or None in (one, other) or TINY_MODEL in (one, other):
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)


def changes(before: dict, now: dict) -> list[str]:
    """Return words for each key at which two dictionaries have different values."""
    pairs = {key: (before.get(key), now.get(key)) for key in [*now, *before]}
    return [f"{key} {new} (not {old})" for key, (old, new) in pairs.items() if old != new]


def draws_weights(model: str, workload: Workload) -> bool:
    """Return True if `model`, the workload's or its teacher's, gets random weights."""
    return model == TINY_MODEL or workload.random_init


def weights_in_words(model: str, workload: Workload) -> str:
    return RANDOM if draws_weights(model, workload) else PRETRAINED


# ---------------------------------------------------------------- in words


def lora_in_words(record: dict) -> str:
    """Return what a record says of LoRA; "" where the record has none."""
    if "lora_rank" not in record:
        return ""
    words = f"LoRA of rank {record['lora_rank']}, alpha {record['lora_alpha']:g}"
    words += f", {record['lora_targets']} projections"
    more = {"trained_parameters": "{:,} trained parameters", "quantize": "frozen layers in {}"}
    more["adapter"] = "from {}"
    said = (text.format(record[key]) for key, text in more.items() if key in record)
    return ", ".join([words, *said])


def kernels_in_words(record: dict) -> str:
    """Return the kernels of a record, and what else differs from PyTorch as it ships."""
    names = [*record["kernels"]]
    if "fp8" in record:
        names.append("fp8" if record["fp8"] == FP8_ALL else f"fp8 {record['fp8']}")
        if "fp8_layers" in record:
            names[-1] += " in {} of {} layers".format(*record["fp8_layers"])
    names += [f"{record['moments']} moments"] if "moments" in record else []
    switches = "stochastic_rounding", "cuda_graph", "deterministic"
    names += [name for name in switches if record.get(name)]
    names += [f"recompute {record['recompute']}"] if "recompute" in record else []
    names += ["offload"] if "offload" in record else []
    names += [OPPONENTS[record["opponent"]]] if "opponent" in record else []
    return ", ".join(names) or "none"


def model_line(record: dict) -> str:
    """Return the model of a record that also has the number of parameters."""
    size = f"{record['parameters']:,} parameters"
    name = record["model"]
    if "first_layers" in record:
        name += f", {record['first_layers']} of its layers"
    words = f"Model: {name}, {size}, {record['weights']}, {record['dtype']}"
    return "; ".join(filter(None, [words, lora_in_words(record)]))


def size_in_words(record: dict) -> str:
    """Return how many tokens a step of a record takes."""
    size = f"{record['batch_size']} x {record['seq_len']} tokens"
    if "accumulate" in record:
        size = f"{record['accumulate']} micro-batches of {size}"
    if "world_size" in record:
        size += f" in each of {record['world_size']} processes ({record['parallel']})"
    return size


def workload_line(record: dict) -> str:
    """Return the model, the size of a step and the kernels of a record."""
    kernels = f"custom kernels: {kernels_in_words(record)}"
    return f"{model_line(record)}; {size_in_words(record)}; {kernels}"


def teacher_line(record: dict) -> str:
    return (
        f"Distilled from: {record['teacher']}, {record['teacher_parameters']:,} parameters, "
        f"{record['teacher_weights']}; the student's layers: {record['student_layers']}; "
        f"loss: reverse KL at temperature {record['temperature']:g}, in place of cross-entropy"
    )


def read_file(path: str) -> str:
    """Return the text of --data's file.

    Raises:
        UserError: the file is no .txt or .jsonl, cannot be read, is not UTF-8 or has no text.
    """
    if not path.endswith((".txt", ".jsonl")):
        raise UserError(f"--data {path}: expected stdlib, synthetic, a .txt file or a .jsonl file")
    try:
        # -sig: without the mark that Windows editors put first
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise UserError(f"{path} is empty")
    return text
