"""One self-contained HTML page for one run, or for several side by side: no network, no file beside it."""

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from leanclip.errors import UserError
from leanclip.filesystem import write_atomically
from leanclip.reporting import comparison, report_sections
from leanclip.reporting.chart import COLOURS, Chart, draw, key
from leanclip.reporting.confusion_table import confusion
from leanclip.reporting.histogram_chart import draw_histograms
from leanclip.reporting.run_reader import RunRecord, number, read_run

SENDERS = {"leanclip": "leanclip", "openclip": "OpenCLIP's local loss", "disco_clip": "DisCo-CLIP"}


def write_report(runs: Path | Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several, finished or still going, and return its path.

    An earlier report is replaced in one step, so a browser never loads half a page.

    Args:
        runs: the directory that training wrote, or several of them.
        output: where the page goes; when left out `report.html` in the run directory, or for several runs
            `comparison.html` beside the first one.

    Raises:
        UserError: there is no run directory, it holds no metrics, or the page cannot be written.
    """
    paths = [runs] if isinstance(runs, Path) else list(runs)
    if not 1 <= len(paths) <= COLOURS:
        raise UserError(f"{len(paths)} runs given; a report shows one to {COLOURS} of them")
    records = [read_run(path) for path in paths]
    if len(records) == 1:
        page, target = render(records[0]), output or paths[0] / "report.html"
    else:
        page, target = render_comparison(records), output or paths[0].resolve().parent / "comparison.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Captions from the web may hold half a surrogate pair, which has no UTF-8 form.
        write_atomically(target, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(
            f"cannot write the report to {target} ({error.strerror}); choose a file in a folder you can write to"
        ) from error
    return target


def render(run: RunRecord) -> str:
    """The page of one run as text."""
    return environment().get_template("report.html.j2").render(page_values(run))


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """The page of several runs as text."""
    return environment().get_template("comparison.html.j2").render(comparison_values(runs))


def environment() -> Environment:
    return Environment(
        loader=PackageLoader("leanclip", "reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page_values(run: RunRecord) -> dict[str, Any]:
    info = run.info
    return {
        "name": run.name,
        "status": run.status,
        "running": run.status == "running",
        "facts": facts(run),
        "notes": texts(info.get("notes")),
        "problems": run.problems,
        "progress": report_sections.progress(run),
        "figures": report_sections.key_figures(run),
        "training_charts": drawn(report_sections.training_charts(run)),
        "evaluation_charts": drawn(report_sections.evaluation_charts(run)),
        "histograms": [
            Markup(draw_histograms(report_sections.HISTOGRAMS.get(name, name), rows))
            for name, rows in run.histograms.items()
        ],
        "tables": report_sections.tables(run),
        "confusions": [confusion(found) for found in run.zero_shot],
        "panel": run.panel if run.panel and run.panel.images else None,
        "hardest": run.panel if run.panel and run.panel.hardest else None,
        "traffic": traffic(run),
        "config": run.config,
        "environment": environment_of(run),
        "version": str(info.get("version") or ""),
        "changed": report_sections.moment(run.changed.isoformat()),
        "written": now(),
    }


def comparison_values(runs: Sequence[RunRecord]) -> dict[str, Any]:
    names = comparison.names_of(runs)
    differing, alike = comparison.differences(runs)
    losses = {str(run.info.get("loss") or "") for run in runs}
    return {
        "name": f"{len(runs)} runs compared",
        "version": str(runs[0].info.get("version") or ""),
        "runs": [
            {
                "name": name,
                "key": Markup(key(i)),
                "status": run.status,
                "facts": facts(run),
                "notes": texts(run.info.get("notes")),
                "problems": run.problems,
                "panel": run.panel if run.panel and run.panel.images else None,
                "hardest": run.panel if run.panel and run.panel.hardest else None,
                "confusions": [confusion(found) for found in run.zero_shot],
                "config": run.config,
                "environment": environment_of(run),
                "traffic": traffic(run),
            }
            for i, (name, run) in enumerate(zip(names, runs, strict=True))
        ],
        "figures": comparison.final_figures(runs),
        "differences": differing,
        "alike": alike,
        "axis": comparison.x_axis(runs).label,
        "losses_differ": len(losses) > 1,
        "training_charts": drawn(comparison.training_charts(runs, names)),
        "evaluation_charts": drawn(comparison.evaluation_charts(runs, names)),
        "histograms": drawn(comparison.histogram_charts(runs, names)),
        "written": now(),
    }


def drawn(charts: Sequence[Chart]) -> list[Markup]:
    """The charts as trusted markup: `draw` has escaped every text in it."""
    return [Markup(draw(chart)) for chart in charts]


def texts(value: object) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def now() -> str:
    return report_sections.moment(datetime.now(timezone.utc).isoformat())


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """What was trained on how much, for the line under the name; only what the run has recorded."""
    info = run.info
    texts = {
        "Model": str(info.get("model") or ""),
        "Loss": str(info.get("loss") or ""),
        "Parameters": report_sections.count(info.get("parameters")),
        "Training samples": report_sections.count(info.get("train_samples")),
        "Global batch": report_sections.count(info.get("global_batch")),
        "Epochs": report_sections.plain(number(info.get("epochs"))),
        "Weights": f"averaged, decay {report_sections.plain(number(info['ema']))}" if info.get("ema") else "",
        "Started": report_sections.moment(info["started"]) if info.get("started") else "",
    }
    return [(name, text) for name, text in texts.items() if text not in ("", report_sections.DASH)]


def environment_of(run: RunRecord) -> dict[str, str]:
    """What the run was computed with, and on how many processes."""
    versions = run.info.get("environment")
    found = {str(name): str(text) for name, text in versions.items()} if isinstance(versions, dict) else {}
    for name in ("processes", "micro_batches"):
        text = report_sections.count(run.info.get(name))
        if text != report_sections.DASH:
            found[name.replace("_", "-")] = text
    return found


def traffic(run: RunRecord) -> list[tuple[str, str, float]]:
    """What each process receives in a step for the loss, and would with others: name, amount, share of the most."""
    sent = {SENDERS[name]: number(comparison.communication(run).get(name)) for name in SENDERS}
    sent = {name: amount for name, amount in sent.items() if amount > 0}
    most = max(sent.values(), default=1.0)
    return [(name, f"{amount / 1e6:,.3g} MB", amount / most) for name, amount in sent.items()]
