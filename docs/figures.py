"""Draws the figures of docs/algorithm.md: python docs/figures.py

The numbers come from a few lines of numpy and from the package's schedule of gamma.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from leanclip.losses import LossConfig
from leanclip.losses.normalizer import inner_rate

IMAGES = Path(__file__).parent / "images"
STYLE = Path(__file__).parents[1] / "benchmarks" / "plots.mplstyle"
Points = tuple[Sequence[float], Sequence[float]]


def draw(name: str, title: str, x_label: str, lines: Mapping[str, Points]) -> None:
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3))
        for label, points in lines.items():
            axes.plot(*points, label=label)
        axes.set(title=title, xlabel=x_label)
        axes.legend()
        figure.savefig(IMAGES / name, metadata={"Date": None})
        plt.close(figure)


def log_g(similarity: np.ndarray, tau: float) -> np.ndarray:
    """log of the mean of exp(similarity / tau) over the last axis; the positive's shift cancels in a difference."""
    logits = similarity / tau
    top = logits.max(-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).mean(-1, keepdims=True)))[..., 0]


def random_similarities(anchors: int, candidates: int, dim: int) -> np.ndarray:
    random = np.random.default_rng(0)
    sides = [random.standard_normal((rows, dim)) for rows in (anchors, candidates)]
    image, text = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides)
    return image @ text.T


def batch_bias() -> dict[str, Points]:
    """Mean of log g over batches, minus log g over everything."""
    similarity, powers = random_similarities(256, 1 << 14, 64), range(2, 15)
    lines: dict[str, Points] = {}
    for tau in (0.07, 0.03, 0.01):
        truth = log_g(similarity, tau)[:, None]
        batches = (similarity.reshape(256, -1, 1 << power) for power in powers)
        lines[f"tau {tau}"] = powers, [float((log_g(batch, tau) - truth).mean()) for batch in batches]
    return lines


def gamma_schedules() -> dict[str, Points]:
    settings = {
        "CC3M": (37, "cosine", 0.2, 18),
        "LAION": (30, "cosine", 0.8, 10),
        "auto": (37, "auto", None, None),
        "constant": (37, "constant", 0.6, None),
    }
    lines: dict[str, Points] = {}
    for name, (epochs, schedule, gamma_min, decay_epochs) in settings.items():
        config = LossConfig(gamma_min=gamma_min, gamma_schedule=schedule, gamma_decay_epochs=decay_epochs)
        lines[name] = range(epochs), [inner_rate(config, epoch, epochs) for epoch in range(epochs)]
    return lines


def old_batch_weights() -> dict[str, Points]:
    visits = range(11)
    return {f"gamma {gamma}": (visits, [gamma * (1 - gamma) ** k for k in visits]) for gamma in (0.2, 0.6, 0.8)}


def estimate_errors() -> dict[str, Points]:
    """Root mean square error of log u against the truth; the embeddings stay fixed, 127 negatives a visit."""
    similarity, tau, visits = random_similarities(512, 1 << 14, 64), 0.03, 16
    random, truth = np.random.default_rng(1), log_g(similarity, tau)
    batches = [log_g(similarity[:, random.choice(1 << 14, 127, replace=False)], tau) for _ in range(visits)]
    lines: dict[str, Points] = {}
    for gamma in (1.0, 0.6, 0.2):
        log_u, errors = batches[0], []
        for log_batch in batches:  # at the first visit u is the batch's own value whatever gamma is
            with np.errstate(divide="ignore"):
                log_u = np.logaddexp(np.log1p(-gamma) + log_u, np.log(gamma) + log_batch)
            errors.append(float(np.sqrt(np.mean((log_u - truth) ** 2))))
        lines[f"gamma {gamma}"] = range(1, visits + 1), errors
    return lines


if __name__ == "__main__":
    draw("bias.svg", "Bias of a batch's log g", "log2 of the negatives in the batch", batch_bias())
    draw("gamma.svg", "The inner learning rate gamma", "epoch", gamma_schedules())
    draw("forgetting.svg", "Weight of an old batch in u", "visits ago", old_batch_weights())
    draw("memory.svg", "Error of log u, 127 negatives a visit, tau 0.03", "visits", estimate_errors())
