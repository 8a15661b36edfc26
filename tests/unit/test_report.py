"""The report of finished, running and odd runs, as text and in a browser."""

import base64
import io
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from PIL import Image, ImageDraw

from browser import inspect_page, needs_browser
from leanclip.cli.search import PORT
from leanclip.reporting import write_report
from leanclip.reporting.curves import curve_of, evaluation_charts, training_charts, trend_charts
from leanclip.reporting.report import SEARCH_PAGE, facts
from leanclip.reporting.report_sections import Column, key_figures, tables
from leanclip.reporting.run_reader import read_run
from refusal import refuses

CAPTIONS = (
    "a red circle on a pale background",
    "two blue squares side by side",
    "a green triangle above a line",
    "a violet ring seen from the side of a very long corridor with many more words than fit on one line",
    "an orange star",
    "a grey cloud over a hill",
)
COLOURS = ("#b5382c", "#2c5cb5", "#2f8f57", "#7a46a8", "#d9822b", "#7d8791")


def picture(number: int) -> str:
    image = Image.new("RGB", (96, 80 + 8 * (number % 3)), "#efe9dd")
    ImageDraw.Draw(image).ellipse((20, 15, 75, 70), fill=COLOURS[number % len(COLOURS)])
    data = io.BytesIO()
    image.save(data, "JPEG")
    return base64.b64encode(data.getvalue()).decode()


def train_row(step: int, total: int = 2000, **changes: Any) -> dict[str, Any]:
    warm = min(1.0, step / (0.1 * total))
    row = {
        "kind": "train",
        "step": step,
        "epoch": step / 40,
        "samples": 64 * step,
        "seconds": 0.31 * step,
        "loss": 4.2 * math.exp(-step / 500) + 0.6 + 0.15 * math.sin(step * 1.7) * math.cos(step * 0.37),
        "tau": 0.07 - 0.04 * step / total,
        "lr": 5e-4 * warm * 0.5 * (1 + math.cos(math.pi * step / total)),
        "samples_per_second": 205 + 12 * math.sin(step * 0.9),
        "data_wait": 0.03 + 0.01 * math.sin(step * 0.3),
        "grad_norm": 1.5 + math.exp(-step / 300) * 4 + 0.4 * math.sin(step * 2.3),
        "gamma": 1 - 0.8 * step / total,
    }
    return row | changes


def eval_row(step: int, recall: float, **changes: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for direction, factor in (("image_to_text", 1.0), ("text_to_image", 0.93)):
        for rank, share in ((1, 0.35), (5, 0.8), (10, 1.0)):
            metrics[f"{direction}_recall@{rank}"] = recall * share * factor
    metrics |= {"images": 256, "captions": 256, "chance@1": 1 / 256, "chance@5": 5 / 256, "chance@10": 10 / 256}
    return {"kind": "eval", "step": step, "epoch": step / 40, "set": "val", "metrics": metrics | changes}


def panel(images: int = 6, captions: tuple[str, ...] = CAPTIONS) -> dict[str, Any]:
    def entry(i: int) -> dict[str, Any]:
        order = [(i + (0, 1, 3)[i % 3] + j) % len(captions) for j in range(5)]
        matches = [
            {"caption": captions[c], "score": 0.41 - 0.06 * rank, "correct": c == i % len(captions)}
            for rank, c in enumerate(order)
        ]
        caption = captions[i % len(captions)]
        return {"image": picture(i), "media": "image/jpeg", "caption": caption, "matches": matches}

    return {"step": 2000, "set": "val", "images": [entry(i) for i in range(images)]}


def write_run(
    folder: Path,
    rows: list[dict[str, Any]] | None = None,
    *,
    with_panel: dict[str, Any] | None = None,
    tail: str = "",
    **info: Any,
) -> Path:
    """A run of 2000 steps, or of the given rows; `tail` is put after the last line as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    if rows is None:
        rows = [train_row(step) for step in range(10, 2001, 10)]
        rows += [eval_row(0, 0.04), eval_row(1000, 0.41), eval_row(1500, 0.63), eval_row(2000, 0.61)]
    text = "".join(json.dumps(row) + "\n" for row in rows) + tail
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    defaults = {
        "name": "shapes",
        "version": "0.1.0",
        "started": "2025-03-04T09:30:00+00:00",
        "status": "finished",
        "model": "ViT-Ti-16",
        "loss": "global_contrastive",
        "parameters": 12_400_000,
        "train_samples": 2560,
        "global_batch": 64,
        "steps": 2000,
        "epochs": 50,
        "environment": {"python": "3.11.7", "torch": "2.12.1", "device": "cpu"},
        "notes": ["Drawn shapes: the recalls show that training works, not how good a model is on photographs."],
    }
    (folder / "run.json").write_text(json.dumps(defaults | info), encoding="utf-8")
    (folder / "config.toml").write_text('model = "ViT-Ti-16"\nglobal_batch = 64\nlr = 5e-4\n', encoding="utf-8")
    if with_panel is not None:
        (folder / "panel.json").write_text(json.dumps(with_panel), encoding="utf-8")
    return folder


def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def figures(run: Path) -> dict[str, tuple[str, str]]:
    return {f.name: (f.value, f.detail) for f in key_figures(read_run(run))}


def test_finished_run_shows_everything(tmp_path: Path):
    run = write_run(tmp_path / "run", with_panel=panel())
    assert write_report(run) == run / "report.html"
    html = page(run)
    for text in ("shapes", "ViT-Ti-16", "global_contrastive", "not how good a model is", "before training", "2.12.1"):
        assert text in html
    assert html.count("<svg viewBox") == 9, "7 training curves with gamma, 2 recall charts"
    assert html.count("<img ") == 6
    assert "http" not in html.replace("http-equiv", "").replace(SEARCH_PAGE, ""), (
        "the page must not refer to the network"
    )


def test_the_report_links_to_search(tmp_path: Path):
    run = write_run(tmp_path / "a <b> run", with_panel=panel(captions=("a <b> & #c", "half \ud800")))
    (run / "config.toml").write_text('train_data = "shards/*.tar"\n')
    commands = [f"leanclip embed '{run}' 'shards/*.tar' '{run}/search'", f"leanclip search '{run}/search'"]
    html = page(run)
    assert ", then ".join(f"<code>{escape(command)}</code>" for command in commands) in html
    assert f"http://127.0.0.1:{PORT}/" == SEARCH_PAGE
    assert f'<a href="{SEARCH_PAGE}">' in html and f"{SEARCH_PAGE}#" not in html  # there is nothing to find yet
    (run / "vectors").mkdir()
    (run / "vectors/embeddings.json").touch()
    html = page(run)
    assert (
        f"<code>{escape(f'leanclip search {chr(39)}{run}/vectors{chr(39)}')}</code>" in html and "embed" not in html
    )
    for caption in ("a%20%3Cb%3E%20%26%20%23c", "half%20%3F"):
        assert f'<a href="{SEARCH_PAGE}#text={caption}">' in html


def test_a_run_from_weights_shows_before_after_and_difference(tmp_path: Path):
    rows = [eval_row(0, 0.5) | {"weights": "before"}, train_row(10), eval_row(10, 0.4, median_rank=3.0)]
    run = write_run(tmp_path, rows)
    (run / "config.toml").write_text('pretrained_image = "timm:vit"\npretrained_text = "bert"\n')
    (table,) = tables(read_run(run))
    assert list(table.rows) == ["before training", "10"]
    assert table.gained == ("-3.3", "-7.4", "-9.3", "-3.5", "-8.0", "-10.0", "\N{EN DASH}")
    assert figures(run)["Text-to-image recall@10"] == (
        "37.2 %", "chance 3.9 % (9.5\N{MULTIPLICATION SIGN}), step 10, 46.5 % before training, best 46.5 % at step 0",
    )  # fmt: skip
    html = page(run)
    assert "after − before" in html and "timm:vit (image) + bert (text)" in html
    (table,) = tables(read_run(write_run(tmp_path, [eval_row(0, 0.5), eval_row(10, 0.4)])))
    assert table.gained == ()


@pytest.mark.parametrize(
    ("recalls", "verdict"),
    [
        ([0.1, 0.3, 0.5, 0.6, 0.65, 0.7, 0.75], "Still learning: +10.0 ± 0.0 points"),
        ([0.1, 0.3, 0.5, 0.6, 0.70, 0.64, 0.70], "No clear change: +0.0 ± 88.0 points"),  # 12.7 * 6.93
        ([0.1, 0.3, 0.5, 0.6, 0.70, 0.65, 0.60], "Getting worse: -10.0 ± 0.0 points"),
        ([0.1, 0.3, 0.5], None),
    ],
)
def test_is_it_still_learning(recalls, verdict, tmp_path: Path):
    rows = [eval_row(100 * i, 0) for i in range(len(recalls))]
    for row, recall in zip(rows, recalls, strict=True):
        row["metrics"]["text_to_image_recall@10"] = recall
    charts = trend_charts(read_run(write_run(tmp_path, rows)))
    assert [chart.note.partition(" over")[0] for chart in charts] == ([verdict] if verdict else [])
    assert ("Is it still learning?" in page(tmp_path)) == bool(verdict)


def test_best_captions_earlier_in_training(tmp_path: Path):
    shown = panel()
    best = [{"caption": f"guess <{i}>", "score": 0.2, "correct": i == 1} for i in range(6)]
    shown["earlier"] = [{"step": 0, "best": best}, {"step": 1000, "best": best}]
    html = page(write_run(tmp_path, with_panel=shown))
    assert "before training: guess &lt;5&gt;" in html and "at step 1,000: guess &lt;1&gt; <span" in html
    shown["earlier"][0]["best"] = best[:2]
    assert "panel.json could not be read" in page(write_run(tmp_path, with_panel=shown))


def test_what_the_features_of_locked_towers_cost(tmp_path: Path):
    images, texts = {"rows": 5120, "mib": 12.5, "seconds": 100.0}, {"rows": 2560, "mib": 2, "seconds": None}
    html = page(write_run(tmp_path, features={"images": images, "texts": texts}))
    assert "5,120 rows, 12.5 MiB, computed in 2 min; 50 epochs read them in place of 128,000 passes" in html
    assert "passes of the tower, about 42 min" in html  # 128,000 / 5,120 times as long
    assert "2,560 rows, 2 MiB, read from the cache; 50 epochs read them in place of 128,000 passes" in html
    for damaged in (["x"], {"images": 3, "texts": {"rows": "many"}}):
        assert "shapes" in page(write_run(tmp_path, features=damaged))


def test_key_figures_give_the_final_result_the_best_and_chance(tmp_path: Path):
    shown = figures(write_run(tmp_path))
    assert shown["Text-to-image recall@10"] == (
        "56.7 %",
        "chance 3.9 % (15×), step 2,000, best 58.6 % at step 1,500",
    )
    assert shown["Temperature τ"] == ("0.03", "from 0.0698")
    assert shown["Time"] == ("10 min", "step 2,000 of 2,000")
    assert shown["Samples per second"][1] == "median, 3.0 % waiting for data"


@pytest.mark.parametrize(
    ("config", "steps", "course"),
    [
        ('loss = "infonce"', 1, "one step logged"),
        ('loss = "infonce"\nlearn_tau = false', 1, "constant"),
        ('loss = "fastclip-v1"', 1, "constant"),
        ('loss = "fastclip-v3"', 1, "one step logged"),
        ("loss = [3]", 1, "one step logged"),
        ("", 1, "one step logged"),
        ('loss = "infonce"', 2, "constant"),
        ("", 0, "no step logged yet"),
    ],
)
def test_one_logged_temperature_is_constant_only_where_the_loss_does_not_learn_it(config, steps, course, tmp_path):
    run = write_run(tmp_path, [*(train_row(step, tau=0.07) for step in range(1, steps + 1)), eval_row(0, 0.1)])
    (run / "config.toml").write_text(config)
    assert figures(run)["Temperature τ"] == ("0.07" if steps else "\N{EN DASH}", course)


def test_evaluation_table(tmp_path: Path):
    rows = [train_row(10), eval_row(0, 0.04), eval_row(10, 0.5, zero_shot=0.25)]
    (table,) = tables(read_run(write_run(tmp_path, rows)))
    assert list(table.rows) == ["before training", "10"]
    assert list(table.groups) == ["Text to image", "Image to text", "Other"]
    assert [cell.text for cell in table.rows["10"]] == [
        "0.25",
        *("16.3 %", "37.2 %", "46.5 %"),
        *("17.5 %", "40.0 %", "50.0 %"),
        "0.25",
    ]
    assert [cell.best for cell in table.rows["10"]] == [False] + [True] * 6 + [False]
    assert not any(cell.best for cell in table.rows["before training"])
    assert table.chance == ("0.4 %", "2.0 %", "3.9 %", "0.4 %", "2.0 %", "3.9 %", "")
    (table,) = tables(read_run(write_run(tmp_path, [eval_row(5, 0.5, captions=1280)])))
    assert not any(cell.best for cells in table.rows.values() for cell in cells), "one row has no best"
    assert table.size == "256 images, 1,280 captions"


def test_chance_is_known_in_both_directions(tmp_path: Path):
    """Five captions of each image: a caption has one right image, an image five right captions."""
    run = read_run(write_run(tmp_path, [eval_row(0, 0.1, captions=1280), eval_row(5, 0.5, captions=1280)]))
    by_image = [f"{100 * (1 - math.comb(1275, k) / math.comb(1280, k)):.1f} %" for k in (1, 5, 10)]
    assert tables(run)[0].chance == ("0.4 %", "2.0 %", "3.9 %", *by_image)
    assert [list(chart.references) for chart in evaluation_charts(run)] == [["chance of recall@10:"]] * 2
    assert all(math.isfinite(value) for chart in evaluation_charts(run) for value in chart.references.values())


@pytest.mark.parametrize(
    ("values", "better", "best"),
    [
        ((0.2, 0.5, 0.4), 1, [False, True, False]),
        ((0.2, 0.5, 0.4), -1, [True, False, False]),
        ((0.2, 0.5, 0.4), 0, [False, False, False]),
        ((0.5, 0.50001, 0.4), 1, [True, True, False]),  # shown as the same figure
        ((0.5, 0.5), 1, [False, False]),
        ((0.5, math.nan), 1, [False, False]),
        ((0.0, 0.1), -1, [True, False]),
    ],
)
def test_the_best_is_marked_by_one_rule(values: tuple[float, ...], better: int, best: list[bool]):
    assert [cell.best for cell in Column(key="k", title="k", better=better).cells(values)] == best


def test_best_of_both_kinds_of_evaluation_is_in_the_tiles(tmp_path: Path):
    classified = [
        {"kind": "eval", "step": step, "set": "groups", "metrics": {"top1": top1, "chance@1": 0.2}}
        for step, top1 in ((10, 0.6), (20, 0.5))
    ]
    shown = figures(write_run(tmp_path, [eval_row(10, 0.5), eval_row(20, 0.4), *classified]))
    for name in ("Text-to-image recall@10", "Zero-shot top-1, groups"):
        assert re.search(r"step 20, best \d\d\.\d % at step 10", shown[name][1])


def test_evaluation_comes_first(tmp_path: Path):
    html = page(write_run(tmp_path))
    assert html.index("<h2>Evaluation</h2>") < html.index("<h2>Training</h2>")


LOGGED = (
    *("loss", "tau", "lr", "samples_per_second", "grad_norm", "data_wait", "gpu_memory_gib", "resident_gib"),
    *(
        "effective_negatives",
        "gamma",
        "log_u_mean",
        "log_u_spread",
        "estimate_gap",
        "never_visited",
        "bias",
    ),
    *("skipped_steps", "loss_scale", "loss_bytes", "loss_collectives", "broken_no_image", "log_u_image", "tau_text"),
)


@pytest.mark.parametrize("key", LOGGED)
def test_every_logged_number_has_a_name_and_an_explanation(key: str):
    curve = curve_of(key)
    assert "_" not in curve.title and curve.title != key
    assert curve.note.endswith(".")


@pytest.mark.parametrize(("pretrained", "text"), [('pretrained = "laion2b_e16"', "laion2b_e16"), ("", "random")])
def test_header_names_the_starting_weights(tmp_path: Path, pretrained: str, text: str):
    run = write_run(tmp_path, [train_row(1)])
    (run / "config.toml").write_text(f'model = "ViT-B-32"\n{pretrained}\n')
    assert f"<dt>Starting weights</dt><dd>{text}</dd>" in page(run)


def test_stopped_run_says_where_it_stopped_and_how_to_continue(tmp_path: Path):
    html = page(write_run(tmp_path / "my run", [train_row(500)], status="stopped"))
    assert "Stopped at step 500 of 2,000: 25% of the steps logged" in html
    assert "my run/config.toml&#39; --name shapes --resume auto" in html
    assert "--resume auto" not in page(write_run(tmp_path / "done", [train_row(2000)]))


def test_run_that_is_silent_for_long_may_have_been_killed(tmp_path: Path):
    run = write_run(tmp_path / "run", [train_row(500)], status="running")
    assert "killed" not in page(run) and "--resume auto" not in page(run)
    then = time.time() - 7400
    os.utime(run / "metrics.jsonl", (then, then))
    assert "Nothing for 2:03 h: it may have been killed. To continue: leanclip train" in page(run)


def test_every_set_has_its_own_table_and_charts(tmp_path: Path):
    rows = [eval_row(0, 0.1), eval_row(0, 0.2) | {"set": "photos"}, eval_row(5, 0.3)]
    run = read_run(write_run(tmp_path, rows))
    assert [(t.set, len(t.rows)) for t in tables(run)] == [("val", 2), ("photos", 1)]
    assert len(evaluation_charts(run)) == 2, "a single evaluation makes no curve"


def test_running_run_names_missing_parts(tmp_path: Path):
    run = write_run(tmp_path, [train_row(10), train_row(500)], status="running")
    html = page(run)
    assert "No evaluation yet." in html
    assert "No panel yet" in html
    assert "Running at step 500 of 2,000: 25% of the steps logged" in html
    assert figures(run)["Text-to-image recall@10"] == ("–", "not evaluated yet")
    assert "No training step logged yet." in page(write_run(tmp_path, [eval_row(0, 0.04)], status="running"))


@pytest.mark.parametrize(
    ("status", "icon"),
    [("running", "▶"), ("finished", "✓"), ("stopped", "■"), ("failed", "✕"), ("strange", "?")],
)
def test_badge_of_every_status_that_a_run_writes(tmp_path: Path, status: str, icon: str):
    html = page(write_run(tmp_path, [train_row(10)], status=status))
    assert f'status-{"unknown" if icon == "?" else status}">{icon} {status}</span>' in html


def test_run_without_the_other_files(tmp_path: Path):
    run = tmp_path / "nameless"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 2.0}) + "\n")
    html = page(run)
    assert "nameless" in html
    assert "This run has no panel." in html
    assert "No configuration was saved" in html


def test_incomplete_last_line_is_ignored(tmp_path: Path):
    run = read_run(write_run(tmp_path, [train_row(10)], tail='{"kind": "train", "step": 20, "lo'))
    assert run.steps == [10]
    assert run.problems == ()


def test_later_lines_of_a_step_replace_earlier_ones(tmp_path: Path):
    rows = [train_row(10, loss=5.0), train_row(20, loss=4.0), eval_row(20, 0.2)]
    rows += [train_row(20, loss=3.0), train_row(15, loss=3.5), eval_row(20, 0.6)]
    run = read_run(write_run(tmp_path, rows))
    assert run.steps == [10, 15, 20]
    assert run.column("loss") == [5.0, 3.5, 3.0]
    assert [e.metrics["image_to_text_recall@10"] for e in run.evaluations] == [0.6]


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path):
    rows = [train_row(1, loss=2.0), train_row(2, loss=None), train_row(3, loss=math.inf), train_row(4, loss="x")]
    rows.append(train_row(5, loss=10**400))
    run = write_run(tmp_path, [*rows, eval_row(4, 0.5, **{"text_to_image_recall@10": None})])
    loss = read_run(run).column("loss")
    assert loss[0] == 2.0
    assert all(math.isnan(value) for value in loss[1:])
    assert figures(run)["Loss"] == ("2", "last logged loss is not finite")
    assert figures(run)["Text-to-image recall@10"][0] == "–"
    assert "nan" not in page(run).lower()


def test_unknown_numbers_get_a_curve(tmp_path: Path):
    run = read_run(write_run(tmp_path, [train_row(1, queue=3, comment="text")]))
    assert [c.title for c in training_charts([run], ["run"])][-2:] == ["Inner learning rate γ", "queue"]


def test_caption_without_utf8_form_does_not_stop_the_report(tmp_path: Path):
    assert "half ? pair" in page(write_run(tmp_path, with_panel=panel(captions=("half \ud800 pair", *CAPTIONS))))


def test_report_is_replaced_and_leaves_nothing_beside_it(tmp_path: Path):
    run = write_run(tmp_path / "run", [train_row(1)], status="running")
    target = tmp_path / "pages" / "a.html"
    assert write_report(run, target) == target
    write_run(run, with_panel=panel())
    write_report(run, target)
    assert "finished" in target.read_text(encoding="utf-8")
    assert [path.name for path in target.parent.iterdir()] == ["a.html"]


def test_refusals(tmp_path: Path):
    for path in (tmp_path / "absent", tmp_path):
        with refuses("report.not_a_run", str(path)):
            write_report(path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "tra')
    with refuses("report.no_metrics", "metrics.jsonl"):
        write_report(tmp_path)
    run = write_run(tmp_path / "run", [train_row(1)])
    (tmp_path / "folder").mkdir()
    with refuses("report.not_writable", "folder"):
        write_report(run, tmp_path / "folder")
    assert not list(tmp_path.glob(".*folder*"))


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_browser_shows_the_report(tmp_path: Path, width: int, dark: bool):
    captions = ("<img src=x onerror=alert(1)> & <b>bold</b>", *CAPTIONS)
    report = write_report(write_run(tmp_path / "run", with_panel=panel(captions=captions)))
    state = inspect_page(report, tmp_path / "page.png", width=width, dark=dark)
    state.assert_whole(width, images=6)
    assert len(state.charts) == 9 and captions[0] in state.text
    with Image.open(tmp_path / "page.png") as shot:
        assert shot.width == width
        assert len(shot.convert("RGB").getcolors(1 << 24) or ()) > 50, "the picture is blank"


@needs_browser
def test_browser_shows_values_under_the_pointer(tmp_path: Path):
    report = write_report(write_run(tmp_path / "run"))
    point = """() => {
      const svg = document.querySelector("svg[data-chart]");
      const box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 0.5 * box.width, clientY: box.top }));
    }"""
    state = inspect_page(report, tmp_path / "page.png", script=point)
    assert state.console == []
    assert "step 1,000\nrecall@1  13.3" in state.text
    assert "\nrecall@5  30.504 %\nrecall@10  38.13 %" in state.text


LAYOUT = """() => {
  const box = document.querySelector(".figures").getBoundingClientRect();
  const rows = {};
  for (const tile of document.querySelectorAll(".figure")) {
    const { top, right } = tile.getBoundingClientRect();
    rows[top] = Math.max(rows[top] ?? 0, right);
  }
  const hints = [...document.querySelectorAll(".more")].map((hint) => hint.getBoundingClientRect().height > 0);
  const wide = [...document.querySelectorAll(".scroll")].map((table) => table.scrollWidth > table.clientWidth);
  document.body.innerText = JSON.stringify({ gaps: Object.values(rows).map((r) => box.right - r), hints, wide });
}"""


@needs_browser
@pytest.mark.parametrize(("width", "wide"), [(1280, False), (400, True)])
def test_tiles_fill_their_rows_and_wide_tables_say_so(tmp_path: Path, width: int, wide: bool):
    rows = [train_row(1000, resident_gib=1.0), eval_row(0, 0.1), eval_row(1000, 0.5)]
    rows.append({"kind": "eval", "step": 1000, "set": "groups", "metrics": {"top1": 0.6}})
    report = write_report(write_run(tmp_path / "run", rows))  # seven tiles
    layout = json.loads(inspect_page(report, tmp_path / "page.png", width=width, script=LAYOUT).text)
    assert len(layout["gaps"]) > 1 and max(layout["gaps"]) < 2
    assert layout["hints"] == layout["wide"] and layout["hints"][0] is wide


@needs_browser
def test_inspect_page_detects_faults(tmp_path: Path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<img alt="gone" src="missing.png"><img alt="garbage" src="data:image/png;base64,AAAA">'
        f'<img alt="sound" src="data:image/jpeg;base64,{picture(0)}">'
        '<svg data-chart="{}" width="0" height="9"></svg>'
        "<script>console.warn('careful'); undefinedFunction()</script>"
    )
    state = inspect_page(bad, tmp_path / "bad.png")
    assert state.images == 3
    assert state.broken == ["gone", "garbage"]
    assert state.charts == [[0, 9]]
    assert any("careful" in text for text in state.console)
    assert any("undefinedFunction is not defined" in text for text in state.console)


def test_epochs_of_a_run_that_ended_early_are_planned_and_done(tmp_path: Path):
    whole = read_run(write_run(tmp_path / "whole"))
    early = read_run(write_run(tmp_path / "early", [train_row(6)], steps=6))
    assert dict(facts(whole))["Epochs"] == "50"
    assert dict(facts(early))["Epochs"] == "0.15 of 50 planned"
