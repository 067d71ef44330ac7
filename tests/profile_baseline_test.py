"""The profile of a step: what is printed of it, and what a real one finds."""

import contextlib
import gzip
import io
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama

import profile_baseline
from harness.cli.command_line import UserError
from harness.cli.device import DEVICE, HAS_GPU
from harness.cli.tables import NO_GPU_NOTE
from harness.cli.workload import Workload
from harness.data import dataset
from harness.model import loading
from harness.profiling import attribution, profiler
from harness.profiling.kernel_facts import (
    ADAPTERS,
    COMMUNICATION,
    DEQUANTIZATION,
    FP8_CASTS,
    KERNELS,
    UNATTRIBUTED,
)
from harness.profiling.profile_tables import OF_A_GRAPH
from harness.records.run_records import read_record
from harness.records.schema import is_environment
from harness.steps import stepping
from next_steps.patches import apply_kernels
from tests.attribution_test import OUR_KERNELS, Timeline, random_profile
from tests.conftest import tracked
from tests.diagnose_test import made_up
from tests.fixtures import needs_gpu

# ---------------------------------------------------------------- what is printed


def made_up_record(profile: dict) -> dict:
    whole = made_up() | profile | {"step_ms": [4.0, 5.0, 6.0], "median_step_ms": 5.0}
    return whole | {"profiled_step_ms": 7.0, "resting_memory_bytes": 2e9, "peak_memory_bytes": 3e9}


def printed_tables(text: str) -> list[list[tuple[str, float, float, int]]]:
    """Every table's rows as (name, milliseconds, percent, count), its Total last."""
    tables, row = [[]], re.compile(r"(.+?)\s+([\d,.]+)ms\s+([\d.]+)%\s+([\d,]+)$")
    for line in text.splitlines():
        if match := row.match(line):
            name, *numbers = match.groups()
            tables[-1].append((name, *(float(n.replace(",", "")) for n in numbers)))
            if name == "Total":
                tables.append([])
    assert tables.pop() == []
    return tables


def assert_tables_add_up(text: str) -> None:
    tables = printed_tables(text)
    assert len(tables) == 3
    for *rows, (_, total_ms, total_share, total_count) in tables:
        rounding = 0.0005 * (len(rows) + 1)
        assert sum(ms for _, ms, _, _ in rows) == pytest.approx(total_ms, abs=rounding)
        assert sum(share for _, _, share, _ in rows) == pytest.approx(100, abs=0.05 * len(rows))
        assert total_share == 100.0 and sum(count for *_, count in rows) == total_count
    assert len({(table[-1][1]) for table in tables}) == 1, "the tables disagree about the total"


def test_the_printed_rows_add_up_to_the_printed_total():
    profile, _, _ = random_profile(0)
    text = profile_baseline.render(made_up_record(profile))
    assert_tables_add_up(text)
    operations = [name for name, *_ in printed_tables(text)[0]]
    assert len(operations) == 22 and re.fullmatch(r"\(\d+ other operations\)", operations[20])
    times = [ms for _, ms, *_ in printed_tables(text)[0][:20]]
    assert times == sorted(times, reverse=True)


def one_product(us: float) -> dict:
    """The record of a step with one matrix product."""
    t = Timeline()
    t.call("aten::mm", "gemm", us)
    return made_up_record(t.attribute())


def test_the_playbooks_title_and_columns():
    text = profile_baseline.render(one_product(1500.0))
    rule = "=" * 70
    assert f"{rule}\nTop 20 CUDA Operations by Total GPU Time\n{rule}\nName " in text
    assert re.search(r"^Name +Self CUDA +Self CUDA % +# Calls$", text, re.M)
    assert re.search(r"^aten::mm +1\.500ms +100\.0% +1$", text, re.M)
    assert "unattributed" not in text and "other operations" not in text
    assert re.search(r"^GPU idle share: +70\.0 %$", text, re.M)  # 1.5 ms busy of 5 ms
    assert "https://ui.perfetto.dev" in text.splitlines()[-1]


def test_a_profile_longer_than_the_step_leaves_no_negative_idle_share():
    text = profile_baseline.render(one_product(7000.0))
    assert re.search(r"^GPU idle share: +0\.0 %$", text, re.M)


def test_the_page_of_a_graph_says_whose_the_categories_are():
    record = one_product(1500.0) | {"timeline": {"step_ms": 6.0, "idle_us": 0.0, "host_us": 0.0}}
    plain, graph = (profile_baseline.render(r) for r in (record, record | {"cuda_graph": True}))
    assert OF_A_GRAPH in graph and OF_A_GRAPH not in plain
    assert re.search(r"^Shapes too, no graph: +7\.0 ms", graph, re.M)
    assert re.search(r"^Shapes too: +7\.0 ms", plain, re.M)


# ---------------------------------------------------------------- real steps


def run(*flags: str) -> tuple[dict, str]:
    """main() in this process: (record, what it printed)."""
    json_path = flags[flags.index("--json") + 1]
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["profile_baseline.py", "--model", "tiny", *flags])
        profile_baseline.main()
    return read_record(json_path, "profile"), printed.getvalue()


def outputs_in(folder: Path, name: str = "record") -> list[str]:
    trace = str(folder / f"{name}-trace.json")
    return ["--warmup", "1", "--json", str(folder / f"{name}.json"), "--trace", trace]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[dict, str]]:
    """The same small training step without and with the custom kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("profile")
    flags = {"baseline": [], "custom": ["--use-custom-rmsnorm", "--use-custom-ce"]}
    results = {}
    for name, extra in flags.items():
        results[name] = run("--seq-len", "16", *outputs_in(folder, name), *extra)
    torch.set_num_threads(threads)
    return results


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["baseline", "custom"])
def test_a_run_leaves_a_trace_and_a_record_that_renders_to_what_was_printed(runs, name):
    record, printed = runs[name]
    assert profile_baseline.render(record) in printed
    assert printed.startswith(NO_GPU_NOTE) == (not HAS_GPU)
    assert bool(printed_tables(printed)) == (HAS_GPU or name == "baseline")
    assert_tables_add_up(profile_baseline.render(record | {"kernels": []}))
    trace = json.loads(Path(record["trace"]).read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"step", "forward", "loss", "backward", "optimizer"} <= names
    assert {"normalization", "mlp", "rotary"} <= names
    assert record["trace_bytes"] == Path(record["trace"]).stat().st_size < 50e6


@pytest.mark.parametrize("name", ["baseline", "custom"])
def test_every_category_of_a_real_step_is_found(runs, name):
    categories = runs[name][0]["categories"]
    empty = {name for name, part in categories.items() if part["us"] == 0}
    # it is one process, and trains all weights, which are not quantized, in bf16 or fp32
    assert empty - {UNATTRIBUTED} == {COMMUNICATION, ADAPTERS, DEQUANTIZATION, FP8_CASTS}
    phases = runs[name][0]["phases"]
    assert all(phases[name]["us"] > 0 for name in ["forward", "loss", "backward", "optimizer"])


def opened(path: str | Path) -> list[dict]:
    """The events of a trace, which Perfetto opens: each is as the format of Chrome's wants it."""
    content = Path(path).read_bytes()
    trace = json.loads(gzip.decompress(content) if str(path).endswith(".gz") else content)
    events = trace["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str) and {"pid", "tid", "ts"} <= event.keys()
        if event["ph"] == "X":
            assert float(event["ts"]) >= 0 and float(event["dur"]) >= 0
    arrows = {
        kind: [{e["id"] for e in events if (e.get("cat"), e["ph"]) == (kind, end)} for end in "sf"]
        for kind in ("fwdbwd", "ac2g")
    }
    assert arrows["fwdbwd"][0] == arrows["fwdbwd"][1] != set()
    # an arrow leads from each launch to its kernel; those of calls that launch nothing have one end
    kernels = {e["args"]["correlation"] for e in events if e.get("cat") == "kernel"}
    assert kernels <= set.intersection(*arrows["ac2g"])
    assert is_environment(trace["environment"])
    return events


def named(events: list[dict]) -> Counter:
    return Counter(each["name"] for each in events if each.get("cat") == "user_annotation")


def test_one_layer_alone_leaves_a_small_trace_of_a_whole_step(runs, tmp_path):
    outputs = outputs_in(tmp_path)
    outputs[-1] += ".gz"
    record, printed = run("--seq-len", "16", "--first-layers", "1", *outputs)
    assert "Model: tiny, 1 of its layers, " in printed and record["first_layers"] == 1
    one, two = (named(opened(each["trace"])) for each in (record, runs["baseline"][0]))
    once = "step", "forward", "embedding", "loss", "backward", "optimizer"
    assert all(one[name] == two[name] == 1 for name in once)
    in_a_layer = {"normalization": 2, "attention": 1, "mlp": 1, "rotary": 1}
    for name, number in in_a_layer.items():
        beside = name in ("normalization", "rotary")  # the last norm, the angles
        assert (one[name], two[name]) == (number + beside, 2 * number + beside)
    assert record["parameters"] < runs["baseline"][0]["parameters"]
    assert len(opened(record["trace"])) < 0.8 * len(opened(runs["baseline"][0]["trace"]))


def test_more_layers_than_the_model_has_are_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"^--first-layers 3 is more than the 2 of tiny: name fewer"
    ):
        run("--first-layers", "3", *outputs_in(tmp_path))


OURS = "rmsnorm_fwd", "rmsnorm_bwd", "rope", "swiglu_fwd", "swiglu_bwd", "adamw"
OURS += ("cross_entropy_inplace",)


@pytest.mark.parametrize("path", tracked("results/trace_*.json.gz"), ids=lambda path: path.name)
def test_a_kept_trace_is_small_and_shows_what_its_page_says(path):
    assert path.stat().st_size <= 300e3
    events = opened(path)
    launches, kernels = (
        {e["args"]["correlation"]: e["name"] for e in events if e.get("cat") in kinds}
        for kinds in (("cuda_runtime", "cuda_driver"), ("kernel",))
    )
    assert kernels and kernels.keys() <= launches.keys()
    found = {name for name in OURS if f"_{name}_kernel" in kernels.values()}
    ranges, operations = named(events), {e["name"] for e in events if e.get("cat") == "cpu_op"}
    passes = sum("multi_tensor_apply" in name for name in kernels.values())
    if path.name == "trace_kernels.json.gz":
        assert found == {*OURS} and not ranges["loss"] and passes == 1  # the steps' numbers
        assert "LinearCrossEntropyFunction" in operations
    else:
        assert not found and passes > 100
        assert (ranges["normalization"], ranges["rotary"], ranges["loss"]) == (3, 2, 1)


def test_the_custom_kernels_replace_the_eager_operations(runs):
    baseline, custom = (
        {row["name"]: row["calls"] for row in runs[n][0]["operations"]}
        for n in ("baseline", "custom")
    )
    eager = {f"aten::{n}" for n in ("pow", "mean", "rsqrt", "_log_softmax", "nll_loss_forward")}
    assert eager <= baseline.keys() and not eager & custom.keys()
    assert baseline["aten::rsqrt"] == 5  # two layers of two norms, and the last one
    norm = "TritonRMSNormFunction"
    assert custom[norm] == custom[f"{norm}Backward"] == 5
    assert custom["InplaceCrossEntropyFunction"] == 1
    assert runs["baseline"][0]["kernels"] == []
    assert runs["custom"][0]["kernels"] == ["rmsnorm", "cross_entropy"]


@pytest.mark.exhaustive
def test_python_stacks_are_in_the_trace_but_not_in_the_tables(runs, tmp_path):
    record, _ = run("--seq-len", "16", "--stacks", *outputs_in(tmp_path))
    assert "modeling_llama.py" in Path(record["trace"]).read_text()
    without = {row["name"] for row in runs["baseline"][0]["operations"]}
    assert {row["name"] for row in record["operations"]} <= without


def tiny_flags(*flags: str):
    return profile_baseline.parse_args(["--model", "tiny", *flags])


def tiny_model() -> torch.nn.Module:
    return loading.load_model(Workload.from_flags(tiny_flags(), HAS_GPU))


@pytest.mark.parametrize("fails", [False, True])
def test_no_range_stays_behind(fails):
    model = tiny_model()
    own = model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    loss_function, rotary = model.loss_function, modeling_llama.apply_rotary_pos_emb
    with contextlib.suppress(ZeroDivisionError), profiler.category_ranges(model):
        assert model.loss_function is not loss_function
        assert modeling_llama.apply_rotary_pos_emb is not rotary
        assert "forward" in vars(model.model.norm)
        if fails:
            raise ZeroDivisionError
    assert model.loss_function is loss_function and modeling_llama.apply_rotary_pos_emb is rotary
    found = {name: module for name, module in model.named_modules() if "forward" in vars(module)}
    assert list(found) == ["model.layers.0.mlp"] and model.model.layers[0].mlp.forward is own


def ranged(model) -> set[str]:
    """Names of the modules around which a range is opened."""
    with profiler.category_ranges(model):
        return {name for name, module in model.named_modules() if "forward" in vars(module)}


def test_parts_of_a_fused_layer_have_no_ranges_so_that_it_stays_fused():
    model = apply_kernels.apply_kernels(tiny_model(), ["rmsnorm", "swiglu", "rope"])
    names = "mlp", "self_attn", "input_layernorm"
    parts = {f"model.layers.{i}.{part}" for i in range(2) for part in names}
    around = {"model.norm", "model.embed_tokens", "model.rotary_emb"}
    assert parts | around < ranged(model)
    apply_kernels.apply_kernels(model, ["fused_layer"])
    assert ranged(model) == around

    calls = []

    def counted(function):
        return lambda *args, **keep: calls.append(1) or function(*args, **keep)

    with pytest.MonkeyPatch.context() as patch, profiler.category_ranges(model):
        for name in ("norm_linear", "norm_mlp"):
            patch.setattr(apply_kernels, name, counted(getattr(apply_kernels, name)))
        ids = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
        model(input_ids=ids, labels=ids)
    assert len(calls) == 4, "a layer was not fused under the profiler"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_the_losss_range_does_not_take_the_place_of_its_kernel(name):
    model = apply_kernels.apply_kernels(tiny_model(), [name])
    ids = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE)
    with profiler.category_ranges(model), torch.profiler.profile() as profile:
        output = model(input_ids=ids, labels=ids)
    assert output.logits is None
    plain = name == "cross_entropy"
    names = {event.name for event in profile.events()}
    assert ("InplaceCrossEntropyFunction" if plain else "LinearCrossEntropyFunction") in names
    assert ("loss" in names) == plain and model.loss_function is ForCausalLMLoss
    assert model(input_ids=ids, labels=ids).loss == output.loss


@pytest.mark.exhaustive
def test_a_profile_with_all_kernels(tmp_path):
    """Kernels run as operations of their Function here; the optimizer steps inside the backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_baseline, "TIMED_STEPS", 1)
        record, printed = run("--seq-len", "4", "--kernels", "all", *outputs_in(tmp_path))
    assert record["kernels"] == KERNELS and profile_baseline.render(record) in printed
    assert_tables_add_up(profile_baseline.render(record | {"kernels": []}))
    operations = {row["name"] for row in record["operations"]}
    ours = "NormLinear", "SwiGLULinear", "TritonRoPE", "LinearCrossEntropy"
    assert {f"{name}Function{way}" for name in ours for way in ("", "Backward")} <= operations
    eager = "silu", "rsqrt", "_log_softmax", "_foreach_addcdiv_"
    assert not operations & {f"aten::{name}" for name in eager}
    for category in ("matmul", "attention", "normalization", "loss", "activation", "rotary"):
        assert record["categories"][category]["us"] > 0, category


def test_the_playbooks_flags_name_kernels():
    flags = ["--use-custom-ce", "--kernels", "rmsnorm"]
    assert Workload.from_flags(tiny_flags(*flags), HAS_GPU).kernels == ("rmsnorm", "cross_entropy")
    assert Workload.from_flags(tiny_flags(), HAS_GPU).kernels == ()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kernels": ("rmsnorm", "cross_entropy")}, "tiny-4x32-rmsnorm+cross_entropy"),
        ({"model": "meta-llama/Llama-3.1-8B"}, "Llama-3.1-8B-4x32-baseline"),
        ({"cuda_graph": True}, "tiny-4x32-baseline-cuda_graph"),
        ({"first_layers": 1}, "tiny-1-layers-4x32-baseline"),
        ({"accumulate": 3}, "tiny-4x32-baseline-accumulate3"),
    ],
)
def test_the_name_of_a_trace_says_what_it_shows(settings, name):
    workload = replace(Workload(model="tiny", batch_size=4, seq_len=32), **settings)
    assert profile_baseline.default_trace(workload) == f"traces/{name}.json"


@needs_gpu
@pytest.mark.alone
@pytest.mark.parametrize("kernels", ["none", "all"])
def test_on_a_gpu_a_replay_keeps_it_busy(kernels, tmp_path):
    flags = ["--kernels", kernels, "--seq-len", "256", "--warmup", "2"]
    outputs = [str(tmp_path / name) for name in ("eager.json", "graph.json", "trace.json")]
    trace = ["--trace", outputs[2]]
    eager, _ = run(*flags, *trace, "--json", outputs[0])
    graph, printed = run(*flags, "--cuda-graph", *trace, "--json", outputs[1])
    assert OF_A_GRAPH in printed and profile_baseline.render(graph) in printed
    assert graph["median_step_ms"] < 0.8 * eager["median_step_ms"]
    assert graph["timeline"]["idle_us"] < 0.5 * eager["timeline"]["idle_us"]
    assert 0.5 * eager["busy_us"] < graph["busy_us"] < 1.5 * eager["busy_us"]
    launches = [sum(p["launches"] for p in r["categories"].values()) for r in (eager, graph)]
    assert launches[1] == pytest.approx(launches[0], rel=0.2)
    events = json.loads(Path(outputs[2]).read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert "cudaGraphLaunch" in names and "aten::mm" not in names


@needs_gpu
@pytest.mark.parametrize("kernels", ["none", "rmsnorm,cross_entropy", "all"])
def test_on_a_gpu_kernels_are_attributed_and_add_up(kernels, tmp_path):
    workload = Workload.from_flags(tiny_flags("--kernels", kernels), HAS_GPU)
    model = loading.load_model(workload)
    apply_kernels.apply_kernels(model, apply_kernels.model_kernels(workload.kernels))
    optimizer = apply_kernels.make_kernel_optimizer(model, 1e-3, workload.kernels)
    batches = [batch.to(DEVICE) for batch in dataset.load_data(workload, model.config, 4).train]
    steps = stepping.in_steps(batches, 1)
    for step in steps[:2]:
        stepping.timed_step(model, optimizer, step)
    with profiler.category_ranges(model):
        recorded, _ = profiler.profiled_step(model, optimizer, steps[2:], stacks=False)
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    total = sum(e["dur"] for e in trace if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))

    events = recorded.events()
    profile = attribution.attribute(events)
    us = {name: part["us"] for name, part in profile["categories"].items()}
    assert profile["device"] == "CUDA"
    assert sum(us.values()) == pytest.approx(total, rel=1e-3)
    assert us[UNATTRIBUTED] < 0.02 * total
    assert profile["phases"]["other"]["us"] < 0.02 * total
    not_asked_for = {ADAPTERS, DEQUANTIZATION, FP8_CASTS, COMMUNICATION, UNATTRIBUTED}
    assert all(us[name] > 0 for name in us.keys() - not_asked_for)
    assert not any(us[name] for name in not_asked_for - {UNATTRIBUTED})

    forward = attribution.forward_operations(events)
    expected = {
        "_rmsnorm": "normalization",
        "_cross_entropy": "loss",
        "multi_tensor_apply": "optimizer",
        "gemm": "matmul",
        "nvjet": "matmul",
        "logsoftmax": "loss",
        "silu": "activation",
        "flash": "attention",
    }
    for work in attribution.work_of(events):
        for part, category in expected.items():
            if part in work.name.lower() and work.launcher is not None:
                assert attribution.category_of(work.launcher, forward) == category, work.name
    launched = {work.name for work in attribution.work_of(events) if work.name in OUR_KERNELS}
    # training overwrites the logits, reverse KL needs a teacher; then the lessons' first forms
    others = {f"_cross_entropy_{way}_kernel" for way in ("fwd", "bwd")}
    others |= {f"_reverse_kl_{way}_kernel" for way in ("fwd", "bwd")}
    others |= {"_plain_fwd_kernel", "_plain_bwd_kernel", "_obvious_kernel"}
    others |= {"_nf4_dequantize_kernel"}  # where --quantize asks for it
    others |= {name for name in OUR_KERNELS if "fp8" in name}  # where --fp8 asks for them
    others |= {name for name in OUR_KERNELS if "lora" in name}  # where there are adapters
    others |= {name for name in OUR_KERNELS if "adamw8" in name}  # where --moments asks for it
    others |= {name for name in OUR_KERNELS if "qk_norm" in name}  # where q and k have norms
    assert launched == set(OUR_KERNELS) - others or kernels != "all"
