"""The comparison of trained models: its statistics, which runs count, and its training runs."""

import io
import json
import math
import sys
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import compare_losses
import estimate_error
import photo_dataset
import pytest
import stats
import step_time
import torch
import training_runs
from compare_losses import Comparison
from photo_dataset import CaptionedImages, PhotoDataset
from PIL import Image
from training_runs import Run, RunStore

from leanclip.data.datasets import BUNDLED

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def emoji():
    return PhotoDataset.load(BUNDLED)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(training_runs.TINY))
    return path


def comparison_with(metrics):
    """A comparison whose store has these metrics of every run; None: the run is missing."""
    return Comparison(
        SimpleNamespace(rows=lambda runs: {run: row for run in runs if (row := metrics(run)) is not None})  # pyright: ignore
    )


@pytest.mark.parametrize(("t", "freedom", "p"), [(2.776445, 4, 0.05), (4.604095, 4, 0.01), (2.228139, 10, 0.05)])
def test_two_tails_equal_the_tables_of_students_distribution(t, freedom, p):
    assert stats.two_tails(t, freedom) == pytest.approx(p, rel=1e-4)


def test_paired_differences():
    gap = stats.paired([0.12, 0.15, 0.11, 0.14, 0.16], [0.10, 0.14, 0.10, 0.12, 0.13])
    assert gap.p == pytest.approx(0.00858, rel=1e-3)  # t = 4.81 at 4 degrees of freedom
    assert str(gap) == "+1.80 ± 0.84"
    assert stats.paired([0.1, 0.2], [0.2, 0.1]).p == pytest.approx(1)
    assert stats.percent([0.1, 0.2, 0.3]) == "20.00 ± 10.00" and stats.mean_and_deviation([2.04], 1) == "2.0"


def test_holm_corrects_for_the_number_of_comparisons():
    """The smallest p counts three times, the next twice, and none becomes smaller than the one before."""
    p_values = {"a": 0.04, "b": 0.01, "c": 0.03}
    assert stats.holm(p_values) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert stats.holm(p_values, family=5) == pytest.approx({"b": 0.05, "c": 0.12, "a": 0.12})
    assert compare_losses.COMPARISONS == 13


def test_every_loss_has_as_many_trials():
    for loss in compare_losses.CHOICES:
        small = compare_losses.trials(loss)
        large = compare_losses.at_batch(small[1], 512)
        assert len(set(small)) == 6 and {run.lr for run in large} == set(compare_losses.rates(512))
        (hyper,) = {run.hyper for run in large}
        far = 4 if loss == "fastclip-v3" else 1  # fewer steps, as far
        assert dict(hyper) == {name: v * (far if name == "lr_tau" else 1) for name, v in small[1].hyper}


def test_best_trial_on_val_is_trained_with_other_seeds():
    trials = compare_losses.trials("infonce")
    missing = replace(trials[0], loss="siglip", hyper=())

    def metrics(run):
        return None if run.loss == "siglip" else {"val_t2i10": str(0.5 - abs(run.lr - 5e-4)), "test_t2i10": "0"}

    chosen = comparison_with(metrics).search({"a": trials, "b": [trials[0], missing]}, 3)
    assert list(chosen) == ["a"]
    assert [(run.lr, run.seed) for run in chosen["a"]] == [(5e-4, seed) for seed in (1, 2, 3)]


def test_differences_are_paired_and_holms_p_spares_the_primary_comparison():
    noise = {1: 0.001, 2: -0.001, 3: 0.0005, 4: -0.0005, 5: 0.0}
    levels = {"infonce": 0.3, "siglip": 0.2}

    def metrics(run):
        recall = levels.get(run.loss, 0.3) + (0 if run.loss == "infonce" else noise.get(run.seed, 0))
        return {"val_t2i10": "0.5", "test_t2i10": str(recall)}

    gaps, p_values = compare_losses.differences(comparison_with(metrics))
    assert str(gaps["siglip", 128]) == "-10.00 ± 0.08"
    assert p_values["siglip", 128] == pytest.approx(13 * gaps["siglip", 128].p)
    assert p_values["fastclip-v3", 128] == gaps["fastclip-v3", 128].p == pytest.approx(1)


def test_change_is_compared_with_the_same_change():
    """Infonce has no gamma, so that change is compared with the unchanged infonce."""
    recalls = {("infonce", 16, 0.1): 0.2, ("infonce", 32, 0.1): 0.3, ("infonce", 16, 0.5): 0.1}

    def metrics(run):
        recall = recalls.get((run.loss, run.epochs, run.wd), 0.25) + run.seed / 1000
        tests = {"test_t2i10": str(recall), "test_i2t10": str(recall / 2), "cifar10": "0.1"}
        return {"val_t2i10": "0.5", "seen_t2i10": "0.6", "tau": "0.03"} | tests

    table = compare_losses.change_table(comparison_with(metrics))
    gaps = [(row[0], row[5], row[7]) for row in table.rows]
    assert gaps == [
        ("unchanged", "+5.00 ± 0.00", "+2.50 ± 0.00"),
        ("twice the epochs", "-5.00 ± 0.00", "-2.50 ± 0.00"),
        (compare_losses.SLOWER, "-5.00 ± 0.00", "-2.50 ± 0.00"),
        ("weight decay 0.5", "+15.00 ± 0.00", "+7.50 ± 0.00"),
        (compare_losses.FASTER, "+5.00 ± 0.00", "+2.50 ± 0.00"),
    ]


def test_trend_over_batches_is_the_mean_slope_of_the_seeds():
    def metrics(run):
        slope = 0.01 if run.loss == "fastclip-v3" and run.seed == 1 else 0.0
        return {"val_t2i10": "0.5", "test_t2i10": str(0.3 + slope * math.log2(run.batch))}

    rows = compare_losses.batch_trend_table(comparison_with(metrics)).rows
    assert [row[0] for row in rows] == ["64 to 4,096", "64 to 2,048", "128 to 2,048"]
    assert {row[1] for row in rows} == {"+0.33 ± 0.58"}


def test_components_are_compared_with_their_baselines():
    comparison = comparison_with(
        lambda run: {
            "val_t2i10": "0.5",
            "test_t2i10": str(
                0.3 + run.seed / 1000 - 0.1 * ("constant" in str(run.hyper)) - 0.1 * (run.loss == "sogclr")
            ),
            "cifar10": "0.1",
        }
    )
    gamma = compare_losses.component_table(comparison, "gamma", ", constant")
    assert gamma.cell("fastclip-v3, cosine", "difference") == "+10.00 ± 0.00"
    assert gamma.cell("fastclip-v3, constant", "baseline") == ""
    searched = compare_losses.component_table(comparison, "searched gamma", "")
    assert [searched.cell("fastclip-v1", column) for column in ("baseline", "difference")] == [
        "sogclr",
        "+10.00 ± 0.00",
    ]
    trials = compare_losses.component_trials(comparison.small)
    assert {dict(run.hyper)["lr_tau"] for run in trials["gradient", "fastclip-v2, visits"]} == {3.1e-3}
    assert {dict(run.hyper)["lr_tau"] for run in trials["gradient", "fastclip-v2, published"]} == {1.4e-2}


def test_point_with_the_best_recall_on_val_counts():
    points = [
        dict.fromkeys(training_runs.METRICS, value) | {"val_t2i10": val} for value, val in ((0.1, 0.3), (0.2, 0.2))
    ]
    for samples, point in enumerate(points, start=1):
        point |= {"samples": samples, "tau": samples, "skipped": 0}
    row = training_runs.csv_row(Run("infonce", 16, 1e-3, 1), "recipe", points, 1.0, 1)
    assert (row["test_t2i10"], row["last_test_t2i10"], row["best_samples"], row["tau"]) == (0.1, 0.2, 1, 1)


def test_run_key_covers_the_recipe_and_ignores_explicit_defaults(tiny, monkeypatch):
    run = Run("infonce", 16, 1e-3, 1)
    keys = {run.key(training_runs.recipe_key(tiny, steps)) for steps in (None, 2)}
    monkeypatch.setitem(training_runs.RECIPE, "eps", 1e-6)
    keys.add(run.key(training_runs.recipe_key(tiny, None)))
    assert len(keys) == 3
    explicit = replace(run, hyper=(("tau", 0.07),))
    assert explicit.key("") == run.key("") != replace(run, hyper=(("tau", 0.03),)).key("")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_is_trained_once(processes, tiny, tmp_path, monkeypatch):
    run = Run("fastclip-v3", 16, 1e-3, 1)
    store = RunStore(tmp_path, BUNDLED, processes, steps=2, config=tiny)
    rows = store.rows([run, replace(run, hyper=(("tau", 0.07),))])
    monkeypatch.setattr(training_runs, "train_in_process", lambda *_: pytest.fail("trained again"))
    assert store.rows([run])[run] == rows[run]
    assert rows[run]["samples"] == "32" and [point["samples"] for point in store.curve(run)] == [32]
    assert (
        RunStore(tmp_path, steps=2, config=tiny).rows([replace(run, seed=2)]) == {}
    )  # without photos nothing trains


def test_runs_of_one_seed_see_the_same_batches(emoji):
    first = Run("infonce", 32, 1e-3, 1)

    def beginning(run):
        stream = training_runs.batches(emoji.train, run, CPU)
        return [next(stream) for _ in range(2)]

    same, other = beginning(replace(first, loss="siglip", lr=5e-4)), beginning(replace(first, seed=2))
    for batch, same_batch in zip(beginning(first), same, strict=True):
        assert batch.images.equal(same_batch.images) and batch.tokens.equal(same_batch.tokens)
    assert not beginning(first)[0].sample_ids.equal(other[0].sample_ids)


def test_captions_belong_to_their_images(emoji):
    """Also where caption numbers are too large for a float32 with a fraction."""
    batch = next(training_runs.batches(emoji.train, Run("infonce", 64, 1e-3, 3), CPU))
    assert batch.lengths is not None
    for image, tokens, length in zip(batch.sample_ids, batch.tokens, batch.lengths, strict=True):
        captions = emoji.train.tokens[emoji.train.first[image] : emoji.train.first[image + 1]].long()
        assert (captions == tokens).all(1).any()
        assert tokens[length - 1] == tokens.max() and (tokens[length:] == 0).all()
    images, per_image = 20_000, 5
    tokens = (torch.arange(images * per_image) // per_image).int()[:, None]  # the number of the image
    pixels = torch.zeros(images, 3, 1, 1, dtype=torch.uint8)
    data = CaptionedImages(pixels, tokens, torch.ones(len(tokens)).long(), torch.arange(images + 1) * per_image)
    large = next(training_runs.batches(data, Run("infonce", images, 1e-3, 1), CPU))
    assert large.tokens[:, 0].equal(large.sample_ids)


def test_photos_are_shrunk_decoded_once_and_labelled(tmp_path, monkeypatch):
    def write(name, *samples):
        path = tmp_path / "sets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
            for number, (side, members) in enumerate(samples):
                image = io.BytesIO()
                Image.new("RGB", (side, side)).save(image, "JPEG")
                for ending, content in ({"jpg": image.getvalue()} | members).items():
                    member = tarfile.TarInfo(f"{number}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))

    write("coco_64/train-000.tar.gz", (64, {"json": b'{"captions": ["one", "two words"]}', "txt": b"one"}))
    write("flickr8k/train-000.tar", (100, {"txt": b"three"}))
    write("flickr8k/val-000.tar", (100, {"txt": b"four"}))
    write("flickr8k/test-000.tar", (100, {"txt": b"five"}), (80, {"txt": b"six"}))
    write("cifar10/test10k-000.tar.gz", (32, {"cls": b"1"}), (32, {"cls": b"0"}))
    (tmp_path / "sets/cifar10/classnames.txt").write_text("cat\ndog\n")
    photos = tmp_path / "photos"
    monkeypatch.setattr(sys, "argv", ["photo_dataset.py", str(tmp_path / "sets"), str(photos)])
    photo_dataset.main()
    for _ in range(2):
        data = PhotoDataset.load(photos)
        assert data.train.images.shape == (2, 3, 64, 64) and data.train.first.tolist() == [0, 2, 3]
        assert len(data.val.images) == 1 and data.test.image_of_text.tolist() == [0, 1]
        assert data.labels.tolist() == [1, 0] and data.prompts.shape == (2, 4, 77)
        assert data.train.last(1).first.tolist() == [0, 1] and data.train.last(1).tokens.equal(data.train.tokens[2:])
        monkeypatch.setattr(photo_dataset, "decode", lambda _: pytest.fail("decoded again"))


def test_crops_keep_their_size_and_half_are_mirrored():
    images = torch.zeros(64, 3, 64, 64, dtype=torch.uint8)
    images[:, :, :, 32:] = 200  # bright on the right
    crops = training_runs.augment(images, torch.Generator().manual_seed(0))
    assert crops.shape == images.shape and crops.dtype == torch.uint8
    assert 16 < (crops[:, 0, :, 0] > 100).all(1).sum() < 48


def test_log_mean_is_over_all_other_samples():
    torch.manual_seed(0)
    queries, candidates, positives = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([5, 0, 2])
    means = estimate_error.log_mean(estimate_error.differences(queries, candidates, positives) / 0.5)
    for row, anchor in enumerate(positives.tolist()):
        similarity = candidates @ queries[row] / 0.5
        terms = [torch.exp(similarity[j] - similarity[anchor]) for j in range(7) if j != anchor]
        assert means[row] == pytest.approx(math.log(sum(terms) / 6), rel=1e-5)


def test_estimate_is_exact_if_the_batch_is_the_whole_data_set(emoji, tiny, monkeypatch):
    place, count = training_runs.Workspace(emoji, CPU, tiny), len(emoji.train.images)
    context, _ = place.begin(Run("fastclip-v3", count, 1e-3, 1))
    context.loss.set_epoch(0, 1)
    monkeypatch.setattr(estimate_error, "VIEWS", 1)
    with torch.no_grad():
        image, text = estimate_error.view(place, 0)
    context.loss(image, text, torch.arange(count))
    figures = estimate_error.inspect(place, 16, context)
    assert abs(figures["estimate_bias"]) < 1e-4 and figures["estimate_spread"] < 1e-4
    assert figures["batch_spread"] > 0.01 and 1 < figures["effective_negatives"] < count


@pytest.mark.parametrize("command", [compare_losses, step_time, estimate_error])
def test_every_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command.__file__, "--quick"])
    command.main()
    out = capsys.readouterr().out
    assert any(word in out for word in ("±", "ms per step", "estimate error"))
    assert list(tmp_path.iterdir()) == []
