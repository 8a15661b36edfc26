"""One self-contained HTML page for one run: no network, no file beside it."""

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from leanclip.errors import UserError
from leanclip.reporting import content
from leanclip.reporting.chart import Chart, draw
from leanclip.reporting.record import Panel, RunRecord, number, read_run


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the report of a run, finished or still going, and return its path.

    An earlier report is replaced in one step, so a browser never loads half a page.

    Args:
        run: the directory that training wrote.
        output: where the page goes; `report.html` in the run directory when left out.

    Raises:
        UserError: there is no run directory, it holds no metrics, or the page cannot be written.
    """
    page = render(read_run(run))
    target = output if output is not None else run / "report.html"
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Captions from the web may hold half a surrogate pair, which has no UTF-8 form.
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write the report to {target} ({error.strerror}); choose a file in a folder you can write to"
        ) from error
    return target


def render(run: RunRecord) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("leanclip", "reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(page_values(run))


def page_values(run: RunRecord) -> dict[str, Any]:
    info = run.info
    notes, versions = info.get("notes"), info.get("environment")
    return {
        "name": str(info.get("name") or run.path.resolve().name),
        "status": run.status,
        "running": run.status == "running",
        "facts": facts(run),
        "notes": [str(note) for note in notes] if isinstance(notes, list) else [],
        "problems": run.problems,
        "progress": content.progress(run),
        "figures": content.key_figures(run),
        "training_charts": [drawn(chart) for chart in content.training_charts(run)],
        "recall_charts": [drawn(chart) for chart in content.recall_charts(run)],
        "tables": content.tables(run),
        "panel": run.panel if run.panel and run.panel.images else None,
        "panel_found": panel_found(run.panel),
        "panel_top_score": panel_top_score(run.panel),
        "config": run.config,
        "environment": versions if isinstance(versions, dict) else {},
        "version": str(info.get("version") or ""),
        "changed": content.moment(run.changed.isoformat()),
        "written": content.moment(datetime.now(timezone.utc).isoformat()),
    }


def drawn(chart: Chart) -> Markup:
    """The chart as trusted markup: `draw` has escaped every text in it."""
    return Markup(draw(chart))


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """What was trained on how much, for the line under the name; only what the run has recorded."""
    info = run.info
    texts = {
        "Model": str(info.get("model") or ""),
        "Loss": str(info.get("loss") or ""),
        "Parameters": content.count(info.get("parameters")),
        "Training samples": content.count(info.get("train_samples")),
        "Global batch": content.count(info.get("global_batch")),
        "Epochs": content.plain(number(info.get("epochs"))),
        "Started": content.moment(info["started"]) if info.get("started") else "",
    }
    return [(name, text) for name, text in texts.items() if text not in ("", content.DASH)]


def panel_found(panel: Panel | None) -> int:
    """How many images have a right caption among the shown ones."""
    return sum(any(m.correct for m in image.matches) for image in panel.images) if panel else 0


def panel_top_score(panel: Panel | None) -> float:
    """The scale of the score bars: the highest score, one when no score is above zero."""
    scores = [m.score for image in panel.images for m in image.matches if m.score > 0] if panel else []
    return max(scores, default=1.0)
