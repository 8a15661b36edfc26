"""What mkdocs does not do by itself.

Links that leave docs/ (to a CSV, a source file) lead to the repository, images outside docs/ are copied into the
site, and the import graph is drawn from the source.
"""

import re
from pathlib import Path
from typing import Any

from import_graph import draw
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "images/imports.svg", content=draw()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    def link(match: re.Match[str]) -> str:
        target = ROOT / match[1]
        if not target.exists():
            raise PluginError(f"{page.file.src_path}: ../{match[1]} does not exist")
        if target.suffix not in (".svg", ".png"):
            return f"]({config.repo_url}/{'tree' if target.is_dir() else 'blob'}/main/{match[1]}"
        name = f"images/{target.name}"
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(target)))
        return f"]({name}"

    return OUTSIDE.sub(link, markdown)
