"""The contracts of a kernel's addresses, as Triton's interpreter sees them (watching.py)."""

from judging.comparing import expect_same, parts_of
from judging.contract import NotTried, Wrong, contract
from judging.layouts import with_gaps
from judging.watching import Watch, watched
from subjects.subject import Parts, Subject


def watched_sizes(subject: Subject) -> list:
    """Return the subject's own size, and the last ragged one: it has several tiles."""
    return [subject.size, *subject.ragged_sizes[-1:]]


def run_watched(subject: Subject, size, order: str = "forward") -> tuple[Parts, Watch]:
    """Return the parts of a forward and a backward of five rows with gaps, and what was seen.

    Raises:
        NotTried: the kernels are compiled.
    """
    inputs, douts = map(with_gaps, subject.make((5,), size, subject.dtypes[0]))
    with watched(inputs | {f"d{name}": t for name, t in douts.items()}, order) as watch:
        if not watch.sees_addresses:
            raise NotTried("needs Triton's interpreter, which is for CPUs")
        return parts_of(subject, inputs, douts), watch


def expect_none(findings: list[str]) -> None:
    if findings:
        raise Wrong(" ".join(findings))


@contract("size", watched_sizes)
def every_address_is_inside_a_tensor(subject, size):
    expect_none(run_watched(subject, size)[1].of("outside"))


@contract("size", watched_sizes)
def programs_run_in_any_order(subject, size):
    expected, watch = run_watched(subject, size)
    expect_none(watch.of("programs"))
    for order in ("reverse", "shuffled"):
        found, _watch = run_watched(subject, size, order)
        expect_same(f"programs in the order {order!r}", found, expected, subject.recorded)


@contract("size", watched_sizes)
def threads_wait_for_each_other(subject, size):
    expect_none(run_watched(subject, size)[1].of("threads"))
