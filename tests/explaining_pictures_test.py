"""The pictures that explain: what they say, by hand, and that they are drawn."""

import pytest

from harness.steps.gpus import GPUS
from tools import explaining_pictures
from tools.page_records import load_record


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


@pytest.mark.parametrize("of", ["addresses", "memories"])
def test_a_picture_is_drawn(of, tmp_path):
    path = tmp_path / "picture.png"
    getattr(explaining_pictures, f"plot_{of}")(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
