"""The flags of the profiler and of both fine-tuning scripts.  A new flag is entered here, twice:

    OF_TRAINING, OF_FINETUNING, OF_KERNELS, OF_OPTIMIZED, OF_PROFILER
        a row for each flag, with what argparse wants to know
    RULES
        which flag needs or excludes which other, with the sentence that a user reads

`Parser` makes a command line from the rows and refuses what breaks a rule.  --help and the list in
docs/flags.md are made from the same tables.  This module imports no PyTorch, so that a wrong flag
is answered at once.
"""

import argparse
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from string import Template
from typing import NamedTuple

from harness.cli import command_line
from harness.cli.adapter_config import TARGETS, lora_targets
from harness.cli.command_line import UserError, flag_name, positive_float, positive_int
from harness.cli.processes import PARALLEL, world_size

# ---------------------------------------------------------------- words that flags take

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"
TINY = "tiny"  # a small random LLaMA of bytes
DTYPES = "bf16", "fp32"
# of --seq-len and --dtype, with a GPU and without: Triton's interpreter is slow
SEQ_LEN = {True: 512, False: 64}
DTYPE = {True: "bf16", False: "fp32"}
RECOMPUTE = "none", "norm", "mlp", "layer"  # each saves more memory than the one before
FP8_ALL = "all"  # of --fp8, where the weights are trained, and with LoRA
IN_FP8 = "all kernels, fp8"  # what studies call such a run
FP8_COMPACT = "compact"  # of --fp8 with LoRA alone
QUANTIZED = ("nf4",)
MOMENTS = ("8bit",)  # AdamW's, if not in --dtype
# not averaged: the first steps compile kernels and fill the allocator's cache
WARMUP_STEPS = 2
# next_steps/finetuning/opponents.py makes them
OPPONENTS = {
    "fused-adamw": "fused AdamW",
    "rms-norm": "F.rms_norm, fused AdamW",
    "compile": "torch.compile, fused AdamW",
    "compile-reduce-overhead": "torch.compile reduce-overhead, fused AdamW",
    "liger": "Liger-Kernel, fused AdamW",
    "unsloth": "Unsloth, fused AdamW",
    "unsloth-fp8": "Unsloth with weights in FP8, fused AdamW",
    "torchao-tensorwise": "torchao float8 tensorwise, compiled layers, fused AdamW",
    "torchao-rowwise": "torchao float8 rowwise, compiled layers, fused AdamW",
}

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
    "--parallel": row(
        "fsdp gives each process a share of every parameter (the default), ddp all of them",
        choices=PARALLEL,
    ),
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
        metavar="|".join([*TARGETS, "NAME,NAME"]),
    ),
    "--adapter": row("train the adapters further that --save wrote to DIR", metavar="DIR"),
    "--quantize": row("the layers' frozen weights in 4 bits", choices=QUANTIZED),
    "--json": row("write the run as a JSON record", metavar="FILE"),
}
OF_FINETUNING = {
    "--steps": row("optimizer steps", type=positive_int, default=20),
    "--lr": row(
        "learning rate (default: 1e-5; 1e-3 for tiny; with LoRA ten times that)",
        type=positive_float,
    ),
    "--save": row("write the trained model; from_pretrained(DIR) loads it", metavar="DIR"),
    "--merge": switch("add the adapters to the weights and save an ordinary model"),
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
OF_KERNELS = {  # beside --kernels, which `Parser.add_kernels` adds
    "--moments": row("the adamw kernel's m and v in 8 bits each", choices=MOMENTS),
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
    "--opponent": row(
        "what others offer in place of our kernels: PyTorch's fused AdamW alone, or with "
        "F.rms_norm, torch.compile, Liger-Kernel's patch, Unsloth or torchao's float8",
        choices=OPPONENTS,
    ),
    "--ladder": switch("baseline and every rung up to all kernels, in one table"),
    "--longest": switch("from --seq-len on, the longest sequence that fits, batch 1"),
    "--plot": row("the ladder's time and memory, rung by rung, as a picture", metavar="FILE.png"),
    "--teacher": row(
        "distil this model into --model, which is its own first half of layers unless told; the "
        "loss is the reverse KL, and its kernel replaces cross_entropy and linear_cross_entropy",
        metavar="ID|DIR|tiny",
    ),
    "--student-layers": row(
        "train the first N layers of --model (default: all; half if it is the teacher's model)",
        type=positive_int,
        metavar="N",
    ),
    "--temperature": row("divides the logits of both models (default: 1)", type=positive_float),
}
OF_PROFILER = {
    "--use-custom-rmsnorm": switch("the same as --kernels rmsnorm"),
    "--use-custom-ce": switch("the same as --kernels cross_entropy"),
    "--first-layers": row("the model's first N layers alone", type=positive_int, metavar="N"),
    "--warmup": row("unmeasured steps", type=positive_int, default=3, metavar="N"),
    "--trace": row(
        "Chrome trace to write (default: traces/MODEL-SIZE-KERNELS.json)", metavar="FILE[.gz]"
    ),
    "--stacks": switch("Python stacks in the trace, which makes it larger"),
    "--estimate": switch("how much memory a step will need on a GPU; runs none"),
    "--memory": switch("what the memory of a step is made of; runs it"),
    "--compare": row(
        "two records of --json; runs nothing", nargs=2, metavar=("BEFORE.json", "AFTER.json")
    ),
    "--plot": row(
        "the roofline as a picture; with --memory: the parts over the step", metavar="FILE.png"
    ),
    "--memory-snapshot": row("a step for https://pytorch.org/memory_viz", metavar="FILE.pickle"),
}

# ---------------------------------------------------------------- which flags go together


class Rule(NamedTuple):
    """A row of RULES."""

    flags: list[str]
    excludes: bool  # "with"; False: "without"
    others: list[str]
    sentence: Template


def read_rules(text: str) -> list[Rule]:
    """Return the rules of a text, whose form the comment at RULES describes."""
    rules = []
    for paragraph in re.split(r"(?<!,)\n+(?! )", text.strip()):
        what, *sentence = re.split(r"\n +", paragraph)
        flags, relation, others = re.fullmatch(r"(.+) (with|without) (.+)", what, re.S).groups()
        words = " ".join(sentence) or "$flag does nothing with $other: leave one of the two out"
        flags, others = (re.split(r",\s", each) for each in (flags, others))
        rules.append(Rule(flags, relation == "with", others, Template(words)))
    return rules


# A rule is "FLAGS with OTHERS" (each flag is refused beside any of the others) or "FLAGS without
# OTHERS" (each flag is refused where there is none of the others).  Indented below is the sentence
# for the user; without one, the flag "does nothing with" the other.
#
# Commas stand between conditions.  A condition is a flag on the command line, or a flag and its
# values (| is "or", * any text), or one of CONDITIONS.  "A and B" holds where both do.  A script
# that lacks a flag breaks no rule about it.  In the sentence $flag and $other are the two
# conditions; where a condition names values, the value from the command line follows the flag.  $n
# is the number of processes.  A user reads the first rule that is broken.
CONDITIONS = GPU, ONE, SEVERAL = "a CUDA GPU", "one process", "several processes"
EVERY_BUT = "every flag but "
COMPILED = "compile*|unsloth*|torchao*"  # opponents that compile a step
CHECKPOINTS = "--checkpoint, --checkpoint-every, --keep, --resume"
RULES = read_rules(f"""
{EVERY_BUT}--plot with --compare
--memory, --data, --seed, --pack, --warmup, --trace, --stacks, --cuda-graph with --estimate
--trace, --stacks, --cuda-graph with --memory
--ladder, --longest, --opponent with --teacher
    $flag trains on labels, $other does not: leave one of the two out
--opponent, --longest, --kernels, --moments, --fp8, --stochastic-rounding, --recompute, --offload,
--cuda-graph, --save, {CHECKPOINTS} with --ladder
--longest, --kernels, --moments, --fp8, --stochastic-rounding, --recompute, --offload,
{CHECKPOINTS} with --opponent
--fp8, --recompute, --offload, --lora-rank, --adapter, {CHECKPOINTS} with --teacher
--data, --batch-size, --pack, --steps, --lr, --cuda-graph, --save,
{CHECKPOINTS} with --longest

--first-layers without --random-init, --model tiny
    $flag leaves weights out, so it is for random ones: add --random-init, or leave $flag out
--plot * without --ladder
    $flag draws the ladder: add --ladder, or leave --plot out
--plot with --estimate
    $flag draws the operations of a step, and $other runs none: leave one of the two out
--plot with --sweep
    $flag draws the benchmark, and $other prints tables alone: leave one of the two out
--memory-snapshot without --memory
    $flag shows the memory of a step: add $other, or leave $flag out

--student-layers, --temperature without --teacher
    $flag needs --teacher, the model to distil: add it, or leave $flag out
--moments, --stochastic-rounding without --kernels adamw
    $flag needs the adamw kernel: add --kernels all, or leave $flag out
--stochastic-rounding with --dtype fp32
    $flag is for bf16 and does nothing in fp32: add --dtype bf16
--lora-alpha, --lora-targets, --quantize, --merge without --lora-rank, --adapter
    $flag is for LoRA: add --lora-rank R or --adapter DIR, or leave $flag out
--merge without --save
    $flag changes what --save writes: add --save DIR, or leave $flag out
--merge with --quantize and --opponent unsloth
    $flag cannot read the 4-bit weights that --opponent unsloth makes:
    leave --merge or --quantize out
--quantize without one process, --parallel ddp
    $flag keeps the frozen weights whole in each process, which fsdp does not: add --parallel ddp
--moments without one process, --parallel ddp
    $flag cuts what a process holds into blocks, and fsdp's shards may end inside of one:
    add --parallel ddp
--merge with --opponent unsloth-fp8
    $flag cannot read the weights in FP8 that $other makes: leave $flag out
--opponent torchao*|unsloth-fp8 with --quantize
    $flag computes in FP8, and $other keeps weights in 4 bits: leave one of the two out
--fp8 without --kernels fused_layer
    $flag computes in the fused layer's place: add --kernels all
--fp8 {FP8_COMPACT} without --lora-rank, --adapter
    $flag keeps weights that are frozen: take --fp8 {FP8_ALL}, or add --lora-rank R
--fp8 with --quantize
    $flag keeps frozen weights in 8 bits, $other in 4: leave one of the two out
--fp8 and --lora-rank, --fp8 and --adapter without one process, --parallel ddp
    $flag keeps the frozen weights whole in each process, which fsdp does not: add --parallel ddp
--fp8 with --dtype fp32 and a CUDA GPU
    $flag stands for products of bf16, and --dtype is fp32: leave one of the two out
--checkpoint-every *, --keep * without --checkpoint
    $flag has no place to write to: add --checkpoint DIR

--cuda-graph with --steps {"|".join(map(str, range(1, WARMUP_STEPS + 1)))}
    $flag starts after {WARMUP_STEPS} steps, so with $other it does nothing: take more steps
--opponent compile-reduce-overhead with --cuda-graph
    $flag records CUDA graphs of its own: leave $other out
--opponent compile-reduce-overhead with --accumulate
    $flag records CUDA graphs of its own, which write over the gradients that are to be added up:
    leave $other out
--ladder, --opponent {COMPILED} with --pack
    $flag records or compiles a step for those after it, and with $other samples end elsewhere in
    each: leave one of the two out
--cuda-graph with --pack
    $flag repeats one step to the byte, and with $other samples end elsewhere in each:
    leave one of the two out
--offload with --cuda-graph
    $flag asks for the host's memory in each step, which a CUDA graph cannot:
    leave one of the two out
--pack with --data synthetic|*.txt
    $flag fills sequences with several samples, and $other has none:
    take stdlib or a .jsonl file, or leave $flag out

--parallel * without several processes
    $flag needs more than the one process; torchrun starts several:
    torchrun --nproc-per-node 2 SCRIPT
--cuda-graph, --offload, --teacher, --ladder, --longest, --estimate, --memory with several processes
    $flag is for one process and torchrun started $n: leave it out
--opponent {COMPILED} with several processes
    $flag is for one process and torchrun started $n: take fused-adamw, rms-norm or liger
--opponent unsloth-fp8 without --lora-rank, --adapter
    $flag freezes the weights: add --lora-rank R or --adapter DIR
--offload, --cuda-graph without a CUDA GPU
    $flag needs a CUDA GPU and none was found: leave it out
--memory-snapshot without a CUDA GPU
    $flag is a record of the CUDA allocator, and no CUDA GPU was found:
    --memory --plot FILE.png works without one
""")


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
    facts = {GPU: on_gpu, ONE: n == 1, SEVERAL: n > 1}

    def holds(condition: str) -> bool | None:
        """Return None if that is not known, or the script has no such flag."""
        if " and " in condition:
            return all(holds(each) for each in condition.split(" and "))
        flag, _, patterns = condition.partition(" ")
        name = name_of(flag)
        if condition in facts or name not in values:
            return facts.get(condition)
        if not patterns:
            return name in given
        value = values[name]
        words = value if isinstance(value, (list, tuple)) else [value]
        pairs = [(str(word), each) for word in words for each in patterns.split("|")]
        return value is not None and any(fnmatch(*pair) for pair in pairs)

    def in_words(condition: str) -> str:
        flag, _, patterns = condition.partition(" ")
        is_flag = patterns and name_of(flag) in values
        return f"{flag} {values[name_of(flag)]}" if is_flag else condition

    for rule in RULES:
        flags, found = rule.flags, [other for other in rule.others if holds(other)]
        if flags[0].startswith(EVERY_BUT):
            spared = {flags[0].removeprefix(EVERY_BUT), *rule.others}
            flags = [flag for flag in map(flag_name, sorted(given)) if flag not in spared]
        if not rule.excludes:
            are_missing = all(holds(other) is False for other in rule.others)
            found = rule.others[:1] if are_missing else []
        for flag in filter(holds, flags):
            for other in found:
                yield rule.sentence.substitute(flag=in_words(flag), other=in_words(other), n=n)


def can_add(switch: str, values: dict) -> bool:
    """Return True if a run on a GPU lacks this switch and would break no further rule with it."""
    name = name_of(switch)
    before, after = (set(broken(values | {name: on}, None, True)) for on in (False, True))
    return not values.get(name) and after <= before


def name_of(flag: str) -> str:
    """Return argparse's name of a flag."""
    return flag.removeprefix("--").replace("-", "_")


# ---------------------------------------------------------------- the command line


class Parser(command_line.Parser):
    """A command line of rows of the tables, on which no rule is broken."""

    def __init__(self, doc: str, *tables: dict[str, dict]):
        super().__init__(doc)
        self.flags = {*CONDITIONS}
        self.add_flags(*tables)

    def add_flags(self, *tables: dict[str, dict]) -> None:
        """Add the rows of tables.  --help also says what RULES say that a flag needs."""
        rows = {flag: options for table in tables for flag, options in table.items()}
        self.flags |= rows.keys()
        for flag, options in rows.items():
            needed = [
                " or ".join(rule.others)
                for rule in RULES
                if not rule.excludes and {flag, f"{flag} *"} & {*rule.flags}
                if all({other, other.split()[0]} & self.flags for other in rule.others)
            ]
            words = "; needs ".join([options["help"], *needed])
            self.add_argument(flag, **options | {"help": words})

    def add_kernels(self, known: Sequence[str], default: str) -> None:
        """Add --kernels a,b|all|none, which refuses a name that is not one of `known`."""

        def parse(text: str) -> list[str]:
            names = {"all": known, "none": []}.get(text, text.split(","))
            unknown = [name for name in names if name not in known]
            if unknown:
                found, choices = ", ".join(map(repr, unknown)), ", ".join([*known, "all", "none"])
                raise argparse.ArgumentTypeError(f"unknown kernel {found}; choose from {choices}")
            return [name for name in known if name in names]

        words = f"custom kernels to use, of {', '.join(known)}"
        options = {"type": parse, "default": default, "metavar": "NAME,NAME|all|none"}
        self.add_flags({"--kernels": row(words, **options)})

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
        return parsed


def finetune_parser(doc: str) -> Parser:
    """Return the command line of finetune_baseline.py, which finetune_optimized.py adds to."""
    return Parser(doc, OF_TRAINING, OF_FINETUNING)


# ---------------------------------------------------------------- the page


def page() -> str:
    """Return the list of docs/flags.md: what each flag needs, and what it cannot be used with."""
    needed, excluded = {}, {}
    for rule in RULES:
        for flag in (each.removesuffix(" *") for each in rule.flags):
            if not rule.excludes:
                needed.setdefault(flag, []).append(" or ".join(rule.others))
                continue
            for other in rule.others:
                for one, two in ((flag, other), (other, flag)):
                    if one.startswith("--") and " and " not in one:
                        excluded.setdefault(one, {})[two] = None
    lines = []
    for flag in sorted({*needed, *excluded}):
        words = [f"needs {each}" for each in needed.get(flag, [])]
        words += [f"not with {', '.join(excluded[flag])}"] if flag in excluded else []
        text = f"{flag}: {'; '.join(words)}"
        lines += textwrap.wrap(text, 118, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(["```text", *lines, "```"])
