"""Puts the findings of all commands here into docs/results.md, in the order of this list.

python benchmarks/evidence/assemble.py
"""

import re
from pathlib import Path

import table

DOCS = Path(__file__).parents[2] / "docs"
INTRODUCTION = """# What was measured

The claims of FastCLIP (arXiv 2407.01445) and DisCo-CLIP (arXiv 2304.08480), on real data and hardware, whatever came
out. Each section is written by its command from its CSV file, where every row names the version, the hardware, the
seed and the command. This page is put together by `python benchmarks/evidence/assemble.py`.
"""
SECTIONS = {
    "quality": ("Quality at equal budget", "quality.py", "runs.csv"),
    "why": ("Why they differ, or do not", "why.py", "why.csv"),
    "components": ("The three components", "components.py", "runs.csv"),
    "batch_size": ("Small batch against large", "batch_size.py", "runs.csv"),
    "loss_over_ranks": ("Memory and time of the loss over ranks", "loss_over_ranks.py", "loss_over_ranks.csv"),
    "communication": ("Communication", "communication.py", "communication.csv"),
    "wall_clock": ("Wall clock to a target", "wall_clock.py", "wall_clock.csv"),
}
RESULTS = "../benchmarks/evidence/results"


def page(results: Path = table.RESULTS) -> str:
    """The whole text. What has not been measured is named as such."""
    parts = [INTRODUCTION]
    for name, (title, command, rows) in SECTIONS.items():
        parts.append(f"## {title}\n")
        written = results / f"{name}.md"
        if written.is_file():
            parts.append(f"`python benchmarks/evidence/{command}`, [{rows}]({RESULTS}/{rows}).\n")
            parts.append(re.sub(r"!\[(.*?)\]\((?!\.\./)", rf"![\1]({RESULTS}/", written.read_text().strip()) + "\n")
        else:
            parts.append(f"Not measured yet. The command is there: `python benchmarks/evidence/{command}`.\n")
    return "\n".join(parts)


def main() -> None:
    (DOCS / "results.md").write_text(page())
    print("written to docs/results.md")


if __name__ == "__main__":
    main()
