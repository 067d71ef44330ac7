"""The workshop's instruments: ceilings, timing, memory, tables and JSON records.

Everything here is shared by the scripts; no kernel mathematics lives here.

Units: times in microseconds (us) or seconds, bandwidth in GB/s and memory in
MB and GB, all decimal (1 GB = 1e9 bytes), as the playbook's tables print them.
"""

import argparse
import contextlib
import errno
import fnmatch
import io
import json
import os
import platform
import resource
import secrets
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if not HAS_GPU:  # read when triton is first imported: kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # noqa: E402
from tabulate import tabulate  # noqa: E402

from harness import interpreter_rounding  # noqa: E402, F401  on the CPU kernels round as on a GPU

RULE = "=" * 70
NO_GPU_NOTE = (
    "No CUDA GPU found: everything runs on the CPU, Triton kernels through its interpreter,\n"
    "with small shapes. Timings printed below are NOT meaningful."
)
NOT_MEANINGFUL = " (CPU: timings not meaningful)"  # ends the title of a table of such times

# Dense bf16 matrix rate by the vendor's data sheets, TFLOP/s, for model FLOPs
# utilization.  First matching name wins; a GPU that is not listed gives n/a.
DATASHEET_BF16_TFLOPS = {
    "GB300": 2500, "B300": 2500, "GB200": 2500, "B200": 2250,
    "H200": 989, "H100 80GB HBM3": 989, "GH200": 989, "A100": 312,
}  # fmt: skip


# ---------------------------------------------------------------- command line


class UserError(Exception):
    """The input is at fault: one sentence, exit code 2."""


class RunError(Exception):
    """Something failed while running: one sentence, exit code 1."""


class Parser(argparse.ArgumentParser):
    """argparse, with errors as one sentence in place of the usage text."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str):
        raise UserError(f"{message} (--help lists the flags)")

    def parse_args(self, args=None, namespace=None):
        """As argparse does it; `given` of the result names the flags that stand on the command line."""
        parsed = super().parse_args(args, namespace)
        absent = object()
        unset = argparse.Namespace(**dict.fromkeys(vars(parsed), absent))  # what is there gets no default
        again = vars(super().parse_args(args, unset))
        parsed.given = {name for name, value in again.items() if value is not absent}
        return parsed


def flag_name(name: str) -> str:
    """As it is typed."""
    return f"--{name.replace('_', '-')}"


def refuse_ignored(args: argparse.Namespace, ignored: dict[str, Sequence[str]]) -> None:
    """Refuse a flag that another one leaves without effect.

    Args:
        args: from `Parser.parse_args`.
        ignored: for the name of a flag, the names of those that do nothing beside it.

    Raises:
        UserError: such two are on the command line.
    """
    for name, others in ignored.items():
        for other in others:
            if {name, other} <= args.given:
                this, that = flag_name(other), flag_name(name)
                raise UserError(f"{this} does nothing with {that}: leave one of the two out")


def whole_number(text: str, least: int = 0) -> int:
    """argparse type: an integer of at least `least` that fits 31 bits, as every size and seed in use does."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least} (below 2**31), not {text!r}")
    return value


def positive_int(text: str) -> int:
    """argparse type: an integer of at least 1."""
    return whole_number(text, least=1)


def positive_float(text: str) -> float:
    """argparse type: a number above 0, and below 1e30 so that fp32 holds what is computed from it."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e30:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and below 1e30, not {text!r}")
    return value


OUT_OF_MEMORY = (
    f"{'the GPU' if HAS_GPU else 'this machine'} ran out of memory. Lower, in this order: --batch-size, --seq-len; "
    "then use a smaller --model. On a GPU, also check with nvidia-smi that no other process holds its memory"
)


def ran_out_of_memory(error: Exception) -> bool:
    """PyTorch's allocator has an exception of its own; Triton, cuBLAS and the CPU's say it in words."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(w in str(error) for w in words)


class OutputError(Exception):
    """Standard output takes nothing more; its cause is the OSError."""


class StandardOutput:
    """sys.stdout, with an OutputError for its OSError, which could be that of any other file."""

    def __init__(self, stream: io.TextIOBase):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._checked(self.stream.write, text)

    def flush(self) -> None:
        self._checked(self.stream.flush)

    def _checked(self, method: Callable, *arguments):
        try:
            return method(*arguments)
        except OSError as error:
            raise OutputError(error.strerror) from error


class Ended(BaseException):
    """A signal ends the process; as Ctrl-C does it, so that whoever has something to end can."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_child(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command to its end and catch what it prints.  It ends with this process, whatever ends that."""

    def end(number, frame):
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        raise Ended(number)

    # under nohup SIGHUP is ignored, and is to be
    ending = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, end)
        return subprocess.run(command, capture_output=True, text=True)
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def run_main(main: Callable[[], int | None]) -> None:
    """Run a script's main(), without a traceback for what is no fault of the script.

    Exit code 0; 1: it failed while running; 2: bad input; 128 + N: signal N ended it, Ctrl-C for
    one (130), or a pipe whose reader is gone, as in `| head -1` (141).
    """
    if sys.stdout is None:  # closed by whoever started the script
        sys.exit(exit_code(main))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no "×" shows "?"
    output = StandardOutput(sys.stdout)
    with contextlib.redirect_stdout(output):
        code = exit_code(main)
        try:
            output.flush()
        except OutputError as error:  # main() printed less than a buffer, or has not been told yet
            code = code or output_failed(error)
    sys.exit(code)


def exit_code(main: Callable[[], int | None]) -> int:
    """What main() ends with; what went wrong is a sentence on stderr."""
    try:
        return main() or 0
    except SystemExit as stop:  # argparse, after --help
        return stop.code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OutputError as error:
        return output_failed(error)
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        print(f"error: {OUT_OF_MEMORY}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Ended as error:
        print(f"ended by {error}", file=sys.stderr)
        return 128 + error.number


def output_failed(error: OutputError) -> int:
    """The exit code where standard output takes nothing more; a sentence, unless its reader is gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # when the interpreter ends, it tries to write what is left
    if isinstance(error.__cause__, BrokenPipeError):
        return 128 + signal.SIGPIPE
    print(f"error: cannot write to standard output: {error}", file=sys.stderr)
    return 1


def require_interpreter() -> None:
    """Refuse to run kernels without a GPU if the environment forbids Triton's interpreter.

    Raises:
        UserError: TRITON_INTERPRET is set to 0.
    """
    if not HAS_GPU and not triton.knobs.runtime.interpret:
        raise UserError(
            f"TRITON_INTERPRET is {os.environ.get('TRITON_INTERPRET')!r} and no CUDA GPU was found, "
            "so no kernel can run; unset it, and Triton's interpreter runs them on the CPU"
        )


# ---------------------------------------------------------------- files

OUTPUT_FILES = "json", "plot", "trace", "memory_snapshot"  # the flags of files that a script writes
INPUT_FILES = "data", "records", "compare"  # and of those that it reads
MODEL_FOLDERS = "save", "model", "teacher"
MODEL_FILES = "config.json", "generation_config.json", "model*.safetensors*", "tokenizer*"
UNFINISHED = ".unfinished-"  # how names begin that exist only while something is written


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written, before minutes of work are spent; creates and changes nothing.

    Raises:
        UserError: of the flags in OUTPUT_FILES and --save, as far as the script has them, one is empty, one cannot be
            written, --plot is no .png, or one would overwrite another or what the script reads.
    """
    outputs = {name: getattr(args, name, None) for name in (*OUTPUT_FILES, "save")}
    outputs = {name: path for name, path in outputs.items() if path is not None}
    for name, path in outputs.items():
        if not path:
            raise UserError(f"{flag_name(name)} '' names nothing: give a path or leave the flag out")
        if name == "plot" and not path.endswith(".png"):
            raise UserError(f"--plot {path} must end in .png")
        (require_folder if name == "save" else require_writable)(path)
    for name in [name for name in OUTPUT_FILES if name in outputs]:
        for what, other in others_files(args, name):
            if not written_straight(outputs[name]) and in_the_way(outputs[name], other):
                raise UserError(f"{flag_name(name)} {outputs[name]} collides with {what}: name another file")


def others_files(args: argparse.Namespace, output: str) -> Iterator[tuple[str, str]]:
    """(in words, path) of every file and folder that the file of the flag `output` must not replace."""
    for name in (*OUTPUT_FILES, "save"):
        if name != output and getattr(args, name, None):
            yield f"{flag_name(name)} {getattr(args, name)}", getattr(args, name)
    for name in INPUT_FILES:
        paths = getattr(args, name, None) or []
        for path in [paths] if isinstance(paths, str) else paths:
            if os.path.isfile(path):
                yield f"{path}, which is read", path
    file = os.path.realpath(getattr(args, output))
    is_of_a_model = any(fnmatch.fnmatch(os.path.basename(file), pattern) for pattern in MODEL_FILES)
    for name in MODEL_FOLDERS:
        folder = getattr(args, name, None)
        if folder and is_of_a_model and os.path.dirname(file) == os.path.realpath(folder):
            yield f"a file of the model in {flag_name(name)} {folder}", file


def in_the_way(file: str, other: str) -> bool:
    """Whether `other` is the same file under this or another name, or would have to lie inside of it."""
    if os.path.exists(file) and os.path.exists(other):
        return os.path.samefile(file, other)
    file, other = os.path.realpath(file), os.path.realpath(other)
    return other == file or other.startswith(file + os.sep)


def require_writable(path: str) -> None:
    """Refuse a file that could not be written.

    Raises:
        UserError: with what the system says.
    """
    try:
        straight = written_straight(path)
        if path.endswith(os.sep) or os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        require_unprotected(path)
        if not straight:
            try_creating_in(os.path.dirname(os.path.realpath(path)))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def require_folder(path: str) -> None:
    """Refuse a folder, which need not exist yet, in which nothing could be written.

    Raises:
        UserError: with what the system says.
    """
    try:
        try_creating_in(os.path.realpath(path))
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error


def require_unprotected(path: str) -> None:
    """PermissionError where a file may not be written; to replace it, its folder's permission would be enough."""
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def try_creating_in(folder: str) -> None:
    """OSError where nothing can be created in a folder, or in the nearest one above it that exists; leaves nothing."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    with tempfile.TemporaryFile(dir=folder):  # it never has a name
        pass


def written_straight(path: str) -> bool:
    """Whether nothing may take the place of this file: a device, a pipe, or what this process prints into.

    Raises:
        OSError: the path cannot be followed, for another reason than that there is no such file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    printed_into = []
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            printed_into.append(os.fstat(stream))
    return not stat.S_ISREG(found.st_mode) or any(os.path.samestat(found, each) for each in printed_into)


def write_whole(path: str, content: bytes) -> None:
    """Write a file so that, whenever this is interrupted, it is the old one or the whole new one.

    The content is written beside it, under a name of its own, and renamed.  So of several processes that write one
    path the last to finish wins.  Links are followed, permissions stay, and missing folders are created.  What
    `written_straight` is written into.

    Raises:
        OSError: it cannot be written; what was there is as before.
    """
    if written_straight(path):
        print(end="", flush=True)  # what was printed before comes first
        with open(path, "ab") as file:
            file.write(content)
        return
    target = os.path.realpath(path)
    require_unprotected(target)
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    unfinished = os.path.join(folder, UNFINISHED + secrets.token_hex(8))
    try:
        with open(unfinished, "xb") as file:
            if os.path.exists(target):
                before = os.stat(target)
                with contextlib.suppress(PermissionError):  # only root may give a file away
                    os.chown(unfinished, before.st_uid, before.st_gid)
                os.chmod(unfinished, stat.S_IMODE(before.st_mode))
            file.write(content)
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def write_output(path: str, content: bytes, what: str) -> None:
    """`write_whole`, with one sentence where it fails.

    Args:
        what: is written, in words.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise RunError(f"{what} could not be written to {path}: {error.strerror}") from error


# ---------------------------------------------------------------- environment


def commit() -> str:
    """This checkout's commit, '+' where files differ from it; GIT_COMMIT overrides; 'unknown' without git."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    here = Path(__file__).parents[1]

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment() -> dict:
    """What a record must say about where it was made."""
    import transformers

    return {
        "gpu": torch.cuda.get_device_name() if HAS_GPU else None,
        "compute_capability": "{}.{}".format(*torch.cuda.get_device_capability()) if HAS_GPU else None,
        "cpu": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def environment_line(env: dict) -> str:
    """One line: GPU, versions, date, commit."""
    device = env["gpu"] or f"none (CPU {env['cpu']})"
    return (
        f"GPU: {device} | PyTorch {env['torch']} | Triton {env['triton']} | "
        f"transformers {env['transformers']} | {env['date']} | commit {env['commit']}"
    )


def datasheet_tflops(gpu: str | None) -> float | None:
    """Dense bf16 TFLOP/s by the data sheet, None where the GPU is not listed."""
    return next((rate for name, rate in DATASHEET_BF16_TFLOPS.items() if gpu and name in gpu), None)


# ---------------------------------------------------------------- timing


@dataclass(frozen=True)
class Timing:
    """Microseconds: 20th percentile, median, 80th percentile."""

    p20: float
    p50: float
    p80: float


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def time_us(fn: Callable[[], object], rep_ms: int = 100) -> Timing:
    """Wall time of fn(), launches included.

    On a GPU: triton's do_bench (warm-up first, so that compilation stays out;
    the L2 cache is flushed before every call, so that inputs come from memory).
    """
    if HAS_GPU:
        return Timing(*(1e3 * t for t in triton.testing.do_bench(fn, warmup=25, rep=rep_ms, quantiles=[0.2, 0.5, 0.8])))
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        fn()
        samples.append(1e6 * (time.perf_counter() - start))
    low, middle, high = sorted(samples)
    return Timing(low, middle, high)


def queued_time_us(fn: Callable[[], object], calls: int = 20) -> float:
    """Wall time of one fn() among `calls` that are queued back to back, median of several batches.

    That is what a training loop pays: the host's time or the GPU's, whichever is longer.
    """
    calls, batches = (calls, 5) if HAS_GPU else (1, 3)
    fn()
    samples = []
    for _ in range(batches):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        synchronize()
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    return statistics.median(samples)


def graph_time_us(fn: Callable[[], object], rep_ms: int = 50) -> float | None:
    """Kernel time of fn() alone: median us of its replays from one CUDA graph, no Python in between.

    Without a GPU, or where fn cannot be captured because it synchronizes with
    the host, None.  Replays run back to back, so data that fits in L2 stays there.
    """
    if not HAS_GPU:
        return None
    try:
        return 1e3 * triton.testing.do_bench_cudagraph(fn, rep=rep_ms, return_mode="median")
    except RuntimeError:  # "operation not permitted when stream is capturing"
        torch.cuda.synchronize()
        return None


def copy_bandwidth(n_bytes: int = 2 << 30) -> float:
    """Measured device copy rate, GB/s, reads plus writes counted."""
    if not HAS_GPU:
        n_bytes = 64 << 20
    source = torch.empty(n_bytes, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * n_bytes / time_us(lambda: target.copy_(source), rep_ms=200).p50 / 1e3


def matmul_rate(n: int = 8192, dtype: torch.dtype = torch.bfloat16) -> float:
    """Measured matrix rate, TFLOP/s, on random data (n x n x n; 512 on the CPU)."""
    n = n if HAS_GPU else 512
    a, b = (torch.randn(n, n, dtype=dtype, device=DEVICE) for _ in range(2))
    return 2 * n**3 / time_us(lambda: a @ b, rep_ms=400).p50 / 1e6


def ceilings_card(env: dict, copy_gbs: float, matmul_tflops: float) -> str:
    """The speed of light of this machine, measured in this run."""
    return "\n".join(
        [
            environment_line(env),
            f"Ceilings measured in this run: copy {copy_gbs:,.0f} GB/s (read + write), "
            f"bf16 matmul {matmul_tflops:,.1f} TFLOP/s",
        ]
    )


# ---------------------------------------------------------------- memory


def peak_extra_bytes(fn: Callable[[], object]) -> int | None:
    """Peak GPU memory that fn() allocates beyond what was allocated before it; None on the CPU."""
    if not HAS_GPU:
        return None
    fn()  # workspaces that are allocated once do not count
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_memory_bytes() -> int:
    """Peak memory allocated on the GPU so far; on the CPU, the peak resident size of this process."""
    if HAS_GPU:
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---------------------------------------------------------------- output


def title(text: str) -> str:
    return f"{RULE}\n{text}\n{RULE}"


def table(headers: list[str], rows: list[list], align: list[str] | None = None) -> str:
    """A plain table: the first column left-aligned, the others right-aligned unless told."""
    align = align or ["left"] + ["right"] * (len(headers) - 1)
    return tabulate(rows, headers=headers, tablefmt="simple", colalign=align, disable_numparse=True)


def number(value: float | None, spec: str = ",.1f", missing: str = "n/a") -> str:
    return missing if value is None else format(value, spec)


def decimal_unit(values: list[float], large: str, small: str, size: float) -> tuple[str, float]:
    """(name, size) of a column's unit: the large one if a value reaches it, else the small one, a thousandth of it."""
    return (large, size) if max(values, default=0.0) >= size else (small, size / 1e3)


def describe(error: Exception) -> str:
    """Its type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


def pyplot():
    """matplotlib.pyplot, which draws into files: there may be no display.  Loaded only where a picture is asked for."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_plot(figure, path: str, dpi: int = 120) -> None:
    """Write a figure of `pyplot()` as a PNG, say so, and free it.

    Raises:
        RunError: the file cannot be written (any more).
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    pyplot().close(figure)
    write_output(path, picture.getvalue(), "the picture")
    print(f"Plot written to {path}")


def write_record(path: str | None, record: dict) -> None:
    """Write a run as JSON, so that a printed figure can always be traced to where it was measured.

    Raises:
        RunError: the file cannot be written (any more).
    """
    if path is None:
        return
    write_output(path, (json.dumps(record, indent=1) + "\n").encode(), "the record")
    print(f"Record written to {path}")


def read_record(path: str, kind: str) -> dict:
    """Read a record of the given kind.

    Raises:
        UserError: the file is missing, is not JSON, or is a record of another kind.
    """
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the last: thousands of brackets
        raise UserError(f"{path} is not a JSON record: {error}") from error
    if not isinstance(record, dict) or record.get("kind") != kind:
        found = record.get("kind") if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{path} is not a {kind!r} record (it is {found!r})")
    return record
