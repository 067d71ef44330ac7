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
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.lib.stride_tricks import as_strided
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    ReduceScanOpInterface,
    TensorHandle,
)
from triton.runtime.jit import JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from harness.steps.launches import replaced
from kernel_support import INTERPRETED, tl

VERBS = {"load": "reads", "store": "writes", "atomic": "updates"}
BITS = {"load": 1, "store": 2, "atomic": 4}
HARMLESS = [BITS["load"], BITS["atomic"]]  # of one element: only loads, or only atomics
NAN_BITS = {tl.bfloat16: 0x7FC0, tl.float8e4nv: 0x7F, tl.float8e5: 0x7F}  # integers in NumPy
NO_KERNELS = (str(Path(triton.__file__).parent), __file__)  # no line of a kernel is in these


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel."""

    name: str
    file: str  # of its source


@dataclass
class Watch:
    """What was seen of the launches."""

    sees_addresses: bool  # False: the kernels are compiled, so only the launches are seen
    kernels: list[Launched] = field(default_factory=list)
    # (kind, where): the first case in words, and the number of cases
    found: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)

    @property
    def findings(self) -> list[str]:
        return [
            sentence for kind in ("outside", "programs", "threads") for sentence in self.of(kind)
        ]

    def of(self, kind: str) -> list[str]:
        """Return the sentences of one kind of fault."""
        unit = "lanes" if kind == "outside" else "elements"
        found = [case for (its_kind, _where), case in self.found.items() if its_kind == kind]
        return [words + (f"; {n} {unit} in all." if n > 1 else ".") for words, n in found]

    def add(self, kind: str, where: str, words: str, n: int) -> None:
        first, before = self.found.get((kind, where), (words, 0))
        self.found[kind, where] = first, before + n


@dataclass(frozen=True)
class Access:
    """What one load, store or atomic of one program touched."""

    act: str  # of VERBS
    line: str  # of the kernel
    argument: "Argument"
    program: int
    epoch: int  # of the launch: every program, and every barrier, begins a new one
    threads: np.ndarray  # the same number for the same lane of a block of the same shape
    places: np.ndarray


class Memory:
    """The memory of tensors that share a storage, cut into places as small as the smallest element.

    is_element has one more place before the first tensor, and one behind the last.
    """

    def __init__(self, tensors: list[torch.Tensor], touchable: list[torch.Tensor]):
        self.place_bytes = min(t.element_size() for t in tensors)
        self.start = min(t.data_ptr() for t in tensors) - self.place_bytes
        end = max(t.data_ptr() + extent(t) * t.element_size() for t in tensors)
        self.is_element = np.zeros((end - self.start) // self.place_bytes + 1, dtype=bool)
        self.accesses: list[Access] = []
        for t in touchable:
            if t.numel() > 0:
                strides = [n * t.element_size() // self.place_bytes for n in t.stride()]
                first = (t.data_ptr() - self.start) // self.place_bytes
                as_strided(self.is_element[first:], t.shape, strides)[...] = True

    def places_of(self, addresses: np.ndarray) -> np.ndarray:
        """Return the place of each address; of one that is outside, the nearest."""
        places = (addresses.astype(np.int64) - self.start) // self.place_bytes
        return places.clip(0, len(self.is_element) - 1)


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel was given."""

    name: str
    tensor: torch.Tensor
    memory: Memory

    def offset_of(self, address: int) -> int:
        return (address - self.tensor.data_ptr()) // self.tensor.element_size()

    def in_words(self, address: int) -> str:
        """Return what lies at an address."""
        offset, n = self.offset_of(address), extent(self.tensor)
        if offset < 0:
            return f"{-offset} before the first element"
        if offset >= n:
            return f"{offset - n + 1} behind the last element"
        index, rest = [0] * self.tensor.ndim, offset
        for dim in sorted(range(self.tensor.ndim), key=self.tensor.stride, reverse=True):
            if stride := self.tensor.stride(dim):
                index[dim], rest = divmod(rest, stride)
        if rest or any(i >= size for i, size in zip(index, self.tensor.shape)):
            return f"{offset} behind the first element, in a gap of strides {self.tensor.stride()}"
        return f"element {tuple(index)}"


class WatchedLaunch:
    """One launch of a kernel by the interpreter."""

    def __init__(self, watch: Watch, values: dict, named: dict[str, torch.Tensor]):
        self.watch, self.grid, self.order = watch, (), ()
        self.program, self.epoch, self.block_shapes = 0, 0, {}
        given = dict(pair for name, value in values.items() for pair in tensors_in(name, value))
        names = {t.data_ptr(): name for name, t in named.items()}
        self.memories: dict[int, Memory] = {}  # by the storage
        self.arguments: dict[int, Argument] = {}  # by the address
        for name, t in given.items():
            storage = storage_of(t)
            if storage not in self.memories:
                same = [other for other in given.values() if storage_of(other) == storage]
                told = [other for other in named.values() if storage_of(other) == storage]
                self.memories[storage] = Memory(same + told, told or same)
            name = names.get(t.data_ptr(), name.removesuffix("_ptr"))
            argument = Argument(name, t, self.memories[storage])
            self.arguments.setdefault(t.data_ptr(), argument)

    def set_grid(self, grid: tuple[int, ...], order: str) -> None:
        n_programs = math.prod(grid)
        orders = {
            "forward": np.arange(n_programs),
            "reverse": np.arange(n_programs)[::-1],
            "shuffled": np.random.default_rng(0).permutation(n_programs),
        }
        self.grid, self.order = grid, orders[order]

    def begin_program(self, turn: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index of the program that runs when the interpreter would run this one."""
        self.program = int(self.order[np.ravel_multi_index(turn, self.grid)])
        self.epoch += 1
        return self.index_of(self.program)

    def index_of(self, program: int) -> tuple[int, ...]:
        return tuple(map(int, np.unravel_index(program, self.grid)))

    def argument_of(self, pointers: TensorHandle) -> Argument:
        """Return the tensor whose pointer these were computed from, or else one that they hit."""
        known = getattr(pointers.dtype, "argument", None)
        first, arguments = int(pointers.data.flat[0]), list(self.arguments.values())
        hit = (a for a in arguments if 0 <= a.offset_of(first) < extent(a.tensor))
        return known or next(hit, arguments[0])

    def reach(self, act: str, pointers: TensorHandle, mask: TensorHandle | None) -> np.ndarray:
        """Note an access, and return which lanes may make it."""
        argument, line = self.argument_of(pointers), line_of_kernel()
        memory, shape = argument.memory, pointers.data.shape
        places = memory.places_of(pointers.data)
        active = np.ones(shape, dtype=bool) if mask is None else np.asarray(mask.data)
        inside = memory.is_element[places] & active
        lanes = np.flatnonzero(inside)
        if len(lanes) < (n_active := np.count_nonzero(active)):
            lane = np.flatnonzero(active & ~inside)[0]
            at = argument.in_words(int(pointers.data.flat[lane]))
            what = act + (" without a mask" if mask is None else "")
            who = f"lane {lane} of program {self.index_of(self.program)}"
            words = f"A {what} reaches outside of {argument.name} ({line}): {who} {VERBS[act]} {at}"
            self.watch.add("outside", f"{line} {argument.name}", words, n_active - len(lanes))
        first_thread = self.block_shapes.setdefault(
            shape if inside.size > 1 else (), len(self.block_shapes) << 20
        )
        who = self.program, self.epoch, first_thread + lanes
        memory.accesses.append(Access(act, line, argument, *who, places.ravel()[lanes]))
        return inside

    def compare(self) -> None:
        """Find the elements that several programs or threads touched and one of them wrote."""
        for memory in self.memories.values():
            accesses = [access for access in memory.accesses if len(access.places)]
            if all(access.act == "load" for access in accesses):
                continue
            which = np.repeat(np.arange(len(accesses)), [len(a.places) for a in accesses])
            rows = np.array([(BITS[a.act], a.program, a.epoch) for a in accesses])
            acts, programs, epochs = rows[which].T
            places = np.concatenate([access.places for access in accesses])
            threads = np.concatenate([access.threads for access in accesses])
            between_programs = conflicts(places, programs, acts)
            between_threads = conflicts(epochs * len(memory.is_element) + places, threads, acts)
            for kind, found in (("programs", between_programs), ("threads", between_threads)):
                if found is not None:
                    n, *pair = found
                    address = memory.start + int(places[pair[0]]) * memory.place_bytes
                    self.add_conflict(kind, [accesses[which[i]] for i in pair], address, n)

    def add_conflict(self, kind: str, pair: list[Access], address: int, n: int) -> None:
        before, after = pair
        if kind == "programs":
            other = f"program {self.index_of(before.program)}"
            why = "programs run in any order"
        else:
            other = "another of its threads"
            why = "a barrier is missing between, and a reduction such as tl.sum is one"
        element = f"{after.argument.in_words(address)} of {after.argument.name} ({after.line})"
        words = (
            f"Program {self.index_of(after.program)} {VERBS[after.act]} {element}, "
            f"which {other} {VERBS[before.act]} ({before.line}): {why}"
        )
        self.watch.add(kind, f"{before.line} {after.line}", words, n)


def conflicts(groups: np.ndarray, who: np.ndarray, acts: np.ndarray) -> tuple | None:
    """Return in how many groups several have touched and one has written, and two of the first.

    The arguments have a number for each touch: its group, who it was, and the bit of its act.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    ordered = who[order]
    several = np.minimum.reduceat(ordered, starts) < np.maximum.reduceat(ordered, starts)
    together = np.bitwise_or.reduceat(acts[order], starts)
    wrong = np.flatnonzero(several & ~np.isin(together, HARMLESS))
    if not len(wrong):
        return None
    group = order[starts[wrong[0]] :]
    group = group[groups[group] == groups[group[0]]]
    pairs = itertools.combinations(group, 2)
    differ = (pair for pair in pairs if who[pair[0]] != who[pair[1]])
    return len(wrong), *next(
        pair for pair in differ if np.bitwise_or(*acts[list(pair)]) not in HARMLESS
    )


def extent(t: torch.Tensor) -> int:
    """Return how many elements lie from the first to the last, with the gaps between them."""
    return sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) + 1 if t.numel() else 0


def storage_of(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def tensors_in(name: str, value) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a kernel's argument, by their names."""
    if isinstance(value, tuple):
        for i, each in enumerate(value):
            yield from tensors_in(f"{name}[{i}]", each)
    elif isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, TensorDescriptor | TensorWrapper):
        yield name, value.base


def line_of_kernel() -> str:
    """Return the line of the kernel, or of a function that it calls, that the interpreter is in."""
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
    order: str

    def set_grid_dim(self, *grid):
        super().set_grid_dim(*grid)
        self.launch.set_grid(grid, self.order)

    def set_grid_idx(self, *turn):
        super().set_grid_idx(*self.launch.begin_program(turn))

    def create_load(self, pointers, *rest):
        return self.create_masked_load(pointers, None, None)

    def create_masked_load(self, pointers, mask, other, *rest, **named):
        inside = self.launch.reach("load", pointers, mask)
        value = unknown_like(pointers)
        if other is not None:
            value = np.where(mask.data & ~inside, value, other.data)
        handles = TensorHandle(inside, tl.int1), TensorHandle(value, pointers.get_element_ty())
        return super().create_masked_load(pointers, *handles, None, None, False)

    def create_store(self, pointers, value, *rest):
        self.create_masked_store(pointers, value, None)

    def create_masked_store(self, pointers, value, mask, *rest):
        inside = TensorHandle(self.launch.reach("store", pointers, mask), tl.int1)
        super().create_masked_store(pointers, value, inside, None, None)

    def create_atomic_rmw(self, operation, pointers, value, mask, *rest):
        inside = TensorHandle(self.launch.reach("atomic", pointers, mask), tl.int1)
        return super().create_atomic_rmw(operation, pointers, value, inside, *rest)

    def create_atomic_cas(self, pointers, expected, *rest):
        if not self.launch.reach("atomic", pointers, None).all():
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
    convert, apply = interpreter._implicit_cvt, ReduceScanOpInterface.apply
    builder = interpreter.interpreter_builder

    def with_argument(value):
        converted = convert(value)
        if hasattr(value, "data_ptr"):
            # the interpreter hands on a pointer's type to all that is computed from it
            dtype = converted.handle.dtype = copy.copy(converted.handle.dtype)
            dtype.argument = launch.arguments[value.data_ptr()]
        return converted

    def with_barrier(reduction, blocks):
        launch.epoch += 1
        return apply(reduction, blocks)

    builder.launch, builder.order, builder.__class__ = launch, order, WatchedBuilder
    try:
        with (
            replaced(interpreter, _implicit_cvt=with_argument),
            replaced(ReduceScanOpInterface, apply=with_barrier),
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
    kernel_class = InterpretedFunction if INTERPRETED else JITFunction
    run = kernel_class.run

    def watched_run(kernel, *arguments, **options):
        watch.kernels.append(Launched(kernel.fn.__name__, kernel.fn.__code__.co_filename))
        if not watch.sees_addresses:
            return run(kernel, *arguments, **options)
        launch = WatchedLaunch(watch, dict(zip(kernel.arg_names, arguments)) | options, tensors)
        with interpreter_of(launch, order):
            result = run(kernel, *arguments, **options)
        launch.compare()
        return result

    with replaced(kernel_class, run=watched_run):
        yield watch
