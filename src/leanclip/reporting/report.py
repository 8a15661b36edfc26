"""One self-contained HTML page for one run, or for several side by side: no network access, no further files."""

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from leanclip.errors import UserError
from leanclip.filesystem import write_atomically, writing
from leanclip.reporting import comparison, curves, report_sections
from leanclip.reporting.charts import COLOURS, draw, templates
from leanclip.reporting.pair_weights import pair_weights_section
from leanclip.reporting.report_sections import DASH, count, last_finite, moment, percent, plain
from leanclip.reporting.run_reader import RunData, number, read_run

MAX_TILES = 6  # in a row
SEARCH_PAGE = "http://127.0.0.1:8026/"  # of leanclip search, while it runs


def write_report(runs: Path | Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several, finished or still training, and return its path.

    Args:
        runs: the directory that training wrote, or several of them.
        output: the file to write; by default `report.html` in the run directory, or for several runs
            `comparison.html` beside the first one.

    Raises:
        UserError: there is no run directory, it holds no metrics, or the page cannot be written.
    """
    paths = [runs] if isinstance(runs, Path) else list(runs)
    if not 1 <= len(paths) <= COLOURS:
        raise UserError(f"{len(paths)} runs; a report shows 1 to {COLOURS}", code="report.too_many_runs")
    data = [read_run(path) for path in paths]
    if len(data) == 1:
        page, target = render("report.html.j2", run_page(data[0])), output or paths[0] / "report.html"
    else:
        page, target = render("comparison.html.j2", comparison_page(data)), output
        target = target or paths[0].resolve().parent / "comparison.html"
    with writing(target, code="report.not_writable", remedy="give another --output"):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Captions from the web may hold half a surrogate pair, which has no UTF-8 form.
        write_atomically(target, page.encode("utf-8", errors="replace"))
    return target


def render(template: str, values: dict[str, Any]) -> str:
    written = moment(datetime.now(timezone.utc).isoformat())
    return templates().get_template(template).render(values, written=written, percent=percent, finding=finding)


def run_values(run: RunData) -> dict[str, Any]:
    """What both pages show of a run."""
    notes = run.info.get("notes")
    return {
        "name": run.name,
        "status": run.status,
        "facts": facts(run),
        "notes": [str(note) for note in notes] if isinstance(notes, list) else [],
        "problems": run.problems,
        "panel": run.panel if run.panel and run.panel.images else None,
        "hardest": run.panel if run.panel and run.panel.hardest else None,
        "zero_shot": run.zero_shot,
        "config": run.config,
        "environment": comparison.environment_of(run),
        "version": str(run.info.get("version") or ""),
    }


def run_page(run: RunData) -> dict[str, Any]:
    figures = report_sections.key_figures(run)
    return run_values(run) | {
        "running": run.status == "running",
        "progress": report_sections.progress(run),
        "figures": figures,
        "tile_columns": math.ceil(len(figures) / math.ceil(len(figures) / MAX_TILES)),
        "training_charts": list(map(draw, curves.training_charts([run], [run.name]))),
        "evaluation_charts": list(map(draw, [*curves.trend_charts(run), *curves.evaluation_charts(run)])),
        "histograms": list(map(draw, curves.histogram_charts([run], [run.name]))),
        "tables": report_sections.tables(run),
        "pair_weights": pair_weights_section(run),
        "search": search_commands(run),
        "search_page": SEARCH_PAGE,
        "changed": moment(run.changed.isoformat()),
    }


def search_commands(run: RunData) -> list[str]:
    """Open the embeddings in the run's directory; without any, make some of the held-out data first."""
    made = sorted(path.parent for path in run.path.glob("*/embeddings.json"))
    out = str(made[0] if made else run.path / "search")
    data = run.settings.get("val_data") or run.settings.get("train_data") or "emoji"
    embed = [] if made else [shlex.join(["leanclip", "embed", str(run.path), str(data), out])]
    return [*embed, shlex.join(["leanclip", "search", out])]


def finding(caption: str) -> str:
    """The address that searches for a caption."""
    return f"{SEARCH_PAGE}#text={quote(caption, safe='', errors='replace')}"


def comparison_page(runs: Sequence[RunData]) -> dict[str, Any]:
    names = comparison.names_of(runs)
    differing, equal = comparison.differences(runs)
    return {
        "name": f"{len(runs)} runs compared",
        "version": str(runs[0].info.get("version") or ""),
        "runs": [run_values(run) | {"name": name} for name, run in zip(names, runs, strict=True)],
        "figures": comparison.final_figures(runs),
        "differences": differing,
        "equal": equal,
        "axis": curves.x_axis(runs).label,
        "losses_differ": len({str(run.info.get("loss") or "") for run in runs}) > 1,
        "training_charts": list(map(draw, curves.training_charts(runs, names))),
        "evaluation_charts": list(map(draw, curves.compared_evaluations(runs, names))),
        "histograms": list(map(draw, curves.histogram_charts(runs, names))),
    }


def starting_weights(settings: Mapping[str, Any]) -> str:
    towers = [f"{settings[key]} ({side})" for side in ("image", "text") if settings.get(key := f"pretrained_{side}")]
    return str(settings.get("pretrained") or " + ".join(towers) or "random")


def facts(run: RunData) -> list[tuple[str, str]]:
    """Model, data and sizes, as far as the run has recorded them."""
    info = run.info
    texts = {
        "Model": str(info.get("model") or ""),
        "Loss": str(info.get("loss") or ""),
        "Parameters": count(info.get("parameters")),
        "Training samples": count(info.get("train_samples")),
        "Starting weights": starting_weights(run.settings) if run.settings else "",
        "Global batch": count(info.get("global_batch")),
        "Epochs": epochs(run),
        "Weights": f"averaged, decay {plain(number(info['ema']))}" if info.get("ema") else "",
        "Started": moment(info["started"]) if info.get("started") else "",
    } | report_sections.feature_costs(run)
    return [(name, text) for name, text in texts.items() if text not in ("", DASH)]


def epochs(run: RunData) -> str:
    """As planned; of a run that ended earlier or has not ended, how many are done too."""
    planned, done = number(run.info.get("epochs")), last_finite(run.column("epoch"))
    return plain(planned) if not done < planned else f"{plain(done)} of {plain(planned)} planned"
