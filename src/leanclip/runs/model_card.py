"""The model card of a run, a checkpoint or an export: README.md with the front matter that model hubs read."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal

from leanclip.runs.metrics import Result

FRONT = """---
library_name: {library}
pipeline_tag: zero-shot-image-classification
license: unknown
tags:
- clip
- {library}
- leanclip
---
"""

USE = {
    "open_clip": """## Use

```python
import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:PATH")  # the directory with the weights
tokenizer = open_clip.get_tokenizer("local-dir:PATH")
```

or, with leanclip, `model, preprocess, tokenizer = leanclip.load("PATH")`.
""",
    "transformers": """## Use

```python
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

model, processor = CLIPModel.from_pretrained("PATH"), CLIPProcessor.from_pretrained("PATH")  # this directory
inputs = processor(text=["a cat", "a dog"], images=Image.open("image.jpg"),
                   return_tensors="pt", padding=True, truncation=True)
print(model(**inputs).logits_per_image.softmax(-1))
```
""",
    "onnx": """## Use

```python
import numpy as np
import onnxruntime
from PIL import Image
from tokenizers import Tokenizer

# RGB, resized as preprocess.json says; its normalisation is in the graph.
pixels = np.asarray(Image.open("image.jpg").convert("RGB").resize((WIDTH, HEIGHT))).transpose(2, 0, 1)[None]
image = onnxruntime.InferenceSession("image.onnx").run(None, {"pixels": pixels})[0]
texts = Tokenizer.from_file("tokenizer.json").encode_batch(["a cat", "a dog"])
tokens = np.array([text.ids for text in texts])
text = onnxruntime.InferenceSession("text.onnx").run(None, {"tokens": tokens})[0]
print(image @ text.T)
```
""",
}

LIMITS = """## Limits

The licence is unknown until you write one into the first lines of this file: it depends on the training data. The
model learned from images and captions as they are, and reproduces their errors and biases. The results above hold for
the named sets only; evaluate the model on your own data before you rely on it.
"""


def model_card(
    facts: Mapping[str, Any],
    results: Mapping[str, Result],
    *,
    step: int | None = None,
    library: Literal["open_clip", "transformers", "onnx"] = "open_clip",
) -> str:
    """The card after `step` steps: `facts` is the content of run.json, `results` the last evaluation on each set."""
    parts = [
        FRONT.format(library=library),
        f"# {one_line(facts.get('name') or 'model')}\n",
        f"A CLIP model ({one_line(facts.get('model') or 'unknown')}): an image encoder and a text encoder in one"
        f" embedding space. Trained with leanclip {one_line(facts.get('version') or '')}."
        + (" Every setting is in `config.toml`.\n" if library == "open_clip" else "\n"),
        *(f"> {one_line(note)}\n" for note in facts.get("notes") or ()),
        "## Training\n",
        training(facts, step),
        "## Results\n",
        *(evaluation(set_name, result) for set_name, result in results.items()),
        *(() if results else ("Not evaluated.\n",)),
        USE[library],
        LIMITS,
    ]
    return "\n".join(parts)


def training(facts: Mapping[str, Any], step: int | None) -> str:
    planned = facts.get("steps")
    step = planned if step is None else step
    rows = {
        "Loss": facts.get("loss"),
        "Parameters": grouped(facts.get("parameters")),
        **(facts.get("architecture") or {}),
        "Training pairs": grouped(facts.get("train_samples")),
        "Global batch": grouped(facts.get("global_batch")),
        "Steps": grouped(step) + (f" of {grouped(planned)}" if planned not in (None, step) else ""),
        "Weights": f"averaged, decay {facts['ema']:g}" if facts.get("ema") else None,
        "Processes": grouped(facts.get("processes")),
        "Started": facts.get("started"),
        **{f"Environment: {key}": value for key, value in (facts.get("environment") or {}).items()},
    }
    return table(("", ""), [(key, value) for key, value in rows.items() if value not in (None, "")])


def evaluation(name: str, result: Result) -> str:
    when = "before training" if result.step == 0 else f"after step {result.step:,}"
    head, columns = ("metric", "value"), [result.metrics]
    if result.before is not None and result.step:
        head, columns = ("metric", "before training", "after"), [result.before, result.metrics]
    rows = [(key, *(figure(key, column.get(key)) for column in columns)) for key in result.metrics]
    return f"On {one_line(name)}, {when}:\n\n" + table(head, rows)


def figure(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not a number"
    if float(value).is_integer() and "recall" not in name and "top" not in name:
        return grouped(int(value))
    return f"{100 * value:.2f} %" if 0 <= value <= 1 else f"{value:.4g}"


def grouped(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(one_line(cell) for cell in line) + " |\n" for line in lines)


def one_line(text: object) -> str:
    """Untrusted text as one line of escaped Markdown: no HTML, no table borders."""
    flat = " ".join(str(text).split())
    return escape(re.sub(r"([\\|\[\]*`])", r"\\\1", flat), quote=False)
