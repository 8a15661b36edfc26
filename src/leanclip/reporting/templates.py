"""The templates of the report. They escape every text."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def templates() -> Environment:
    return Environment(
        loader=PackageLoader("leanclip", "reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
