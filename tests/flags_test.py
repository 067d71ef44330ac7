"""Which flags go together: a real command line breaks each rule, and a user reads its sentence."""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import benchmark_kernels
import finetune_baseline
import finetune_optimized
import profile_baseline
from harness.cli import command_line, device, flags
from harness.profiling.kernel_facts import KERNELS
from next_steps import finetune_options
from next_steps.studies import scaling

DOCS = Path(__file__).parents[1] / "docs"
RULES = flags.RULES
SCRIPTS = {
    script.__name__.split(".")[-1]: script
    for script in (
        *(benchmark_kernels, finetune_baseline, finetune_optimized, profile_baseline),
        scaling,
    )
}
COMPILED = [name for name in flags.OPPONENTS if name not in ("fused-adamw", "rms-norm", "liger")]
COMPILING = ", ".join(f"--opponent {name}" for name in COMPILED)
CHECKPOINTS = "--checkpoint x, --checkpoint-every 2, --keep 2, --resume x"
# Command lines, and indented below them what the user reads.  In the brackets are flags of which
# each is refused: GIVEN in the sentence, or FLAG without its value.  OTHER is the flag before.
REFUSED = f"""
finetune_optimized --ladder [--opponent liger, --longest, --fp8, --stochastic-rounding, --save x]
finetune_optimized --ladder [--moments 8bit]
finetune_optimized --opponent liger [--moments 8bit]
finetune_optimized --ladder [--kernels rmsnorm, --kernels rmsnorm,cross_entropy, --kernels none]
finetune_optimized --ladder [--recompute none, --offload, --cuda-graph, {CHECKPOINTS}]
finetune_optimized --opponent liger [--longest, --kernels all, --fp8, --stochastic-rounding]
finetune_optimized --opponent liger [--recompute mlp, --offload, {CHECKPOINTS}]
finetune_optimized --teacher tiny [--fp8, --recompute norm, --offload, --lora-rank 2, --adapter x]
finetune_optimized --teacher tiny [{CHECKPOINTS}]
finetune_optimized --longest [--data stdlib, --batch-size 1, --pack, --steps 3, --lr 1e-3]
finetune_optimized --longest [--cuda-graph, --save x, {CHECKPOINTS}]
profile_baseline --compare a b [--json x, --model tiny, --use-custom-ce, --cuda-graph, --seed 0]
profile_baseline --compare a b [--estimate, --memory]
profile_baseline --estimate [--memory, --data synthetic, --seed 0, --pack, --warmup 3, --trace x]
profile_baseline --estimate [--stacks, --cuda-graph]
profile_baseline --memory [--trace x, --stacks, --cuda-graph]
scaling --compare a [--model tiny, --random-init, --parallel ddp, --json x]
    FLAG does nothing with OTHER: leave one of the two out
finetune_optimized --teacher tiny [--ladder, --longest, --opponent liger]
    FLAG trains on labels, OTHER does not: leave one of the two out
finetune_optimized [--student-layers 1, --temperature 1]
    FLAG needs --teacher, the model to distil: add it, or leave FLAG out
profile_baseline [--first-layers 1]
    FLAG leaves weights out, so it is for random ones: add --random-init, or leave FLAG out
finetune_baseline [--lora-alpha 8, --lora-targets mlp, --merge]
profile_baseline [--quantize nf4]
    FLAG is for LoRA: add --lora-rank R or --adapter DIR, or leave FLAG out
profile_baseline --kernels all --fp8 compact
    --fp8 compact keeps weights that are frozen: take --fp8 all, or add --lora-rank R
finetune_optimized --kernels all --lora-rank 2 --quantize nf4 --fp8
    --fp8 keeps frozen weights in 8 bits, --quantize in 4: leave one of the two out
torchrun finetune_optimized --kernels all --fp8 --lora-rank 2
    --fp8 all keeps the frozen weights whole in each process, which fsdp does not: add --parallel
    ddp
torchrun profile_baseline --kernels all --fp8 compact --adapter x
    --fp8 compact keeps the frozen weights whole in each process, which fsdp does not: add
    --parallel ddp
torchrun finetune_baseline [--cuda-graph, --offload]
torchrun finetune_optimized [--teacher tiny, --ladder, --longest]
torchrun profile_baseline [--estimate, --memory]
    FLAG is for one process and torchrun started 2: leave it out
torchrun finetune_optimized [{COMPILING}]
    GIVEN is for one process and torchrun started 2: take fused-adamw, rms-norm or liger
finetune_optimized --pack [--ladder, {COMPILING}]
    GIVEN records or compiles a step for those after it, and with --pack samples end elsewhere in
    each: leave one of the two out
finetune_baseline [--cuda-graph, --offload]
finetune_optimized [--cuda-graph]
profile_baseline [--cuda-graph]
    FLAG needs a CUDA GPU and none was found: leave it out
finetune_optimized --plot x.png
    --plot x.png draws the ladder: add --ladder, or leave --plot out
profile_baseline --plot x.png --estimate
    --plot draws the operations of a step, and --estimate runs none: leave one of the two out
benchmark_kernels --plot x.png --sweep
    --plot draws the benchmark, and --sweep prints tables alone: leave one of the two out
profile_baseline --memory-snapshot x.pickle
    --memory-snapshot shows the memory of a step: add --memory, or leave --memory-snapshot out
finetune_optimized --stochastic-rounding
    --stochastic-rounding needs the adamw kernel: add --kernels all, or leave --stochastic-rounding
    out
finetune_optimized --stochastic-rounding --kernels adamw
    --stochastic-rounding is for bf16 and does nothing in fp32: add --dtype bf16
profile_baseline --moments 8bit --kernels rmsnorm
    --moments needs the adamw kernel: add --kernels all, or leave --moments out
torchrun finetune_optimized --kernels all --moments 8bit
    --moments cuts what a process holds into blocks, and fsdp's shards may end inside of one: add
    --parallel ddp
finetune_baseline --lora-rank 2 --merge
    --merge changes what --save writes: add --save DIR, or leave --merge out
finetune_optimized --opponent unsloth --lora-rank 4 --quantize nf4 --save x --merge
    --merge cannot read the 4-bit weights that --opponent unsloth makes: leave --merge or --quantize
    out
torchrun finetune_baseline --lora-rank 2 --quantize nf4
    --quantize keeps the frozen weights whole in each process, which fsdp does not: add --parallel
    ddp
finetune_optimized --opponent torchao-rowwise --lora-rank 2 --quantize nf4
    --opponent torchao-rowwise computes in FP8, and --quantize keeps weights in 4 bits: leave one of
    the two out
finetune_optimized --opponent unsloth-fp8 --adapter x --quantize nf4
    --opponent unsloth-fp8 computes in FP8, and --quantize keeps weights in 4 bits: leave one of the
    two out
finetune_optimized --opponent unsloth-fp8 --lora-rank 2 --save x --merge
    --merge cannot read the weights in FP8 that --opponent unsloth-fp8 makes: leave --merge out
finetune_optimized --opponent unsloth-fp8
    --opponent unsloth-fp8 freezes the weights: add --lora-rank R or --adapter DIR
finetune_optimized --fp8
    --fp8 computes in the fused layer's place: add --kernels all
profile_baseline --fp8 --kernels rmsnorm,swiglu
    --fp8 computes in the fused layer's place: add --kernels all
GPU finetune_optimized --kernels all --fp8 --dtype fp32
    --fp8 stands for products of bf16, and --dtype is fp32: leave one of the two out
finetune_baseline --checkpoint-every 2
    --checkpoint-every 2 has no place to write to: add --checkpoint DIR
finetune_baseline --keep 2
    --keep 2 has no place to write to: add --checkpoint DIR
finetune_baseline --cuda-graph --steps 2
    --cuda-graph starts after 2 steps, so with --steps 2 it does nothing: take more steps
finetune_optimized --cuda-graph --opponent compile-reduce-overhead
    --opponent compile-reduce-overhead records CUDA graphs of its own: leave --cuda-graph out
finetune_optimized --accumulate 2 --opponent compile-reduce-overhead
    --opponent compile-reduce-overhead records CUDA graphs of its own, which write over the
    gradients that are to be added up: leave --accumulate out
finetune_baseline --cuda-graph --pack
    --cuda-graph repeats one step to the byte, and with --pack samples end elsewhere in each: leave
    one of the two out
finetune_baseline --offload --cuda-graph
    --offload asks for the host's memory in each step, which a CUDA graph cannot: leave one of the
    two out
finetune_baseline --pack --data synthetic
    --pack fills sequences with several samples, and --data synthetic has none: take stdlib or a
    .jsonl file, or leave --pack out
finetune_baseline --pack --data a.txt
    --pack fills sequences with several samples, and --data a.txt has none: take stdlib or a .jsonl
    file, or leave --pack out
finetune_baseline --parallel ddp
    --parallel ddp needs more than the one process; torchrun starts several: torchrun
    --nproc-per-node 2 SCRIPT
profile_baseline --memory --memory-snapshot x.pickle
    --memory-snapshot is a record of the CUDA allocator, and no CUDA GPU was found: --memory --plot
    FILE.png works without one
"""
ALLOWED = [
    "finetune_optimized",
    "finetune_baseline --adapter x --quantize nf4 --merge --save x --lora-alpha 2",
    "finetune_baseline --lora-rank 2 --quantize nf4 --lora-targets mlp",
    "torchrun finetune_baseline --lora-rank 2 --quantize nf4 --parallel ddp",
    "torchrun finetune_optimized --kernels adamw --moments 8bit --parallel ddp",
    "profile_baseline --kernels all --moments 8bit --estimate",
    "torchrun finetune_optimized --opponent liger --pack --accumulate 2",
    "finetune_optimized --kernels all --fp8 --dtype fp32 --pack",
    "finetune_optimized --kernels all --lora-rank 2 --fp8",
    "finetune_optimized --kernels all --lora-rank 2 --fp8 compact",
    "finetune_optimized --kernels all --adapter x --fp8 compact --save x --merge",
    "torchrun finetune_optimized --kernels all --fp8",
    "profile_baseline --random-init --first-layers 1",
    "profile_baseline --model tiny --first-layers 1 --estimate",
    "torchrun finetune_optimized --kernels all --lora-rank 2",
    "torchrun finetune_optimized --kernels all --lora-rank 2 --fp8 --parallel ddp",
    "torchrun finetune_optimized --kernels all --adapter x --fp8 --parallel ddp",
    "finetune_optimized --opponent compile-reduce-overhead --accumulate 1",
    "finetune_optimized --opponent torchao-rowwise --lora-rank 2",
    "finetune_optimized --opponent unsloth-fp8 --lora-rank 2 --save x",
    "finetune_optimized --opponent unsloth-fp8 --adapter x",
    "finetune_optimized --opponent torchao-tensorwise --adapter x --lora-alpha 2",
    "GPU finetune_optimized --kernels all --stochastic-rounding --cuda-graph --steps 3",
    "GPU finetune_optimized --ladder --dtype fp32 --plot x.png",
    "GPU profile_baseline --memory --memory-snapshot x --pack --plot x.png",
    "profile_baseline --compare a b --plot x.png",
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
    for side in ("flags", "others"):
        listed = getattr(rule, side)
        for each in listed if len(listed) > 1 else ():
            less = rule._replace(**{side: [other for other in listed if other != each]})
            yield [*before, less, *after]


def parsed(script: ModuleType, words: list[str]) -> argparse.Namespace:
    if script is profile_baseline:
        parser = flags.Parser("", flags.OF_TRAINING)
        parser.add_kernels(KERNELS, default="none")
        parser.add_flags(flags.OF_KERNELS, flags.OF_PROFILER)
    else:
        parser = flags.finetune_parser("")
    if script is finetune_optimized:
        finetune_options.add_flags(parser)
    return parser.parse_args(words)


def test_no_part_of_a_rule_could_be_left_out(typed, monkeypatch):
    """Without it, a command line above is refused in other words or not at all, or one is refused
    that is not to be.
    """
    monkeypatch.setattr(flags, "RULES", [])
    cases = []
    for command, expected in (REFUSED | dict.fromkeys(ALLOWED)).items():
        script, words = typed(command)
        if script not in (benchmark_kernels, scaling):  # which have flags of their own
            args = parsed(script, words)
            values = vars(args) | {"dtype": args.dtype or flags.DTYPE[device.HAS_GPU]}
            cases.append((expected, command, (values, args.given, device.HAS_GPU)))

    def is_noticed() -> bool:
        for expected, command, case in cases:
            typed(command)
            if next(flags.broken(*case), None) != expected:
                return True
        return False

    for rule in RULES:
        for rules in without(rule) if "--sweep" not in rule.others else ():
            monkeypatch.setattr(flags, "RULES", rules)
            assert is_noticed(), rule
    monkeypatch.setattr(flags, "RULES", RULES)
    assert not is_noticed()


def test_help_says_what_a_flag_needs(run_script):
    printed = " ".join(run_script(finetune_optimized, "--help").out.split())
    for words in (
        "an ordinary model; needs --lora-rank or --adapter; needs --save",
        "as a picture; needs --ladder",
        "is one launch; needs a CUDA GPU",
    ):
        assert words in printed
    assert "needs --ladder" not in run_script(profile_baseline, "--help").out


def test_a_flag_counts_as_given_when_its_value_is_the_default():
    args = flags.Parser("", flags.OF_TRAINING).parse_args(
        ["--seed", "0", "--data=stdlib", "--random-init"]
    )
    assert args.given == {"seed", "data", "random_init"} and args.batch_size == 1
    assert parsed(finetune_optimized, []).given == set()


# ---------------------------------------------------------------- what other pages say of it

PAGES = {  # a page, its words: command lines that are refused
    ("several_gpus", "each `--opponent` that compiles"): [
        f"torchrun finetune_optimized --opponent {name}" for name in COMPILED
    ],
    ("data", "those `--opponent`s that compile"): [
        f"finetune_optimized --pack --opponent {name}" for name in COMPILED
    ],
    ("resume", "not with `--opponent`, `--teacher`,\n  `--ladder`, `--longest`"): [
        f"finetune_optimized {beside} {flag} x"
        for beside in ("--opponent liger", "--teacher tiny", "--ladder", "--longest")
        for flag in ("--checkpoint", "--resume")
    ],
    ("lora", "Only `--teacher` cannot be combined"): [
        "finetune_optimized --teacher tiny --lora-rank 2",
    ],
    ("lora", "several processes need `--parallel ddp`"): [
        "torchrun finetune_baseline --lora-rank 2 --quantize nf4"
    ],
}


def test_what_a_page_says_is_refused_is_refused():
    for (page, words), commands in PAGES.items():
        assert words in (DOCS / f"{page}.md").read_text(), page
        assert commands and set(commands) <= set(REFUSED)
