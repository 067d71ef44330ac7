"""Scripts in forks of one process, the server, that has imported what they import.

PyTorch, transformers and Triton take 5 seconds to import: longer than most runs of a test.
"""

import functools
import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from unittest import mock

import torch

HERE = Path(__file__).parents[1]
IMPORTED = ["pytest", "torch.distributed.fsdp", "tests.small_workloads", "harness.steps.parallel"]
IMPORTED += ["next_steps.finetuning.kernel_training", "next_steps.layers.fp8_layer"]
IMPORTED += ["harness.profiling.profiler"]
# What is read during imports.  A process that has asked CUDA for its GPUs cannot be forked.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
ENVIRONMENT |= {"PYTHONPATH": str(HERE)}
SECONDS_TO_END = 3  # by itself, once another process has failed; and after a signal


@functools.cache
def forks() -> BaseContext:
    """Start the server; its forks have the environment of now, and of ENVIRONMENT."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def torchrun(n: int, *command: str, timeout: float = 540) -> subprocess.CompletedProcess:
    """Run a script, or "-m", MODULE, in n processes as torchrun does, or in one without it.

    All write to the same stdout and stderr.  If one fails, the others are ended.

    Raises:
        subprocess.TimeoutExpired: they have not ended in so many seconds, and are stopped.
    """
    environment = os.environ | ENVIRONMENT
    if n > 1:
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}"}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": f"{n}"}
        environment |= {"LOCAL_WORLD_SIZE": f"{n}"}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("out", "err")]
        several = []
        for rank in range(n):
            own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if n > 1 else {}
            arguments = command, environment | own, paths
            several.append(forks().Process(target=_run, args=arguments))
            several[-1].start()
        code = _first_failure(several, time.monotonic() + timeout)
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (path.read_text() for path in paths)
    return subprocess.CompletedProcess(command, code, out, err)


def _first_failure(processes: list, end: float) -> int | None:
    """Wait for all; return the first exit code that is not 0, else 0, or None after the end."""
    code, running = 0, {process.sentinel: process for process in processes}
    while running and not code:
        ended = connection.wait(running, timeout=end - time.monotonic())
        if not ended:
            code = None
            break
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            code = code or process.exitcode
    for process in running.values():
        process.join(SECONDS_TO_END)
        process.terminate()
        process.join(SECONDS_TO_END)
        process.kill()
        process.join()
    return code


def _run(command: tuple[str, ...], environment: dict[str, str], paths: list[Path]) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), paths):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(HERE)
    if command[0] == "-m":
        sys.argv = [*command[1:]]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*command]
        runpy.run_path(command[0], run_name="__main__")
