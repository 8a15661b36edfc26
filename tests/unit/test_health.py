import math
from dataclasses import replace

import pytest

from leanclip.runs import RunConfig, TrainConfig
from leanclip.runs.defaults import fill
from leanclip.runs.health import STEPS_BEFORE_WARNING, HealthCheck

FINE = {"loss": 1.0, "tau": 0.05, "grad_norm": 1.0}


def warnings(loss, metrics, logged=3 * STEPS_BEFORE_WARNING):
    config = fill(replace(TrainConfig(), run=RunConfig(loss=loss, epochs=2)), samples=12800)
    check = HealthCheck(config, batch=128)
    return [line for step in range(logged) for line in check(100 + step, FINE | metrics)]


@pytest.mark.parametrize(
    ("loss", "metrics", "words"),
    [
        ("infonce", {"loss": math.log(128)}, ["distinguish", "--dry-run"]),
        ("fastclip-v1", {"log_u_mean": 0.001, "gamma": 1.0}, ["distinguish"]),
        ("fastclip-v3", {"log_u_mean": -3.0, "tau": 0.01}, ["at its clamp", "--rho"]),
        ("dcl", {"loss": math.log(128)}, ["distinguish"]),
        ("infonce", {"tau": 1.0}, ["at its clamp"]),
        ("fastclip-v3", {"log_u_mean": -3.0, "estimate_gap": 3.0, "gamma": 0.2}, ["lag 3.0 nats", "--gamma-min"]),
        ("fastclip-v2", {"log_u_mean": -3.0, "tau": 0.01}, ["at its clamp", "--rho"]),
    ],
)
def test_every_warning_is_given_once_with_its_remedy(loss, metrics, words):
    (line,) = warnings(loss, metrics)
    for word in words:
        assert word in line


def test_a_healthy_run_has_no_warning():
    assert warnings("infonce", {}) == []
    assert warnings("fastclip-v3", {"log_u_mean": -4.0, "estimate_gap": 0.3, "gamma": 0.4}) == []
    assert warnings("infonce", {"loss": math.log(128)}, logged=STEPS_BEFORE_WARNING - 1) == []
