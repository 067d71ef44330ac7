"""Every address of every kernel, as Triton's interpreter sees it.

    with watched({"x": x, "out": out}) as watch:
        launch(x, out)
    watch.findings                     sentences; empty: nothing was found

Three kinds of fault are found:

    outside     A lane's address is no element of its tensor.  The access is not made, and a load
                gives NaN.
    programs    A program touches, without an atomic, an element that another program writes.  A GPU
                runs programs in any order.
    threads     Two threads of a program touch an element, one of them writes it, and there is no
                barrier between.  A thread is a lane of a block of one shape.

Besides, a masked lane of a load without `other` gives NaN.  A GPU gives whatever its register
holds; the interpreter alone gives 0.
"""

import contextlib
import copy
import itertools
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
from numpy.lib.stride_tricks import as_strided
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from harness.steps.launches import replaced
from kernel_support import INTERPRETED, tl

ORDERS = {
    "forward": np.arange,
    "reverse": lambda n_programs: np.arange(n_programs)[::-1],
    "shuffled": lambda n_programs: np.random.default_rng(0).permutation(n_programs),
}
VERBS = {"load": "reads", "store": "writes", "atomic": "updates"}
ACT_BITS = {"load": 1, "store": 2, "atomic": 4}
HARMLESS = ACT_BITS["load"], ACT_BITS["atomic"]  # of one element: only loads, or only atomics
NAN_BITS = {tl.bfloat16: 0x7FC0, tl.float8e4nv: 0x7F, tl.float8e5: 0x7F}  # integers in NumPy
NO_KERNELS = os.path.dirname(triton.__file__), __file__  # no line of a kernel is in these


@dataclass
class Watch:
    """What was seen of the launches."""

    sees_addresses: bool  # False: the kernels are compiled, so only the launches are seen
    # (name, file of its source) of each launch
    kernels: list[tuple[str, str]] = field(default_factory=list)
    # (kind, where): [the first case in words, the number of cases]
    found: dict[tuple[str, str], list] = field(default_factory=dict)

    @property
    def findings(self) -> list[str]:
        return self.of("outside") + self.of("programs") + self.of("threads")

    def of(self, kind: str) -> list[str]:
        """Return the sentences of one kind of fault."""
        found = [case for (its_kind, _where), case in self.found.items() if its_kind == kind]
        return [words + (f"; {n} times in all." if n > 1 else ".") for words, n in found]

    def add(self, kind: str, where: str, words: str, n: int) -> None:
        self.found.setdefault((kind, where), [words, 0])[1] += n


class Memory:
    """The bytes of a storage, and one more at each end: which are the first of an element?"""

    def __init__(self, storage: torch.UntypedStorage):
        self.start = storage.data_ptr() - 1
        self.is_element = np.zeros(storage.nbytes() + 2, dtype=bool)
        self.accesses: list[Access] = []

    def allow(self, t: torch.Tensor) -> None:
        strides = [stride * t.element_size() for stride in t.stride()]
        as_strided(self.is_element[t.data_ptr() - self.start :], t.shape, strides)[...] = True


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel was given."""

    name: str
    tensor: torch.Tensor
    memory: Memory

    def at(self, address: int) -> str:
        """Return in words what lies at an address."""
        t = self.tensor
        offset = (address - t.data_ptr()) // t.element_size()
        n = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) + 1
        if offset < 0:
            return f"{-offset} before the first element"
        if offset >= n:
            return f"{offset - n + 1} behind the last element"
        offsets = torch.arange(n, dtype=torch.int64).as_strided(t.shape, t.stride())
        index = (offsets == offset).nonzero().tolist()
        return f"element {tuple(index[0])}" if index else "a gap between the elements"


@dataclass(frozen=True)
class Access:
    """What one load, store or atomic of one program touched."""

    act: str  # of VERBS
    argument: Argument
    line: str  # of the kernel
    program: int
    epoch: int  # of the launch: every program, and every barrier, begins a new one
    threads: np.ndarray  # the same number for the same lane of a block of the same shape
    bytes: np.ndarray  # the first of each element, counted as in Memory


class WatchedLaunch:
    """One launch of a kernel by the interpreter."""

    def __init__(self, watch: Watch, values: dict, tensors: dict[str, torch.Tensor]):
        self.watch, self.tensors = watch, tensors
        given = [(t, name.removesuffix("_ptr")) for name, t in values.items()]
        given += [(t, name) for name, t in tensors.items()]  # these names win
        self.names = {t.data_ptr(): name for t, name in given if hasattr(t, "data_ptr")}
        self.memories: dict[int, Memory] = {}  # by the storage's address
        self.arguments: dict[int, Argument] = {}  # by the tensor's address
        self.program, self.epoch, self.block_shapes = 0, 0, {}

    def add_argument(self, t: torch.Tensor) -> Argument:
        storage = t.untyped_storage()
        memory = self.memories.setdefault(storage.data_ptr(), Memory(storage))
        all_named = [(part.untyped_storage().data_ptr(), part) for part in self.tensors.values()]
        named = [part for start, part in all_named if start == storage.data_ptr()]
        for part in named or [t]:
            memory.allow(part)
        argument = Argument(self.names.get(t.data_ptr(), "a tensor"), t, memory)
        return self.arguments.setdefault(t.data_ptr(), argument)

    def argument_of(self, pointers: TensorHandle) -> Argument:
        """Return the tensor whose pointer these were computed from, or the one before them."""
        if hasattr(pointers.dtype, "argument"):
            return pointers.dtype.argument
        before = [start for start in self.arguments if start <= pointers.data.flat[0]]
        return self.arguments[max(before, default=min(self.arguments))]

    def reach(self, act: str, pointers: TensorHandle, mask: TensorHandle | None) -> TensorHandle:
        """Note an access, and return the mask of the lanes that may make it."""
        argument, line = self.argument_of(pointers), line_of_kernel()
        memory, shape = argument.memory, pointers.data.shape
        active = np.ones(shape, dtype=bool) if mask is None else np.asarray(mask.data, dtype=bool)
        offsets = pointers.data.astype(np.int64) - memory.start
        offsets = offsets.clip(0, len(memory.is_element) - 1)  # there is no element at both ends
        inside = memory.is_element[offsets] & active
        outside, lanes = np.flatnonzero(active & ~inside), np.flatnonzero(inside)
        if len(outside):
            what = f"A {act} {'without a mask ' if mask is None else ''}reaches outside of"
            who = f"lane {outside[0]} of program {self.index_of(self.program)} {VERBS[act]}"
            at = argument.at(int(pointers.data.flat[outside[0]]))
            words = f"{what} {argument.name} ({line}): {who} {at}"
            self.watch.add("outside", f"{line} {argument.name}", words, len(outside))
        first_thread = self.block_shapes.setdefault(
            shape if inside.size > 1 else (), len(self.block_shapes) << 20
        )
        who = self.program, self.epoch, first_thread + lanes
        memory.accesses.append(Access(act, argument, line, *who, offsets.ravel()[lanes]))
        return TensorHandle(inside, tl.int1)

    def compare(self) -> None:
        """Find the elements that several programs or threads touched and one of them wrote."""
        for memory in self.memories.values():
            accesses = [access for access in memory.accesses if len(access.bytes)]
            if all(access.act == "load" for access in accesses):
                continue
            of_access = np.array([(ACT_BITS[a.act], a.program, a.epoch) for a in accesses])
            of_lane = np.repeat(np.arange(len(accesses)), [len(a.bytes) for a in accesses])
            acts, programs, epochs = of_access[of_lane].T
            touched = np.concatenate([access.bytes for access in accesses])
            threads = np.concatenate([access.threads for access in accesses])
            in_epoch = epochs * len(memory.is_element) + touched
            for kind, groups, who in (
                ("programs", touched, programs),
                ("threads", in_epoch, threads),
            ):
                n, pair = conflicts(groups, who, acts)
                if n > 0:
                    address = memory.start + int(touched[pair[0]])
                    self.add_conflict(kind, *(accesses[of_lane[i]] for i in pair), address, n)

    def add_conflict(self, kind: str, before: Access, after: Access, address: int, n: int) -> None:
        if kind == "programs":
            other = f"program {self.index_of(before.program)}"
            why = "programs run in any order"
        else:
            other = "another of its threads"
            why = "a barrier is missing between, and a reduction such as tl.sum is one"
        does = f"Program {self.index_of(after.program)} {VERBS[after.act]}"
        what = f"{after.argument.at(address)} of {after.argument.name} ({after.line})"
        which = f"which {other} {VERBS[before.act]} ({before.line})"
        self.watch.add(kind, f"{before.line} {after.line}", f"{does} {what}, {which}: {why}", n)

    def index_of(self, program: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(program, self.grid)))


def conflicts(groups: np.ndarray, who: np.ndarray, acts: np.ndarray) -> tuple[int, tuple]:
    """Return in how many groups several have touched and one has written, and two of the first.

    The arguments have a number for each touch: its group, who it was, and the bit of its act.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    several = np.minimum.reduceat(who[order], starts) < np.maximum.reduceat(who[order], starts)
    together = np.bitwise_or.reduceat(acts[order], starts)
    wrong = starts[several & ~np.isin(together, HARMLESS)]
    if len(wrong) == 0:
        return 0, ()
    first = order[groups[order] == groups[order[wrong[0]]]]
    first = first[np.argsort(acts[first] == ACT_BITS["load"], kind="stable")]  # writes, then loads
    for pair in itertools.combinations(first, 2):
        (one, other), (act, other_act) = who[list(pair)], acts[list(pair)]
        if one != other and act | other_act not in HARMLESS:
            return len(wrong), tuple(sorted(pair))


def line_of_kernel() -> str:
    """Return the line of a kernel, or of a function that it calls, that is interpreted now."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(NO_KERNELS):
        frame = frame.f_back
    return f"line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)}"


def unknown_like(pointers: TensorHandle) -> np.ndarray:
    """Return what lanes get that read nothing: NaN, or the largest integer."""
    element = pointers.get_element_ty()
    dtype = interpreter._get_np_dtype(element)
    value = np.nan if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max
    return np.full(pointers.data.shape, NAN_BITS.get(element, value), dtype=dtype)


class WatchedBuilder(InterpreterBuilder):
    """The interpreter's builder, which asks a launch at each access."""

    launch: WatchedLaunch
    order: str  # of ORDERS

    def set_grid_dim(self, *grid):
        super().set_grid_dim(*grid)
        self.launch.grid, self.turns = grid, ORDERS[self.order](math.prod(grid))

    def set_grid_idx(self, *turn):
        """Begin the program that runs when the interpreter would begin this one."""
        self.launch.program = int(self.turns[np.ravel_multi_index(turn, self.grid_dim)])
        self.launch.epoch += 1
        super().set_grid_idx(*self.launch.index_of(self.launch.program))

    def create_load(self, pointers, *rest):
        return self.create_masked_load(pointers, None, None, *rest)

    def create_masked_load(self, pointers, mask, other, *rest, **named):
        inside = self.launch.reach("load", pointers, mask)
        value = unknown_like(pointers)
        # Triton's interpreter drops an `other` that is 0, where a single number is loaded
        dropped = other is None and mask is not None and value.size == 1
        if other is not None or dropped:  # for a masked lane, not for one that is outside
            outside = np.asarray(mask.data, dtype=bool) & ~inside.data
            value = np.where(outside, value, 0 if dropped else other.data).astype(value.dtype)
        value = TensorHandle(value, pointers.get_element_ty())
        return super().create_masked_load(pointers, inside, value, *rest, **named)

    def create_store(self, pointers, value, *rest):
        self.create_masked_store(pointers, value, None, *rest)

    def create_masked_store(self, pointers, value, mask, *rest):
        inside = self.launch.reach("store", pointers, mask)
        super().create_masked_store(pointers, value, inside, *rest)

    def create_atomic_rmw(self, operation, pointers, value, mask, *rest):
        inside = self.launch.reach("atomic", pointers, mask)
        return super().create_atomic_rmw(operation, pointers, value, inside, *rest)

    def create_atomic_cas(self, pointers, expected, *rest):
        inside = self.launch.reach("atomic", pointers, None)
        if not inside.data.all():
            return expected
        return super().create_atomic_cas(pointers, expected, *rest)

    def create_barrier(self):
        self.launch.epoch += 1

    def create_dot(self, *operands):
        self.launch.epoch += 1
        return super().create_dot(*operands)


@contextlib.contextmanager
def interpreter_of(launch: WatchedLaunch, order: str) -> Iterator[None]:
    """Have the interpreter ask a launch, and run its programs in this order."""
    builder, reductions = interpreter.interpreter_builder, interpreter.ReduceScanOpInterface
    convert, reduce = interpreter._implicit_cvt, reductions.apply

    def with_argument(value):
        converted = convert(value)
        if hasattr(value, "data_ptr"):
            # the interpreter hands on a pointer's type to all that is computed from it
            dtype = converted.handle.dtype = copy.copy(converted.handle.dtype)
            dtype.argument = launch.add_argument(getattr(value, "base", value))
        return converted

    def with_barrier(reduction, blocks):
        launch.epoch += 1
        return reduce(reduction, blocks)

    builder.launch, builder.order, builder.__class__ = launch, order, WatchedBuilder
    try:
        with (
            replaced(interpreter, _implicit_cvt=with_argument),
            replaced(reductions, apply=with_barrier),
        ):
            yield
    finally:
        builder.__class__ = InterpreterBuilder


@contextlib.contextmanager
def watched(tensors: dict[str, torch.Tensor], order: str = "forward") -> Iterator[Watch]:
    """See every address of every kernel that is launched meanwhile.

    Args:
        tensors: what may be touched, by the names for the findings.  Of a storage that none of them
            shares, each tensor that a launch is given may be.
        order: of a launch's programs: "forward", "reverse" or "shuffled".
    """
    watch = Watch(sees_addresses=INTERPRETED and not torch.cuda.is_available())
    kernel_class = interpreter.InterpretedFunction if INTERPRETED else JITFunction
    run = kernel_class.run

    def watched_run(kernel, *arguments, **options):
        watch.kernels.append((kernel.fn.__name__, kernel.fn.__code__.co_filename))
        if not watch.sees_addresses:
            return run(kernel, *arguments, **options)
        launch = WatchedLaunch(watch, dict(zip(kernel.arg_names, arguments)) | options, tensors)
        with interpreter_of(launch, order):
            result = run(kernel, *arguments, **options)
        launch.compare()
        return result

    with replaced(kernel_class, run=watched_run):
        yield watch
