"""docs/results.md and the README have the figures of the CSV files."""

from pathlib import Path

import compare_losses
import measurements
import pytest
import results_page
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


@pytest.mark.parametrize("name", results_page.FILES)
def test_plots_are_reproducible(name, tmp_path):
    drawings = []
    for file in measurements.RESULTS.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for _ in range(2):
        results_page.FILES[name].draw(tmp_path / name)
        drawings.append((tmp_path / name).with_suffix(".svg").read_text())
    assert drawings[0] == drawings[1] and "leanclip" in drawings[0]
