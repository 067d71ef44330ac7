"""What a CPU shows fits a terminal: no row of a table is wider than 100 columns."""

import functools
import re

import pytest

import compare_runs
import finetune_baseline
import profile_baseline
from harness.cli import tables
from tests.calls import torchrun
from tools import page_outputs
from tools.page_records import RESULTS, load
