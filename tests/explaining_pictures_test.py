"""The pictures that explain: what they say, by hand, and that they are drawn."""

import pytest

from harness.steps.gpus import GPUS
from tools import explaining_pictures
from tools.page_records import HERE, load_record


def test_the_memories_of_an_h200_by_hand():
    """132 x 256 KiB; 67e12 / 2 FMAs of 12 bytes; 132 x 128 bytes at 67e12 / (132 x 256) Hz."""
    registers, shared, cache, memory, host = explaining_pictures.memories()
    assert registers.n_bytes == shared.n_bytes == 132 * 262_144
    assert registers.tbs == pytest.approx(402)
    assert shared.tbs == pytest.approx(33.5)
    assert memory.tbs == GPUS["H200"].tbs
    record = load_record("frontier")
    assert "H200" in record["environment"]["gpu"]
    assert explaining_pictures.rate(host.tbs) == f"{record['rates']['link_gbs']:.0f} GB/s"
    rates = [each.tbs for each in (registers, shared, cache, memory, host)]
    assert rates == sorted(rates, reverse=True)


def test_the_lines_beside_the_lanes_are_those_of_lesson_5():
    """Of six columns, lane 7 of program 1 would load row 2's second number."""
    lesson = (HERE / "README.md").read_text().split("## Lesson ")[5]
    assert all(line in lesson for line in explaining_pictures.LINES)
    assert [value(1, 7) for value in explaining_pictures.LINES.values()] == [1, 7, 13, 0]
    assert [value(2, 5) for value in explaining_pictures.LINES.values()] == [2, 5, 17, 1]


@pytest.mark.parametrize("of", ["addresses", "memories"])
def test_a_picture_is_drawn(of, tmp_path):
    path = tmp_path / "picture.png"
    getattr(explaining_pictures, f"plot_{of}")(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
