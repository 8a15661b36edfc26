"""The geometry of the charts, from the numbers to the drawn coordinates."""

import json
import math
import random
import re
from html import unescape

import pytest

from leanclip.reporting.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Chart,
    Series,
    downsample,
    draw,
    label,
    segments,
    step_axis,
    value_axis,
)

NAN = math.nan


def chart(y: list[float], x: list[float] | None = None, **options: object) -> str:
    series = Series(name="loss", x=x or list(range(1, len(y) + 1)), y=y)
    return draw(Chart(title="Loss", series=[series], **options))  # type: ignore[arg-type]


def paths(svg: str) -> list[list[tuple[float, float]]]:
    """The points of every unbroken piece of line."""
    pieces = [piece for d in re.findall(r'class="line [^"]*" d="([^"]*)"', svg) for piece in d.split("M")[1:]]
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in piece.split("L"))] for piece in pieces]


def test_points_run_left_to_right_inside_the_frame():
    (points,) = paths(chart([3.0, 1.0, 2.0, 8.0, -4.0]))
    xs, ys = [x for x, _ in points], [y for _, y in points]
    assert xs == sorted(xs)
    assert (xs[0], xs[-1]) == (LEFT, RIGHT)
    assert all(TOP <= y <= BOTTOM for y in ys)
    assert ys[3] == min(ys), "the highest value is at the top"


@pytest.mark.parametrize("gap", [NAN, math.inf, -math.inf])
def test_missing_value_breaks_the_line(gap: float):
    svg = chart([1.0, 2.0, gap, 2.0, 1.0])
    assert [len(piece) for piece in paths(svg)] == [2, 2]
    assert "nan" not in svg.lower()
    assert "inf" not in svg.lower()


def test_value_between_two_gaps_is_a_dot():
    svg = chart([1.0, 2.0, NAN, 5.0, NAN, 1.0, 2.0])
    assert svg.count("<circle") == 1


@pytest.mark.parametrize("from_zero", [False, True])
def test_ticks_enclose_the_values(from_zero: bool):
    draws = random.Random(0)
    for _ in range(500):
        scale = 10 ** draws.uniform(-8, 8)
        values = [draws.uniform(-1, 1) * scale for _ in range(draws.randint(1, 5))]
        axis = value_axis(values, from_zero=from_zero)
        slack = 1e-6 * (axis.high - axis.low)
        assert axis.ticks[0] - slack <= min(values)
        assert max(values) <= axis.ticks[-1] + slack
        assert 2 <= len(axis.ticks) <= 6
        if from_zero:
            assert axis.ticks[0] <= slack
            assert axis.ticks[-1] >= -slack
        step = axis.ticks[1] - axis.ticks[0]
        assert len({label(tick, step) for tick in axis.ticks}) == len(axis.ticks), "labels repeat"


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize(
    ("values", "ticks"), [([0.0, 0.0], (0, 1)), ([0.0, 1.0], (0, 1)), ([0.0, 3.0], (0, 1, 2, 3))]
)
def test_counts_have_whole_numbers_on_their_axis(values: list[float], ticks: tuple[int, ...], from_zero: bool):
    assert value_axis(values, from_zero=from_zero).ticks == ticks


@pytest.mark.parametrize("values", [[0.0], [1.0, 12.0], [7.0], [10.0, 100_000.0], [1.0, 1e7]])
def test_step_ticks_are_whole_numbers_inside_the_axis(values: list[float]):
    axis = step_axis(values)
    assert 1 <= len(axis.ticks) <= 7
    assert all(axis.low <= tick <= axis.high and tick == int(tick) for tick in axis.ticks)
    assert axis.place(values[0]) == LEFT


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.0, 1e-4, "0"),
        (1e-17, 0.2, "0"),
        (4e-4, 2e-4, "4e-4"),
        (2.5e-4, 5e-5, "2.5e-4"),
        (0.06, 0.01, "0.06"),
        (-2.0, 1.0, "−2"),
        (1500.0, 500.0, "1500"),
        (20_000.0, 5000.0, "20k"),
        (12_500.0, 2500.0, "12.5k"),
        (2e6, 1e6, "2M"),
        (3e20, 1e20, "3e20"),
    ],
)
def test_labels(value: float, step: float, text: str):
    assert label(value, step) == text


def test_constant_value_lies_in_the_middle():
    (points,) = paths(chart([0.07, 0.07, 0.07]))
    assert len({y for _, y in points}) == 1
    assert TOP < points[0][1] < BOTTOM


def test_many_points_stay_few_and_keep_their_extremes():
    draws = random.Random(1)
    x = [float(i) for i in range(100_000)]
    y = [draws.gauss(0, 1) for _ in x]
    y[31_415], y[27_182], y[50_000] = 99.0, -99.0, NAN
    kept = downsample(y)
    assert len(kept) <= 5 * 240
    assert kept == sorted(set(kept))
    assert {0, 99_999, 31_415, 27_182, 50_000} <= set(kept)
    assert len(list(segments(y, kept))) == 2, "the gap survives"
    assert len(chart(y, x)) < 60_000


def test_few_points_are_all_kept():
    assert downsample([3, NAN, 4]) == [0, 1, 2]


def test_hover_values_are_the_measured_ones():
    data = re.search(r'data-chart="([^"]*)"', chart([0.123456789, NAN, 2.0], [10, 123_457, 250_001], unit=" %"))
    assert data is not None
    values = json.loads(unescape(data[1]))
    assert values["series"] == [{"name": "loss", "x": [10, 250_001], "y": [0.12346, 2]}]
    assert values["unit"] == " %"


def test_several_series_share_the_axes_and_have_a_legend():
    short = Series(name="short <run>", x=[0, 10], y=[0.0, 1.0])
    long = Series(name="long", x=[0, 10, 20], y=[4.0, 3.0, 2.0])
    svg = draw(Chart(title="Two runs", series=[short, long], references={"chance": 5.5}))
    first, second = paths(svg.split("<svg viewBox", 2)[-1].split("role=", 1)[1])
    assert first[1][0] == second[1][0] < second[2][0] == RIGHT
    assert "short &lt;run&gt;</li>" in svg
    assert "<run>" not in svg
    assert "chance 5.5</li>" in svg and not re.search("<text[^>]*>chance", svg)  # beside the curves, not over them
    assert "series-1" in svg
