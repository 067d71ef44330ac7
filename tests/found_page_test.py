"""docs/found.md: the records still say what its sentences say."""

import re

from harness.records.spread import NO_DIFFERENCE
from tools import page_found_table as found
from tools.page_records import HERE


def test_the_optimizer_takes_most_of_a_small_step_and_the_targets_little():
    optimizer, targets = found.shares_of_the_small_step()
    assert targets < 0.1 < 0.5 < optimizer


def test_norms_became_ten_times_as_fast_and_the_step_longer():
    (norm, step), (norm_after, step_after) = found.norms_and_steps_ms()
    assert round(norm / norm_after / 10) == 1 and step < step_after


def test_the_products_take_back_a_part_of_what_the_kernels_save():
    saved_ms, lost_ms = found.saved_and_lost_ms()
    assert 0 < lost_ms < saved_ms


def test_the_loss_in_place_is_faster_than_three_trips():
    ours, three_trips = found.in_place_and_three_trips()
    assert ours < three_trips


def test_a_graph_and_fp8_gain_at_one_size_alone():
    for gain, none in (found.graph_gains(), found.fp8_gains()):
        assert none == NO_DIFFERENCE != gain and float(gain.removesuffix("×")) > 1


def test_the_peak_of_the_small_step_is_in_the_square_roots_of_all_weights():
    peak = found.peak_of_the_small_step()
    assert (peak["phase"], peak["operation"]) == ("optimizer", "_foreach_sqrt")
    assert peak["parts"]["temporaries"] == peak["parts"]["gradients"]


def test_most_other_functions_break_a_contract():
    broken = found.judged_functions()
    assert len(broken) / 2 < sum(broken) < len(broken)


def test_random_rounding_trains_better():
    nearest, at_random = found.losses_by_rounding()
    assert at_random < nearest


def test_the_strongest_other_is_compiled_and_near_in_time_alone():
    strongest, ours = found.compiled_and_ours()
    assert strongest["name"].startswith("torch.compile,")
    assert 1 < strongest["step_ms"] / ours["step_ms"] < 1.05
    assert strongest["peak_memory_bytes"] > 1.2 * ours["peak_memory_bytes"]


def test_each_finding_says_why():
    page = (HERE / "docs/found.md").read_text()
    numbers = [re.findall(pattern, page, re.MULTILINE) for pattern in (r"^\| (\d+)\.", r"^(\d+)\.")]
    assert numbers[0] == numbers[1] == [str(n) for n in range(1, 11)]
