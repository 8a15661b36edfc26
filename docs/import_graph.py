"""Draws which part of src/leanclip imports which: layers from the longest path, arrows without the implied ones."""

import ast
import io
from graphlib import TopologicalSorter
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

SOURCE = Path(__file__).parent.parent / "src" / "leanclip"
ENTRY = ("__init__", "__main__")
Graph = dict[str, set[str]]


def package_imports(source: Path = SOURCE) -> Graph:
    """What each package or top-level module imports of the others, lazy imports included."""
    graph: Graph = {}
    for path in sorted(source.rglob("*.py")):
        part = path.relative_to(source).parts[0].removesuffix(".py")
        targets = graph.setdefault(part, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == source.name:
                names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                targets.update(name for name in names if name != part)
    parts = set(graph) - set(ENTRY)
    return {part: graph[part] & parts for part in sorted(parts)}


def reduced(graph: Graph) -> Graph:
    """Without the arrows that a longer way implies."""
    reach: Graph = {}
    for part in TopologicalSorter(graph).static_order():
        reach[part] = graph[part].union(*(reach[target] for target in graph[part]))
    return {
        part: {target for target in targets if not any(target in reach[other] for other in targets)}
        for part, targets in graph.items()
    }


def layers(graph: Graph) -> list[list[str]]:
    """From the top: a part stands above everything that it imports, as low as that allows."""
    height: dict[str, int] = {}
    for part in TopologicalSorter(graph).static_order():  # raises CycleError
        height[part] = 1 + max((height[target] for target in graph[part]), default=-1)
    return [[part for part in graph if height[part] == level] for level in range(max(height.values()), -1, -1)]


def draw(source: Path = SOURCE) -> str:
    """The graph as SVG."""
    graph = package_imports(source)
    rows = layers(graph)
    figure = Figure(figsize=(8, 0.75 * len(rows)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    place = {
        part: ((column + 0.5) / len(row), -float(level))
        for level, row in enumerate(rows)
        for column, part in enumerate(row)
    }
    arrow = {"arrowstyle": "-|>", "color": "#8899aa", "shrinkA": 14, "shrinkB": 16, "linewidth": 0.8}
    for part, targets in reduced(graph).items():
        for target in sorted(targets):
            axes.annotate("", place[target], place[part], arrowprops=arrow)
    for part, (x, y) in place.items():
        style = {"boxstyle": "round,pad=0.4", "facecolor": "#e8eef7", "edgecolor": "#335577"}
        axes.text(x, y, part, ha="center", va="center", fontsize=10, family="monospace", bbox=style)
    axes.set_xlim(0, 1)
    axes.set_ylim(0.5 - len(rows), 0.5)
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "leanclip", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


if __name__ == "__main__":
    print(draw())
