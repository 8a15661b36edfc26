"""Prompts: class names in templates such as 'a photo of a {}.'"""

from collections.abc import Sequence
from pathlib import Path

from leanclip.errors import UserError
from leanclip.evaluation.labelled_sets import LabelledSet, read_lines
from leanclip.filesystem import reading
from leanclip.models import TEMPLATES

Prompts = tuple[tuple[str, ...], ...]  # the texts of each class


def prompts_for(labelled: LabelledSet, templates: str | None = None) -> Prompts:
    """The prompts of each class: by `templates` (a name or a file), else by the templates of the set.

    A set without any gets OpenAI's templates if it has 1,000 classes, as ImageNet, else the simple ones.
    """
    if templates is None and labelled.descriptions is not None:
        return labelled.descriptions
    if templates is not None:
        chosen = load_templates(templates)
    elif labelled.templates is not None:
        chosen = _checked(labelled.templates, f"the templates of {labelled.name}")
    else:
        chosen = TEMPLATES["openai" if len(labelled.classnames) == 1000 else "simple"]
    return tuple(
        tuple(template.replace("{}", name).replace("{c}", name) for template in chosen)
        for name in labelled.classnames
    )


def load_templates(name: str) -> tuple[str, ...]:
    if name in TEMPLATES:
        return TEMPLATES[name]
    with reading(name):
        if not Path(name).is_file():
            raise UserError(
                f"--templates {name}: no such file, and none of the sets {', '.join(TEMPLATES)}",
                code="templates.not_found",
            )
    return _checked(read_lines(name), name)


def _checked(lines: Sequence[str], origin: str) -> tuple[str, ...]:
    for number, line in enumerate(lines, 1):
        if "{}" not in line and "{c}" not in line:
            raise UserError(
                f"{origin}, template {number}: {line[:80]!r} has no {{}} for the name of the class",
                code="templates.bad_line",
            )
    return tuple(lines)
