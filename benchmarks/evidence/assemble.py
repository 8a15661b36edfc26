"""Puts the findings of all commands here into docs/results.md, in the order of this list, and the main ones into the
README, between its two marks.

python benchmarks/evidence/assemble.py
"""

import re
from pathlib import Path

import quality
import race_report
import table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INTRODUCTION = """# What was measured

The claims of FastCLIP (arXiv 2407.01445) and DisCo-CLIP (arXiv 2304.08480), on real data and hardware, whatever came
out. Each section is written by its command from the CSV file it names. A row there has the version, a hash of the
sources, torch, the hardware, the date, the command and, where something is drawn, the seed; quality.csv and
curves.csv name the rows of runs.csv that they belong to. The hashes 4e258e0d0099 and a2cc5f263e87 are of sources
between two commits, so that code is not in the history as it ran. This page is put together by `python
benchmarks/evidence/assemble.py`; in the table that follows and in the section on what the figures say the words are
written by hand, and the figures taken from the tables below.

How the models of the first sections were trained: a ViT of 4 layers and a text tower of 3, both 256 wide, from
scratch on 32,023 photographs of 64 x 64 pixels with one to five captions each, 26,023 of COCO and the 6,000 of
Flickr8k's train set, so that Flickr8k's test set is of the kind that was trained on. 16 epochs, whatever the batch.
Each loss had six trials at batch 128 and three at larger ones, one seed each; the best on Flickr8k's val set was
trained with other seeds, and a run counts by the one of its eight points that is best on val. The race has a section
of its own.
"""
SECTIONS = {  # title, command and rows; those without are written by hand
    "quality": ("Quality at equal budget", "quality.py", "runs.csv"),
    "why": ("Why they differ, or do not", "why.py", "why.csv"),
    "changes": ("What would change it", "changes.py", "runs.csv"),
    "analysis": ("What the figures say", None, None),
    "components": ("The three components", "components.py", "runs.csv"),
    "batch_size": ("Small batch against large", "batch_size.py", "runs.csv"),
    "loss_over_ranks": ("Memory and time of the loss over ranks", "loss_over_ranks.py", "loss_over_ranks.csv"),
    "communication": ("Communication", "communication.py", "communication.csv"),
    "wall_clock": ("Wall clock to a target", "wall_clock.py", "wall_clock.csv"),
}
PLOTS = {  # of the README: the first that there is
    "wall_clock.svg": "recall over seconds, open_clip and leanclip",
    "quality_128_samples.svg": "recall over samples seen, by loss, batch 128",
}
MARKS = ("<!-- measured: by benchmarks/evidence/assemble.py -->", "<!-- measured: end -->")
MENDED = "docs/log.md#the-fifth-race-wrong-gradients-found-and-mended"
NOT_RUN = (
    "Not run: ImageNet, CC3M and the other sets of the papers, models of their size to the end, more than one GPU at"
    " once. [docs/results.md](docs/results.md) has all figures, also those that did not come out well."
)


def page(results: Path = table.RESULTS) -> str:
    """The whole text. What has not been measured is named as such."""
    parts = [INTRODUCTION, words("summary", results)]
    for name, (title, command, rows) in SECTIONS.items():
        parts.append(f"## {title}\n")
        if command is None:
            parts.append(words(name, results))
            continue
        written = results / f"{name}.md"
        if written.is_file():
            link = "../benchmarks/evidence/results"
            parts.append(f"`python benchmarks/evidence/{command}`, [{rows}]({link}/{rows}).\n")
            parts.append(re.sub(r"!\[(.*?)\]\((?!\.\./)", rf"![\1]({link}/", written.read_text().strip()) + "\n")
        else:
            parts.append(f"Not measured yet. The command is there: `python benchmarks/evidence/{command}`.\n")
    return "\n".join(parts)


def words(name: str, results: Path) -> str:
    """A text by hand, with a cell of a table for each [[table;row;column]]; a row may be several leading cells."""
    text = (HERE / f"{name}.md").read_text()
    try:
        return re.sub(r"\[\[(.+?)\]\]", lambda found: cell(results, *found[1].split(";")), text)
    except FileNotFoundError as error:
        return f"Not written yet: {Path(error.filename).name} is not there.\n"


def cell(results: Path, name: str, *where: str) -> str:
    """The first that there is in a table of a finding."""
    *row, column = where
    columns: list[str] = []
    for line in (results / f"{name}.md").read_text().splitlines():
        cells = [part.strip() for part in line.strip()[1:-1].split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
        elif cells[: len(row)] == row and column in columns and (found := cells[columns.index(column)]):
            return found
    raise KeyError(f"{name}.md has no {column} of {', '.join(row)}")


def headline(results: Path = table.RESULTS, steps: Path = ROOT / "benchmarks/results/step.csv") -> str:
    """For the README: one table, one plot, and what was not run. What is not measured yet is not in it."""
    rows, race = table.rows(results / "quality.csv"), race_report.known(results / "wall_clock.csv")
    seconds, verdict = _seconds(race), quality.verdict(rows)
    lines = [
        *([f"{verdict} [Why](docs/results.md#what-the-figures-say).", ""] if verdict else []),
        "| | leanclip | open_clip | data and hardware |",
        "|---|---|---|---|",
        *_quality(rows),
        *seconds,
        *_step(table.rows(steps)),
        *_memory(table.rows(results / "loss_over_ranks.csv")),
        "",
    ]
    for plot, title in PLOTS.items():
        if (results / plot).is_file():
            lines += [f"![{title}]({(results / plot).relative_to(ROOT)})", ""]
            break
    missing = [
        title.lower()
        for name, (title, command, _) in SECTIONS.items()
        if command and not (results / f"{name}.md").is_file()
    ]
    later = f"Not measured yet: {'; '.join(missing)}. " if missing else ""
    later += "" if seconds or not race else "Without a result: the race against open_clip's own trainer. "
    return "\n".join([*lines, later + NOT_RUN])


def _quality(rows: list[dict[str, str]]) -> list[str]:
    named = {row["loss"]: row for row in rows if int(row["batch"]) == quality.BATCH}
    ours, theirs = named.get(quality.PRIMARY[0]), named.get("infonce")
    if ours is None or theirs is None:
        return []
    tests = {
        "test_t2i10": ("text-to-image recall@10", "Flickr8k test", f", paired p = {float(ours['p']):.3f}"),
        "cifar10": ("zero-shot accuracy", "CIFAR-10", ""),
    }
    found = []
    for metric, (title, data, chance) in tests.items():
        cells = [
            f"{100 * float(row[f'{metric}_mean']):.1f} ± {100 * float(row[f'{metric}_deviation']):.1f}%"
            for row in (ours, theirs)
        ]
        found.append(
            f"| {title}, batch {quality.BATCH} | {ours['loss']} {cells[0]} | its loss, InfoNCE, in our trainer"
            f" {cells[1]} | {data}, 64 px, trained on 32,023 photographs, as many trials each,"
            f" {ours['seeds']} seeds{chance}, {ours['device']} |"
        )
    return found


def _seconds(rows: list[dict[str, str]]) -> list[str]:
    best, _ = race_report.compared(rows)
    base = best.pop(race_report.BASE, None)
    if base is None:
        return []
    told = []
    for name, line in best.items():
        found = race_report.reached(line, base.final)
        seconds = f"{race_report.spread(found.seconds)} s" if found.seconds else "not reached"
        some = "" if len(found.seconds) in (0, found.runs) else f" ({len(found.seconds)} of {found.runs} runs)"
        told.append(f"{name.removeprefix('leanclip ')}: {seconds}{some}, {_runs(line)}")
    own, first = race_report.reached(base, None), base.runs[0].rows[0]
    return [
        f"| seconds from the start to open_clip's final recall, {base.final:.1%} | {'; '.join(told)} |"
        f" {race_report.spread(own.seconds)} s, each run to its own, {first['epochs']} epochs, compiled, [its kernels"
        f" mended]({MENDED}), {_runs(base)} | {int(first['samples']):,} captioned photographs of 64 px, batch"
        f" {first['batch']}, {len(base.rates)} learning rates tried for each, {first['device']} |"
    ]


def _runs(line: race_report.Line) -> str:
    return f"{len(line.runs)} seeds" if len(line.runs) > 1 else "one seed"


def _step(rows: list[dict[str, str]]) -> list[str]:
    rates: dict[str, float] = {}
    for row in rows:  # the newest of each counts
        if row["case"] == "ViT-B-32" and row["loss"] == "infonce":
            rates[row["provider"]] = float(row["samples_per_second"])
    if not {"leanclip", "open_clip compiled"} <= set(rates):
        return []
    return [
        f"| samples a second, ViT-B-32, batch 2,048 | {rates['leanclip']:,.0f} | {rates['open_clip compiled']:,.0f},"
        f" compiled ({rates['open_clip']:,.0f} if not) | synthetic images of 224 px, captions of 8 to 23 tokens,"
        f" bf16, {rows[-1]['device']} |"
    ]


def _memory(rows: list[dict[str, str]]) -> list[str]:
    batch, ranks = 65536, 8
    found = {row["provider"]: row for row in rows if (int(row["batch"]), int(row["ranks"])) == (batch, ranks)}
    if not {"leanclip infonce", "local", "undivided"} <= set(found):
        return []
    own, local, whole = (float(found[name]["extra_gib"]) for name in ("leanclip infonce", "local", "undivided"))
    return [
        f"| memory of the loss, batch {batch:,} on {ranks} GPUs | {own:.1f} GiB | {local:.1f} GiB with its local"
        f" loss, {whole:.1f} without | one rank's share, d = {found['local']['dim']}, {found['local']['device']} |"
    ]


def with_headline(readme: str, text: str) -> str:
    """The README with the text between its marks."""
    begin, end = MARKS
    before, _, rest = readme.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"the README has no {begin} ... {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main() -> None:
    (ROOT / "docs" / "results.md").write_text(page())
    readme = ROOT / "README.md"
    readme.write_text(with_headline(readme.read_text(), headline()))
    print("written to docs/results.md and README.md")


if __name__ == "__main__":
    main()
