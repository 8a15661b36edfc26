"""Ranks with different settings or data are refused; all choose the same number of threads."""

import pytest
from agreement_worker import chosen_threads, disagree
from ranks_job import run_ranks


@pytest.mark.parametrize(
    ("difference", "words"),
    [("order", "training data"), ("rate", "settings"), ("nothing", "")],  # copies on each host are allowed
)
def test_ranks_must_agree(difference, words, tmp_path):
    for result in run_ranks(disagree, 2, tmp_path, difference):
        assert words in result["error"] and bool(result["error"]) == bool(words)


def test_ranks_measure_together_and_agree(tmp_path):
    one, other = run_ranks(chosen_threads, 2, tmp_path)
    assert one == other and one["threads"] in (1, 2) and one["gradients"] == 0
