"""Imports point one way: a short walk over the source that fails on an arrow the wrong way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import leanclip

SOURCE = Path(leanclip.__file__).parent
# Top to bottom: a module may import from tiers below its own and from its own package.
TIERS = (
    ("cli",),
    ("api", "recipes", "planning", "reporting"),
    ("config",),
    ("training",),
    ("inference",),
    ("checkpointing",),
    ("runs",),
    ("evaluation",),
    ("packing",),
    ("losses", "optim", "data", "models"),
    ("distributed", "ops"),
    ("device", "worker_pool", "progress"),
    ("filesystem",),
    ("errors",),
)
RANK = {name: rank for rank, tier in enumerate(TIERS) for name in tier}
ENTRY = ("__init__", "__main__")  # the public names and the command sit on top of everything
ONE_DOOR = {
    "open_clip": "models/open_clip_api.py",
    "tyro": "cli/parse.py",
    "timm": "optim/factory.py",
    "fsspec": "data/files.py",
    "transformers": "models/transformers_clip.py",
    "clip_benchmark": "evaluation/clip_benchmark_main.py",
    "wandb": "runs/trackers.py",
}


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def wrong_arrows(source: Path) -> list[str]:
    wrong = []
    for path in sorted(source.rglob("*.py")):
        own = path.relative_to(source).parts[0].removesuffix(".py")
        for name in imported(path):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package != source.name or target not in RANK or own in ENTRY or target == own:
                continue
            assert own in RANK, f"{own} has no place in TIERS"
            if RANK[target] <= RANK[own]:
                wrong.append(f"{path.relative_to(source)} imports {name}")
    return wrong


def test_imports_point_down():
    assert wrong_arrows(SOURCE) == []


def test_a_wrong_import_is_found(tmp_path):
    package = tmp_path / "leanclip"
    (package / "ops").mkdir(parents=True)
    (package / "ops" / "tiled.py").write_text("from leanclip.losses import create_loss\n")
    (package / "data").mkdir()
    (package / "data" / "loader.py").write_text("import torch\nfrom leanclip.errors import UserError\n")
    assert wrong_arrows(package) == [
        "ops/tiled.py imports leanclip.losses",
        "ops/tiled.py imports leanclip.losses.create_loss",
    ]


def test_third_party_libraries_enter_through_one_module():
    for library, door in ONE_DOOR.items():
        users = {
            path.relative_to(SOURCE).as_posix()
            for path in SOURCE.rglob("*.py")
            if any(name.partition(".")[0] == library for name in imported(path))
        }
        assert users == {door}


@pytest.mark.parametrize("command", ["", "--version", "trian", "report --help", "data --help"])
def test_what_needs_no_torch_does_not_wait_for_it(command):
    code = (
        "import sys; from leanclip.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize("name", ["create_loss", "losses.create_loss"])
def test_a_name_is_there_without_another_import(name):
    code = f"import leanclip; print(leanclip.{name}('infonce').__class__.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == type(leanclip.create_loss("infonce")).__name__


def test_the_public_names_are_there_when_asked_for():
    assert set(leanclip.__all__) <= set(dir(leanclip))
    for name in leanclip.__all__:
        assert getattr(leanclip, name) is not None
    assert not hasattr(leanclip, "loss")
