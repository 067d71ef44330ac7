"""Fill README.md's recorded outputs and figures from results/*.json, or check that they agree.

    python readme_figures.py            # rewrite README.md
    python readme_figures.py --check    # exit code 1 where README.md and the records differ
    python readme_figures.py --record results/rmsnorm_test.json rmsnorm_test.py    # run a script, keep what it prints

README.md marks what comes from a record:

    <!-- output: results/a.json -->            the next fenced block is what the script printed, rendered again
    <!-- output: results/a.json b.json -->     two or more fine-tuning records: the comparison of compare_runs.py;
                                               two profiles: that of profile_baseline.py --compare
    <!-- figure: name -->1.23<!-- / -->        one figure in a sentence; figures() below says how it is computed
"""

# first: importing PyTorch takes seconds
import quiet_interrupt  # noqa: F401  # isort: skip

import json
import re
import subprocess
import sys
from pathlib import Path

import benchmark_kernels
import compare_runs
import diagnose
import ladder
import llama
import measure
import memory_profile
import profile_baseline
import sweep_kernels

HERE = Path(__file__).parent
BLOCK = re.compile(r"(<!-- output: (?P<paths>[^>]+?) -->\n+```text\n)(?P<body>.*?)(^```$)", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"(<!-- figure: (?P<name>\w+) -->)(?P<body>.*?)(<!-- / -->)", re.DOTALL)


def load(name: str) -> dict:
    return json.loads((HERE / "results" / name).read_text())


def render(paths: list[str]) -> str:
    """What the script that wrote these records printed."""
    records = [json.loads((HERE / path).read_text()) for path in paths]
    if len(records) > 1 and records[0]["kind"] == "profile":
        return diagnose.render_comparison(*records)
    if len(records) > 1:
        return compare_runs.render(compare_runs.run_names(records), records)
    (record,) = records
    renderers = {
        "finetune": finetune_output,
        "profile": profile_baseline.render,
        "memory": memory_profile.render,
        "benchmark": benchmark_kernels.render,
        "sweep": sweep_kernels.render_sweep,
        "ladder": ladder.render,
        "longest": ladder.render_longest,
        "text": lambda record: "\n".join(record["lines"]),
    }
    return renderers[record["kind"]](record)


def finetune_output(record: dict) -> str:
    """Every step and the result block."""
    columns = [record[key] for key in ("losses", "seconds", "tokens", "peaks")]
    steps = [llama.step_line(step, record["steps"], *columns) for step in range(1, record["steps"] + 1)]
    return "\n".join([*steps, "", llama.result_block(record)])


def benchmark_rows(record: dict) -> dict[tuple[int, str], dict]:
    """{(tokens, implementation): row} of a benchmark of one kernel."""
    return {(row["tokens"], row["implementation"]): row for row in record["sections"][0]["rows"]}


def figures() -> dict[str, str]:
    """Every figure that a sentence of README.md quotes, by name."""
    rms, ce = load("benchmark_rmsnorm.json"), load("benchmark_cross_entropy.json")
    rms_rows, ce_rows = benchmark_rows(rms), benchmark_rows(ce)
    eager, ours, on_bf16 = benchmark_kernels.EAGER, benchmark_kernels.OURS, "F.cross_entropy, bf16 logits"
    in_place = f"{ours}, in place"

    def us(row: dict) -> float:
        return row["total_us"][1]

    def share(row: dict, record: dict) -> str:
        return f"{100 * row['gbs'] / record['copy_gbs']:.0f}"

    def category_ms(record: dict, *names: str) -> float:
        return sum(record["categories"][name]["us"] for name in names) / 1e3

    def category_share(record: dict, *names: str) -> str:
        return f"{100 * category_ms(record, *names) / category_ms(record, *record['categories']):.0f}"

    values = {
        "gpu": rms["environment"]["gpu"],
        "copy_tbs": f"{rms['copy_gbs'] / 1e3:.2f}",
        "matmul_tflops": f"{rms['matmul_tflops']:.0f}",
        "flop_per_byte": f"{rms['matmul_tflops'] / rms['copy_gbs'] * 1e3:.0f}",
    }
    large_eager, large_ours = rms_rows[65_536, eager], rms_rows[65_536, ours]
    values |= {
        "rms_eager_us": f"{us(large_eager):,.0f}", "rms_eager_pct": share(large_eager, rms),
        "rms_ours_us": f"{us(large_ours):,.0f}", "rms_ours_pct": share(large_ours, rms),
        "rms_gain": f"{us(large_eager) / us(large_ours):.1f}",
        "rms_vs_quack": f"{us(rms_rows[65_536, 'QuACK']) / us(large_ours):.2f}",
        "rms_host_256": f"{rms_rows[256, ours]['host_us']:.0f}",
        "rms_host_floor": f"{rms_rows[256, benchmark_kernels.HOST_FLOOR]['host_us']:.0f}",
        "rms_host_torch": f"{rms_rows[256, 'F.rms_norm']['host_us']:.0f}",
        "rms_kernels_256": f"{rms_rows[256, ours]['kernels_us']:.0f}",
    }  # fmt: skip
    contenders = {
        "ours": ours, "torch": "F.rms_norm", "liger": "Liger-Kernel", "compile": "torch.compile", "quack": "QuACK",
    }  # fmt: skip
    for name, opponent in contenders.items():  # at 16,384 rows a slow host hides the differences: the kernels alone
        theirs, mine = (rms_rows[16_384, which]["kernels_us"] for which in (opponent, ours))
        values[f"rms_{name}"] = f"{theirs / mine:.2f}"
    for rows in (4096, 16_384):
        n_bytes = rms["sections"][0]["bytes_per_element"] * rows * rms["sections"][0]["size"]
        values[f"rms_kernels_pct_{rows}"] = f"{n_bytes / rms_rows[rows, ours]['kernels_us'] / 10 / rms['copy_gbs']:.0f}"
    sizes = load("benchmark_rmsnorm_sizes.json")
    for section in sizes["sections"]:
        rows = {row["implementation"]: row for row in section["rows"] if row["tokens"] == 65_536}
        values |= {f"rms_{name}_{section['size']}": share(rows[each], sizes) for name, each in contenders.items()}
    for dtype in ("fp16", "fp32"):
        other = load(f"benchmark_rmsnorm_{dtype}.json")
        values[f"rms_ours_{dtype}"] = share(benchmark_rows(other)[65_536, ours], other)
    sizes = load("benchmark_cross_entropy_sizes.json")
    for section in sizes["sections"]:
        rows, V = {row["implementation"]: row for row in section["rows"]}, section["size"]
        # The kernels alone: the short vocabularies' take less time than a slow host needs to launch them.
        floor = section["bytes_per_element"] / 3 * 8192 * V / sizes["copy_gbs"] / 1e3  # us, of one pass over the logits
        values[f"ce_pct_{V}"] = f"{100 * 3 * floor / rows[ours]['kernels_us']:.0f}"
        values[f"ce_in_place_floor_{V}"] = f"{rows[in_place]['kernels_us'] / (2 * floor):.2f}"
        values[f"ce_torch_gain_{V}"] = f"{rows[on_bf16]['kernels_us'] / rows[ours]['kernels_us']:.1f}"
        values[f"ce_compile_gain_{V}"] = f"{rows['torch.compile']['kernels_us'] / rows[ours]['kernels_us']:.1f}"
    kl, kl_names = load("benchmark_reverse_kl.json"), {"ours": ours, "compile": benchmark_kernels.COMPILED}
    kl_names |= {"two": benchmark_kernels.TWO_KERNELS, "tile": benchmark_kernels.ONE_TILE}
    for section in kl["sections"]:
        rows, V = {row["implementation"]: row for row in section["rows"]}, section["size"]
        times = {name: rows[each]["kernels_us"] for name, each in kl_names.items()}
        floor = section["bytes_per_element"] * rows[ours]["tokens"] * V / kl["copy_gbs"] / 1e3  # us
        values |= {f"rkl_{name}_{V}": f"{time:,.0f}" for name, time in times.items()}
        values |= {
            f"rkl_gain_{V}": f"{times['compile'] / times['ours']:.1f}",
            f"rkl_pct_{V}": f"{100 * floor / times['ours']:.0f}",
            f"rkl_mb_{V}": f"{rows[ours]['extra_bytes'] / 1e6:,.0f}",
            f"rkl_compile_mb_{V}": f"{rows[kl_names['compile']]['extra_bytes'] / 1e6:,.0f}",
        }
    large_eager, large_ours = ce_rows[8192, eager], ce_rows[8192, ours]
    values |= {
        "ce_hf_us": f"{us(large_eager):,.0f}", "ce_hf_mb": f"{large_eager['extra_bytes'] / 1e6:,.0f}",
        "ce_ours_us": f"{us(large_ours):,.0f}", "ce_ours_mb": f"{large_ours['extra_bytes'] / 1e6:,.0f}",
        "ce_gain": f"{us(large_eager) / us(large_ours):.1f}",
        "ce_mem_gain": f"{large_eager['extra_bytes'] / large_ours['extra_bytes']:.1f}",
        "ce_in_place_mb": f"{ce_rows[8192, in_place]['extra_bytes'] / 1e6:.1f}",
        "ce_ours_pct": share(large_ours, ce),
        "ce_in_place_us": f"{us(ce_rows[8192, in_place]):,.0f}",
        "ce_in_place_floor": f"{us(ce_rows[8192, in_place]) / (4 * 8192 * 128_256 / ce['copy_gbs'] / 1e3):.2f}",
        "ce_vs_quack": f"{us(ce_rows[8192, 'QuACK']) / us(large_ours):.2f}",
        "ce_speed_honest": f"{us(ce_rows[8192, on_bf16]) / us(large_ours):.1f}",
        "ce_mem_honest": f"{ce_rows[8192, on_bf16]['extra_bytes'] / large_ours['extra_bytes']:.1f}",
        "ce_host_128": f"{ce_rows[128, ours]['host_us']:.0f}",
        "ce_host_torch_128": f"{ce_rows[128, on_bf16]['host_us']:.0f}",
        "ce_kernels_128": f"{ce_rows[128, ours]['kernels_us']:.0f}",
        "ce_torch_kernels_128": f"{ce_rows[128, on_bf16]['kernels_us']:.0f}",
    }  # fmt: skip
    opponents = {
        "quack": "QuACK, in place",
        "liger": "Liger-Kernel, in place",
        "compile": "torch.compile",
        "torch": on_bf16,
    }
    for name, opponent in opponents.items():
        values[f"ce_in_place_{name}"] = f"{us(ce_rows[8192, opponent]) / us(ce_rows[8192, in_place]):.2f}"

    for suffix, size in (("small", "1x512"), ("large", "4x2048")):
        base, optimized = (load(f"finetune_{which}_{size}.json") for which in ("baseline", "optimized"))
        before, after = load(f"profile_{size}.json"), load(f"profile_{size}_both.json")
        targets = ("normalization", "loss")
        values |= {
            f"step_base_{suffix}": f"{1e3 * base['median_seconds']:.0f}",
            f"step_opt_{suffix}": f"{1e3 * optimized['median_seconds']:.0f}",
            f"mem_base_{suffix}": f"{base['peak_memory_bytes'] / 1e9:.1f}",
            f"mem_opt_{suffix}": f"{optimized['peak_memory_bytes'] / 1e9:.1f}",
            f"step_gain_{suffix}": f"{base['median_seconds'] / optimized['median_seconds']:.2f}",
            f"mem_gain_{suffix}": f"{optimized['peak_memory_bytes'] / base['peak_memory_bytes']:.2f}",
            f"mem_saved_{suffix}": f"{(base['peak_memory_bytes'] - optimized['peak_memory_bytes']) / 1e9:.1f}",
            f"opt_share_{suffix}": category_share(before, "optimizer"),
            f"norm_loss_share_{suffix}": category_share(before, *targets),
            f"norm_loss_ms_before_{suffix}": f"{category_ms(before, *targets):.1f}",
            f"norm_loss_ms_after_{suffix}": f"{category_ms(after, *targets):.1f}",
        }
        values |= ladder_figures(load(f"ladder_{size}.json"), suffix)
    values["mem_floor"] = f"{3 * 2 * load('ladder_1x512.json')['parameters'] / 1e9:.1f}"
    values |= beyond_figures()
    fp32, bf16, stochastic = (
        load(f"quality_{name}.json")["validation_loss_after"] for name in ("fp32", "bf16", "stochastic")
    )
    values |= {
        "quality_fp32": f"{fp32:.4f}", "quality_bf16": f"{bf16:.4f}", "quality_stochastic": f"{stochastic:.4f}",
        "quality_closed": f"{100 * (bf16 - stochastic) / (bf16 - fp32):.0f}",
    }  # fmt: skip
    values["distill_teacher"] = f"{load('distill_teacher_tiny.json')['validation_loss_after']:.2f}"
    for student, name in (("half", "distill_tiny_first_layer.json"), ("random", "distill_tiny.json")):
        record = load(name)
        values |= {
            f"distill_{student}_first": f"{record['losses'][0]:.2f}",
            f"distill_{student}_last": f"{record['losses'][-1]:.2f}",
            f"distill_{student}_before": f"{record['validation_loss_before']:.2f}",
            f"distill_{student}_after": f"{record['validation_loss_after']:.2f}",
        }
    for name in ("distill_8b", "distill_8b_none"):
        record = load(f"{name}.json")
        values[f"{name}_ms"] = f"{1e3 * record['median_seconds']:.0f}"
        values[f"{name}_gb"] = f"{record['peak_memory_bytes'] / 1e9:.1f}"
    values["norm_ms_before"] = f"{category_ms(load('profile_1x512.json'), 'normalization'):.1f}"
    values["norm_ms_after"] = f"{category_ms(load('profile_1x512_rmsnorm.json'), 'normalization'):.1f}"
    values["norm_launches"] = f"{load('profile_1x512.json')['categories']['normalization']['launches']:,}"
    return values


def ladder_figures(record: dict, suffix: str) -> dict[str, str]:
    """The baseline, every kernel, the CUDA graph and Liger-Kernel, in one run of --ladder."""
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    base, kernels, graph, liger = (rungs[name] for name in ("baseline", ladder.RUNGS[-1].name, *list(rungs)[-2:]))
    best = min(kernels, graph, key=lambda rung: rung["step_ms"])
    return {
        f"ladder_base_{suffix}": f"{base['step_ms']:.0f}",
        f"ladder_all_{suffix}": f"{kernels['step_ms']:.0f}",
        f"ladder_graph_{suffix}": f"{graph['step_ms']:.0f}",
        f"ladder_liger_{suffix}": f"{liger['step_ms']:.0f}",
        f"ladder_gain_{suffix}": f"{best['tokens_per_second'] / base['tokens_per_second']:.2f}",
        f"ladder_vs_liger_{suffix}": f"{best['tokens_per_second'] / liger['tokens_per_second']:.2f}",
        f"ladder_mem_base_{suffix}": f"{base['peak_memory_bytes'] / 1e9:.1f}",
        f"ladder_mem_{suffix}": f"{best['peak_memory_bytes'] / 1e9:.1f}",
        f"ladder_mem_gain_{suffix}": f"{best['peak_memory_bytes'] / base['peak_memory_bytes']:.2f}",
        f"ladder_mem_liger_{suffix}": f"{liger['peak_memory_bytes'] / 1e9:.1f}",
        f"ladder_diff_{suffix}": f"{max(compare_runs.relative_differences(base, best)):.1e}",
    }


def beyond_figures() -> dict[str, str]:
    """The single kernels beyond step 12 beside their opponents, and the longest sequences."""
    ours, in_place = benchmark_kernels.OURS, f"{benchmark_kernels.OURS}, in place"
    eager, compiled, liger = benchmark_kernels.EAGER, "torch.compile", "Liger-Kernel"
    adamw, fused = "torch.optim.AdamW", "torch.optim.AdamW, fused=True"
    on_bf16 = "F.linear + F.cross_entropy, bf16 logits"
    values = {}
    for name, kernel, tokens, mine, theirs in (
        ("swiglu", "swiglu", 16_384, in_place, {"torch": eager, "compile": compiled, "liger": f"{liger}, in place"}),
        ("rope", "rope", 32_768, ours, {"torch": eager, "compile": compiled, "liger": f"{liger}, in place"}),
        ("adamw", "adamw", None, ours, {"torch": adamw, "fused": fused}),
        ("lce", "linear_cross_entropy", 8192, ours, {"torch": on_bf16, "compile": compiled, "liger": liger}),
        ("lce_512", "linear_cross_entropy", 512, ours, {"torch": on_bf16, "compile": compiled, "liger": liger}),
    ):
        record = load(f"benchmark_{kernel}.json")
        rows = benchmark_rows(record)
        tokens = tokens or max(tokens for tokens, _ in rows)
        # RoPE is so short that a slow host hides the kernels; whoever waits for the GPU has no time without the host.
        us = {
            implementation: row["kernels_us"] if kernel == "rope" else row["total_us"][1]
            for (n, implementation), row in rows.items()
            if n == tokens
        }
        rate, row = benchmark_kernels.KERNELS[kernel].rate, rows[tokens, mine]
        achieved = row[rate.key] * row["total_us"][1] / us[mine]
        values |= {
            f"{name}_us": f"{us[mine]:,.0f}", f"{name}_pct": f"{100 * achieved / record[rate.ceiling_key]:.0f}",
            f"{name}_mb": f"{(row['extra_bytes'] or 0) / 1e6:,.0f}",
            f"{name}_torch_mb": f"{(rows[tokens, theirs['torch']]['extra_bytes'] or 0) / 1e6:,.0f}",
        }  # fmt: skip
        values |= {f"{name}_vs_{opponent}": f"{us[theirs[opponent]] / us[mine]:.2f}" for opponent in theirs}
    for which in ("baseline", "all"):
        values[f"longest_{which}"] = f"{load(f'longest_{which}.json')['lengths'][-1]:,}"
    return values


def fill(text: str) -> str:
    """README.md's text with every marked block and figure computed from the records."""
    values = figures()

    def block(match: re.Match) -> str:
        lines = render(match["paths"].split()).splitlines()
        return match[1] + "".join(line.rstrip() + "\n" for line in lines) + match[4]

    text = BLOCK.sub(block, text)
    return FIGURE.sub(lambda match: match[1] + values[match["name"]] + match[4], text)


def record_output(path: str, script: str) -> int:
    """Run a script that writes no record of its own, keep its printed lines as one; returns its exit code."""
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=HERE)
    print(run.stdout, run.stderr, sep="", end="")
    if run.returncode == 0:
        record = {"kind": "text", "environment": measure.environment(), "script": script}
        measure.write_record(path, record | {"lines": run.stdout.splitlines()})
    return run.returncode


def main() -> int:
    parser = measure.Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where they differ")
    parser.add_argument("--record", nargs=2, metavar=("FILE", "SCRIPT"), help="record what SCRIPT prints")
    args = parser.parse_args()
    if args.record:
        return record_output(*args.record)
    readme = HERE / "README.md"
    before = readme.read_text()
    after = fill(before)
    if not args.check:
        readme.write_text(after)
    elif before != after:
        print("README.md differs from the records; run: python readme_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    measure.run_main(main)
