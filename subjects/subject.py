"""What is known of a differentiable function: `Subject`; and how any of them is run and compared.

The records are the other files of this folder.  The contracts (`judging`) ask the same of each.

A function's results are one dictionary, its *parts*: the outputs by their names, and the gradient
of an input called x as "dx".
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from harness.benchmark.checking import compare
from harness.cli.device import DEVICE, HAS_GPU

Parts = dict[str, torch.Tensor | None]
# The compiler leaves gaps only between long rows whose length it knows: those of a graph's first
# size.
PADDED_WIDTHS = (1289, 5000, 5001) if HAS_GPU else (1289,)
HALF_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class BadInput:
    """A call that must be refused."""

    inputs: tuple
    error: type[Exception]
    sentence: str  # a regular expression of what it says


def bad_call(inputs: dict, error: type[Exception], sentence: str, **changed) -> BadInput:
    """Return the call with some inputs changed."""
    return BadInput(tuple((inputs | changed).values()), error, sentence)


def refused_tensors(inputs: dict[str, torch.Tensor]) -> dict[str, BadInput]:
    """Return calls that `kernel_support.check_tensors` refuses, of each of these tensors."""
    first, *_ = inputs
    nowhere = {name: t.to("meta") for name, t in inputs.items()}
    sentence = f"{first} is on meta, expected a GPU: move it"
    calls = {"without memory": bad_call(inputs, ValueError, sentence, **nowhere)}
    for name, t in inputs.items():
        for kind, bad, expected in (
            ("a list", [1.0], "expected a tensor"),
            ("torch.float64", t.double(), f"expected {expected_dtypes(t)}"),
            ("torch.sparse_coo", t.to_sparse(), "expected torch.strided"),
        ):
            said = f"{name} is {kind}"
            calls[said] = bad_call(inputs, TypeError, f"{said}, {expected}", **{name: bad})
        if name != first:
            said = f"{name} is on meta"
            sentence = f"{said}, expected {first}'s {DEVICE}"
            calls[said] = bad_call(inputs, ValueError, sentence, **{name: nowhere[name]})
    return calls


def bad_inputs(types: dict[str, tuple], shapes: dict[str, tuple]) -> dict[str, BadInput]:
    """Return calls from rows (*inputs, sentence): wrong types, and wrong shapes or values."""
    return {
        name: BadInput(tuple(inputs), error, sentence)
        for error, rows in ((TypeError, types), (ValueError, shapes))
        for name, (*inputs, sentence) in rows.items()
    }


def expected_dtypes(t: torch.Tensor) -> str:
    """Return the words of a refusal for the dtypes of floats, of a mask, or of targets."""
    if t.is_floating_point():
        return "torch.float"  # some, or the first one's
    return "torch.bool" if t.dtype == torch.bool else "torch.int64 or torch.int32"


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """One differentiable function, and all that the contracts need to know of it.

    Sizes are what `make` understands: a row's width for most, several widths for some.
    """

    name: str
    # the files whose kernels are launched
    kernels: tuple[ModuleType, ...]
    # of the inputs, in the order in which `make` gives them
    function: Callable
    # the same in eager PyTorch, in any dtype
    reference: Callable
    # (rows, size, dtype, seed) -> (inputs by name, gradients of the outputs by name)
    make: Callable
    # the same as a training step has it, for benchmarks: no row is left out; `make` unless told
    make_plain: Callable | None = None
    differentiable: tuple[str, ...]
    size: object
    # another subject has the same autograd Function, with other settings
    other_settings: bool = False
    # what the record says of keeping, sentences and bits holds: it is nobody else's function
    recorded: bool = True
    # what a user calls, where `function` hands it copies to overwrite or looks at the inputs itself
    entry: Callable | None = None

    # ---- How it is compared
    # what decides the allowance, in the kernel's dtype; the reference unless told
    eager: Callable | None = None
    # (inputs, douts) -> several such results, of which the most lenient decides
    eagers: Callable | None = None
    # (inputs) -> {part: {label: which elements are compared by themselves}}
    split: Callable | None = None
    # (inputs, douts, right parts), all in float64 -> {mistake: the parts that differ}
    wrong_answers: Callable | None = None
    dtypes: tuple[torch.dtype, ...] = HALF_AND_SINGLE
    # parts that no kernel has a share in
    made_by_pytorch: tuple[str, ...] = ()
    # else by matrix products too, whose library may choose another order of sums
    made_by_kernels_alone: bool = True

    # ---- Sizes and layouts
    # next to powers of two and to the ends of tiles
    ragged_sizes: tuple = ()
    # of real models, or where launch settings change
    large_sizes: tuple = ()
    # {input, or "d" + output: {name: what lays a tensor out so}}
    more_layouts: dict[str, dict] = field(default_factory=dict)
    # inputs, or "d" + outputs, and the dimension that is laid beyond int32
    far: tuple[tuple[str, int], ...] = ()
    far_rows: tuple[int, ...] = (3,)
    # `size` unless told
    far_size: object = None

    # ---- Autograd
    # inputs that are kept for the backward, and so must not be changed
    saved: tuple[str, ...] = ()
    # (inputs) -> bytes kept beside inputs and outputs, in fp32
    saved_bytes: Callable = lambda inputs: 0
    # {output: what autograd says where it is changed}
    fixed_outputs: dict[str, str] = field(default_factory=dict)
    # a second backward and accumulation give the same bits, not only the same numbers
    exact_again: bool = True

    # ---- torch.compile
    # a compiled call gives eager's bits, not only the same numbers
    exact_compiled: bool = True
    # inputs that are matrix products inside of a larger graph, or other results
    activations: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    # (subject) -> the subject inside of a larger graph, if not as others are
    in_a_graph: Callable | None = None
    # (rows, size): the first of each graph, whose rows the compiler pads, and the others
    compiled_first: tuple = tuple(((5,), width) for width in PADDED_WIDTHS)
    compiled_next: tuple = (((4,), 2048), ((16,), 48))

    # ---- A GPU
    gpu_rows: tuple[int, ...] = (64,)
    gpu_size: object = None
    # (inputs) -> bytes that may be taken beyond outputs and gradients
    workspace: Callable | None = None
    # inputs that have the rows, for rows that begin beyond int32
    row_inputs: tuple[str, ...] = ()

    # ---- Refusals
    # () -> {name: BadInput}, and which of them is also tried inside of torch.compile
    bad_input: Callable = dict
    bad_when_compiled: str = ""
    # the input that is refused where it is not on a GPU; the first one unless told
    refused_on_cpu: str = ""
    # inputs that PyTorch's matrix product reads, and refuses
    multiplied: tuple[str, ...] = ()

    # {contract: the sentence that says why it cannot apply}
    exempt: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    def called_as(self, change: Callable[[Callable], Callable]) -> "Subject":
        """The subject whose function, and whose reference, are what `change` makes of them."""
        changed = {"function": change(self.function), "reference": change(self.reference)}
        if self.eager is not None:
            changed["eager"] = change(self.eager)
        return replace(self, **changed, eagers=None)


def generator_of(seed: int, numbers: int) -> torch.Generator:
    """A source of so many random numbers: the GPU where a CPU core would draw them for seconds."""
    device = DEVICE if numbers > 2**24 else "cpu"
    return torch.Generator(device).manual_seed(seed)


def normals(seed: int, dtype: torch.dtype, numbers: int = 0) -> Callable:
    """Return normal(*shape), which draws tensors from one source of so many random numbers."""
    generator = generator_of(seed, numbers)

    def normal(*shape, mean=0.0, scale=1.0, dtype=dtype):
        drawn = torch.randn(shape, generator=generator, device=generator.device)
        return (mean + scale * drawn).to(DEVICE, dtype)

    return normal


def of_rows(make: Callable) -> Callable:
    """Return `make` of a loss, with an upstream gradient for each row instead of one for all."""

    def make_of_rows(rows, size, dtype, seed=0, **options):
        inputs, _ = make(rows, size, dtype, seed, **options)
        generator = torch.Generator().manual_seed(seed + 1)
        return inputs, {"loss": torch.randn(rows, generator=generator).to(DEVICE)}

    return make_of_rows


def chosen(drawn: Callable, inputs: Iterable[str], outputs: dict[str, str]) -> Callable:
    """Return a record's `make`: some of what `drawn` draws by name, {output: its gradient}."""

    def make(rows, size, dtype, seed=0):
        t = drawn(rows, size, dtype, seed)
        return {name: t[name] for name in inputs}, {name: t[d] for name, d in outputs.items()}

    return make


def as_tuple(outputs) -> tuple[torch.Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def in_float64(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def leaves_of(subject: Subject, inputs: Parts, needed: Iterable[str] | None = None) -> Parts:
    """The inputs, with their strides; those that are needed, or else all differentiable ones, are
    leaves.
    """
    needed = subject.differentiable if needed is None else needed
    return {name: t.detach().requires_grad_(name in needed) for name, t in inputs.items()}


def gradients(outputs, leaves: Parts, douts: Parts, **options) -> Parts:
    """The gradients of those leaves that need one."""
    wanted = {f"d{name}": leaf for name, leaf in leaves.items() if leaf.requires_grad}
    pairs = [pair for pair in zip(as_tuple(outputs), douts.values()) if pair[0].requires_grad]
    outputs, douts = zip(*pairs)
    return dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), douts, **options)))


def run(subject: Subject, function: Callable, inputs: Parts, douts: Parts, needed=None) -> Parts:
    """The parts of one forward and one backward; the inputs are used as they are, strides
    included.
    """
    leaves = leaves_of(subject, inputs, needed)
    outputs = as_tuple(function(*leaves.values()))
    parts = dict(zip(douts, (out.detach() for out in outputs), strict=True))
    return parts | gradients(outputs, leaves, douts)


def references(
    subject: Subject, inputs: Parts, douts: Parts, needed=None
) -> tuple[Parts, list[Parts]]:
    """(parts in float64, the same of eager PyTorch in the inputs' dtypes, as often as the subject
    says).
    """
    ref64 = run(subject, subject.reference, in_float64(inputs), in_float64(douts), needed)
    if subject.eagers is not None and set(needed or subject.differentiable) == set(
        subject.differentiable
    ):
        return ref64, subject.eagers(inputs, douts)
    return ref64, [run(subject, subject.eager or subject.reference, inputs, douts, needed)]


def compare_parts(
    subject: Subject, found: Parts, inputs: Parts, ref64: Parts, eagers: list[Parts], dtype=None
):
    """One Check for each part, or for each piece of a part that the subject has compared by itself.

    dtype: whose floor applies; each part's own unless told.
    """
    assert found.keys() == ref64.keys(), (
        f"{subject}: the parts are {list(found)}, expected {list(ref64)}"
    )
    pieces = subject.split(inputs) if subject.split else {}
    result = []
    for part, ref in ref64.items():
        for label, mask in pieces.get(part, {"": None}).items():
            tensors = [found[part], ref, *(eager[part] for eager in eagers)]
            if mask is not None:
                tensors = [None if t is None else t.masked_fill(~mask, 0) for t in tensors]
            ours, wide, *theirs = tensors
            name = f"{subject} {part}{label and f' ({label})'}"
            candidates = [compare(name, ours, wide, eager, dtype) for eager in theirs]
            result.append(max(candidates, key=lambda check: check.allowed))
    return result


def checks(
    subject: Subject,
    inputs: Parts,
    douts: Parts,
    ours: Callable | None = None,
    needed=None,
    dtype=None,
):
    """list[Check]: the function, or `ours` in its place, against float64."""
    found = run(subject, ours or subject.function, inputs, douts, needed)
    return compare_parts(subject, found, inputs, *references(subject, inputs, douts, needed), dtype)


def same_bits(a: Parts, b: Parts) -> bool:
    """Return True if all parts are equal.  NaN is equal to NaN alone."""
    assert a.keys() == b.keys()
    pairs = [(x, b[name]) for name, x in a.items()]
    return all(
        x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all()) for x, y in pairs
    )
