"""The flags of all scripts that train, profile or measure.  A new flag is entered here, twice:

    OF_TRAINING, OF_FINETUNING, OF_CHECKPOINTS, OF_KERNELS, OF_OPTIMIZED, OF_PROFILER
        a row for each flag, with what argparse wants to know; a script takes some of the rows
    RULES
        which flag needs or excludes which other, with the sentence that a user reads

`FlagParser` makes a command line from the rows and refuses what breaks a rule.  --help and the list
in docs/flags.md are made from the same tables.  This module imports no PyTorch, so that a wrong
flag is answered at once.
"""

import argparse
import itertools
import textwrap
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

from harness.cli import command_line
from harness.cli.adapter_config import LORA_TARGETS, lora_targets
from harness.cli.command_line import UserError, positive_float, positive_int
from harness.cli.processes import PARALLEL, world_size

# ---------------------------------------------------------------- words that flags take

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
TINY_MODEL = "tiny"  # a small random LLaMA of bytes
DTYPES = "bf16", "fp32"
# of --seq-len and --dtype, with a GPU and without: Triton's interpreter is slow
SEQ_LEN = {True: 512, False: 64}
DTYPE = {True: "bf16", False: "fp32"}
RECOMPUTE = "none", "norm", "mlp", "layer"  # each saves more memory than the one before
FP8_ALL = "all"  # of --fp8, where the weights are trained, and with LoRA
IN_FP8 = "all kernels, fp8"  # what studies call such a run
FP8_COMPACT = "compact"  # of --fp8 with LoRA alone
QUANTIZED = ("nf4",)
MOMENT_WORDS = ("8bit",)  # AdamW's, if not in --dtype
# not averaged: the first steps compile kernels and fill the allocator's cache
WARMUP_STEPS = 2
# next_steps/finetuning/opponents.py makes them
OPPONENTS = {
    "fused-adamw": "fused AdamW",
    "flashoptim": "FlashOptim",
    "rms-norm": "F.rms_norm, fused AdamW",
    "compile": "torch.compile, fused AdamW",
    "compile-reduce-overhead": "torch.compile reduce-overhead, fused AdamW",
    "liger": "Liger-Kernel, fused AdamW",
    "unsloth": "Unsloth, fused AdamW",
    "unsloth-fp8": "Unsloth with weights in FP8, fused AdamW",
    "torchao-tensorwise": "torchao float8 tensorwise, compiled layers, fused AdamW",
    "torchao-rowwise": "torchao float8 rowwise, compiled layers, fused AdamW",
}
FP8_OPPONENTS = "unsloth-fp8", "torchao-tensorwise", "torchao-rowwise"

# ---------------------------------------------------------------- the flags


def row(words: str, **options) -> dict:
    """Return what argparse's add_argument takes beside the flag; --help also says a default."""
    words += " (default: %(default)s)" if "default" in options else ""
    return {"help": words, **options}


def switch(words: str) -> dict:
    return row(words, action="store_true")


def micro_batches(text: str) -> int | None:
    """argparse type: how many, or None for one, which is a step without the flag."""
    number = positive_int(text)
    return number if number > 1 else None


OF_LORA = {
    "--lora-rank": row(
        "LoRA: freeze the weights and train two thin matrices beside each projection",
        type=positive_int,
        metavar="R",
    ),
    "--lora-alpha": row(
        "the adapters' results count X / R times (default: R)", type=positive_float, metavar="X"
    ),
    "--lora-targets": row(
        "which projections get adapters, in a word or by name: q_proj,v_proj (default: all)",
        type=lora_targets,
        metavar="|".join([*LORA_TARGETS, "NAME,NAME"]),
    ),
    "--adapter": row("train the adapters further that --save wrote to DIR", metavar="DIR"),
    "--quantize": row("the layers' frozen weights in 4 bits", choices=QUANTIZED),
}
OF_TRAINING = {
    "--model": row(
        "Hugging Face id, local directory, or 'tiny': a small random LLaMA, no download",
        default=DEFAULT_MODEL,
        metavar="ID|DIR|tiny",
    ),
    "--random-init": switch(
        "the model's real architecture with random weights; nothing is downloaded for the "
        "default model"
    ),
    "--data": row(
        "stdlib: the source of Python's standard library; synthetic: random tokens; a text "
        "file; or jsonl with 'prompt' and 'completion', or 'messages'",
        default="stdlib",
        metavar="stdlib|synthetic|FILE.txt|FILE.jsonl",
    ),
    "--batch-size": row("sequences per step, or per micro-batch", type=positive_int, default=1),
    "--seq-len": row(
        f"tokens per sequence (default: {SEQ_LEN[True]}; {SEQ_LEN[False]} without a GPU)",
        type=positive_int,
    ),
    "--seed": row("of weights and data order", type=command_line.whole_number, default=0),
    "--dtype": row(
        "of weights, activations and optimizer state "
        f"(default: {DTYPE[True]}; {DTYPE[False]} without a GPU)",
        choices=DTYPES,
    ),
    "--accumulate": row(
        "micro-batches in a step, whose gradients are added up (default: 1)",
        type=micro_batches,
        metavar="N",
    ),
    "--pack": switch("fill each sequence with several samples, which do not see one another"),
    "--recompute": row(
        "what the backward computes again instead of keeping it: nothing, the norms' outputs, "
        "SwiGLU's product too, or whole layers",
        choices=RECOMPUTE,
    ),
    "--offload": switch("what a layer keeps for the backward waits in the host's memory"),
    "--cuda-graph": switch("record a step once and replay it, so that each is one launch"),
    "--deterministic": switch("only kernels that give the same bits in each run, at a price"),
    "--parallel": row(
        "fsdp gives each process a share of every parameter (the default), ddp all of them",
        choices=PARALLEL,
    ),
    "--json": row("write the run as a JSON record", metavar="FILE"),
    **OF_LORA,
}
OF_FINETUNING = {
    "--steps": row("optimizer steps", type=positive_int, default=20),
    "--lr": row(
        "learning rate (default: 1e-5; 1e-3 for tiny; with LoRA ten times that)",
        type=positive_float,
    ),
    "--save": row("write the trained model; from_pretrained(DIR) loads it", metavar="DIR"),
    "--merge": switch("add the adapters to the weights and save an ordinary model"),
}
OF_CHECKPOINTS = {
    "--checkpoint": row(
        "where checkpoints go: one when Ctrl-C or SIGTERM ends the run, after its step",
        metavar="DIR",
    ),
    "--checkpoint-every": row("also one after every N steps", type=positive_int, metavar="N"),
    "--keep": row(
        "how many checkpoints stay, the newest ones (default: 1)", type=positive_int, metavar="K"
    ),
    "--resume": row("go on from the newest checkpoint in DIR, to the bit", metavar="DIR"),
}
OF_BASELINE = OF_TRAINING | OF_FINETUNING | OF_CHECKPOINTS  # of finetune_baseline.py
OF_KERNELS = {
    "--moments": row("the adamw kernel's m and v in 8 bits each", choices=MOMENT_WORDS),
    "--fp8": row(
        "the fused layer's matrix products in FP8; 'compact', with LoRA: half the frozen weights' "
        f"memory (default: {FP8_ALL})",
        nargs="?",
        const=FP8_ALL,
        choices=(FP8_ALL, FP8_COMPACT),
    ),
}
OF_OPTIMIZED = {
    "--stochastic-rounding": switch("of the adamw kernel's bf16 weights and moments"),
}
OF_PROFILER = {
    "--use-custom-rmsnorm": switch("the same as --kernels rmsnorm"),
    "--use-custom-ce": switch("the same as --kernels cross_entropy"),
    "--trace": row(
        "Chrome trace to write (default: traces/MODEL-SIZE-KERNELS.json)", metavar="FILE[.gz]"
    ),
    "--stacks": switch("Python stacks in the trace, which makes it larger"),
    "--plot": row("the roofline as a picture", metavar="FILE.png"),
    "--first-layers": row("the model's first N layers alone", type=positive_int, metavar="N"),
    "--warmup": row("unmeasured steps", type=positive_int, default=3, metavar="N"),
}
# What was a flag, and the command that it has become
COMMANDS = {
    "--ladder": "next_steps.studies.ladder",
    "--longest": "next_steps.studies.frontier --longest",
    "--opponent": "next_steps.finetuning.opponents --opponent NAME",
    "--teacher": "next_steps.finetuning.distill --teacher MODEL",
    "--estimate": "next_steps.memory.estimate",
    "--memory": "next_steps.memory.profile",
    "--compare": "next_steps.comparisons.compare_profiles BEFORE.json AFTER.json",
    "--sweep": "next_steps.comparisons.sweep",
}


def without(table: dict[str, dict], *flags: str) -> dict[str, dict]:
    """Return a table's other rows."""
    return {flag: options for flag, options in table.items() if flag not in flags}


def of_kernels(known: Sequence[str], default: str) -> dict[str, dict]:
    """Return the rows of --kernels, which refuses a name not in `known`, and of its variants."""

    def parse(text: str) -> list[str]:
        names = {"all": known, "none": []}.get(text, text.split(","))
        command_line.require_known("kernel", names, known, "all", "none")
        return [name for name in known if name in names]

    words = f"custom kernels to use, of {', '.join(known)}"
    options = {"type": parse, "default": default, "metavar": "NAME,NAME|all|none"}
    return {"--kernels": row(words, **options), **OF_KERNELS}


# ---------------------------------------------------------------- which flags go together

# what a condition may say beside the command line
FACTS_IN_WORDS = {"GPU": "a CUDA GPU", "ALONE": "one process", "SEVERAL": "several processes"}


class Rule(NamedTuple):
    """A row of RULES."""

    flags: list[str]
    others: list[str]
    sentence: str
    where: list[str]
    excludes: bool

    @property
    def beside(self) -> str:
        return f" (with {' or '.join(map(condition_in_words, self.where))})" if self.where else ""


def needs(flags: str, others: str, sentence: str, where: str = "") -> Rule:
    """Refuse each of the flags where none of the others holds."""
    return Rule(flags.split(), others.split(), sentence, where.split(), excludes=False)


def excludes(flags: str, others: str, sentence: str, where: str = "") -> Rule:
    """Refuse each of the flags where any of the others holds."""
    return Rule(flags.split(), others.split(), sentence, where.split(), excludes=True)


# A condition is a flag on the command line, a flag and its values (| is "or", * any text), or one
# of FACTS_IN_WORDS.  A rule with `where` counts where one of those conditions holds.  A script that
# lacks a flag breaks no rule about it.  In a sentence {flag} and {other} are the two conditions,
# with the value from the command line if the condition has values; {n} is the number of processes.
# A user reads the first rule that is broken.
LORA = "--lora-rank --adapter"
COMPILED_OPPONENTS = "--opponent=compile*|unsloth*|torchao*"  # these compile a step
TOO_SHORT = f"--steps={'|'.join(map(str, range(1, WARMUP_STEPS + 1)))}"
RULES = [
    excludes("--kernels", "--opponent",
        "{flag} does nothing with {other}: leave one of the two out"),
    needs("--first-layers", "--random-init --model=tiny",
        "{flag} leaves weights out, so it is for random ones: add --random-init, or leave {flag} "
        "out"),
    needs("--moments --stochastic-rounding", "--kernels=adamw",
        "{flag} needs the adamw kernel: add --kernels all, or leave {flag} out"),
    excludes("--stochastic-rounding", "--dtype=fp32",
        "{flag} is for bf16 and does nothing in fp32: add --dtype bf16"),
    needs("--lora-alpha --lora-targets --quantize --merge", LORA,
        "{flag} is for LoRA: add --lora-rank R or --adapter DIR, or leave {flag} out"),
    needs("--merge", "--save",
        "{flag} changes what --save writes: add --save DIR, or leave {flag} out"),
    excludes("--merge", "--quantize", where="--opponent=unsloth", sentence=
        "{flag} cannot read the 4-bit weights that --opponent unsloth makes: leave --merge or "
        "--quantize out"),
    needs("--moments", "ALONE --parallel=ddp",
        "{flag} cuts what a process holds into blocks, and fsdp's shards may end inside of one: "
        "add --parallel ddp"),
    needs("--quantize --fp8", "ALONE --parallel=ddp", where=LORA, sentence=
        "{flag} keeps the frozen weights whole in each process, which fsdp does not: "
        "add --parallel ddp"),
    excludes("--merge", "--opponent=unsloth-fp8",
        "{flag} cannot read the weights in FP8 that {other} makes: leave {flag} out"),
    excludes("--opponent=torchao*|unsloth-fp8", "--quantize",
        "{flag} computes in FP8, and {other} keeps weights in 4 bits: leave one of the two out"),
    needs("--fp8", "--kernels=fused_layer",
        "{flag} computes in the fused layer's place: add --kernels all"),
    needs(f"--fp8={FP8_COMPACT}", LORA,
        f"{{flag}} keeps weights that are frozen: take --fp8 {FP8_ALL}, or add --lora-rank R"),
    excludes("--fp8", "--quantize",
        "{flag} keeps frozen weights in 8 bits, {other} in 4: leave one of the two out"),
    excludes("--fp8", "--dtype=fp32", where="GPU", sentence=
        "{flag} stands for products of bf16, and --dtype is fp32: leave one of the two out"),
    needs("--checkpoint-every --keep", "--checkpoint",
        "{flag} has no place to write to: add --checkpoint DIR"),
    excludes("--cuda-graph", TOO_SHORT,
        f"{{flag}} starts after {WARMUP_STEPS} steps, so with {{other}} it does nothing: "
        "take more steps"),
    excludes("--opponent=compile-reduce-overhead", "--cuda-graph --accumulate",
        "{flag} records CUDA graphs of its own, which no other graph can hold and which overwrite "
        "sums of gradients: leave {other} out"),
    excludes("--opponent=flashoptim", "--cuda-graph",
        "{flag} counts its steps on the host, and {other} would repeat one of them: leave {other} "
        "out"),
    excludes(f"--cuda-graph {COMPILED_OPPONENTS}", "--pack",
        "{flag} records or compiles a step for those after it, and with {other} samples end "
        "elsewhere in each: leave one of the two out"),
    excludes("--offload", "--cuda-graph",
        "{flag} asks for the host's memory in each step, which a CUDA graph cannot: leave one of "
        "the two out"),
    excludes("--pack", "--data=synthetic|*.txt",
        "{flag} fills sequences with several samples, and {other} has none: take stdlib or a "
        ".jsonl file, or leave {flag} out"),
    needs("--parallel", "SEVERAL",
        "{flag} needs more than the one process; torchrun starts several: "
        "torchrun --nproc-per-node 2 SCRIPT"),
    excludes("--cuda-graph --offload", "SEVERAL",
        "{flag} is for one process and torchrun started {n}: leave it out"),
    excludes(COMPILED_OPPONENTS, "SEVERAL",
        "{flag} is for one process and torchrun started {n}: take fused-adamw, rms-norm or liger"),
    needs("--opponent=unsloth-fp8", LORA,
        "{flag} freezes the weights: add --lora-rank R or --adapter DIR"),
    needs("--offload --cuda-graph --memory-snapshot", "GPU",
        "{flag} needs a CUDA GPU and none was found: leave it out"),
]  # fmt: skip


def condition_in_words(condition: str) -> str:
    return FACTS_IN_WORDS.get(condition, condition.replace("=", " "))


def needed_by(flag: str, of: Collection[str] | None = None) -> list[str]:
    """Return what RULES say that a flag needs; of: the rules alone that are about these flags."""
    found = []
    for rule in RULES:
        about = {each.partition("=")[0] for each in rule.others}
        if not rule.excludes and flag in rule.flags and (of is None or about <= of):
            found.append(" or ".join(map(condition_in_words, rule.others)) + rule.beside)
    return found


def refuse(values: dict, given: Collection[str] | None = None, on_gpu: bool | None = None) -> None:
    """Raise a UserError for the first rule that is `broken`."""
    for sentence in broken(values, given, on_gpu):
        raise UserError(sentence)


def broken(values: dict, given: Collection[str] | None, on_gpu: bool | None) -> Iterator[str]:
    """Yield the sentence of each rule that the flags break, together or on this machine.

    Args:
        values: a script's flags, by the names that argparse gives them.
        given: names of those on the command line; None: all that have a value.
        on_gpu: will the run be on a GPU?  None: unknown, and no rule about a GPU is broken.
    """
    # a record's run had processes of its own
    n, names = values.get("world_size") or world_size(), values if given is None else given
    given = {name for name in names if values[name] is not None and values[name] is not False}
    facts = {"GPU": on_gpu, "ALONE": n == 1, "SEVERAL": n > 1}

    def holds(condition: str) -> bool | None:
        """Return None if that is not known, or the script has no such flag."""
        flag, _, patterns = condition.partition("=")
        name = argparse_name(flag)
        if name not in values:
            return facts.get(flag)
        if not patterns:
            return name in given
        value = values[name]
        words = value if isinstance(value, (list, tuple)) else [value]
        pairs = [(str(word), each) for word in words for each in patterns.split("|")]
        return value is not None and any(fnmatch(*pair) for pair in pairs)

    def as_given(condition: str) -> str:
        flag, _, patterns = condition.partition("=")
        return f"{flag} {values[argparse_name(flag)]}" if patterns else flag

    for rule in RULES:
        if rule.where and not any(map(holds, rule.where)):
            continue
        found = [as_given(other) for other in rule.others if holds(other)]
        if not rule.excludes:
            found = [""] if all(holds(other) is False for other in rule.others) else []
        for flag in map(as_given, filter(holds, rule.flags)):
            for other in found:
                yield rule.sentence.format(flag=flag, other=other, n=n)


def can_add(switch: str, values: dict) -> bool:
    """Return True if a run on a GPU lacks this switch and would break no further rule with it."""
    name = argparse_name(switch)
    before, after = (set(broken(values | {name: on}, None, True)) for on in (False, True))
    return not values.get(name) and after <= before


def argparse_name(flag: str) -> str:
    """Return argparse's name of a flag."""
    return flag.removeprefix("--").replace("-", "_")


# ---------------------------------------------------------------- the command line


class FlagParser(command_line.Parser):
    """A command line of rows of the tables, on which no rule is broken."""

    def __init__(self, doc: str, table: dict[str, dict]):
        """Add the rows of a table.  --help also says what RULES say that a flag needs."""
        super().__init__(doc)
        self.flags = {*FACTS_IN_WORDS, *table}
        for flag, options in table.items():
            words = "; needs ".join([options["help"], *needed_by(flag, self.flags)])
            self.add_argument(flag, **options | {"help": words})

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """Parse as argparse does; `given` of the result names the flags on the command line.

        Raises:
            UserError: a flag is wrong, or a rule is broken, whether or not there is a GPU.
        """
        parsed = super().parse_args(args, namespace)
        absent = object()
        # argparse gives no default to what the namespace already has
        unset = argparse.Namespace(**dict.fromkeys(vars(parsed), absent))
        again = vars(super().parse_args(args, unset))
        parsed.given = {name for name, value in again.items() if value is not absent}
        refuse(vars(parsed), parsed.given)
        if "--parallel" not in self.flags:
            command_line.require_one_process()
        return parsed

    def error(self, message: str):
        """Also say where a flag has gone."""
        for flag in message.split() if message.startswith("unrecognized") else ():
            if flag in COMMANDS:
                command = f"python -m {COMMANDS[flag]}"
                raise UserError(f"{flag} is no flag but a command of its own: {command}")
        super().error(message)


# ---------------------------------------------------------------- the page


def page() -> str:
    """Return the list of docs/flags.md: what each flag needs, and what it cannot be used with."""
    excluded = {}
    for rule in (rule for rule in RULES if rule.excludes):
        for one, two in itertools.product(rule.flags, rule.others):
            excluded.setdefault(one, []).append(condition_in_words(two) + rule.beside)
            excluded.setdefault(two, []).append(condition_in_words(one) + rule.beside)
    lines = []
    for flag in sorted(
        {*excluded, *(each for rule in RULES for each in rule.flags)} - {*FACTS_IN_WORDS}
    ):
        words = [f"needs {each}" for each in needed_by(flag)]
        words += [f"not with {', '.join(excluded[flag])}"] if flag in excluded else []
        text = f"{condition_in_words(flag)}: {'; '.join(words)}"
        lines += textwrap.wrap(text, 118, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(["```text", *lines, "```"])
