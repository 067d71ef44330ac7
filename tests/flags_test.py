"""Which flags go together: a real command line breaks each rule, and a user reads its sentence."""

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import command_line, device, flags
from harness.cli.command_line import UserError
from next_steps import finetune_options
from next_steps.finetuning import distill, opponents
from next_steps.hugging_face import sft
from next_steps.memory import estimate, profile

DOCS = Path(__file__).parents[1] / "docs"
RULES = flags.RULES


TABLES = {
    finetune_baseline: finetune_options.FLAGS["Baseline"],
    finetune_optimized: finetune_options.OPTIMIZED,
    **{each: each.FLAGS for each in (profile_baseline, distill, opponents, estimate, profile, sft)},
}
SCRIPTS = {script.__name__.rpartition(".")[2]: script for script in TABLES}
COMPILED = [name for name in flags.OPPONENTS if name.startswith(("compile", "unsloth", "torchao"))]
COMPILING = ", ".join(f"--opponent {name}" for name in COMPILED)
# Command lines, and indented below them what the user reads.  In the brackets are flags of which
# each is refused: GIVEN in the sentence, or FLAG without its value.  OTHER is the flag before.
REFUSED = f"""
profile_baseline [--first-layers 1]
estimate [--first-layers 1]
    FLAG leaves weights out, so it is for random ones: add --random-init, or leave FLAG out
finetune_baseline [--lora-alpha 8, --lora-targets mlp, --merge]
profile_baseline [--quantize nf4]
    FLAG is for LoRA: add --lora-rank R or --adapter DIR, or leave FLAG out
profile_baseline --kernels all --fp8 compact
    --fp8 compact keeps weights that are frozen: take --fp8 all, or add --lora-rank R
finetune_optimized --kernels all --lora-rank 2 --quantize nf4 --fp8
    --fp8 keeps frozen weights in 8 bits, --quantize in 4: leave one of the two out
torchrun finetune_optimized --kernels all [--fp8 --lora-rank 2, --fp8 compact --adapter x]
torchrun finetune_baseline --lora-rank 2 [--quantize nf4]
    FLAG keeps the frozen weights whole in each process, which fsdp does not: add --parallel ddp
torchrun finetune_baseline [--cuda-graph, --offload]
    FLAG is for one process and torchrun started 2: leave it out
torchrun opponents [{COMPILING}]
    GIVEN is for one process and torchrun started 2: take fused-adamw, rms-norm or liger
opponents --pack [{COMPILING}]
finetune_baseline --pack [--cuda-graph]
    GIVEN records or compiles a step for those after it, and with --pack samples end elsewhere in
    each: leave one of the two out
finetune_baseline [--cuda-graph, --offload]
profile_baseline [--cuda-graph]
profile [--memory-snapshot x.pickle]
    FLAG needs a CUDA GPU and none was found: leave it out
distill --teacher tiny [--stochastic-rounding, --moments 8bit]
finetune_optimized [--stochastic-rounding]
profile_baseline --kernels rmsnorm [--moments 8bit]
    FLAG needs the adamw kernel: add --kernels all, or leave FLAG out
finetune_optimized --stochastic-rounding --kernels adamw
    --stochastic-rounding is for bf16 and does nothing in fp32: add --dtype bf16
torchrun finetune_optimized --kernels all --moments 8bit
    --moments cuts what a process holds into blocks, and fsdp's shards may end inside of one: add
    --parallel ddp
finetune_baseline --lora-rank 2 --merge
    --merge changes what --save writes: add --save DIR, or leave --merge out
opponents --opponent unsloth --lora-rank 4 --quantize nf4 --save x --merge
    --merge cannot read the 4-bit weights that --opponent unsloth makes: leave --merge or --quantize
    out
opponents --lora-rank 2 --quantize nf4 [--opponent torchao-rowwise]
opponents --adapter x --quantize nf4 [--opponent unsloth-fp8]
    GIVEN computes in FP8, and --quantize keeps weights in 4 bits: leave one of the two out
opponents --opponent unsloth-fp8 --lora-rank 2 --save x --merge
    --merge cannot read the weights in FP8 that --opponent unsloth-fp8 makes: leave --merge out
opponents --opponent unsloth-fp8
    --opponent unsloth-fp8 freezes the weights: add --lora-rank R or --adapter DIR
finetune_optimized --fp8
profile_baseline --fp8 --kernels rmsnorm,swiglu
    --fp8 computes in the fused layer's place: add --kernels all
GPU finetune_optimized --kernels all --fp8 --dtype fp32
    --fp8 stands for products of bf16, and --dtype is fp32: leave one of the two out
finetune_baseline [--checkpoint-every 2, --keep 2]
    FLAG has no place to write to: add --checkpoint DIR
finetune_baseline --cuda-graph --steps 2
    --cuda-graph starts after 2 steps, so with --steps 2 it does nothing: take more steps
opponents --opponent compile-reduce-overhead [--cuda-graph, --accumulate 2]
    --opponent compile-reduce-overhead records CUDA graphs of its own, which no other graph can hold
    and which overwrite sums of gradients: leave FLAG out
opponents --opponent flashoptim --cuda-graph
    --opponent flashoptim counts its steps on the host, and --cuda-graph would repeat one of them:
    leave --cuda-graph out
finetune_baseline --offload --cuda-graph
    --offload asks for the host's memory in each step, which a CUDA graph cannot: leave one of the
    two out
finetune_baseline --pack [--data synthetic, --data a.txt]
    --pack fills sequences with several samples, and GIVEN has none: take stdlib or a .jsonl file,
    or leave --pack out
finetune_baseline [--parallel ddp]
    FLAG needs more than the one process; torchrun starts several: torchrun --nproc-per-node 2
    SCRIPT
sft --data x.jsonl --opponent liger --kernels all
    --kernels does nothing with --opponent: leave one of the two out
"""
ALLOWED = [
    "finetune_optimized",
    "finetune_baseline --adapter x --quantize nf4 --merge --save x --lora-alpha 2",
    "finetune_baseline --lora-rank 2 --quantize nf4 --lora-targets mlp",
    "torchrun finetune_baseline --lora-rank 2 --quantize nf4 --parallel ddp",
    "torchrun finetune_optimized --kernels adamw --moments 8bit --parallel ddp",
    "profile_baseline --kernels all --moments 8bit",
    "estimate --kernels all --offload",
    "torchrun opponents --opponent liger --pack --accumulate 2",
    "finetune_optimized --kernels all --fp8 --dtype fp32 --pack",
    "finetune_optimized --kernels all --lora-rank 2 --fp8",
    "finetune_optimized --kernels all --lora-rank 2 --fp8 compact",
    "finetune_optimized --kernels all --adapter x --fp8 compact --save x --merge",
    "torchrun finetune_optimized --kernels all --fp8",
    "profile_baseline --random-init --first-layers 1",
    "estimate --model tiny --first-layers 1",
    "torchrun finetune_optimized --kernels all --lora-rank 2",
    "torchrun finetune_optimized --kernels all --lora-rank 2 --fp8 --parallel ddp",
    "torchrun finetune_optimized --kernels all --adapter x --fp8 --parallel ddp",
    "opponents --opponent compile-reduce-overhead --accumulate 1",
    "torchrun opponents --opponent flashoptim --accumulate 2 --pack",
    "opponents --opponent torchao-rowwise --lora-rank 2",
    "opponents --opponent unsloth-fp8 --lora-rank 2 --save x",
    "opponents --opponent unsloth-fp8 --adapter x",
    "opponents --opponent torchao-tensorwise --adapter x --lora-alpha 2",
    "GPU finetune_optimized --kernels all --stochastic-rounding --cuda-graph --steps 3",
    "GPU profile --memory-snapshot x --pack --plot x.png",
    "profile_baseline --plot x.png",
    "sft --data x.jsonl --opponent liger",
]


def read(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command line of a text such as REFUSED, and its sentence."""
    for commands, sentence in re.findall(r"((?:^\S.*\n)+)((?:^ +.*\n)+)", text, re.M):
        sentence = " ".join(sentence.split())
        for command in commands.splitlines():
            before, each = re.fullmatch(r"(.*?)(?: \[(.*)\])?", command).groups()
            other = (re.findall(r" (--\S+)", before) or [""])[-1]
            for flag in each.split(", ") if each else [""]:
                said = sentence.replace("GIVEN", flag).replace("FLAG", flag.split(" ")[0])
                said = said.replace("OTHER", other)
                yield f"{before} {flag}".rstrip(), said


REFUSED = dict(read(REFUSED))


@pytest.fixture
def typed(monkeypatch):
    """typed("torchrun SCRIPT --flag") -> (the script, its flags), where the script would start."""
    monkeypatch.setattr(command_line, "leave", sys.exit)  # which would end these tests

    def prepare(command: str) -> tuple[ModuleType, list[str]]:
        words = command.split()
        where = words.pop(0) if words[0] in ("torchrun", "GPU") else ""
        monkeypatch.setenv("WORLD_SIZE", "2" if where == "torchrun" else "1")
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(device, "HAS_GPU", where == "GPU")
        return SCRIPTS[words[0]], words[1:]

    return prepare


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_that_do_not_go_together_are_refused(run_script, typed, tmp_path, monkeypatch, name):
    """Before a model is loaded or a file written."""
    monkeypatch.chdir(tmp_path)
    commands = [command for command in REFUSED if name in command.split()]
    assert commands
    for command in commands:
        script, words = typed(command)
        outcome = run_script(script, *words)
        expected = (2, "", f"error: {REFUSED[command]}\n")
        assert (outcome.code, outcome.out, outcome.err) == expected, command
    assert not list(tmp_path.iterdir())


def without(rule: flags.Rule) -> Iterator[list[flags.Rule]]:
    """Yield RULES without the rule, and with one flag fewer on either side of it."""
    i = RULES.index(rule)
    before, after = RULES[:i], RULES[i + 1 :]
    yield before + after
    yield [*before, *([rule._replace(where=[])] if rule.where else []), *after]
    for side in ("flags", "others", "where"):
        listed = getattr(rule, side)
        for each in listed if len(listed) > 1 else ():
            less = rule._replace(**{side: [other for other in listed if other != each]})
            yield [*before, less, *after]


def parsed(command: str, typed) -> argparse.Namespace:
    script, words = typed(command)
    return flags.FlagParser("", TABLES[script]).parse_args(words)


def test_no_part_of_a_rule_could_be_left_out(typed, monkeypatch):
    """Without it, a command line above is refused in other words or not at all, or one is refused
    that is not to be.
    """
    monkeypatch.setattr(flags, "RULES", [])
    cases = []
    for command, expected in (REFUSED | dict.fromkeys(ALLOWED)).items():
        args = parsed(command, typed)
        on_gpu = device.HAS_GPU or command.startswith("estimate")
        values = vars(args) | {"dtype": args.dtype or flags.DTYPE[device.HAS_GPU]}
        for where in (on_gpu,) if expected else (on_gpu, None):  # None: not known yet
            cases.append((expected, command, (values, args.given, where)))

    def is_noticed() -> bool:
        for expected, command, case in cases:
            typed(command)
            if next(flags.broken(*case), None) != expected:
                return True
        return False

    for rule in RULES:
        for rules in without(rule):
            monkeypatch.setattr(flags, "RULES", rules)
            assert is_noticed(), rule
    monkeypatch.setattr(flags, "RULES", RULES)
    assert not is_noticed()


def test_help_lists_the_flags_and_what_they_need(run_script):
    outcome = run_script(finetune_optimized, "--help")
    printed = " ".join(outcome.out.split())
    for words in (
        "an ordinary model; needs --lora-rank or --adapter; needs --save",
        "is one launch; needs a CUDA GPU",
        "(default: rmsnorm,cross_entropy)",
        *finetune_options.OPTIMIZED,
    ):
        assert words in printed
    assert outcome.code == 0 and not outcome.err


@pytest.mark.parametrize("name", ["distill --teacher tiny", "estimate", "profile"])
def test_a_command_that_cannot_share_a_step_is_for_one_process(typed, name):
    with pytest.raises(UserError, match="is for one process and torchrun started 2"):
        parsed(f"torchrun {name}", typed)


@pytest.mark.parametrize("flag, command", flags.COMMANDS.items())
def test_what_was_a_flag_is_answered_with_its_command(flag, command):
    said = f"{flag} is no flag but a command of its own: python -m {command}"
    for script in (finetune_optimized, profile_baseline):
        with pytest.raises(UserError, match=said):
            flags.FlagParser("", TABLES[script]).parse_args([flag, "value", "--unknown"])
    assert callable(importlib.import_module(command.split()[0]).main)


def test_a_flag_counts_as_given_when_its_value_is_the_default(typed):
    args = flags.FlagParser("", flags.OF_TRAINING).parse_args(
        ["--seed", "0", "--data=stdlib", "--random-init"]
    )
    assert args.given == {"seed", "data", "random_init"} and args.batch_size == 1
    assert parsed("finetune_optimized", typed).given == set()


# ---------------------------------------------------------------- what other pages say of it

PAGES = {  # a page, its words: command lines that are refused
    ("several_gpus", "each `--opponent` that compiles"): [
        f"torchrun opponents --opponent {name}" for name in COMPILED
    ],
    ("data", "those `--opponent`s that compile"): [
        f"opponents --pack --opponent {name}" for name in COMPILED
    ],
    ("lora", "several processes need `--parallel ddp`"): [
        "torchrun finetune_baseline --lora-rank 2 --quantize nf4"
    ],
}


def test_what_a_page_says_is_refused_is_refused():
    for (page, words), commands in PAGES.items():
        assert words in (DOCS / f"{page}.md").read_text(), page
        assert commands and set(commands) <= set(REFUSED)
