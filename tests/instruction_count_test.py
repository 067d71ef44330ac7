"""instruction_count.py: what is counted, by hand, and what the records allow."""

import json
import math
import re
import sys

import pytest
import triton

from harness.benchmark.benchmark_specs import HEAD_DIM, K_HEADS, Q_HEADS, numbers
from harness.cli.command_line import UserError
from harness.profiling.kernel_facts import FACTS_BY_NAME, launch_of
from tests.toolchain_test import HERE, run
from tools import compile_cases, instruction_count
from tools.instruction_count import (
    COUNTED_GPUS,
    Count,
    Traffic,
    instructions_of,
    parse,
    streaming_loops,
)
from tools.page_records import load_record

# One program copies 2 x 32 x 16 bytes in a turn of its loop; with a rare loop, a way that never
# returns, and what an assembler fills up with.
LISTING = """
_copy:
.text._copy:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_0:
        /*0020*/               @P1 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64+0x200] ;
        /*0040*/                   LDG.E.U16 R9, desc[UR4][R12.64] ;
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0060*/                   STG.E.128 desc[UR4][R2.64+0x200], R8 ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   BRA.DIV UR4, `(.L_x_3) ;
.L_x_1:
        /*0090*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*00a0*/               @P0 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   NOP ;
        /*00d0*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4);
        /*00f0*/                   NOP ;
"""
OUTSIDE, INSIDE = 6, 6  # of the copying loop; once: two, the BRA.DIV, the rare loop's two, EXIT
COPIED = Traffic(loads=2**20, stores=2**20, loads_in_loops=2**20, stores_in_loops=2**20, rows=None)


IN_LOOPS = 2**20 // (2 * 32 * 16) * INSIDE


def test_a_copy_by_hand_and_without_a_loop_the_longest_way():
    code = parse(LISTING)
    assert len(code) == 16
    (loop,) = streaming_loops(code)
    assert (loop.loads, loop.stores) == (2 * 32 * 16, 2 * 32 * 16)
    assert instructions_of(code, COPIED, programs=5, warps=4) == 5 * 4 * OUTSIDE + IN_LOOPS
    code = parse(LISTING.replace("@P0 BRA `(.L_x_0)", "NOP").replace("@P0 BRA `(.L_x_1)", "NOP"))
    assert not streaming_loops(code)
    assert instructions_of(code, COPIED, programs=5, warps=4) == 5 * 4 * (OUTSIDE + INSIDE)


def test_loops_that_store_nothing_share_what_is_loaded():
    one = LISTING.replace("STG.E.128 desc[UR4]", "FADD.128 desc[UR4]")
    body = one[one.index(".L_x_0:") : one.index(".L_x_2:")]
    two = one.replace(".L_x_2:", body.replace(".L_x_0", ".L_x_5") + ".L_x_2:")
    counts = [instructions_of(parse(each), COPIED, 5, 4) for each in (one, two)]
    assert len(streaming_loops(parse(two))) == 2 and counts[0] == counts[1]


def test_an_outer_loop_turns_once_for_each_row():
    outer = LISTING.replace("/*0000*/ ", ".L_x_9:\n/*0000*/ ").replace("EXIT", "@P3 BRA `(.L_x_9)")
    code = parse(outer.replace(".L_x_3:", "/*00b8*/ EXIT ;\n.L_x_3:"))
    with pytest.raises(ValueError, match="outer loop"):
        instructions_of(code, COPIED, programs=5, warps=4)
    found = instructions_of(code, COPIED._replace(rows=100), programs=5, warps=4)
    assert found == 4 * (100 * OUTSIDE + 5) + IN_LOOPS


def test_a_copy_in_bulk_and_code_that_nvdisasm_cannot_read_are_refused():
    with pytest.raises(UserError, match="copy in bulk"):
        streaming_loops(parse(LISTING.replace("LDG.E.128 R8", "UBLKCP R8")))
    with pytest.raises(UserError, match=r"cannot read the code .*: use Triton"):
        instruction_count.disassemble(b"no code")


@pytest.mark.parametrize("name", ["%pair_0", "%pair.0"], ids=["to 3.8", "from 3.9"])
def test_an_address_is_followed_to_the_argument_or_to_an_element_of_one(name):
    """Triton 3.9 writes an element of a tuple with a dot."""
    ttir = f"""
      tt.func public @kernel(%x_ptr: !tt.ptr<bf16>, {name}: !tt.ptr<bf16>, %n: i32) {{
        %a = tt.splat {name} : !tt.ptr<bf16> -> tensor<8x!tt.ptr<bf16>>
        %a_1 = tt.addptr %a, %lane : tensor<8x!tt.ptr<bf16>>, tensor<8xi32>
        %b = tt.load %a_1 : tensor<8x!tt.ptr<bf16>>
        scf.for %i = %c0 to %n step %c1 : i32 {{
          %c = tt.splat %x_ptr : !tt.ptr<bf16> -> tensor<8x!tt.ptr<bf16>>
          tt.store %c, %b : tensor<8x!tt.ptr<bf16>>
    """
    assert [*instruction_count.accesses(ttir)] == [("load", 1, False), ("store", 0, True)]


def test_the_quotient_by_hand():
    """H200: 67e12 / 2 instructions of threads, 4.8e12 bytes a second; GB300: 40e12 and 7.1e12."""
    for gpu, threads, n_bytes in (("H200", 67e12 / 2, 4.8e12), ("GB300", 40e12, 7.1e12)):
        count = Count("", "", "", threads / 32, n_bytes)
        assert count.quotient(COUNTED_GPUS[gpu]) == pytest.approx(1)
    clocks = [round(gpu.clock_ghz, 2) for gpu in COUNTED_GPUS.values()]
    assert clocks == [1.98, 1.98, 2.06]


# In a process and a file of its own: the kernels are compiled, and Triton reads their source.
KERNELS = """
import os
os.environ.update(TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
import dataclasses, json, sys, triton, triton.language as tl
from harness.cli import command_line
from tools import compile_cases, instruction_count
from tools.compile_cases import Case

@triton.jit
def _copy(x_ptr, y_ptr, n, N_ADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + offsets)
    for _ in tl.static_range(N_ADDED):
        x = tl.sin(x.to(tl.float32)).to(x.dtype)
    tl.store(y_ptr + offsets, x)

def launch(x, y, n_added):
    _copy[(x.numel() // 2048,)](x, y, x.numel(), n_added, 2048, num_warps=4)

def main():
    cases = [Case(str(n), launch, lambda t, n=n: (t(2**20), t(2**20), n), 0) for n in (0, 1, 2)]
    for count in instruction_count.count_launches(cases, sys.argv[1]):
        print(json.dumps(dataclasses.asdict(count)))

command_line.run_main(main)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", instruction_count.COUNTED_TARGETS)
def test_a_compiled_copy_and_more_instructions(tmp_path, target):
    """2,048 numbers of bf16 in 128 threads: each loads and stores 16 bytes twice."""
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    environment = {"PYTHONPATH": str(HERE), "TRITON_CACHE_DIR": str(tmp_path)}
    result = run(sys.executable, str(script), target, **environment)
    if "use Triton 3.7 or later" in result.stderr and target == "sm_103":
        assert triton.__version__.startswith("3.6.")
        pytest.skip("Triton 3.6 compiles for GB300, and its disassembler does not know GB300")
    assert result.returncode == 0, result.stderr
    counts = [Count(**json.loads(line)) for line in result.stdout.splitlines()]
    assert [count.n_bytes for count in counts] == [2 * 2 * 2**20] * 3
    warps = 2**20 // 2048 * 4
    # 4 accesses, EXIT, and what computes two addresses
    assert 5 < counts[0].instructions / warps < 40
    one, more, most = (count.quotient(COUNTED_GPUS["GB300"]) for count in counts)
    assert one < more < most


# ---------------------------------------------------------------- the record


COUNTS = [Count(**each) for each in load_record("instruction_count")["counts"]]
TOKENS, INTERMEDIATE = 4096, 14_336  # of tools/compile_cases.py
NUMBERS = {  # of the tensor that a pass is over, by kernel_facts.py's names
    "stream": TOKENS * 4096,
    "heads": TOKENS * (Q_HEADS + K_HEADS) * HEAD_DIM,
    "inner": TOKENS * INTERMEDIATE,
    "weights": 4096 * 4096,
    "projection": INTERMEDIATE * 4096,
    "quantized": TOKENS * 4096,
    "transposed": TOKENS * 4096,
}


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: f"{count.kernel} {count.target}")
def test_bytes_are_the_facts_passes(count):
    """Within 5 %: a row's statistics, weights and cos and sin are no passes."""
    launch = launch_of(count.kernel)[1]
    vocabulary = 131_072 if count.kernel.startswith("_reverse_kl") else 128_256
    numbers = (NUMBERS | {"logits": TOKENS * vocabulary})[launch.tensor]
    assert count.n_bytes == pytest.approx(launch.bytes_per_number(2) * numbers, rel=0.05)


@pytest.mark.parametrize("case, name", [
    ("AdamW", "adamw"),
    ("AdamW, 8-bit moments, stochastic: False", "adamw8"),
    ("NF4", "nf4"),
    ("reverse KL, batchmean, V = 131,072", "reverse_kl"),
])  # fmt: skip
def test_no_gpu_was_faster_than_the_count_allows(case, name):
    record = load_record(f"benchmark_{name}")
    (gpu,) = (COUNTED_GPUS[each] for each in COUNTED_GPUS if each in record["environment"]["gpu"])
    (count,) = (each for each in COUNTS if each.case == case and each.target == gpu.target)
    section = record["sections"][-1]
    most = max(row["tokens"] for row in section["rows"])
    rows = (row for row in section["rows"] if row["tokens"] == most)
    ours = (row["kernels_us"] for row in rows if row["implementation"].startswith("ours"))
    n_bytes = section["bytes_per_element"] * most * math.prod(numbers(section["size"]))
    in_memory_us = n_bytes / gpu.tbs / 1e6
    assert min(ours) >= in_memory_us * max(1, count.quotient(COUNTED_GPUS["H200"]))


@pytest.mark.exhaustive
def test_the_record_is_what_this_triton_gives(tmp_path):
    """Of one lesson and target; another Triton may count otherwise, and the page names its own."""
    record = load_record("instruction_count")
    if triton.__version__ != record["environment"]["triton"]:
        pytest.skip(f"the record is Triton {record['environment']['triton']}'s")
    code = "import dataclasses, json; from tools.instruction_count import counts_of; "
    code += "print(json.dumps([*map(dataclasses.asdict, counts_of(('sm_103', 'adamw')))]))"
    environment = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE)}
    result = run(sys.executable, "-c", code, TRITON_CACHE_DIR=str(tmp_path), **environment)
    assert result.returncode == 0, result.stderr
    for count in json.loads(result.stdout):
        assert count in record["counts"]


@pytest.mark.parametrize("lesson", instruction_count.COUNTED_CASES)
def test_every_kernel_that_moves_a_tensor_is_counted_by_cases_of_the_compile_check(lesson):
    cases = {case.name for case in compile_cases.CASES[lesson]}
    assert {*instruction_count.COUNTED_CASES[lesson]} <= cases
    for launch in FACTS_BY_NAME[lesson].launches:
        counted = any(count.kernel.startswith(launch.prefix) for count in COUNTS)
        assert counted or launch.tensor is None


def test_what_is_printed_says_which_limit_comes_first():
    record = load_record("instruction_count")
    printed = instruction_count.render(record)
    last = " ".join(printed.rpartition("\n\n")[2].split())
    first, others = last.split(" The memory in the ")
    body = instruction_count.rows(record)
    for row in body:
        assert (row["Kernel"] in first) >= (row["GB300"] > 1)
    assert others == f"other {sum(row['GB300'] <= 1 for row in body)}."
    assert f"Triton {record['environment']['triton']}" in printed


def test_the_pages_quotients_and_rates_are_those_of_the_gpus():
    """What gb300.md types by hand of GB300's figures."""
    page = (HERE / "docs" / "gb300.md").read_text()
    gb300, h200 = COUNTED_GPUS["GB300"], COUNTED_GPUS["H200"]
    for faster, text in (
        (gb300.tbs / h200.tbs, "memory is {:.2f} times as fast"),
        (gb300.fp32_tflops / h200.fp32_tflops, "issue only {:.2f} times as many"),
    ):
        assert text.format(faster) in " ".join(page.split())
    for figure in (
        f"{gb300.multiprocessors}, of",
        f"{gb300.tbs} TB/s",
        f"{gb300.fp32_tflops} TFLOP",
    ):
        assert f"  {figure}" in page
    candidates = re.findall(r"  ([\d.]+)   ([\d.]+)   ([\d.]+) -> ([\d.]+)", page)
    assert len(candidates) == 4
    for *counts, before, after in candidates:
        quotients = (Count("", "", "", float(n), 1000).quotient(gb300) for n in counts)
        assert [f"{quotient:.2f}" for quotient in quotients] == [before, after]
