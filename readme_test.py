"""README.md quotes records: a figure that no record holds must not stay in it."""

import re

import pytest

import readme_figures

README = (readme_figures.HERE / "README.md").read_text()

# Figures that are counted or quoted, not measured; each is derived where it stands.
NOT_MEASURED = re.compile(
    r"16\.1|32\.1|64\.2|64 GB|96 GB|16 GB|150 GB"  # bytes of weights, gradients and moments; disk space
    r"|2\.1 GB|4\.2 GB"  # bytes of the logits
    r"|12\.8×|6× less|4× faster|11 %|80-90 %"  # predicted; the playbook's claims
    r"|1 GB = 10⁹"
)
UNIT = re.compile(r"\d[\d.,]*\s?(?:ms\b|us\b|µs|GB\b|MB\b|GB/s|TB/s|TFLOP/s|tokens/sec|×(?! \d)|%)")


def test_outputs_and_figures_equal_the_records():
    assert readme_figures.fill(README) == README, "run: python readme_figures.py"


def test_every_measured_figure_is_filled_in():
    bodies = [match["body"] for match in readme_figures.FIGURE.finditer(README)]
    bodies += [match["body"] for match in readme_figures.BLOCK.finditer(README)]
    assert len(bodies) > 30 and all(bodies)


def test_no_figure_is_typed_by_hand():
    prose = re.sub(r"```.*?```", "", readme_figures.FIGURE.sub("", README), flags=re.DOTALL)
    typed = [line for line in prose.splitlines() if UNIT.search(NOT_MEASURED.sub("", line))]
    assert not typed


def test_every_record_that_readme_quotes_says_where_it_was_made():
    for match in readme_figures.BLOCK.finditer(README):
        for path in match["paths"].split():
            environment = readme_figures.load(path.removeprefix("results/"))["environment"]
            assert environment["gpu"] and environment["date"] and environment["commit"] != "unknown"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?://)([^)]+)\)", README))))
def test_every_link_leads_somewhere(link):
    if not link.startswith("#"):
        assert (readme_figures.HERE / link).exists()
        return
    headings = re.findall(r"^#+ (.+)$", README, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert link[1:] in anchors


def test_a_changed_figure_is_noticed():
    match = next(readme_figures.FIGURE.finditer(README))
    start, end = match.span("body")
    assert readme_figures.fill(README[:start] + "12345" + README[end:]) == README
