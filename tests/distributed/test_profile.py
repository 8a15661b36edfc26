"""The profile of several processes: which collectives a step has, and what waits for them."""

import pytest
from profile_worker import profile
from ranks_job import run_ranks

DELAY = 0.3  # seconds


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(profile, 2, tmp_path_factory.mktemp("profile"), DELAY)


def test_every_collective_of_a_step_is_timed(found):
    for rank in found:
        collectives = rank["collectives"]
        assert set(collectives) == {"embeddings", "ids", "state", "scalars", "parameter gradients"}
        assert rank["rows"] == 5
        assert collectives["parameter gradients"]["bytes"] == rank["trained"]
        assert collectives["embeddings"]["bytes"] == 2 * 24 * 16 * 4
        assert collectives["state"]["calls"] == 1 and collectives["embeddings"]["calls"] == 2
        for part in collectives.values():
            assert part["alone"] > 0 and part["waited"] > 0
            assert part["hidden"] >= 0 and part["hidden"] + part["exposed"] == pytest.approx(part["alone"])
        assert sum(rank["seconds"].values()) == pytest.approx(rank["step"])
        assert sum(rank["breakdown"].values()) == pytest.approx(rank["step"])


def test_waiting_for_a_late_process_is_no_communication(found):
    first = found[0]
    assert first["seconds"]["communication"] > 0.9 * DELAY
    assert first["breakdown"]["other"] > 0.5 * DELAY
