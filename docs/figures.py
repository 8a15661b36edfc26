"""Draws the figures of docs/algorithm.md: python docs/figures.py

The numbers come from a few lines of numpy and from the package's own schedules; the lines are drawn with the
report's charts, in a style that needs no page around it.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from leanclip.losses.gamma import InnerRate
from leanclip.reporting.chart import (
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Series,
    curve,
    grid,
    step_axis,
    value_axis,
)

IMAGES = Path(__file__).parent / "images"
HEAD = 46  # room for title and legend
STYLE = """
text{font:11px system-ui,sans-serif;fill:#444}.title{font-size:13px;font-weight:600;fill:#111}
.grid{stroke:#e3e3e3}.axis{stroke:#888}.line{fill:none;stroke-width:2}.dot{stroke:none}
.line.series-0{stroke:#1f6f8b}.line.series-1{stroke:#c2571a}.line.series-2{stroke:#2e7d32}.line.series-3{stroke:#7b4fa3}
.dot.series-0{fill:#1f6f8b}.dot.series-1{fill:#c2571a}.dot.series-2{fill:#2e7d32}.dot.series-3{fill:#7b4fa3}
"""


def figure(title: str, x_label: str, series: Sequence[Series]) -> str:
    """One chart as a file of its own, on white, so that it reads on light and dark pages."""
    x_axis = step_axis([v for s in series for v in s.x])
    y_axis = value_axis([v for s in series for v in s.y], from_zero=True)
    body = [*grid(x_axis, y_axis, "")]
    body += [curve(s, list(range(len(s.x))), x_axis, y_axis, i, markers=False) for i, s in enumerate(series)]
    width = (RIGHT - LEFT) / len(series)
    keys = [
        f'<path class="line series-{i}" d="M{LEFT + i * width:.0f},34h16"/>'
        f'<text x="{LEFT + i * width + 20:.0f}" y="38">{escape(s.name)}</text>'
        for i, s in enumerate(series)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + HEAD + 16}" width="{2 * WIDTH}" '
        f'role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        '<rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>{"".join(keys)}'
        f'<g transform="translate(0 {HEAD})">{"".join(body)}</g>'
        f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT + HEAD + 10}" text-anchor="middle">{escape(x_label)}</text>'
        "</svg>\n"
    )


def log_g(similarity: np.ndarray, tau: float) -> np.ndarray:
    """log of the mean of exp(similarity / tau) over the last axis; the positive's shift cancels in a difference."""
    logits = similarity / tau
    top = logits.max(-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).mean(-1, keepdims=True)))[..., 0]


def random_similarities(anchors: int, candidates: int, dim: int) -> np.ndarray:
    draw = np.random.default_rng(0)
    unit = [draw.standard_normal((rows, dim)) for rows in (anchors, candidates)]
    image, text = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in unit)
    return image @ text.T


def bias_of_the_batch() -> str:
    """Mean of log g over batches, minus log g over everything."""
    similarity = random_similarities(256, 1 << 14, 64)
    powers = range(2, 15)
    series = []
    for tau in (0.07, 0.03, 0.01):
        truth = log_g(similarity, tau)
        gaps = [(log_g(similarity.reshape(256, -1, 1 << p), tau) - truth[:, None]).mean() for p in powers]
        series.append(Series(name=f"tau {tau}", x=list(powers), y=[float(gap) for gap in gaps]))
    return figure("Bias of a batch's log g against the data set's", "log2 of the negatives in the batch", series)


def gamma_schedules() -> str:
    def line(name: str, epochs: int, **settings: object) -> Series:
        rate = InnerRate(**({"gamma_min": None, "decay_epochs": None, "per_step": False} | settings))  # pyright: ignore
        return Series(name=name, x=list(range(epochs)), y=[rate(epoch, epochs) for epoch in range(epochs)])

    series = [
        line("CC3M", 37, schedule="cosine", gamma_min=0.2, decay_epochs=18),
        line("LAION", 30, schedule="cosine", gamma_min=0.8, decay_epochs=10),
        line("auto", 37, schedule="auto"),
        line("constant", 37, schedule="constant", gamma_min=0.6),
    ]
    return figure("The inner learning rate gamma", "epoch", series)


def forgetting() -> str:
    visits = list(range(11))
    series = [
        Series(name=f"gamma {gamma}", x=visits, y=[gamma * (1 - gamma) ** k for k in visits])
        for gamma in (0.2, 0.6, 0.8)
    ]
    return figure("Weight of an old batch in u", "visits ago", series)


def what_memory_buys() -> str:
    """Root mean square error of log u against the truth, embeddings held still, 127 negatives a visit."""
    similarity, tau, visits = random_similarities(512, 1 << 14, 64), 0.03, 16
    draw = np.random.default_rng(1)
    truth = log_g(similarity, tau)
    seen = [log_g(similarity[:, draw.choice(1 << 14, 127, replace=False)], tau) for _ in range(visits)]
    series = []
    for gamma in (1.0, 0.6, 0.2):
        log_u, errors = seen[0], []
        for visit, fresh in enumerate(seen):
            if visit and gamma < 1:
                log_u = np.logaddexp(np.log1p(-gamma) + log_u, np.log(gamma) + fresh)
            elif visit:
                log_u = fresh
            errors.append(float(np.sqrt(np.mean((log_u - truth) ** 2))))
        series.append(Series(name=f"gamma {gamma}", x=list(range(1, visits + 1)), y=errors))
    return figure("Error of log u, 127 negatives a visit, tau 0.03", "visits", series)


FIGURES = {
    "bias.svg": bias_of_the_batch,
    "gamma.svg": gamma_schedules,
    "forgetting.svg": forgetting,
    "memory.svg": what_memory_buys,
}

if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, draw_it in FIGURES.items():
        (IMAGES / name).write_text(draw_it())
        print(IMAGES / name)
