"""The picture of two GPUs: which part of a trace is drawn, as what, and what is shaded."""

import gzip
import json

import pytest

from tools import trace_picture

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM, STREAM, NCCL_STREAM = "nvjet_tst_128x256_64x4", 7, 28


def event(name, ts, dur, stream=STREAM, cat="kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def made_up(layers: int = 8) -> dict:
    """Every layer takes 1 ms: 0.5 ms of gathering, of which a product hides all but 0.2 ms."""
    events = [{"ph": "M", "name": "process_name"}, event("aten::mm", 0, 9, cat="cpu_op")]
    for i in range(2 * layers):  # the second half is the backward
        begin = 1000 * i
        events.append(event(GATHER, begin, 500, NCCL_STREAM))
        events.append(event(GEMM, begin + 200, 800))
        if i >= layers:
            events.append(event(SCATTER, begin + 600, 100, NCCL_STREAM))
    return {"deviceProperties": [{"name": "Made Up"}], "traceEvents": events}


def test_two_layers_of_the_forward_and_of_the_backward_are_cut_out():
    record = trace_picture.picture_of(made_up(), layers=2)
    forward, backward = record["panels"]["forward"], record["panels"]["backward"]
    assert forward["ms"] == backward["ms"] == pytest.approx(2)
    assert {each["kind"] for each in forward["work"]} == {"all-gather", "matmul"}
    assert {each["kind"] for each in backward["work"]} == {"all-gather", "matmul", "reduce-scatter"}
    assert {each["lane"] for each in backward["work"]} == {"NCCL", "stream 7"}
    assert all(0 <= each["start"] < each["end"] <= 2 for each in backward["work"])


def test_exposed_is_what_is_sent_while_nothing_else_runs():
    panels = trace_picture.picture_of(made_up(), layers=2)["panels"]
    found = trace_picture.exposed(panels["forward"]["work"])
    assert found == [pytest.approx((0, 0.2)), pytest.approx((1, 1.2))]


@pytest.mark.parametrize(
    "name, kind",
    [
        (GATHER, "all-gather"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all-reduce"),
        (GEMM, "matmul"),
        ("void pytorch_flash::flash_fwd_kernel", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel", "optimizer"),
        ("_adamw_kernel", "optimizer"),
        ("_rmsnorm_fwd_kernel", "other"),
        ("void at::native::elementwise_kernel", "other"),
    ],
)
def test_a_kernel_has_the_colour_of_its_kind(name, kind):
    assert trace_picture.kind_of(name) == kind


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_the_picture_is_drawn_again_from_its_record(run_script, tmp_path, ending):
    trace, picture, kept = (tmp_path / name for name in (f"trace{ending}", "a.png", "a.json"))
    content = json.dumps(made_up()).encode()
    trace.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    outcome = run_script(trace_picture, str(trace), str(picture), "--json", str(kept))
    assert outcome.code == 0, outcome.err
    trace_picture.plot(json.loads(kept.read_text()), str(tmp_path / "again.png"))
    assert (tmp_path / "again.png").read_bytes() == picture.read_bytes()


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "cannot read"),
        ("{", "is no Chrome trace"),
        ("[1]", "is no Chrome trace"),
        ('{"traceEvents": []}', "has 0 kernels of NCCL's for all-gather"),
        (json.dumps(made_up(1)), "too few for --layers 2"),
    ],
)
def test_what_cannot_be_drawn_is_refused(run_script, tmp_path, content, words):
    trace = tmp_path / "trace.json"
    if content is not None:
        trace.write_text(content)
    outcome = run_script(trace_picture, str(trace), str(tmp_path / "a.png"))
    assert outcome.code == 2 and words in outcome.err and outcome.err.count("\n") == 1
    assert not (tmp_path / "a.png").exists()
