"""Imports point one way and form no cycle, lazy imports included."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import leanclip

SOURCE = Path(leanclip.__file__).parent
# Top to bottom: a module may import from tiers below its own and from its own package.
TIERS = (
    ("cli",),
    ("suspects",),
    ("api", "planning", "reporting", "search"),
    ("recipes", "training_run", "evaluation_run"),
    ("config",),
    ("training",),
    ("inference",),
    ("checkpointing",),
    ("runs",),
    ("evaluation", "features"),
    ("packing",),
    ("losses", "optim", "data", "models"),
    ("distributed", "ops"),
    ("device", "worker_pool", "progress"),
    ("filesystem",),
    ("chance", "errors", "settings", "version"),
)
RANK = {name: rank for rank, tier in enumerate(TIERS) for name in tier}
ENTRY = ("__init__", "__main__")  # the public names and the command sit on top of everything
ONE_DOOR = {
    "open_clip": "models/open_clip_api.py",
    "timm": "optim/factory.py",
    "fsspec": "data/files.py",
    "transformers": "models/transformers_clip.py",
    "clip_benchmark": "evaluation/clip_benchmark_main.py",
    "wandb": "runs/trackers.py",
    "usearch": "search/index.py",
    "onnxruntime": "models/formats/onnx_towers.py",
}


def imported(path: Path) -> list[str]:
    """Every imported name, lazy and type-checking imports included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def wrong_arrows(source: Path) -> list[str]:
    wrong = []
    for path in sorted(source.rglob("*.py")):
        importer = path.relative_to(source).parts[0].removesuffix(".py")
        for name in imported(path):
            package, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if package != source.name or target not in RANK or importer in ENTRY or target == importer:
                continue
            assert importer in RANK, f"{importer} has no place in TIERS"
            if RANK[target] <= RANK[importer]:
                wrong.append(f"{path.relative_to(source)} imports {name}")
    return wrong


def module_graph(source: Path) -> dict[str, set[str]]:
    """The modules that each module imports; `from package import module` is an import of the module."""
    paths = {
        ".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }
    graph: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        for name in imported(path):
            target = name if name in paths else name.rpartition(".")[0]
            if target in paths and target != module:
                graph[module].add(target)
    return graph


def test_imports_point_down():
    assert wrong_arrows(SOURCE) == []


def test_there_is_no_module_cycle():
    try:
        TopologicalSorter(module_graph(SOURCE)).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def write_package(folder: Path, **modules: str) -> Path:
    package = folder / "leanclip"
    for name, text in modules.items():
        path = package / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("ops__tiled", "from leanclip.losses import create_loss"),
        ("training__loop", "from leanclip.planning.step_trace import tracing"),
        ("checkpointing__state", "def f():\n    from leanclip.training.step import training_step"),
        ("runs__metrics", "from leanclip.checkpointing import storage"),
        ("data__index", "from leanclip.packing.pack import pack"),
        ("data__loader", "import leanclip.evaluation.embed"),
        ("filesystem", "from leanclip.distributed import Ranks"),
    ],
)
def test_a_wrong_arrow_is_reported(tmp_path, importer, line):
    right = "import torch\nfrom leanclip.errors import UserError\n"
    assert wrong_arrows(write_package(tmp_path, **{importer: right})) == []
    wrong = wrong_arrows(write_package(tmp_path, **{importer: right + line}))
    assert len(wrong) == 1 and wrong[0].startswith(importer.replace("__", "/"))


def test_a_cycle_behind_lazy_imports_is_reported(tmp_path):
    lazy = "def f():\n    from leanclip.models import build\n"
    package = write_package(tmp_path, models__build="from leanclip.models.weights import w", models__weights=lazy)
    with pytest.raises(CycleError):
        TopologicalSorter(module_graph(package)).prepare()


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
