"""Why the losses differ, or do not: how good the estimates are that FastCLIP lives on, while it trains.

    python benchmarks/evidence/why.py --photos FOLDER         # after quality.py, whose settings it starts from
    python benchmarks/evidence/why.py --write                 # text from the rows there are
    python benchmarks/evidence/why.py --quick                 # tries the code, on a CPU too; nothing is kept

One run of fastclip-v3 at batch 128. At each of its measured points, with the weights as they are: for some of the
samples g, the mean over *all* other samples of exp((s_ij - s_ii) / tau), is computed, and beside it what a batch
knows (the same mean over as many samples as a batch has) and what the running estimate knows (its u). A loss that
divides by a better estimate has a better gradient; InfoNCE has the batch's. Samples are taken as they are, without
crops, each with its first caption; u has seen crops and all captions, so it is not only late but of other pictures,
too.
"""

import math
from functools import partial

import quality
import table
import torch
from runs import Experiment, Place, Run, experiment, train
from torch import Tensor

from leanclip.losses.global_contrastive import GlobalContrastiveLoss
from leanclip.training.pieces import Pieces

ANCHORS = 1024
FIGURES = (
    "tau", "log_g", "batch_bias", "batch_spread", "estimate_bias", "estimate_spread", "effective_negatives",
    "share_of_first_100",
)  # fmt: skip
MEASURED = ("samples", "loss", "val_t2i10", "test_t2i10", "seen_t2i10")
FIELDS = ("run", "seed", *MEASURED, *FIGURES, *table.PROVENANCE)


@torch.no_grad()
def look(place: Place, batch: int, pieces: Pieces) -> dict[str, float]:
    """How far from the truth, in nats: what a batch says of log g, and what the estimate says. Both directions."""
    data, loss, model = place.photos.train, pieces.loss, place.model.eval()
    assert isinstance(loss, GlobalContrastiveLoss) and loss.state is not None
    first = data.first[:-1]
    with place.autocast:
        images = torch.cat([model.encode_image(part) for part in data.images.split(2000)]).float()
        texts = torch.cat([model.encode_text(data.tokens[part].long()) for part in first.split(5000)]).float()
    model.train()
    draw = torch.Generator().manual_seed(0)
    anchors = torch.randperm(len(images), generator=draw)[:ANCHORS].to(images.device)
    tau = float(loss.temperature())
    known = loss.state.read(["log_u"], (anchors, anchors))["log_u"]
    exact, of_batch, spreads, firsts = [], [], [], []
    for own, others in ((images, texts), (texts, images)):
        exponents = differences(own[anchors], others, anchors) / tau
        few = torch.randperm(len(images), generator=draw)[: batch - 1].to(images.device)
        exact.append(log_mean(exponents))
        of_batch.append(log_mean(exponents[:, few]))
        weights = exponents.softmax(1)
        spreads.append(torch.special.entr(weights).sum(1).exp().mean())
        firsts.append(weights.topk(min(100, weights.shape[1]), dim=1).values.sum(1).mean())
    truth = torch.stack(exact)
    figures = {"log_g": truth.mean(), "effective_negatives": sum(spreads) / 2, "share_of_first_100": sum(firsts) / 2}
    for name, told in (("batch", torch.stack(of_batch)), ("estimate", known)):
        error = (told - truth)[told.isfinite()]  # an anchor may not have been visited, or be one of the few itself
        figures |= {f"{name}_bias": error.mean(), f"{name}_spread": error.std()}
    return {name: float(value) for name, value in figures.items()} | {"tau": tau}


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


def paragraph(rows: list[dict[str, str]]) -> str:
    lines = [
        "| samples seen | tau | seen / test recall@10 | a batch's log g: bias, spread | the estimate's: bias, spread"
        " | negatives that count | share of the first 100 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        number = {name: float(row[name]) for name in (*MEASURED, *FIGURES)}
        lines.append(
            f"| {number['samples']:,.0f} | {number['tau']:.3f}"
            f" | {100 * number['seen_t2i10']:.1f} / {100 * number['test_t2i10']:.1f}"
            f" | {number['batch_bias']:+.2f}, {number['batch_spread']:.2f}"
            f" | {number['estimate_bias']:+.2f}, {number['estimate_spread']:.2f}"
            f" | {number['effective_negatives']:,.0f} | {100 * number['share_of_first_100']:.0f}% |"
        )
    last = {name: float(rows[-1][name]) for name in FIGURES}
    better = "smaller" if last["estimate_spread"] < last["batch_spread"] else "not smaller"
    note = (
        f"log g in nats, of {ANCHORS:,} samples against all others, one run of fastclip-v3, seed {rows[-1]['seed']}."
        f" At the end the running estimate scatters by {last['estimate_spread']:.2f} around the truth, one batch by"
        f" {last['batch_spread']:.2f}: the estimate's error is {better}. Negatives that count: the exponential of the"
        " entropy of an anchor's softmax over all samples."
    )
    return "\n".join([*lines, "", note, ""])


def measure(asked: Experiment, run: Run) -> None:
    place = asked.place()
    steps = 2 if asked.quick else None
    for point in train(run, place, steps, partial(look, place, run.batch)):
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
