"""docs/results.md and the README have the figures of the CSV files."""

import re
from pathlib import Path

import compare_losses
import measurements
import pytest
import results_page
from measurements import Table
from training_runs import RunStore

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables():
    return results_page.tables()


def test_page_equals_its_template_filled_from_the_csv_files(tables):
    assert (ROOT / "docs/results.md").read_text() == results_page.page(results_page.TEMPLATE.read_text(), tables)


def test_quality_csv_follows_from_the_runs():
    summary = compare_losses.loss_summary(compare_losses.Comparison(RunStore()))
    assert [{key: str(value) for key, value in row.items()} for row in summary] == measurements.rows(
        measurements.RESULTS / "quality.csv"
    )


def test_readme_has_the_measured_figures(tables):
    readme = (ROOT / "README.md").read_text()
    assert [figure for figure in results_page.headline(tables).values() if figure not in readme] == []


def test_figures_of_the_prose_are_cells_of_tables():
    """Exceptions: settings, releases, figures of the papers, and two confidence intervals."""
    prose = re.sub(r"\[\[.+?\]\]|(torch|open_clip) \d+\.\d+(\.\d+)?|arXiv \S+", "", results_page.TEMPLATE.read_text())
    assert set(re.findall(r"\d+\.\d+", prose)) <= {"0.6", "1.2", "0.5", "2.7", "0.00025", "0.0005", "0.001"}


def test_cells_are_found_by_the_start_of_their_row():
    named = {"a": Table(["x", "y", "z"], [["b", "c", "1"], ["b", "d", "2"]])}
    assert results_page.page("[[a;b;z]] [[a;b;d;z]]\n{{a}}", named) == (
        "1 2\n| x | y | z |\n| --- | --- | --- |\n| b | c | 1 |\n| b | d | 2 |"
    )
    for address in (["e", "z"], ["b", "w"], ["b", "e", "z"]):
        with pytest.raises(KeyError, match="no cell"):
            named["a"].cell(*address)


@pytest.mark.parametrize("name", results_page.FILES)
def test_plots_are_reproducible(name, tmp_path):
    drawings = []
    for file in measurements.RESULTS.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for _ in range(2):
        results_page.FILES[name].draw(tmp_path / name)
        drawings.append((tmp_path / name).with_suffix(".svg").read_text())
    assert drawings[0] == drawings[1] and "leanclip" in drawings[0]


def test_rows_are_appended_below_one_header(tmp_path):
    path = tmp_path / "rows.csv"
    assert measurements.rows(path) == []
    measurements.append(path, {"a": "x, y", "b": 2})
    measurements.append(path, {"b": None, "a": 3})
    assert measurements.rows(path) == [{"a": "x, y", "b": "2"}, {"a": "3", "b": ""}]
    with pytest.raises(ValueError, match="not in fieldnames"):
        measurements.append(path, {"a": 1, "c": 1})
    assert list(measurements.provenance()) == ["version", "source", "torch", "device", "date", "command"]
