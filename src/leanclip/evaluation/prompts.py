"""Prompt templates: the sentences that a class name is put into."""

from pathlib import Path

from leanclip.errors import UserError
from leanclip.evaluation.labelled_sets import LabelledSet, read_lines
from leanclip.models import PROMPT_SETS, prompt_templates

Prompts = tuple[tuple[str, ...], ...]  # for each class its texts


def prompts_for(labelled: LabelledSet, templates: str | None = None) -> Prompts:
    """What stands for each class: its name in the templates asked for, else what the set brings.

    Where it brings nothing: OpenAI's templates for 1,000 classes, which are ImageNet's, else the simple ones.
    """
    if templates is None and labelled.descriptions is not None:
        return labelled.descriptions
    if templates is not None:
        chosen = load_templates(templates)
    elif labelled.templates is not None:
        chosen = checked(labelled.templates, f"the templates of {labelled.name}")
    else:
        chosen = prompt_templates("openai" if len(labelled.classnames) == 1000 else "simple")
    return tuple(tuple(filled(template, name) for template in chosen) for name in labelled.classnames)


def load_templates(given: str) -> tuple[str, ...]:
    """A named set, or a file with one template per line."""
    if given in PROMPT_SETS:
        return prompt_templates(given)
    if not Path(given).is_file():
        raise UserError(f"--templates {given}: no such file, and none of the sets {', '.join(PROMPT_SETS)}")
    return checked(read_lines(given), given)


def checked(lines: list[str] | tuple[str, ...], where: str) -> tuple[str, ...]:
    if not lines:
        raise UserError(f"{where}: no templates; write one per line, such as 'a photo of a {{}}.'")
    for number, line in enumerate(lines, 1):
        if "{}" not in line and "{c}" not in line:
            raise UserError(f"{where}, template {number}: {line[:80]!r} has no {{}} for the name of the class")
    return tuple(lines)


def filled(template: str, classname: str) -> str:
    return template.replace("{}", classname).replace("{c}", classname)
