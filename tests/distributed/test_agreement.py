"""Ranks that were given different settings or data are told so, instead of training on a mixture."""

import pytest
from agreement_worker import disagree
from ranks_job import run_ranks


@pytest.mark.parametrize(
    ("what", "words"),
    [("order", "rank 1 has other training data than rank 0"), ("rate", "rank 1 has other settings than rank 0")],
)
def test_ranks_must_agree(what, words, tmp_path):
    for found in run_ranks(disagree, 2, tmp_path, what):
        assert words in found["complaint"]


def test_copies_on_each_host_are_fine(tmp_path):
    for found in run_ranks(disagree, 2, tmp_path, "nothing"):
        assert found["complaint"] == ""
