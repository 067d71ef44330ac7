"""What only a GPU can show of every function: real sizes, graphs, waiting."""

import torch

from harness.benchmark.checking import FLOOR
from judging.circumstances import captured, waiting_forbidden
from judging.comparing import expect_same, match_float64, parts_of
from judging.contract import Wrong, contract
from subjects.subject import Parts, Subject, run


def of_real_size(
    subject: Subject, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Parts, Parts]:
    return subject.make(subject.gpu_rows, subject.gpu_size, dtype, seed)


@contract("dtype", lambda subject: subject.dtypes, gpu=True, shipped_tiles=True)
def sizes_of_real_models(subject, dtype):
    match_float64(subject, *of_real_size(subject, dtype))


@contract(gpu=True)
def nothing_waits_for_the_gpu(subject):
    inputs, douts = of_real_size(subject)
    run(subject, subject.function, inputs, douts)  # compiling may wait
    try:
        with waiting_forbidden():
            run(subject, subject.function, inputs, douts)
    except RuntimeError as error:
        raise Wrong(f"the host waits: {error}, expected that it only launches") from error


@contract(gpu=True)
def forward_and_backward_can_be_captured_in_a_cuda_graph(subject):
    inputs, douts = of_real_size(subject)
    graph, found = captured(lambda: run(subject, subject.function, inputs, douts), steps_before=3)
    for old, new in zip((inputs, douts), of_real_size(subject, seed=1)):
        for name, t in old.items():
            t.copy_(new[name])
    graph.replay()
    expected = parts_of(subject, *of_real_size(subject, seed=1))
    # cuBLAS may choose another order of sums where it captures
    exact = subject.recorded and subject.made_by_kernels_alone
    expect_same("a replay with other inputs", found, expected, exact, FLOOR[torch.bfloat16])
