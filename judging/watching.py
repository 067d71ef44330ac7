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
import math
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

KINDS = ("outside", "programs", "threads")
VERBS = {"load": "reads", "store": "writes", "atomic": "updates"}
TOO_LARGE = 2**31  # for the number of a program or a thread
NAN_BITS = {tl.bfloat16: 0x7FC0, tl.float8e4nv: 0x7F, tl.float8e5: 0x7F}  # integers in NumPy
REPLACED = (
    "create_masked_load",
    "create_masked_store",
    "create_atomic_rmw",
    "create_atomic_cas",
    "create_dot",
    "set_grid_dim",
    "set_grid_idx",
)
NO_KERNELS = (str(Path(triton.__file__).parent), __file__)  # no line of a kernel is in these


@dataclass(frozen=True)
class Launched:
    """A launch of a kernel."""

    name: str
    file: str  # of its source


@dataclass
class Finding:
    """A fault of a kernel's line: the first lane that has it, and how many have."""

    kind: str
    words: str
    n_lanes: int = 0


@dataclass
class Watch:
    """What was seen of the launches."""

    sees_addresses: bool  # False: the kernels are compiled, so only the launches are seen
    kernels: list[Launched] = field(default_factory=list)
    found: dict[tuple, Finding] = field(default_factory=dict)  # by kind and lines

    @property
    def findings(self) -> list[str]:
        return [sentence for kind in KINDS for sentence in self.of(kind)]

    def of(self, kind: str) -> list[str]:
        """Return the sentences of one kind of fault."""
        found = [finding for finding in self.found.values() if finding.kind == kind]
        return [f"{each.words}; {each.n_lanes} lanes in all." for each in found]


class Memory:
    """The memory of tensors that share a storage, cut into places as small as the smallest element.

    is_element has another place before the first and behind the last tensor.
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
        """Return the place of each address, or the nearest place."""
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

    def outside_at(self, address: int) -> str:
        """Return in words where an address lies that is no element."""
        offset, n = self.offset_of(address), extent(self.tensor)
        if offset < 0:
            return f"{-offset} before its first element"
        if offset >= n:
            return f"{offset - n + 1} behind its last element"
        return f"{offset} behind its first element, in a gap of its strides {self.tensor.stride()}"

    def index_at(self, place: int) -> tuple[int, ...]:
        """Return the index of the element at a place of the memory."""
        offset = self.offset_of(self.memory.start + place * self.memory.place_bytes)
        index = [0] * self.tensor.ndim
        for dim in sorted(range(self.tensor.ndim), key=self.tensor.stride, reverse=True):
            if stride := self.tensor.stride(dim):
                index[dim], offset = divmod(offset, stride)
        return tuple(map(int, index))


@dataclass(frozen=True)
class Access:
    """The elements that one load, store or atomic of one program touched."""

    act: str  # of VERBS
    argument: Argument
    program: int
    epoch: int  # of the launch: every program, and every barrier, begins a new one
    threads: np.ndarray  # the same number for the same lane of a block of the same shape
    places: np.ndarray
    line: str


class Touched:
    """The largest and the smallest number of those who touched a place in its latest epoch."""

    def __init__(self, n_places: int):
        self.largest = np.zeros(n_places, dtype=np.int64)
        self.smallest = np.zeros(n_places, dtype=np.int64)  # counted from the epoch's end

    def by_others(self, places: np.ndarray, epoch: int, numbers) -> np.ndarray:
        largest = self.largest[places] > epoch * TOO_LARGE + numbers + 1
        return largest | (self.smallest[places] > (epoch + 1) * TOO_LARGE - numbers)

    def add(self, places: np.ndarray, epoch: int, numbers) -> None:
        numbers = np.broadcast_to(numbers, places.shape)
        # Lanes ascend.  Of several on one place NumPy keeps the last, so here the largest ...
        largest = np.maximum(self.largest[places], epoch * TOO_LARGE + numbers + 1)
        self.largest[places] = largest
        # ... and backwards the smallest.
        smallest = np.maximum(self.smallest[places], (epoch + 1) * TOO_LARGE - numbers)
        self.smallest[places[::-1]] = smallest[::-1]


class WatchedLaunch:
    """One launch of a kernel by the interpreter."""

    def __init__(self, watch: Watch, values: dict, named: dict[str, torch.Tensor]):
        self.watch = watch
        self.program, self.epoch, self.block_shapes = 0, 0, {}
        self.grid = self.order = ()
        given = dict(pair for name, value in values.items() for pair in tensors_in(name, value))
        names = {t.data_ptr(): name for name, t in reversed(named.items())}
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
        self.grid, n_programs = grid, math.prod(grid)
        orders = {
            "forward": np.arange(n_programs),
            "reverse": np.arange(n_programs)[::-1],
            "shuffled": np.random.default_rng(0).permutation(n_programs),
        }
        self.order = orders[order]

    def begin_program(self, turn: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index of the program that runs when the interpreter would run this one."""
        self.program = int(self.order[np.ravel_multi_index(turn, self.grid)])
        self.epoch += 1
        return self.index_of(self.program)

    def argument_of(self, pointers: TensorHandle) -> Argument:
        """Return the tensor whose pointer these were computed from, or else one that they hit."""
        known = getattr(pointers.dtype, "argument", None)
        first, arguments = int(pointers.data.flat[0]), list(self.arguments.values())
        hit = (a for a in arguments if 0 <= a.offset_of(first) < extent(a.tensor))
        return known or next(hit, arguments[0])

    def reach(self, act: str, pointers: TensorHandle, mask: np.ndarray | None) -> np.ndarray:
        """Note an access, and return which lanes may make it."""
        argument, line = self.argument_of(pointers), line_of_kernel()
        memory = argument.memory
        places = memory.places_of(pointers.data)
        active = np.ones(places.shape, dtype=bool) if mask is None else mask
        inside = memory.is_element[places] & active
        lanes = np.flatnonzero(inside)
        if n_outside := np.count_nonzero(active) - len(lanes):
            lane = np.flatnonzero(active & ~inside)[0]
            at = argument.outside_at(int(pointers.data.flat[lane]))
            access = act + (" without a mask" if mask is None else "")
            self.add(
                ("outside", line, argument.name),
                f"A {access} ({line}) {VERBS[act]} outside of {argument.name}: lane {lane} of "
                f"program {self.index_of(self.program)} {VERBS[act]} {at}",
                n_outside,
            )
        shape = inside.shape if inside.size > 1 else ()
        first_thread = self.block_shapes.setdefault(shape, len(self.block_shapes) << 20)
        touched = places.ravel()[lanes]
        memory.accesses.append(
            Access(act, argument, self.program, self.epoch, first_thread + lanes, touched, line)
        )
        return inside

    def add(self, key: tuple, words: str, n_lanes: int) -> None:
        self.watch.found.setdefault(key, Finding(key[0], words)).n_lanes += int(n_lanes)

    def index_of(self, program: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(program, self.grid))

    def compare(self) -> None:
        """Find what several programs, or several threads, touched and one of them wrote."""
        for memory in self.memories.values():
            if all(access.act == "load" for access in memory.accesses):
                continue
            n_places = len(memory.is_element)
            touched = {(kind, act): Touched(n_places) for kind in KINDS[1:] for act in VERBS}
            for access in memory.accesses:
                numbers = {
                    "programs": (0, access.program),
                    "threads": (access.epoch, access.threads),
                }
                for (kind, act), before in touched.items():
                    if act != access.act or act == "store":
                        again = before.by_others(access.places, *numbers[kind])
                        if again.any():
                            self.add_conflict(kind, act, access, again)
                for kind, number in numbers.items():
                    touched[kind, access.act].add(access.places, *number)

    def add_conflict(self, kind: str, act: str, access: Access, again: np.ndarray) -> None:
        """Add that an `act` of others has touched some places of an access before."""
        lane = np.flatnonzero(again)[0]
        place, thread = access.places[lane], access.threads[lane]
        for before in access.argument.memory.accesses:
            threads = before.threads[before.places == place]
            if kind == "programs":
                others = before.program != access.program
            else:
                others = before.epoch == access.epoch and (threads != thread).any()
            if before.act == act and len(threads) and others:
                break
        element = f"element {access.argument.index_at(place)} of {access.argument.name}"
        does = f"Program {self.index_of(access.program)} {VERBS[access.act]} {element}"
        if kind == "programs":
            whose = f"program {self.index_of(before.program)}"
            why = "and programs run in any order"
        else:
            whose = "another of its threads"
            why = "and no barrier lies between: a reduction, such as tl.sum, is one"
        words = f"{does} ({access.line}), which {whose} {VERBS[act]} ({before.line}), {why}"
        self.add((kind, access.line, before.line), words, np.count_nonzero(again))


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
    frame = sys._getframe(2)
    while frame.f_code.co_filename.startswith(NO_KERNELS):
        frame = frame.f_back
    return f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"


def unknown_like(pointers: TensorHandle) -> np.ndarray:
    """Return what lanes get that read nothing: NaN, or the largest integer."""
    element = pointers.get_element_ty()
    dtype = interpreter._get_np_dtype(element)
    if element in NAN_BITS:
        value = NAN_BITS[element]
    elif dtype.kind == "f":
        value = np.nan
    else:
        value = True if dtype.kind == "b" else np.iinfo(dtype).max
    return np.full(pointers.data.shape, value, dtype=dtype)


@contextlib.contextmanager
def told_to(launch: WatchedLaunch, order: str) -> Iterator[None]:
    """Have the interpreter ask a launch at each access, and run its programs in this order."""
    own = {name: getattr(InterpreterBuilder, name) for name in REPLACED}
    own_apply, own_convert = ReduceScanOpInterface.apply, interpreter._implicit_cvt

    def load(builder, pointers, *rest) -> TensorHandle:
        return masked_load(builder, pointers, None, None)

    def masked_load(builder, pointers, mask, other, *rest, **named) -> TensorHandle:
        mask = None if mask is None else np.asarray(mask.data)
        inside = launch.reach("load", pointers, mask)
        value = unknown_like(pointers)
        if other is not None:
            value = np.where(mask & ~inside, value, other.data)
        handles = TensorHandle(inside, tl.int1), TensorHandle(value, pointers.get_element_ty())
        return own["create_masked_load"](builder, pointers, *handles, None, None, False)

    def store(builder, pointers, value, *rest) -> None:
        masked_store(builder, pointers, value, None)

    def masked_store(builder, pointers, value, mask, *rest) -> None:
        mask = None if mask is None else np.asarray(mask.data)
        inside = TensorHandle(launch.reach("store", pointers, mask), tl.int1)
        own["create_masked_store"](builder, pointers, value, inside, None, None)

    def atomic_rmw(builder, operation, pointers, value, mask, *rest) -> TensorHandle:
        inside = TensorHandle(launch.reach("atomic", pointers, mask.data), tl.int1)
        return own["create_atomic_rmw"](builder, operation, pointers, value, inside, *rest)

    def atomic_cas(builder, pointers, expected, *rest) -> TensorHandle:
        if not launch.reach("atomic", pointers, None).all():
            return expected  # as if it were there
        return own["create_atomic_cas"](builder, pointers, expected, *rest)

    def barrier(builder) -> None:
        launch.epoch += 1

    def dot(builder, *operands) -> TensorHandle:
        launch.epoch += 1
        return own["create_dot"](builder, *operands)

    def apply(reduction, blocks):
        launch.epoch += 1
        return own_apply(reduction, blocks)

    def set_grid_dim(builder, *grid) -> None:
        own["set_grid_dim"](builder, *grid)
        launch.set_grid(grid, order)

    def set_grid_idx(builder, *index) -> None:
        own["set_grid_idx"](builder, *launch.begin_program(index))

    def convert(value):
        converted = own_convert(value)
        if hasattr(value, "data_ptr"):
            # the interpreter hands on a pointer's type to all that is computed from it
            dtype = converted.handle.dtype = copy.copy(converted.handle.dtype)
            dtype.argument = launch.arguments[value.data_ptr()]
        return converted

    with (
        replaced(
            InterpreterBuilder,
            create_load=load,
            create_masked_load=masked_load,
            create_store=store,
            create_masked_store=masked_store,
            create_atomic_rmw=atomic_rmw,
            create_atomic_cas=atomic_cas,
            create_barrier=barrier,
            create_dot=dot,
            set_grid_dim=set_grid_dim,
            set_grid_idx=set_grid_idx,
        ),
        replaced(ReduceScanOpInterface, apply=apply),
        replaced(interpreter, _implicit_cvt=convert),
    ):
        yield


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
        given = dict(zip(kernel.arg_names, arguments)) | options
        launch = WatchedLaunch(watch, given, tensors)
        with told_to(launch, order):
            result = run(kernel, *arguments, **options)
        launch.compare()
        return result

    with replaced(kernel_class, run=watched_run):
        yield watch
