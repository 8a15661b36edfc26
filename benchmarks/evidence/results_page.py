"""Writes docs/results.md from results_template.md and the CSV files of results/, and draws the plots.

    python benchmarks/evidence/results_page.py

In the template, `{{name}}` stands for a table and `[[name;row;column]]` for one of its cells; the row is given by its
first cell or cells.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import communication
import compare_losses
import estimate_error
import fine_tuning
import loss_over_ranks
import measurements
import network_time
import overlap
import time_to_recall_report
import wrong_captions_report
from measurements import RESULTS, Table
from training_runs import RunStore

ROOT = Path(__file__).parents[2]
TEMPLATE = Path(__file__).with_name("results_template.md")
WRONG_CAPTIONS_ARMS = ("v1-auto", "infonce", "dcl-constant", "siglip-auto")
FILES = {
    "loss_over_ranks.csv": loss_over_ranks,
    "communication.csv": communication,
    "network_time.csv": network_time,
    "overlap.csv": overlap,
    "wall_clock.csv": time_to_recall_report,
    "wrong_captions.csv": wrong_captions_report,
    "fine_tuning.csv": fine_tuning,
}


def tables() -> dict[str, Table]:
    result = compare_losses.tables(compare_losses.Comparison(RunStore()))
    result["estimate_error"] = estimate_error.table(RESULTS / "estimate_error.csv")
    for name, module in FILES.items():
        result |= module.tables(RESULTS / name)
    return result


def page(template: str, named: Mapping[str, Table]) -> str:
    def cell(match: re.Match[str]) -> str:
        name, *address = match[1].split(";")
        return named[name].cell(*address)

    text = re.sub(r"\[\[(.+?)\]\]", cell, template)
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(named[match[1]]), text)


def headline(named: Mapping[str, Table]) -> dict[str, str]:
    """The figures of the README, as text."""
    rates = {  # the newest row of each provider counts
        row["provider"]: f"{float(row['samples_per_second']):,.0f}"
        for row in measurements.rows(ROOT / "benchmarks/results/step.csv")
        if row["case"] == "ViT-B-32"
    }
    recalls = {
        row["loss"]: f"{100 * float(row['test_t2i10_mean']):.1f} ± {100 * float(row['test_t2i10_deviation']):.1f}%"
        for row in measurements.rows(RESULTS / "quality.csv")
        if row["batch"] == "128"
    }
    return {
        "seconds to open_clip's final recall, leanclip": named["time"].cell(
            "leanclip fastclip-v3, 10 epochs", "seconds"
        ),
        "seconds to open_clip's final recall, open_clip": named["time"].cell("open_clip infonce", "seconds"),
        "samples per second, leanclip": rates["leanclip"],
        "samples per second, open_clip": rates["open_clip compiled"],
        "recall, fastclip-v3": recalls["fastclip-v3"],
        "recall, infonce": recalls["infonce"],
        **{
            f"wrong captions, {arm}": named["wrong_captions"].cell("20%", arm, "mean recall@10")
            for arm in WRONG_CAPTIONS_ARMS
        },
    }


def main() -> None:
    (ROOT / "docs" / "results.md").write_text(page(TEMPLATE.read_text(), tables()))
    compare_losses.draw(compare_losses.Comparison(RunStore()))
    for name, module in FILES.items():
        module.draw(RESULTS / name)


if __name__ == "__main__":
    main()
