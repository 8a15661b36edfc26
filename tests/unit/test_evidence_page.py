"""The page of results and the README's first screen: they say what the tables say."""

import re
from pathlib import Path

import assemble
import pytest
import quality
import table
import wall_clock

EVIDENCE = Path(__file__).parents[2] / "benchmarks" / "evidence"


def test_the_page_says_what_the_files_say():
    """Figures are not edited by hand, and what was not measured is named."""
    assert (EVIDENCE.parents[1] / "docs" / "results.md").read_text() == assemble.page()
    readme = (EVIDENCE.parents[1] / "README.md").read_text()
    assert assemble.with_headline(readme, assemble.headline()) == readme


def test_figures_in_the_words_are_cells_of_the_tables(tmp_path, monkeypatch):
    (tmp_path / "a.md").write_text(
        "| | x | y |\n|---|---|---|\n| b | 1 |  |\n\n| n | m | y |\n|---|---|---|\n| b | c | 2 |\n"
    )
    assert assemble.cell(tmp_path, "a", "b", "x") == "1"
    assert assemble.cell(tmp_path, "a", "b", "y") == "2"  # the first that is not empty
    assert assemble.cell(tmp_path, "a", "b", "c", "y") == "2"
    for missing in (("d", "x"), ("b", "z"), ("b", "d", "y")):
        with pytest.raises(KeyError, match=r"a\.md has no"):
            assemble.cell(tmp_path, "a", *missing)
    monkeypatch.setattr(assemble, "HERE", tmp_path)
    (tmp_path / "words.md").write_text("[[a;b;x]] and [[a;b;c;y]]")
    assert assemble.words("words", tmp_path) == "1 and 2"


@pytest.mark.parametrize("name", ["summary", "analysis"])
def test_the_words_have_few_figures_of_their_own(name):
    """Of those with a point: what the paper says, and gamma, and two that follow from the table; not releases."""
    text = re.sub(r"\[\[.+?\]\]|torch 2\.\d+", "", (EVIDENCE / f"{name}.md").read_text())
    own = {"2.7", "0.6", "1.2"} if name == "analysis" else set()
    assert set(re.findall(r"\d+\.\d+", text)) == own


def test_the_headline_takes_its_figures_from_the_rows(tmp_path):
    summary = dict.fromkeys(quality.SUMMARY, "") | {"batch": 128, "seeds": 5, "device": "a GPU"}
    summary |= {"p": 0.0312, "gap_mean": 0.01, "gap_deviation": 0.002}
    for loss, recall in (("infonce", 0.2), ("fastclip-v3", 0.2251)):
        figures = {f"{metric}_{what}": recall for metric in quality.METRICS for what in ("mean", "deviation")}
        table.append(tmp_path / "quality.csv", quality.SUMMARY, summary | figures | {"loss": loss})
    empty = dict.fromkeys(wall_clock.FIELDS, "") | {"batch": 128, "epochs": 2, "samples": 500, "model": "small"}
    for trainer, pace, recalls in (("open_clip", 50, (0.1, 0.2)), ("leanclip", 20, (0.2, 0.3))):
        for epoch, recall in enumerate(recalls, 1):
            row = {"trainer": trainer, "loss": "infonce", "lr": 1e-3, "seed": 0, "epoch": epoch, "device": "a GPU"}
            row |= {"seconds": epoch * pace, "startup_seconds": 1, "alone": True}
            row |= {"text_to_image_recall_at_10": recall, "image_to_text_recall_at_10": 0}
            table.append(tmp_path / "wall_clock.csv", wall_clock.FIELDS, empty | row)
    text = assemble.headline(tmp_path)
    assert text.startswith("**At batch 128 fastclip-v3 beats infonce (+1.00 ± 0.20 points, p = 0.0312).**")
    assert "| fastclip-v3 22.5 ± 22.5% | its loss, InfoNCE, in our trainer 20.0 ± 20.0% |" in text
    assert "5 seeds, paired p = 0.031" in text
    assert "to open_clip's final recall, 20.0% | infonce, 2 epochs: 20.0 s, one seed | 100.0 s, each run" in text
    assert "Without a result" not in text
    assert "memory of the loss" not in text and "Not run: " in text
    (tmp_path / "wall_clock.csv").unlink()
    only = {"trainer": "leanclip", "loss": "infonce", "lr": 1e-3, "alone": False, "text_to_image_recall_at_10": 0.1}
    table.append(tmp_path / "wall_clock.csv", wall_clock.FIELDS, empty | only)
    none = assemble.headline(tmp_path)  # no baseline, no comparison
    assert "seconds from the start" not in none
    assert "Without a result: the race against open_clip's own trainer." in none
    assert "Not measured yet: quality at equal budget; why" in text


def test_a_missing_table_is_said_to_be_missing(tmp_path, monkeypatch):
    (tmp_path / "quality.md").write_text("| 1 |\n\n![curves](quality_128.svg)\n")
    monkeypatch.setattr(assemble, "HERE", tmp_path)
    (tmp_path / "summary.md").write_text("In short: [[why;a;b]].")
    (tmp_path / "analysis.md").write_text("No figures.")
    found = assemble.page(tmp_path)
    assert "(../benchmarks/evidence/results/quality_128.svg)" in found
    measured = [name for name, (_, command, _) in assemble.SECTIONS.items() if command]
    assert found.count("Not measured yet") == len(measured) - 1
    assert "Not written yet: why.md is not there." in found and "No figures." in found
