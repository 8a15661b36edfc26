"""Ranks with different settings or data are refused."""

import pytest
from agreement_worker import disagree
from ranks_job import run_ranks


@pytest.mark.parametrize(
    ("difference", "words"),
    [("order", "training data"), ("rate", "settings"), ("nothing", "")],  # copies on each host are allowed
)
def test_ranks_must_agree(difference, words, tmp_path):
    for result in run_ranks(disagree, 2, tmp_path, difference):
        assert words in result["error"] and bool(result["error"]) == bool(words)
