"""How exact FastCLIP's running estimates are during training.

    python benchmarks/evidence/estimate_error.py --photos FOLDER   # after compare_losses.py, with its settings
    python benchmarks/evidence/estimate_error.py --quick           # a test of the code on any machine; keeps nothing

One run of fastclip-v3 at batch 128. At each evaluated point, with the weights of that point, for a part of the
samples: g, the mean of exp((s_ij - s_ii) / tau) over *all* other samples j and over several views (crops and captions
drawn as in training); the same mean over as many samples as a batch has, in a further view, which is InfoNCE's
estimate; and the running estimate u. A loss that divides by a better estimate has a better gradient.
"""

import math
from functools import partial
from pathlib import Path

import compare_losses
import measurements
import torch
from measurements import Table
from torch import Tensor
from training_runs import Workspace, augment, store_from_command_line, train

from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.training.step_context import StepContext

ANCHORS, VIEWS = 1024, 4
COLUMNS = (
    "samples", "loss", "val_t2i10", "test_t2i10", "seen_t2i10", "tau", "log_g", "batch_bias", "batch_spread",
    "estimate_bias", "estimate_spread", "effective_negatives", "share_of_first_100",
)  # fmt: skip


@torch.no_grad()
def inspect(place: Workspace, batch: int, context: StepContext) -> dict[str, float]:
    """Errors of log g, in nats, of a batch's mean and of the running estimate. Both directions."""
    loss, count = context.loss, len(place.data.train.images)
    assert isinstance(loss, GlobalContrastiveLoss) and loss.state is not None
    tau, random = float(loss.temperature()), torch.Generator().manual_seed(0)
    anchors = torch.randperm(count, generator=random)[:ANCHORS].to(place.device)
    in_batch = torch.randint(count, (len(anchors), batch - 1), generator=random).to(place.device)
    estimates = {"estimate": loss.state.read(["log_u"], (anchors, anchors))["log_u"]}
    estimates["batch"] = torch.zeros_like(estimates["estimate"])
    figures = {"tau": tau, "effective_negatives": 0.0, "share_of_first_100": 0.0}
    means = []
    for number in range(VIEWS + 1):
        pair = view(place, number)
        for side, (queries, candidates) in enumerate((pair, pair[::-1])):
            exponents = differences(queries[anchors], candidates, anchors) / tau
            if number < VIEWS:
                means.append(log_mean(exponents))
            else:  # the batch's own view is no part of the truth
                estimates["batch"][side] = log_mean(exponents.gather(1, in_batch))
                weights = exponents.softmax(1)
                largest = weights.topk(min(100, weights.shape[1]), dim=1).values.sum(1)
                figures["effective_negatives"] += float(torch.special.entr(weights).sum(1).exp().mean()) / 2
                figures["share_of_first_100"] += float(largest.mean()) / 2
    truth = torch.stack(means).view(VIEWS, 2, -1).logsumexp(0) - math.log(VIEWS)
    for name, estimate in estimates.items():
        error = (estimate - truth)[estimate.isfinite()]  # samples without a visit have no estimate yet
        figures |= {f"{name}_bias": float(error.mean()), f"{name}_spread": float(error.std())}
    return figures | {"log_g": float(truth.mean())}


def view(place: Workspace, number: int) -> tuple[Tensor, Tensor]:
    """Embeddings of all training samples, each cropped and with one of its captions, as in a training batch."""
    data, model = place.data.train, place.model.eval()
    random = torch.Generator().manual_seed(number)
    crops = torch.Generator(place.device).manual_seed(number)
    count = data.first.diff()
    chosen = data.first[:-1] + (torch.rand(len(count), generator=random).double() * count).long()
    with place.autocast:
        images = [model.encode_image(augment(part, crops)) for part in data.images.split(2000)]
        texts = [model.encode_text(data.tokens[part].long()) for part in chosen.split(5000)]
    model.train()
    return torch.cat(images).float(), torch.cat(texts).float()


def differences(queries: Tensor, candidates: Tensor, positives: Tensor) -> Tensor:
    """s_ij - s_ii for each query; minus infinity for its positive."""
    similarity = queries @ candidates.T
    rows = torch.arange(len(positives), device=positives.device)
    positive = similarity[rows, positives].clone()
    similarity[rows, positives] = -math.inf
    return similarity - positive[:, None]


def log_mean(exponents: Tensor) -> Tensor:
    """log of the mean of exp over the negatives."""
    return exponents.logsumexp(1) - exponents.isfinite().sum(1).clamp(min=1).log()


def table(path: Path) -> Table:
    """Of the newest run."""
    stored = measurements.rows(path)
    rows = []
    for row in stored:
        if row["run"] != stored[-1]["run"]:
            continue
        number = {name: float(row[name]) for name in COLUMNS}
        errors = []
        for name in ("batch", "estimate"):
            bias, spread = number[f"{name}_bias"], number[f"{name}_spread"]
            errors += [f"{bias:+.2f}", f"{spread:.2f}", f"{math.hypot(bias, spread):.2f}"]
        recalls = [f"{100 * number[name]:.1f}" for name in ("seen_t2i10", "test_t2i10")]
        negatives = [f"{number['effective_negatives']:,.0f}", f"{100 * number['share_of_first_100']:.0f}%"]
        rows.append([f"{number['samples']:,.0f}", f"{number['tau']:.3f}", *recalls, *errors, *negatives])
    errors = [f"{name} {figure}" for name in ("batch", "estimate") for figure in ("bias", "spread", "error")]
    columns = ["samples seen", "tau", "seen", "test", *errors, "effective negatives", "share of the largest 100"]
    return Table(columns, rows)


def main() -> None:
    store = store_from_command_line(__doc__)
    comparison = compare_losses.Comparison(store, quick=store.steps is not None)
    run = comparison.best({"fastclip-v3": compare_losses.trials("fastclip-v3")})["fastclip-v3"]
    path = store.results / "estimate_error.csv"
    place = store.workspace
    for point in list(train(run, place, store.steps, partial(inspect, place, run.batch))):
        row = {"run": run.key(store.recipe), "seed": run.seed}
        row |= {name: round(point[name], 5) for name in COLUMNS}
        measurements.append(path, row | measurements.provenance())
    print(table(path))


if __name__ == "__main__":
    main()
