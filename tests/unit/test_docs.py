"""The documentation names only what exists: files, flags, commands, losses, recipes."""

import re
import shlex
from pathlib import Path

import pytest

from leanclip.cli import COMMANDS
from leanclip.cli.data import CheckCommand, PackCommand
from leanclip.cli.embed import EmbedCommand
from leanclip.cli.evaluate import EvaluateCommand
from leanclip.cli.export import ExportCommand
from leanclip.cli.flags import sections_of
from leanclip.cli.openclip_flags import FLAGS
from leanclip.cli.plan import PlanCommand
from leanclip.cli.report import ReportCommand
from leanclip.cli.search import SearchCommand
from leanclip.cli.selftest import SelftestCommand
from leanclip.cli.suspects import SuspectsCommand
from leanclip.cli.train import TrainCommand
from leanclip.losses import LOSSES
from leanclip.recipes import DIRECTORY, list_recipes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("docs/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:^|`|: +)leanclip ([^`\n]*)", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")

# Named in the documentation because OpenCLIP has them or other programs do, not because we do.
FOREIGN_FLAGS = {"max-restarts", "signal",
    "logdir", "sort", "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint",
    "rdzv-id", "rdzv-conf", "node-rank", "master-addr", "master-port", "nodes", "requeue", "requirements",
    "per-process", "on-cpu",
    *FLAG.findall(" ".join(f"--{flag.name}" for flag in FLAGS)),
}  # fmt: skip


def flags_of(*kinds: type) -> set[str]:
    names = {flag.name for kind in kinds for section in sections_of(kind) for flag in section.flags}
    return {name.removeprefix("--") for name in names} | {"help", "help-all"}


KNOWN_FLAGS = {
    "train": flags_of(TrainCommand),
    "plan": flags_of(PlanCommand),
    "evaluate": flags_of(EvaluateCommand),
    "embed": flags_of(EmbedCommand),
    "data": flags_of(PackCommand, CheckCommand, SuspectsCommand),
    "export": flags_of(ExportCommand),
    "report": flags_of(ReportCommand),
    "search": flags_of(SearchCommand),
    "selftest": flags_of(SelftestCommand),
}


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[list[str]]:
    """The leanclip commands in a text, split as a shell would."""
    return [shlex.split(match.replace("...", "")) for match in COMMAND.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if linked.name == "imports.svg":
            continue  # drawn when the documentation is built
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name}: {linked.name} has no heading {anchor}"


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted(DIRECTORY.rglob("*.toml"))], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_commands_and_flags_exist(page):
    recipes = {name for name, _ in list_recipes()} | {"list"}
    for words in commands(page.read_text()):
        if not words or words[0] not in COMMANDS:
            continue
        named = {flag for word in words for flag in FLAG.findall(word)}
        assert named <= KNOWN_FLAGS[words[0]], f"{page.name}: leanclip {' '.join(words)}"
        if "--recipe" in words:
            assert words[words.index("--recipe") + 1] in recipes
        if "--loss" in words:
            assert words[words.index("--loss") + 1] in LOSSES
    mentioned = set(FLAG.findall(page.read_text()))
    assert mentioned <= set.union(*KNOWN_FLAGS.values()) | FOREIGN_FLAGS, page.name


def test_commands_are_found_where_they_are_written():
    text = "```sh\nleanclip train --recipe small\n```\nrun `leanclip evaluate x` or\n# Command:  leanclip report r"
    assert [words[0] for words in commands(text)] == ["train", "evaluate", "report"]
