"""Why the losses differ, or do not: how good the estimates are that FastCLIP lives on, while it trains.

    python benchmarks/evidence/why.py --photos FOLDER         # after quality.py, whose settings it starts from
    python benchmarks/evidence/why.py --write                 # text from the rows there are
    python benchmarks/evidence/why.py --quick                 # tries the code, on a CPU too; nothing is kept

One run of fastclip-v3 at batch 128. At each of its measured points, with the weights as they are, for some of the
samples: g, the mean of exp((s_ij - s_ii) / tau) over *all* other samples j and over several views (crops and captions
drawn as in training); beside it what one batch knows, the same mean over as many samples as a batch has, in one view;
and what the running estimate knows, its u. A loss that divides by a better estimate has a better gradient; InfoNCE
has the batch's.
"""

import math
from functools import partial

import quality
import table
import torch
from experiment import Experiment, experiment
from runs import Place, Run, augmented, train
from torch import Tensor

from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.training.step_context import StepContext

ANCHORS, VIEWS = 1024, 4
FIGURES = (
    "tau", "log_g", "batch_bias", "batch_spread", "estimate_bias", "estimate_spread", "effective_negatives",
    "share_of_first_100",
)  # fmt: skip
MEASURED = ("samples", "loss", "val_t2i10", "test_t2i10", "seen_t2i10")
FIELDS = ("run", "seed", *MEASURED, *FIGURES, *table.PROVENANCE)


@torch.no_grad()
def look(place: Place, batch: int, context: StepContext) -> dict[str, float]:
    """How far from the truth, in nats: what a batch says of log g, and what the estimate says. Both directions."""
    loss, count = context.loss, len(place.photos.train.images)
    assert isinstance(loss, GlobalContrastiveLoss) and loss.state is not None
    tau, draw = float(loss.temperature()), torch.Generator().manual_seed(0)
    anchors = torch.randperm(count, generator=draw)[:ANCHORS].to(place.device)
    few = torch.randint(count, (len(anchors), batch - 1), generator=draw).to(place.device)  # others for each anchor
    known = loss.state.read(["log_u"], (anchors, anchors))["log_u"]
    of_batch, figures = torch.zeros_like(known), {"effective_negatives": 0.0, "share_of_first_100": 0.0}
    means = []
    for number in range(VIEWS):
        pair = view(place, number)
        for side, (own, others) in enumerate((pair, pair[::-1])):
            exponents = differences(own[anchors], others, anchors) / tau
            means.append(log_mean(exponents))
            if number == 0:
                of_batch[side] = log_mean(exponents.gather(1, few))
                weights = exponents.softmax(1)
                first = weights.topk(min(100, weights.shape[1]), dim=1).values.sum(1)
                figures["effective_negatives"] += float(torch.special.entr(weights).sum(1).exp().mean()) / 2
                figures["share_of_first_100"] += float(first.mean()) / 2
    truth = torch.stack(means).view(VIEWS, 2, -1).logsumexp(0) - math.log(VIEWS)
    for name, told in (("batch", of_batch), ("estimate", known)):
        error = (told - truth)[told.isfinite()]  # not every sample has been visited yet
        figures |= {f"{name}_bias": float(error.mean()), f"{name}_spread": float(error.std())}
    return figures | {"log_g": float(truth.mean()), "tau": tau}


def view(place: Place, number: int) -> tuple[Tensor, Tensor]:
    """Embeddings of all training samples, each cropped and with one of its captions, as a training batch has them."""
    data, model = place.photos.train, place.model.eval()
    draw = torch.Generator().manual_seed(number)
    crops = torch.Generator(place.device).manual_seed(number)
    several = data.first.diff()
    chosen = data.first[:-1] + (torch.rand(len(several), generator=draw).double() * several).long()
    with place.autocast:
        images = [model.encode_image(augmented(part, crops)) for part in data.images.split(2000)]
        texts = [model.encode_text(data.tokens[part].long()) for part in chosen.split(5000)]
    model.train()
    return torch.cat(images).float(), torch.cat(texts).float()


def differences(own: Tensor, others: Tensor, at: Tensor) -> Tensor:
    """s_ij - s_ii of the samples `at`; minus infinity where j is i."""
    similar = own @ others.T
    rows = torch.arange(len(at), device=at.device)
    positive = similar[rows, at].clone()
    similar[rows, at] = -math.inf
    return similar - positive[:, None]


def log_mean(exponents: Tensor) -> Tensor:
    """Of exp, over the negatives."""
    return exponents.logsumexp(1) - exponents.isfinite().sum(1).clamp(min=1).log()


def error(figures: dict[str, float], name: str) -> float:
    """The root mean square of what bias and spread are of."""
    return math.hypot(figures[f"{name}_bias"], figures[f"{name}_spread"])


def paragraph(rows: list[dict[str, str]]) -> str:
    lines = [
        "| samples seen | tau | seen / test recall@10 | a batch's log g: bias, spread | the batch is off by"
        " | the estimate's: bias, spread | the estimate is off by | negatives that count | share of the first 100 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        number = {name: float(row[name]) for name in (*MEASURED, *FIGURES)}
        batch, estimate = (error(number, name) for name in ("batch", "estimate"))
        lines.append(
            f"| {number['samples']:,.0f} | {number['tau']:.3f}"
            f" | {100 * number['seen_t2i10']:.1f} / {100 * number['test_t2i10']:.1f}"
            f" | {number['batch_bias']:+.2f}, {number['batch_spread']:.2f} | {batch:.2f}"
            f" | {number['estimate_bias']:+.2f}, {number['estimate_spread']:.2f} | {estimate:.2f}"
            f" | {number['effective_negatives']:,.0f} | {100 * number['share_of_first_100']:.0f}% |"
        )
    last = {name: float(rows[-1][name]) for name in FIGURES}
    errors = {name: error(last, name) for name in ("estimate", "batch")}
    better = "better" if errors["estimate"] < errors["batch"] else "no better"
    note = (
        f"log g in nats, of {ANCHORS:,} samples against all others, over {VIEWS} views; one run of fastclip-v3, seed"
        f" {rows[-1]['seed']}. At the end the running estimate is off by {errors['estimate']:.2f} (root mean square)"
        f" and one batch by {errors['batch']:.2f}: the estimate is {better} than the batch. Negatives that count: the"
        " exponential of the entropy of an anchor's softmax over all samples."
    )
    return "\n".join([*lines, "", note, ""])


def measure(asked: Experiment, run: Run) -> None:
    """All points or none are written down."""
    place = asked.place()
    points = list(train(run, place, 2 if asked.quick else None, partial(look, place, run.batch)))
    for point in points:
        figures = {name: round(point[name], 5) for name in (*MEASURED, *FIGURES)}
        row = {"run": run.key(asked.recipe), "seed": run.seed} | figures | table.provenance()
        table.append(asked.results / "why.csv", FIELDS, row)


def main() -> None:
    asked = experiment(__doc__)
    best = asked.best({"fastclip-v3": quality.trials("fastclip-v3", asked.quick)})
    if not best:
        raise SystemExit("the trials of quality.py are not complete: run it first")
    run = best["fastclip-v3"]
    path = asked.results / "why.csv"
    if not asked.write and not any(row["run"] == run.key(asked.recipe) for row in table.rows(path)):
        measure(asked, run)
    rows = [row for row in table.rows(path) if row["run"] == run.key(asked.recipe)]
    if not rows:
        raise SystemExit("not measured yet: run the command without --write")
    text = paragraph(rows)
    print(text)
    (asked.results / "why.md").write_text(text)


if __name__ == "__main__":
    main()
