"""Recipes: complete settings by name, as TOML files whose first comment says what each is for."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanclip.config import load_toml, override, yielding
from leanclip.errors import UserError
from leanclip.runs import TrainConfig

DIRECTORY = Path(__file__).parent


def load_recipe(name: str) -> dict[str, Any]:
    return load_toml(recipe_path(name))


def recipe_path(name: str) -> Path:
    names = [known for known, _ in list_recipes()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
        hint = f"nearest: {', '.join(near)} (--recipe list lists all)" if near else "--recipe list lists all"
        raise UserError(f"unknown recipe {name!r}; {hint}", code="recipe.unknown")
    return DIRECTORY / f"{name}.toml"


def list_recipes() -> list[tuple[str, str]]:
    """All recipes with the first line of their description."""
    recipes = []
    for path in sorted(DIRECTORY.rglob("*.toml")):
        first = path.read_text().partition("\n")[0]
        recipes.append((path.relative_to(DIRECTORY).with_suffix("").as_posix(), first.lstrip("# ")))
    return recipes


def settings_below(typed: Mapping[str, Any]) -> TrainConfig:
    """The settings of the recipe and the file that `typed` names, which the values of `typed` then override."""
    settings = TrainConfig()
    recipe, file = typed.get("recipe"), typed.get("config")
    if recipe not in (None, "list"):
        settings = override(settings, load_recipe(recipe), f"recipe {recipe}")
    if file is not None:
        settings = override(settings, load_toml(Path(file)), file)
    return yielding(settings, typed)
