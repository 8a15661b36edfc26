"""Words of the old dialect do not come back into what people read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import leanclip
from leanclip.cli import COMMANDS

ROOT = Path(leanclip.__file__).parents[2]
WORDS = (
    "mend", "mended", "complains", "blow", "blows", "rival", "rivals", "patience", "lent", "rehearsal", "rehearsed",
    "who computes", "who shows", "nobody's", "there twice", "of no kind", "another future", "may be chance",
)  # fmt: skip
PATTERN = re.compile(r"(?<![a-z])(" + "|".join(re.escape(word) for word in WORDS) + r")(?![a-z])", re.IGNORECASE)


def old_words(text: str) -> list[str]:
    """The old words of a text, underscores counted as spaces so that identifiers count too."""
    return [match[0] for match in PATTERN.finditer(re.sub(r"[\s_]+", " ", text))]


def test_the_search_is_not_blind():
    assert old_words("It was\nmended; PATIENCE, set_rival, may\n be chance.") == [
        "mended", "PATIENCE", "rival", "may be chance",
    ]  # fmt: skip
    assert old_words("recommended, talent, blown, equivalent") == []


def test_readme_docs_and_source_have_none():
    patterns = ("README.md", "docs/*.md", "src/**/*.py", "src/**/*.j2", "src/**/*.toml")
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert len(paths) > 100
    assert {str(path.relative_to(ROOT)): words for path in paths if (words := old_words(path.read_text()))} == {}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_none(command):
    everything = ["--help-all"] if command in ("train", "plan", "evaluate") else ["--help"]
    done = subprocess.run(
        [sys.executable, "-m", "leanclip", *command.split(), *everything], capture_output=True, text=True, check=True
    )
    assert len(done.stdout) > 200
    assert old_words(done.stdout) == []
