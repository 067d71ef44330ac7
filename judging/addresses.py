"""The contracts of a kernel's addresses, as Triton's interpreter sees them (watching.py)."""

from judging.contracts import NotTried, Wrong, contract
from judging.watching import Watch, watched
from subjects.subject import Parts, Subject, run, same_bits


def watched_sizes(subject: Subject) -> list:
    """Return the subject's own size, and the last ragged one: it has several tiles."""
    return [subject.size, *subject.ragged_sizes[-1:]]


def gaps_behind_rows(tensors: Parts) -> Parts:
    """Return the tensors with five elements behind each row, so that a row's end is seen."""
    placed = {}
    for name, t in tensors.items():
        placed[name] = t
        if t.ndim > 1:
            wide = t.new_empty((*t.shape[:-1], t.shape[-1] + 5))
            placed[name] = wide[..., : t.shape[-1]].copy_(t)
    return placed


def run_watched(subject: Subject, size, order: str = "forward") -> tuple[Parts, Watch]:
    """Return the parts of a forward and a backward of five rows, and what was seen.

    Raises:
        NotTried: the kernels are compiled.
    """
    inputs, douts = map(gaps_behind_rows, subject.make((5,), size, subject.dtypes[0]))
    named = inputs | {f"d{name}": t for name, t in douts.items()}
    with watched({name: t.detach() for name, t in named.items()}, order) as watch:
        parts = run(subject, subject.function, inputs, douts)
    if not watch.sees_addresses:
        raise NotTried("Addresses are seen in Triton's interpreter only, which is for CPUs.")
    return parts, watch


def raise_wrong(findings: list[str]) -> None:
    if findings:
        raise Wrong(" ".join(findings))


@contract("size", watched_sizes)
def every_address_is_inside_a_tensor(subject, size):
    raise_wrong(run_watched(subject, size)[1].of("outside"))


@contract("size", watched_sizes)
def programs_run_in_any_order(subject, size):
    expected, watch = run_watched(subject, size)
    raise_wrong(watch.of("programs"))
    for order in ("reverse", "shuffled"):
        found, _watch = run_watched(subject, size, order)
        for part in expected:
            if not same_bits({part: found[part]}, {part: expected[part]}):
                raise Wrong(f"{part} has other bits if the programs run in the order {order!r}.")


@contract("size", watched_sizes)
def threads_wait_for_each_other(subject, size):
    raise_wrong(run_watched(subject, size)[1].of("threads"))
