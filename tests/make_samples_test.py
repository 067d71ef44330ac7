"""The samples to try packing with are short, documented, and the same every time."""

import json

import pytest

from harness.data import dataset
from harness.model import architecture
from next_steps.studies import make_samples
from tests.conftest import assert_refused
from tests.small_workloads import tiny_workload

MODULE = '''
class Long:
    """A class with a doc string of more than fifty bytes, which is enough."""

    @property
    def method(self, a: int = 1) -> str:
        """The first line of a doc string that is as long.

        And another one.
        """
        return 1

    def short(self):
        """Too short."""

    def undocumented(self):
        return "nothing that is more than fifty bytes long is a doc string here"
'''


def test_a_sample_is_a_heading_and_its_doc_string():
    assert list(make_samples.examples(MODULE)) == [
        {
            "prompt": "class Long:\n",
            "completion": "A class with a doc string of more than fifty bytes, which is enough.",
        },
        {
            "prompt": "def method(self, a: int=1) -> str:\n",
            "completion": "The first line of a doc string that is as long.\n\nAnd another one.",
        },
    ]


@pytest.mark.exhaustive  # to parse the standard library twice takes ten seconds
def test_the_file_is_the_same_every_time_and_can_be_packed(run_script, tmp_path):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        outcome = run_script(make_samples, str(file))
        assert outcome.code == 0 and "samples of 50 to 600 bytes" in outcome.out
    assert files[0].read_bytes() == files[1].read_bytes()
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    lengths = [len((line["prompt"] + line["completion"]).encode()) for line in lines]
    assert len(lines) > 1000 and min(lengths) >= 50 and max(lengths) <= 600
    flags = "--data", str(files[0]), "--seq-len", "2048", "--batch-size", "4"
    config = architecture.tiny_config()
    packed = dataset.load_data(tiny_workload(*flags, "--pack"), config, 10).train
    padded = dataset.load_data(tiny_workload(*flags), config, 10).train
    assert packed.padding() < 0.05 < 0.3 < padded.padding()


def test_a_name_that_data_would_not_take_is_refused(run_script):
    assert_refused(run_script(make_samples, "samples.txt"), "samples.txt", ".jsonl")
