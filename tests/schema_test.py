"""Every kept record has the keys of its kind."""

import json

import pytest

from harness.records.run_records import read_record
from harness.records.schema import KINDS
from tests.conftest import tracked

ANSWERED = "trace_picture"  # the kind of a record whose program has left, and which no page reads


@pytest.mark.parametrize("path", tracked("results/*.json"), ids=lambda path: path.stem)
def test_a_record_fits_its_kind(path):
    kind = json.loads(path.read_text())["kind"]
    assert kind == ANSWERED or read_record(str(path), kind)


def test_every_kind_is_kept():
    kept = {json.loads(path.read_text())["kind"] for path in tracked("results/*.json")}
    assert kept == {*KINDS, ANSWERED}
