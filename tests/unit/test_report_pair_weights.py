"""The report's section on pair weights, as text and in a browser."""

import json
import math
from pathlib import Path
from typing import Any

from test_report import page, picture, train_row, write_run

from browser import inspect_page, needs_browser
from leanclip.reporting import write_report
from leanclip.reporting.pair_weights import scores_chart
from leanclip.reporting.run_reader import read_run

HOSTILE = "<script>alert(1)</script>"


def fit_row(step: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl: 900 right pairs around -0.5 and 100 wrong ones around 2."""
    centres = [-8 + (number + 0.5) / 8 for number in range(128)]
    counts = [round(900 / 8 * normal(x, -0.5, 0.5) + 100 / 8 * normal(x, 2.0, 0.6)) for x in centres]
    fit = {"low": -0.5, "low_spread": 0.5, "high": 2.0, "high_spread": 0.6, "share": 0.1}
    row = {"kind": "pair_weights", "step": step, "epoch": step / 40, "on": True, "wrong_pairs": 0.093}
    return row | {"fit": fit, "counts": counts, "range": 8.0} | changes


def normal(x: float, mean: float, spread: float) -> float:
    return math.exp(-0.5 * ((x - mean) / spread) ** 2) / (spread * math.sqrt(2 * math.pi))


def suspects(count: int) -> dict[str, Any]:
    def entry(number: int) -> dict[str, Any]:
        captions = {"caption": f"caption {number}", "instead": f"other {number}"}
        return captions | {"score": 3.0 - number, "image": picture(number)}

    return {"wrong_pairs": 0.1, "pairs": [entry(number) for number in range(count)]}


def run_with(folder: Path, fits: list[dict[str, Any]], worst: dict[str, Any] | None) -> Path:
    run = write_run(folder, [train_row(10), train_row(20), *fits])
    if worst is not None:
        (run / "suspects.json").write_text(json.dumps(worst))
    return run


def test_the_fitted_parts_add_up_to_the_histogram(tmp_path: Path):
    (fit,) = read_run(run_with(tmp_path / "run", [fit_row(20)], None)).pair_fits
    pairs, right, wrong = scores_chart(fit).series
    assert abs(sum(pairs.y) - 100) < 1e-9
    assert abs(sum(wrong.y) - 10) < 0.2 and abs(sum(right.y) - 90) < 0.2
    assert all(abs(a + b - c) < 0.2 for a, b, c in zip(right.y, wrong.y, pairs.y, strict=True))
    assert -3 < pairs.x[0] < -1.5 and 3 < pairs.x[-1] < 5  # bins without pairs are left out


def test_the_section_says_what_looked_wrong_and_shows_the_worst_pairs(tmp_path: Path):
    fits = [fit_row(10, on=False, wrong_pairs=0.004), fit_row(20)]
    worst = suspects(8)
    worst["pairs"][0] |= {"caption": HOSTILE}
    worst["pairs"][1] = {"caption": "without an image", "score": None, "unreadable": "broken", "instead": None}
    text = page(run_with(tmp_path / "run", fits, worst))
    assert "9.3 % of the pairs looked wrong; weights were on. They were on after 1 of 2 fits." in text
    assert "other 5" in text and "other 6" not in text and HOSTILE not in text and "without an image" in text


def test_a_run_without_pair_weights_has_no_such_section(tmp_path: Path):
    assert 'id="pair-weights"' not in page(run_with(tmp_path / "plain", [], None))
    assert "made no fit" in page(run_with(tmp_path / "scored", [], suspects(1)))
    damaged = run_with(tmp_path / "damaged", [fit_row(20, counts=[0] * 128), fit_row(30, range=0)], None)
    text = page(damaged)
    assert 'id="pair-weights"' not in text and "left out: 2" in text


@needs_browser
def test_the_section_in_a_browser(tmp_path: Path):
    path = write_report(run_with(tmp_path / "run", [fit_row(10), fit_row(20)], suspects(8)))
    for width in (1200, 380):
        inspect_page(path, tmp_path / "page.png", width=width).assert_whole(width, images=6)
