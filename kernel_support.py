"""What every kernel needs from PyTorch and Triton, and what no lesson is about.

    from kernel_support import tl, triton          Triton; without a GPU its interpreter
    check_tensors(("x", x, FLOATS, ("...", "H")))  refuses what a kernel cannot take
    with on_device_of(x): ...                      launches on the GPU that holds x
    rows, row_stride = as_rows(x)                  (..., H) as rows with adjacent columns
    refuse_to_overwrite(gate=gate, up=up)          before a kernel writes over its inputs
    refuse_second_derivative("RMSNorm")            in a backward
    @operator("tutorial::rmsnorm", ...)            one operation for torch.compile
    recordable(kernel)[grid](...)                  or launches that it makes itself

A lesson is carried away as two files: itself and this one.

Without a GPU Triton's interpreter runs the kernels, on the CPU.  In Triton 3.6 to 3.9 it gives
other numbers than a GPU in three places, which this file mends:

- fp32 -> bf16 drops the lower 16 bits, where a GPU rounds to nearest, ties to even.  The
  interpreter so rounds towards zero: bf16 weights lose norm in every step of an optimizer.  Some
  NaN become infinity, a number beyond bf16's range does not, subnormal numbers come out wrong in
  both directions, and integers and fp64 are not converted.
- fp32 -> fp8 (e4m3) adds the first bit that is dropped, and may lose the carry: 1.99 becomes 1.
  Ties do not go to even, subnormal numbers are truncated, NaN becomes a number, and a number that
  is too large becomes any number.  A GPU rounds to nearest, ties to even, and stops at 448.
- `tl.fma(x, y, z)` rounds x * y, and then the sum; a GPU rounds once, and so does Triton 3.9.  For
  a logit of 10,000 the first rounding is already 5e-4, and exp turns it into a relative error.

Besides, with NumPy 2.4 the interpreter of Triton 3.5 and 3.6 runs no loop whose bound is a number
of the kernel, and that of Triton 3.9 takes no mask that is made of one comparison for all lanes.

Three things are not mended.  No kernel here needs them:

- `tl.fma` of fp64, and fp64 -> bf16, which is rounded to fp32 first;
- arithmetic on bf16 values: for +, -, *, <, `tl.dot` the interpreter takes their bits for
  integers.  Convert to fp32 first, as all kernels here do;
- fp8 but e4m3 (`tl.float8e4nv`) to and from fp32; casts with `fp_downcast_rounding=`.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import inspect
import math
import os
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

INTERPRETED = triton.knobs.runtime.interpret  # does the interpreter run the kernels, on the CPU?
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP32 = (torch.float32,)
INTEGERS = (torch.int64, torch.int32)
SAME = ()  # for check_tensors: the first tensor's dtype
PLAIN = (torch.Tensor, torch.nn.Parameter)  # types of tensors that are looked at no closer


# ---- Checks: a kernel is handed addresses, so a wrong tensor must be refused before ------------


def check_tensors(*arguments: tuple) -> dict[str, int | tuple[int, ...]]:
    """Refuse tensors that a kernel cannot take; return the length of each named dimension.

        check_tensors(("x", x, FLOATS, ("...", "H")), ("w?", w, FLOATS, ("H",)))["H"]

    Args:
        arguments: (name, tensor, dtypes, shape) for each tensor.  The tensor may be None if the
            name ends in "?", except for the first one.  The dtypes SAME are the first tensor's.
            shape has a number or a word for each dimension.  A word stands for any length, and for
            the same length in each shape.  "..." comes first in a shape and stands for any number
            of dimensions; after it, "n_rows" is their product.  None: any shape.

    Raises:
        TypeError: something is no plain tensor, or has another dtype or layout.
        ValueError: a tensor is on another device than the first one, or has another shape; or the
            first one is not on a GPU, although the kernels are not interpreted.
    """
    device, patterns, shapes, is_plain = None, (), (), True
    traced = torch.compiler.is_dynamo_compiling()  # is_neg() cannot be traced
    for name, t, dtypes, pattern in arguments:
        if t is None and name.endswith("?"):
            continue
        dtypes = dtypes or (arguments[0][1].dtype,)
        plain = type(t) in PLAIN and t.layout is torch.strided
        if not (plain and t.dtype in dtypes) or (not traced and t.is_neg()):
            check_memory(name.rstrip("?"), t, dtypes)
            is_plain = False
        if device is None:
            device = t.device
            if not t.is_cuda and not (INTERPRETED and t.is_cpu):
                expected = "a GPU: move it, or export TRITON_INTERPRET=1 for a CPU."
                raise ValueError(f"{name} is on {device}, expected {expected}")
        elif t.device != device:
            expected = f"{arguments[0][0]}'s {device}: move it there."
            raise ValueError(f"{name.rstrip('?')} is on {t.device}, expected {expected}")
        patterns += (pattern,)
        shapes += (t.shape,)
    # torch.compile's tensors have lengths that cannot be keys of a cache
    lengths, misfit = (_lengths if is_plain else _lengths.__wrapped__)(patterns, shapes)
    if misfit is not None:
        name = [name for name, t, *_ in arguments if t is not None][misfit].rstrip("?")
        given = f"{name} has shape {tuple(shapes[misfit])}"
        expected = _in_words(patterns[misfit], lengths)
        raise ValueError(f"{given}, expected {expected}: reshape it.")
    return lengths


def check_memory(name: str, t: torch.Tensor, dtypes: Sequence[torch.dtype] = ()) -> None:
    """Refuse wrappers and sparse tensors, which have no element at each address, and other dtypes.

    A wrapper such as DTensor has a data_ptr(), but nothing lies there.
    """
    if type(t) not in PLAIN:
        given = f"{name} is a {type(t).__name__}"
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{given}, expected a tensor: wrap it in torch.tensor().")
        if is_traceable_wrapper_subclass(t):
            how = "pass its to_local() or full_tensor()" if hasattr(t, "to_local") else "unwrap it"
            raise TypeError(f"{given}, expected a plain tensor: {how}.")
    if t.layout is not torch.strided:
        raise TypeError(f"{name} is {t.layout}, expected torch.strided: pass its to_dense().")
    if dtypes and t.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} is {t.dtype}, expected {expected}: convert it.")
    if not torch.compiler.is_dynamo_compiling() and t.is_neg():
        given = f"{name} holds its numbers negated (is_neg() is True)"
        raise HeldNegatedError(f"{given}, expected the numbers: pass its resolve_neg().")


class HeldNegatedError(TypeError):
    """A tensor's memory holds the negated numbers, as those of `z.conj().imag` are."""


def takes_negated(*written: str) -> Callable:
    """Decorate what checks tensors first: it gets copies of those held negated and not written."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **named):
            try:
                return function(*args, **named)
            except HeldNegatedError:
                given = inspect.signature(function).bind(*args, **named)
            given.arguments |= {
                name: tree_map_only(torch.Tensor, torch.Tensor.resolve_neg, value)
                for name, value in given.arguments.items()
                if name not in written
            }
            return function(*given.args, **given.kwargs)

        return call

    return decorate


def number(name: str, value, kind: type) -> int | float:
    """Return a number, which may be NumPy's or a tensor of one, as Python's int or float."""
    if type(value) is kind:
        return value
    plain = value.item() if isinstance(value, (np.generic, torch.Tensor)) else value
    if isinstance(plain, bool) or not isinstance(plain, (int, kind)):
        expected = "a whole number" if kind is int else "a number"
        raise TypeError(f"{name} is {value!r}, expected {expected}: convert it.")
    return kind(plain)


@functools.lru_cache(maxsize=4096)
def _lengths(patterns: Sequence[tuple], shapes: Sequence) -> tuple[dict, int | None]:
    """Return the lengths of words, and the number of the first shape that is not as expected."""
    lengths = {}
    for number, (pattern, shape) in enumerate(zip(patterns, shapes)):
        if pattern is None:
            continue
        shape = tuple(shape)
        if pattern and pattern[0] == "...":
            n_before = max(len(shape) - len(pattern) + 1, 0)
            lengths.setdefault("n_rows", math.prod(shape[:n_before]))
            shape = shape[:n_before], *shape[n_before:]
        if len(shape) != len(pattern):
            return lengths, number
        for length, word in zip(shape, pattern):
            if length != (lengths.setdefault(word, length) if type(word) is str else word):
                return lengths, number
    return lengths, None


def _in_words(pattern: tuple, lengths: dict) -> str:
    """Write an expected shape, with the lengths that are known: (..., 4096)."""
    words = []
    for word in pattern:
        known = lengths.get(word, word)
        words += known if isinstance(known, tuple) else (known,)
    return f"({', '.join(map(str, words))}{',' if len(words) == 1 else ''})"


def refuse_to_overwrite(**tensors: torch.Tensor) -> None:
    """Refuse to write over tensors unless each is a contiguous result that shares no memory.

    A leaf's gradient would lie in the leaf's own memory.
    """
    compiling = torch.compiler.is_compiling()  # the compiler does not know whose view a tensor is
    seen = []  # (owner of the memory, tensor) of each tensor so far
    for name, t in tensors.items():
        owner = t if compiling or t._base is None else t._base
        leaf = owner.is_leaf and owner.requires_grad
        others = (other for its_owner, other in seen if its_owner is owner)
        starts = ((other, t.storage_offset() - other.storage_offset()) for other in others)
        shared = any(-t.numel() < start < other.numel() for other, start in starts)
        if leaf or shared or not t.is_contiguous():
            given = f"{name} has strides {t.stride()}, is a leaf: {leaf}, shares memory: {shared}"
            expected = "expected a contiguous result of its own to overwrite"
            raise ValueError(f"{given}; {expected}: use inplace=False.")
        seen.append((owner, t))


def refuse_second_derivative(name: str) -> None:
    """Refuse, first in a backward, what `once_differentiable` may let vanish without a word."""
    if torch.is_grad_enabled():  # in a backward only under create_graph=True
        raise RuntimeError(f"{name} has no second derivative, which create_graph=True asks for.")


def outside_autocast(backward: Callable) -> Callable:
    """Decorate a backward that multiplies: autocast may be on there, and off in the forward."""

    @functools.wraps(backward)
    def call(*args):
        if torch.compiler.is_compiling() or not torch._C._is_any_autocast_enabled():
            return backward(*args)
        with torch._C._DisableAutocast():  # torch.autocast(enabled=False) is of one kind of device
            return backward(*args)

    return call


# ---- Launches -----------------------------------------------------------------------------------
#
# On a few hundred rows the GPU needs 10 us and waits for the host, which needs ten times as long.
# So nothing here takes microseconds where nothing depends on it: no view of what is contiguous, no
# change to the device that is the current one, no property of the GPU looked up twice.


def on_device_of(t: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make t's GPU the current one, on which Triton launches."""
    elsewhere = t.is_cuda and t.get_device() != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else contextlib.nullcontext()


def as_rows(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return t (..., H) as rows with adjacent columns, and the stride between two rows.

    A contiguous t comes back as it is.  Any other becomes a view (n_rows, H), or a copy where no
    such view exists.
    """
    n_cols = t.shape[-1] if t.ndim > 0 else 1
    if t.is_contiguous():
        return t, n_cols
    rows = t.reshape(t.numel() // max(n_cols, 1), n_cols)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def output_like(x: torch.Tensor) -> torch.Tensor:
    """Return memory for a result, in x's order of dimensions if columns are the innermost."""
    out = torch.empty_like(x)
    if out.stride(-1) != 1:  # x is not dense, or its columns are not the innermost in memory
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out


@functools.cache
def n_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- What torch.compile sees --------------------------------------------------------------------
#
# torch.compile does not run a launcher, it traces it, and takes what it reads in a tensor for
# constant: the stride of a row would become a number in the compiled code.  Yet inside of a graph
# it lays out tensors as it likes, with gaps between rows if that aligns them, and a kernel would
# walk through them with the wrong stride.  The body of an operator is not traced but called, with
# real tensors.  The compiler is told which arguments it writes, and what the results look like.
# But calling an operator takes host time.  So where all sizes are numbers, a launcher is traced
# after all.  The compiler then launches the kernels itself, and keeps the strides of their tensors.

recording = contextvars.ContextVar("recording", default=False)  # is a launcher traced?


def recordable(kernel):
    """Return the kernel, or what puts its launches into the graph while a launcher is traced."""
    return torch.library.wrap_triton(kernel) if recording.get() else kernel


def record(launch: Callable, mode: FunctionalTensorMode, operator, types, args, kwargs):
    """Trace a launcher; keep its operator if a size is unknown, or in a graph to be exported."""
    tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
    kinds = {type(n) for t in tensors for n in (*t.shape, *t.stride())} | {*types}
    if kinds != {int, FunctionalTensor} or not torch._functorch.config.decompose_custom_triton_ops:
        return mode.__torch_dispatch__(operator, types, args, kwargs)
    before = recording.set(True)
    try:
        with mode:
            return launch(*args, **kwargs)
    finally:
        recording.reset(before)


def operator(
    name: str,
    schema: str,
    results: Callable,
    mutates: Sequence[str] = (),
    present: Callable | None = None,
    tags: Sequence[torch.Tag] = (),
    launches_are_recordable: bool = False,
) -> Callable:
    """Decorate a launcher: torch.compile sees one operator in its place, launcher.operator.

    Eager code calls the launcher itself, because an operator takes host time.

    Args:
        name: "namespace::name", used once in a process.
        schema: the arguments and results, as torch.library writes them.  A launcher gets an "int"
            or a "float" as Python's, whatever the caller's is.
        results: takes the launcher's arguments and returns new tensors that look like its results.
        mutates: the arguments that the launcher writes.
        present: where a result may be None.  It takes the launcher's arguments and returns, for
            each result, whether there is one.  The schema then ends in "-> Tensor[]".
        tags: of the operator.
        launches_are_recordable: the launcher can be traced, and all its kernels are `recordable`.
    """
    resolving = takes_negated(*mutates)
    numbers = [
        (place, name, {"int": int, "float": float}[kind])
        for place, argument in enumerate(schema.split(", "))
        for kind, name in re.findall(r"\b(int|float) (\w+)", argument)
    ]

    def decorate(launch: Callable) -> Callable:
        resolved = resolving(launch)

        def without_none(function):
            if present is None:
                return function
            return lambda *args: [t for t in function(*args) if t is not None]

        body = without_none(resolved)
        compiled = torch.library.custom_op(
            name, body, mutates_args=mutates, schema=schema, tags=tags
        )
        compiled.register_fake(without_none(resolving(results)))
        if launches_are_recordable and not INTERPRETED:
            compiled.register_torch_dispatch(FunctionalTensorMode, functools.partial(record, body))
            # PyTorch keeps graphs on disk, by the operators' names.  A changed file is another one.
            with open(inspect.getsourcefile(launch), "rb") as file:
                torch.compiler.config.cache_key_tag += hashlib.sha256(file.read()).hexdigest()

        @functools.wraps(launch)
        def call(*args, **named):
            for place, name, kind in numbers:
                if name in named:
                    named[name] = number(name, named[name], kind)
                elif place < len(args) and type(args[place]) is not kind:
                    args = *args[:place], number(name, args[place], kind), *args[place + 1 :]
            if not torch.compiler.is_compiling():
                return resolved(*args, **named)
            tensors = (t for t in (*args, *named.values()) if isinstance(t, torch.Tensor))
            tangents = (forward_ad.unpack_dual(t).tangent for t in tensors)
            if forward_ad._current_level >= 0 and any(t is not None for t in tangents):
                given = f"{name} has no forward-mode derivative, which jvp asks for"
                raise RuntimeError(f"{given}: use backward().")
            if present is None:
                return compiled(*args, **named)
            found = iter(compiled(*args, **named))
            there = present(*args, **named)
            return tuple(next(found) if is_there else None for is_there in there)

        call.operator = compiled
        return call

    return decorate


# ---- The interpreter rounds as a GPU does -------------------------------------------------------


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Return the bits (uint16) of fp32 x, rounded to nearest even in bf16; NaN stays NaN."""
    bits = x.view(np.uint32)
    # The sum carries into the upper bits from the middle on; at a tie, only if they are odd.
    halfway = 0x7FFF + ((bits >> 16) & 1)
    quiet_nan = bits | 0x400000  # so that the upper bits of a NaN are not all 0
    rounded = np.where(np.isnan(x), quiet_nan, bits + halfway)
    return (rounded >> 16).astype(np.uint16)


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z of fp32 or fp16 arrays, rounded once.

    In float64 the product is exact.  The float64 nearest to the sum could lie in the middle of two
    fp32 numbers, although the sum does not.  So an inexact sum becomes that neighbour in float64
    whose last bit is 1: never in a middle, and on the sum's side (Boldo and Melquiond, 2008).
    """
    with np.errstate(all="ignore"):  # infinities and NaN come out as they should
        product, z64 = x.astype(np.float64) * y, z.astype(np.float64)
        total = product + z64
        z_part = total - product
        # product + z64 - total, exactly (Knuth's two-sum)
        lost = (product - (total - z_part)) + (z64 - z_part)
        even = total.view(np.int64) & 1 == 0
        other = np.nextafter(total, np.copysign(np.inf, lost))
        return np.where(even & (np.abs(lost) > 0), other, total).astype(z.dtype)


if INTERPRETED:
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    # Triton may have been imported before this file, to compile: then tl.sum and others of its own
    # functions are compiled ones.
    for namespace in (tl, tl.standard, tl.random, tl.core.tensor):
        for name, function in list(vars(namespace).items()):
            if isinstance(function, JITFunction):
                setattr(namespace, name, InterpretedFunction(function.fn))

    _patch_lang, _patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    _nothing_to_restore = getattr(interpreter, "_LangPatchScope", lambda: None)
    _cast, _convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp
    _splat = InterpreterBuilder.create_splat

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), target)
        if source != tl.bfloat16 and target == tl.bfloat16:
            with np.errstate(over="ignore"):
                return TensorHandle(round_to_bf16(src.data.astype(np.float32)), target)
        return _cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target == tl.float8e4nv:
            # PyTorch 2.11 turns a number beyond 448, the largest, into NaN, so limit it first.
            limited = torch.from_numpy(np.array(src.data, np.float32)).clamp(-448, 448)
            return TensorHandle(limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), target)
        if source == tl.float8e4nv and target == tl.float32:
            codes = torch.from_numpy(np.array(src.data)).view(torch.float8_e4m3fn)
            return TensorHandle(codes.float().numpy(), target)
        return _convert(self, src, dst_type, rounding_mode)

    def create_splat(self, *shape_and_number):
        *shape, number = shape_and_number
        if number.data.dtype == np.bool_:  # it has the type of what was compared
            number = TensorHandle(number.data, tl.int1)
        return _splat(self, *shape, number)

    def create_fma(self, x, y, z):
        return TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    dtype_of_scalar = functools.cache(interpreter._get_np_dtype)  # it makes a table at each call

    def numpy_dtype(dtype):
        scalar = dtype.scalar
        return np.dtype(np.uint64) if scalar.is_ptr() else dtype_of_scalar(scalar)

    @functools.cache
    def languages(function):
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_language(function):
        """Do what the interpreter does, but not at each tl.sum too: a third of its time."""
        is_patched = all(language.static_print is print for language in languages(function))
        return _nothing_to_restore() if is_patched else _patch_lang(function)

    def patch_tensor(tensor, *scope):
        _patch_lang_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    # The interpreter also computes in int64 whether an operation on integers overflows, and then
    # ignores the answer unless it debugs: another third of its time.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = numpy_dtype
    interpreter._patch_lang = patch_language
    interpreter._patch_lang_tensor = patch_tensor
    for mended in (cast_impl, create_fp_to_fp, create_splat, create_fma):
        setattr(InterpreterBuilder, mended.__name__, mended)
