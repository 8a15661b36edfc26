"""Several runs on one page, per-sample histograms, hardest negatives and confusion, as text and in a browser."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from test_report import eval_row, page, panel, picture, train_row, write_run

from browser import inspect_page, needs_browser
from leanclip.reporting import write_report
from leanclip.reporting.comparison import differences, final_figures, names_of
from leanclip.reporting.curves import compared_evaluations, histogram_charts, quantile, training_charts, x_axis
from leanclip.reporting.report_sections import key_figures, tables
from leanclip.reporting.run_reader import Histogram, read_run
from refusal import exit_code, refuses

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def histogram_row(step: int, name: str = "log_u_image", **changes: Any) -> dict[str, Any]:
    """A hundred samples, one of them not met, that move down by one bin per thousand steps."""
    counts = [0] * 20
    counts[10 - step // 1000], counts[11 - step // 1000] = 60, 39
    edges = [i / 2 - 5 for i in range(21)]
    row = {"kind": "histogram", "step": step, "epoch": 1.0, "name": name, "edges": edges, "counts": counts}
    return row | {"absent": 1} | changes


def rows(scale: float = 1.0, **changes: Any) -> list[dict[str, Any]]:
    """A run with every kind of line."""
    train = [
        train_row(step, loss=scale * 100 / step, resident_gib=scale, **changes) for step in range(100, 2001, 100)
    ]
    evaluations = [eval_row(step, recall * scale) for step, recall in ((0, 0.04), (1000, 0.4), (2000, 0.6))]
    classified = [
        {"kind": "eval", "step": step, "epoch": 1, "set": "groups"}
        | {
            "metrics": {
                "top1": top1 * scale,
                "top5": 0.9,
                "mean_per_class_recall": 0.4,
                "images": 50,
                "chance@1": 0.2,
            }
        }
        for step, top1 in ((0, 0.2), (2000, 0.5))
    ]
    histograms = [histogram_row(step, name) for step in (1000, 2000) for name in ("log_u_image", "tau_image")]
    return train + evaluations + classified + histograms


def full_panel(captions: tuple[str, ...] = ("a cat", "a dog", "a hat")) -> dict[str, Any]:
    def entry(i: int) -> dict[str, Any]:
        return {"image": picture(i), "media": "image/jpeg", "caption": captions[i % len(captions)], "score": 0.3}

    hardest = [entry(i) | {"negatives": [entry(i + 1) | {"score": 0.4}, entry(i + 2)]} for i in range(3)]
    return panel(images=3, captions=captions) | {"hardest": hardest}


def zero_shot(classnames: list[str], name: str = "groups") -> dict[str, Any]:
    count = len(classnames)
    counts = [[8 if i == j else 2 if j == (i + 1) % count else 0 for j in range(count)] for i in range(count)]
    found = {"classnames": classnames, "confusion": counts, "top1": 0.8, "top5": None, "mean_per_class_recall": 0.8}
    return {"sets": {name: found}}


def three_runs(folder: Path) -> list[Path]:
    runs = []
    for name, scale, batch in (("one", 1.0, 64), ("two", 1.2, 64), ("three", 0.8, 128)):
        run = write_run(folder / name, rows(scale), with_panel=full_panel(), name=name, global_batch=batch)
        (run / "config.toml").write_text(f'name = "{name}"\nlr = {scale}\nepochs = 50\nloss = "infonce"\n')
        (run / "zero_shot.json").write_text(json.dumps(zero_shot(["cats", "dogs", "hats"])))
        runs.append(run)
    return runs


def test_comparison_has_the_final_figures_and_what_differs(tmp_path: Path):
    runs = [read_run(run) for run in three_runs(tmp_path)]
    by_title = final_figures(runs)
    recall = by_title["Text to image recall@10, val"]
    assert [cell.text for cell in recall] == ["55.8 %", "67.0 %", "44.6 %"]
    assert [cell.best for cell in recall] == [False, True, False]
    assert [cell.text for cell in by_title["Zero-shot top-1, groups"]] == ["50.0 %", "60.0 %", "40.0 %"]
    assert [cell.best for cell in by_title["Resident memory (GiB)"]] == [False, False, True], "less is better"
    assert not any(cell.best for cell in by_title["Loss"]), "losses may be of different kinds"
    rows, equal = differences(runs)
    assert {name: [cell.text for cell in cells] for name, cells in rows.items()} == {"lr": ["1.0", "1.2", "0.8"]}
    assert equal == 2


def test_a_run_keeps_its_colour_where_another_has_no_values(tmp_path: Path):
    one = write_run(tmp_path / "one", [train_row(1), train_row(2)], name="one")
    other = write_run(tmp_path / "two", [train_row(1, queue=3.0), train_row(2, queue=4.0)], name="two")
    runs = [read_run(one), read_run(other)]
    charts = {chart.title: chart for chart in training_charts(runs, names_of(runs))}
    assert [(s.name, s.colour) for s in charts["Loss"].series] == [("one", 0), ("two", 1)]
    assert [(s.name, s.colour) for s in charts["queue"].series] == [("two", 1)]


def test_runs_with_different_batches_have_pairs_on_the_x_axis(tmp_path: Path):
    runs = [read_run(run) for run in three_runs(tmp_path)]
    assert x_axis(runs[:2]).label == "step" and x_axis(runs).label == "pairs"
    names = names_of(runs)
    (recall, *_), (median, *_) = compared_evaluations(runs, names), histogram_charts(runs, names)
    assert [list(s.x) for s in recall.series] == [[0, 64000, 128000]] * 2 + [[0, 128000, 256000]]
    assert [list(s.x) for s in median.series] == [[64000, 128000]] * 2 + [[128000, 256000]]
    assert median.title == "Estimate log u of the images, median"
    assert recall.references == {"chance": pytest.approx(100 * 10 / 256)}


def test_runs_of_one_name_get_different_names(tmp_path: Path):
    paths = [write_run(tmp_path / name, [train_row(1)]) for name in ("a", "b")]
    runs = [read_run(path) for path in (*paths, paths[1])]
    names = names_of(runs)
    assert names[0] == f"shapes ({paths[0]})" and len(set(names)) == 3


def test_command_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [str(run) for run in three_runs(tmp_path)]
    assert exit_code("report", *runs) == 0
    assert f"report: {(tmp_path / 'comparison.html').resolve()}" in capsys.readouterr().out
    with refuses("report.too_many_runs", "11 runs"):
        write_report([Path(runs[0])] * 11)


def test_old_and_new_runs_compare(tmp_path: Path):
    old = tmp_path / "old"
    old.mkdir()
    (old / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 2.0}) + "\n")
    html = write_report([old, three_runs(tmp_path)[0]]).read_text(encoding="utf-8")
    assert "2 runs compared" in html and not re.search(r"\bnan\b", html, re.IGNORECASE)


def test_quantiles_lie_inside_their_bins():
    histogram = Histogram(step=1, edges=(0.0, 1.0, 2.0, 4.0), counts=(10, 0, 10), absent=0)
    assert [quantile(histogram, share) for share in (0.25, 0.5, 0.75)] == [0.5, 1.0, 3.0]
    assert math.isnan(quantile(Histogram(step=1, edges=(0.0, 1.0), counts=(0,), absent=5), 0.5))


def test_quantiles_of_one_run_over_time(tmp_path: Path):
    (estimator, _) = histogram_charts([read_run(write_run(tmp_path, rows()))], ["run"])
    median = next(series for series in estimator.series if series.name == "median")
    assert list(median.y) == pytest.approx([-0.5 + 0.5 * 49.5 / 60, -1 + 0.5 * 49.5 / 60])
    assert [series.name for series in estimator.series] == ["95 %", "median", "5 %"]
    assert estimator.note.endswith("1.0% of the samples have none: not visited yet, held out or excluded.")
    empty = [train_row(1), histogram_row(1, counts=[0] * 20)]
    assert histogram_charts([read_run(write_run(tmp_path, empty))], ["run"]) == []


def test_a_broken_histogram_is_left_out_and_named(tmp_path: Path):
    broken = [histogram_row(1, edges=[0, 1]), histogram_row(2, counts=["x"]), histogram_row(3, absent=-1)]
    run = read_run(write_run(tmp_path, [train_row(1), *broken, histogram_row(4)]))
    assert [h.step for h in run.histograms["log_u_image"]] == [4]
    assert run.problems == ("unreadable lines of metrics.jsonl left out: 3",)


def test_few_classes_are_a_whole_table_and_many_the_worst_of_it(tmp_path: Path):
    run = write_run(tmp_path, [train_row(1)])
    (run / "zero_shot.json").write_text(json.dumps(zero_shot(["cats", "dogs", "hats"])))
    (classified,) = read_run(run).zero_shot
    assert classified.recalls == [("cats", 0.8), ("dogs", 0.8), ("hats", 0.8)]
    assert classified.confusions[0] == ("cats", "dogs", 2, 0.2)
    html = page(run)
    assert "8 of 10 images of cats predicted as cats" in html and "Lowest recall" not in html
    assert "top-1 80.0 %" in html and "mean per-class recall 80.0 %" in html and "top-5" not in html

    many = zero_shot([f"class {i}" for i in range(1000)])
    many["sets"]["groups"]["confusion"][7] = [0] * 1000
    many["sets"]["groups"]["confusion"][9][9], many["sets"]["groups"]["confusion"][9][0] = 0, 50
    (run / "zero_shot.json").write_text(json.dumps(many))
    (classified,) = read_run(run).zero_shot
    assert classified.recalls[0] == ("class 9", 0.0) and classified.confusions[0][:3] == ("class 9", "class 0", 50)
    assert "Lowest recall, of 1,000 classes" in page(run)
    assert len(page(run)) < 80_000


def test_classification_and_memory_are_shown(tmp_path: Path):
    run = write_run(tmp_path, rows(), processes=4)
    found = {figure.name: (figure.value, figure.detail) for figure in key_figures(read_run(run))}
    assert found["Zero-shot top-1, groups"] == ("50.0 %", "chance 20.0 % (2.5×), step 2,000")
    assert found["Memory"] == ("1 GiB", "resident, maximum")
    groups = tables(read_run(run))[1]
    assert groups.size == "50 images" and list(groups.groups) == ["Zero-shot"]
    assert [cell.text for cell in groups.rows["2,000"]] == ["1", "50.0 %", "90.0 %", "40.0 %"]
    assert groups.chance == ("20.0 %", "", "20.0 %")
    html = page(run)
    for text in ("Resident memory (GiB)", "Per-sample state"):
        assert text in html


def evil_runs(folder: Path) -> list[Path]:
    """Three runs whose names, directory, captions, classes, sets and settings all hold markup."""
    runs = three_runs(folder / "<b>'logs'")
    for number, run in enumerate(runs):
        hurt = rows(1.0 + number)
        for row in hurt:
            row |= {"eval": {"set": EVIL}, "histogram": {"name": EVIL}, "train": {EVIL: 1}}[row["kind"]]
        captions = (EVIL, "a dog", "a hat")
        write_run(run, hurt, with_panel=full_panel(captions), name=EVIL, loss=EVIL, notes=[EVIL], status=EVIL)
        (run / "config.toml").write_text(f"lr = {number}\nmodel = '''{EVIL.replace(chr(39), '')}{number}'''\n")
        (run / "zero_shot.json").write_text(json.dumps(zero_shot([EVIL, "dogs", EVIL + " 2"], name=EVIL)))
    return runs


def test_markup_is_text_on_every_page(tmp_path: Path):
    runs = evil_runs(tmp_path)
    for html in (write_report(runs).read_text(encoding="utf-8"), page(runs[0])):
        assert "<script>alert" not in html and "<img src=x" not in html and "<b>'" not in html
        assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 20


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_browser_shows_three_compared_runs(tmp_path: Path, width: int, dark: bool):
    report = write_report(evil_runs(tmp_path), tmp_path / "comparison.html")
    opened = "document.querySelectorAll('details').forEach((d) => d.open = true)"
    state = inspect_page(report, tmp_path / "page.png", width=width, dark=dark, script=opened)
    state.assert_whole(width, images=3 * (3 + 3 * 3))
    assert len(state.charts) >= 10 and EVIL in state.text and "3 runs compared" in state.text


@needs_browser
def test_browser_shows_every_part_of_one_run(tmp_path: Path):
    report = write_report(evil_runs(tmp_path)[0])
    state = inspect_page(report, tmp_path / "page.png", width=390)
    assert state.console == [] and state.broken == [] and state.images == 12 and state.width <= 390
    for text in ("Hardest negatives", "above the correct one", "Most frequent confusions", "Per-sample state"):
        assert text in state.text
