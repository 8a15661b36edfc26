"""The comparison of the losses: its statistics, its pairing, and its commands."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import batch_size
import changes
import components
import everything
import experiment
import photos
import pytest
import quality
import runs
import stats
import step_time
import table
import torch
import why
import workers

import leanclip
from leanclip.data.datasets import BUNDLED

EVIDENCE = Path(__file__).parents[2] / "benchmarks" / "evidence"


@pytest.fixture(scope="module")
def emoji():
    return photos.Photos.of(BUNDLED)


@pytest.mark.parametrize(("t", "freedom", "p"), [(2.776445, 4, 0.05), (4.604095, 4, 0.01), (2.228139, 10, 0.05)])
def test_the_tail_is_that_of_the_tables(t, freedom, p):
    assert stats.tail(t, freedom) == pytest.approx(p, rel=1e-4)


def test_paired_differences_know_their_sign_and_their_chance():
    found = stats.paired([0.12, 0.15, 0.11, 0.14, 0.16], [0.10, 0.14, 0.10, 0.12, 0.13])
    assert found.mean == pytest.approx(0.018)
    assert found.p == pytest.approx(0.00858, rel=1e-3)  # t = 4.81 at 4 degrees of freedom
    assert stats.paired([0.1, 0.2], [0.2, 0.1]).p == pytest.approx(1)


def test_several_comparisons_share_their_chance():
    """Holm: the clearest of three counts three times, the next twice, and none is clearer than the one before."""
    found = {"a": 0.04, "b": 0.01, "c": 0.03}
    assert stats.holm(found) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert stats.holm(found, family=5) == pytest.approx({"b": 0.05, "c": 0.12, "a": 0.12})  # two are to come
    assert quality.COMPARISONS == 13


def test_every_loss_has_as_many_trials(tmp_path):
    """Six at the small batch; at larger ones three, with the setting that was best at the small one."""

    def finish(wanted):
        return {run: {"val_t2i10": str(run.lr + (run.hyper == best_setting[run.loss]))} for run in wanted}

    best_setting = {loss: tuple(sorted(choices[1].items())) for loss, choices in quality.CHOICES.items()}
    asked = experiment.Experiment(finish, pytest.fail, tmp_path, "", 5, False)
    small = quality.small_spaces(asked)
    found = small | quality.larger_spaces(asked, asked.best(small))
    assert {(batch, len(set(trials))) for (_, batch), trials in found.items()} == {(128, 6), (512, 3), (2048, 3)}
    assert {loss for loss, batch in found if batch == 128} == set(quality.CHOICES)
    assert {loss for loss, batch in found if batch == 512} == set(quality.CHOICES)
    for (loss, batch), trials in found.items():
        assert {trial.lr for trial in trials} == set(quality.rates(batch))
        if batch > 128:
            (hyper,) = {trial.hyper for trial in trials}
            far = batch / 128 if loss == "fastclip-v3" else 1  # as far in fewer steps
            assert dict(hyper) == {k: v * (far if k == "lr_tau" else 1) for k, v in best_setting[loss]}


def test_one_run_by_two_names_is_trained_once(tmp_path, monkeypatch):
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(runs.TINY))
    said, default = runs.Run("infonce", 16, 1e-3, 1, (("tau", 0.07),)), runs.Run("infonce", 16, 1e-3, 1)
    found = workers.Workers(BUNDLED, results=tmp_path, processes=2, steps=1, config=config).rows([said, default])
    assert found[said] == found[default] and len(table.rows(tmp_path / "runs.csv")) == 1


@pytest.mark.parametrize(("form", "lr_tau"), [("published", quality.PER_SAMPLE["lr_tau"]), ("visits", 3.1e-3)])
def test_temperatures_of_both_forms_can_go_as_far(form, lr_tau):
    """A rho that is out of reach pushes tau down at every visit, one in each epoch."""
    image, text = (torch.nn.functional.normalize(torch.randn(2, 6, 8), dim=-1)).unbind()
    loss = leanclip.create_loss("isogclr", num_samples=6, rho=50.0, tau=0.07, lr_tau=lr_tau, tau_adam=form)
    for epoch in range(runs.EPOCHS):
        loss.set_epoch(epoch, runs.EPOCHS)
        loss(image, text, torch.arange(6))
    assert float(loss.temperature()) == pytest.approx(0.021, abs=0.001)


def test_settings_of_a_gradient_do_not_mix():
    """Of two choices only one names tau_min; the form that is longer in its steps gets a smaller rate."""
    best = {loss: quality.trials(loss)[-1] for loss in quality.CHOICES}
    found = components.spaces(best)
    assert [dict(run.hyper).get("tau_min") for run in found["gradient", "fastclip-v3, exact"]] == [None, 0.03]
    assert {dict(run.hyper)["lr_tau"] for run in found["gradient", "fastclip-v2, visits"]} == {3.1e-3}
    assert {dict(run.hyper)["lr_tau"] for run in found["gradient", "fastclip-v2, published"]} == {1.4e-2}


@pytest.mark.parametrize(
    ("mean", "p", "said"),
    [
        (0.01, 0.01, "beats infonce (+1.00"),
        (-0.01, 0.01, "is worse than infonce (-1.00"),
        (0.01, 0.2, "does not beat"),
    ],
)
def test_the_headline_says_what_came_out(mean, p, said):
    row = {"loss": "fastclip-v3", "batch": 128, "gap_mean": mean, "gap_deviation": 0.002, "p": p}
    assert said in quality.verdict([row])
    assert quality.verdict([row | {"batch": 512}]) == ""


def test_a_summary_pairs_the_seeds_and_names_its_runs():
    def five(loss, recalls):
        runs_of = runs.with_seeds(runs.Run(loss, 128, 5e-4, 0), 5)
        row = {"cifar10": "0.3", "test_i2t10": "0.2", "seen_t2i10": "0.5", "tau": "0.05", "device": "a GPU"}
        return runs_of, {run: row | {"test_t2i10": str(r)} for run, r in zip(runs_of, recalls, strict=True)}

    ours, our_rows = five("fastclip-v3", [0.12, 0.15, 0.11, 0.14, 0.16])
    theirs, their_rows = five("infonce", [0.10, 0.14, 0.10, 0.12, 0.13])
    chosen = {("infonce", 128): theirs, ("fastclip-v3", 128): ours}
    base, found = quality.summary(chosen, our_rows | their_rows, "r")
    assert base["p"] == "" and found["gap_mean"] == pytest.approx(0.018)
    assert found["p"] == found["p_holm"] == pytest.approx(0.00858, rel=1e-3)
    assert found["runs"].split() == [run.key("r") for run in ours]
    text = quality.paragraph([base, found])
    assert text.startswith("**At batch 128 fastclip-v3 beats infonce (+1.80 ± 0.84 points, p = 0.0086).**")
    assert "| 128 | fastclip-v3 | lr 0.0005 | 13.60 ± 2.07 | 20.00 ± 0.00 |" in text


def test_a_change_is_compared_with_the_same_change(tmp_path):
    """And one that the other loss cannot have, with the other as it was."""
    recalls = {("infonce", 16, 0.1): 0.2, ("infonce", 32, 0.1): 0.3, ("infonce", 16, 0.5): 0.1}

    def finish(wanted):
        return {run: row(recalls.get((run.loss, run.epochs, run.wd), 0.25) + run.seed / 1000) for run in wanted}

    def row(recall):
        tests = {"test_t2i10": str(recall), "test_i2t10": str(recall / 2), "cifar10": "0.1"}
        return {"val_t2i10": "0.5", "seen_t2i10": "0.6"} | tests

    changes.report(experiment.Experiment(finish, pytest.fail, tmp_path, "", 3, False))
    lines = (tmp_path / "changes.md").read_text().splitlines()
    gaps = {line.split(" | ")[0][2:]: line.split(" | ")[5] for line in lines[2:6]}
    assert gaps == {
        "as they were": "+5.00 ± 0.00", changes.LONGER: "-5.00 ± 0.00", changes.HEAVIER: "+15.00 ± 0.00",
        changes.FASTER: "+5.00 ± 0.00",
    }  # fmt: skip
    assert lines[3].endswith(" | -2.50 ± 0.00 | +0.00 ± 0.00 |")  # image-to-text, CIFAR-10


def test_the_last_points_are_told_too():
    """By them another loss may differ from infonce beyond chance."""
    chosen, found = {}, {}
    noise = (0.001, -0.001, 0.0005, -0.0005, 0.0)
    for loss, last in (("infonce", 0.3), ("fastclip-v3", 0.3), ("siglip", 0.2), ("sogclr", 0.3)):
        chosen[loss, 128] = runs.with_seeds(runs.Run(loss, 128, 5e-4, 0), 5)
        for number, run in enumerate(chosen[loss, 128]):
            more = 0.0 if loss == "infonce" else noise[(number + len(loss)) % 5]
            found[run] = {"last_test_t2i10": str(last + more), "test_t2i10": "0.3"}
    told = quality.at_the_end(chosen, found)
    assert (
        "fastclip-v3 at 128 +0.00 ± 0.08, p = 1.0000; beyond chance, by Holm's p: siglip at 128 (-10.00, p = 0.0000)."
        in told
    )
    assert "sogclr" not in told


def test_the_trend_over_batches_is_the_slope_of_each_seed():
    chosen, found = {}, {}
    for batch, gaps in ((64, (-0.01, 0.0)), (128, (0.0, 0.0)), (256, (0.01, 0.0)), (512, (0.02, 0.0))):
        for loss, more in (("infonce", (0.0, 0.0)), ("fastclip-v3", gaps)):
            chosen[loss, batch] = runs.with_seeds(runs.Run(loss, batch, 5e-4, 0), 2)
            found |= {run: {"test_t2i10": str(0.2 + gap)} for run, gap in zip(chosen[loss, batch], more, strict=True)}
    lines = batch_size.trend(chosen, found)
    assert lines[-2:] == ["| 64 to 512 | +0.50 ± 0.71 | 0.5000 |", "| 64 to 256 | +0.50 ± 0.71 | 0.5000 |"]
    chosen |= {(loss, 1024): chosen[loss, 512] for loss in batch_size.LOSSES}
    assert batch_size.trend(chosen, found)[-1].startswith("| 128 to 512 | ")  # without the smallest and the largest
    assert batch_size.trend({key: value for key, value in chosen.items() if key[1] < 256}, found) == []


def test_what_is_compared_has_its_own_constant_form_or_the_first_rule():
    assert components.base_of("own", "fastclip-v2") == "isogclr" and components.base_of("own", "sogclr") == "sogclr"
    assert components.base_of("rule", "fastclip-v3") == "fastclip-v0"
    assert components.base_of("gamma", "fastclip-v1, cosine") == "fastclip-v1, constant"
    five = {
        name: runs.with_seeds(runs.Run(name, 128, 5e-4, 0), 2) for name in ("sogclr", "fastclip-v1", "fastclip-v2")
    }
    found = {
        run: {"test_t2i10": "0.2" if name == "sogclr" else "0.25"}
        for name, several in five.items()
        for run in several
    }
    gaps = components.gaps({("own", name): several for name, several in five.items()}, found, "own")
    assert list(gaps) == ["fastclip-v1"] and gaps["fastclip-v1"].mean == pytest.approx(0.05)


def test_what_is_not_complete_is_named():
    whole = [(loss, 128) for loss in quality.CHOICES] + [(loss, 512) for loss in quality.CHOICES]
    assert quality.unfinished({key: [] for key in [*whole, ("infonce", 2048)]}) == []
    missing = quality.unfinished({key: [] for key in whole[1:]})
    assert missing == ["infonce at 128", "infonce at 2,048"]
    assert "not in the table: infonce at 128, infonce at 2,048." in table.not_complete(missing)
    assert table.not_complete([]) == ""


def test_the_truth_about_an_estimate_is_the_mean_over_all_others():
    torch.manual_seed(0)
    own, others, at = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([5, 0, 2])
    found = why.log_mean(why.differences(own, others, at) / 0.5)
    for row, anchor in enumerate(at.tolist()):
        terms = [torch.exp((own[row] @ others[j] - own[row] @ others[anchor]) / 0.5) for j in range(7) if j != anchor]
        assert found[row] == pytest.approx(math.log(sum(terms) / 6), rel=1e-5)


def test_the_estimate_is_exact_where_the_batch_is_the_whole_data_set(emoji, tmp_path, monkeypatch):
    """One view, the same for the loss and the truth: then u is g itself."""
    (tmp_path / "tiny.json").write_text(json.dumps(runs.TINY))
    place = runs.Place(emoji, torch.device("cpu"), tmp_path / "tiny.json")
    count = len(emoji.train.images)
    context, _ = runs.begin(runs.Run("fastclip-v3", count, 1e-3, 1), place)
    context.loss.set_epoch(0, 1)
    monkeypatch.setattr(why, "VIEWS", 1)
    with torch.no_grad():
        image, text = why.view(place, 0)
    context.loss(image, text, torch.arange(count))
    found = why.look(place, 16, context)
    assert abs(found["estimate_bias"]) < 1e-4 and found["estimate_spread"] < 1e-4
    assert found["batch_spread"] > 0.01
    assert 1 < found["effective_negatives"] < count


def test_runs_of_one_seed_see_the_same(emoji):
    """Whatever the loss; another seed sees another order and other crops."""
    first = runs.Run("infonce", 32, 1e-3, 1)

    def beginning(run):
        batches = runs.batches_of(emoji.train, run, torch.device("cpu"))
        return [next(batches) for _ in range(2)]

    same, other = beginning(replace(first, loss="siglip", lr=5e-4)), beginning(replace(first, seed=2))
    for ours, theirs in zip(beginning(first), same, strict=True):
        assert ours.images.equal(theirs.images) and ours.tokens.equal(theirs.tokens)
    assert not beginning(first)[0].sample_ids.equal(other[0].sample_ids)


def test_a_batch_holds_each_images_own_caption(emoji):
    batch = next(runs.batches_of(emoji.train, runs.Run("infonce", 64, 1e-3, 3), torch.device("cpu")))
    assert batch.lengths is not None
    for image, tokens, length in zip(batch.sample_ids, batch.tokens, batch.lengths, strict=True):
        own = emoji.train.tokens[emoji.train.first[image] : emoji.train.first[image + 1]].long()
        assert (own == tokens).all(1).any()
        assert tokens[length - 1] == tokens.max() and (tokens[length:] == 0).all()


def test_captions_far_back_belong_to_their_images():
    """Their numbers are too large for a float32 with a fraction."""
    images, several = 20_000, 5
    first = torch.arange(images + 1) * several
    tokens = (torch.arange(images * several) // several).int()[:, None]  # the image's own number
    data = photos.Captioned(
        torch.zeros(images, 3, 1, 1, dtype=torch.uint8), tokens, torch.ones(images * several).long(), first
    )
    batches = runs.batches_of(data, runs.Run("infonce", images, 1e-3, 1), torch.device("cpu"))
    for batch in (next(batches), next(batches)):
        assert batch.tokens[:, 0].equal(batch.sample_ids)


def test_what_all_runs_share_is_part_of_their_key(tmp_path, monkeypatch):
    run, config = runs.Run("infonce", 16, 1e-3, 1), tmp_path / "tiny.json"
    config.write_text(json.dumps(runs.TINY))
    keys = {run.key(runs.recipe_of(config, steps)) for steps in (None, 2)}
    monkeypatch.setitem(runs.RECIPE, "eps", 1e-6)
    keys.add(run.key(runs.recipe_of(config, None)))
    config.write_text(json.dumps(runs.TINY | {"embed_dim": 32}))
    keys.add(run.key(runs.recipe_of(config, None)))
    assert len(keys) == 4
    default = replace(run, hyper=(("tau", 0.07),))  # said or not, it is the same run
    assert default.key("") == run.key("") != replace(run, hyper=(("tau", 0.03),)).key("")


def test_no_run_begins_that_would_not_be_over_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_trained", lambda *_: pytest.fail("trained"))
    run = runs.Run("infonce", 128, 1e-3, 1)
    until = time.time() + 4 * workers.AN_EPOCH
    assert workers.Workers(BUNDLED, results=tmp_path, processes=1, until=until).rows([run]) == {}
    timed = dict.fromkeys(runs.FIELDS, "") | {
        "batch": "128",
        "epochs": "4",
        "recipe": runs.recipe_of(runs.MODEL, None),
    }
    for seconds in (16, 40, 40, 40):  # ten an epoch
        table.append(tmp_path / "runs.csv", runs.FIELDS, timed | {"seconds": seconds})
    for epochs, spare in ((2, 15), (2, 30), (3, 25)):
        asked = workers.Workers(BUNDLED, results=tmp_path, processes=1, until=time.time() + spare)
        assert asked._in_time(replace(run, epochs=epochs), warm=True) == (epochs * 10 < spare)


def test_a_process_stays_with_its_batch_and_a_dead_one_is_replaced(tmp_path, monkeypatch):
    """The longest runs first, but for those of the batch size that the process has compiled for."""
    trained, told, started = [], [], []

    def process(self):
        started.append(self)

        def call(function, run, *_):
            trained.append((run.batch, run.seed))
            if run.seed == 3:
                raise BrokenProcessPool
            return [], 1.0

        return call

    monkeypatch.setattr(workers.Workers, "_process", process)
    monkeypatch.setattr(workers.Workers, "_write", lambda self, run, what, beside: told.append(what))
    asked = workers.Workers(BUNDLED, results=tmp_path, processes=1)
    wanted = [runs.Run("infonce", batch, 1e-3, seed) for seed, batch in enumerate((16, 32, 16, 16, 32), start=1)]
    wanted[1] = replace(wanted[1], epochs=3 * runs.EPOCHS)
    assert asked.rows(wanted) == {}
    assert trained == [(32, 2), (32, 5), (16, 1), (16, 3), (16, 4)]  # 3 took its process with it
    assert len(started) == 2 and "its process died" in told[3]


def feeding(monkeypatch, call):
    """Workers whose processes are calls, and that keep no rows."""
    monkeypatch.setattr(workers.Workers, "_process", lambda self: lambda function, run, *_: call(run))
    monkeypatch.setattr(workers.Workers, "_write", lambda self, run, told, beside: None)


def test_a_run_that_fails_gets_another_process(tmp_path, monkeypatch):
    """One whose GPU is in error would fail all that come after."""
    started = []

    def process(self):
        started.append(self)
        return lambda function, run, *_: "an error" if run.seed == 1 else ([], 1.0)

    monkeypatch.setattr(workers.Workers, "_process", process)
    monkeypatch.setattr(workers.Workers, "_write", lambda self, run, told, beside: None)
    wanted = [runs.Run("infonce", 16, 1e-3, seed) for seed in (1, 2, 3)]
    workers.Workers(BUNDLED, results=tmp_path, processes=1).rows(wanted)
    assert len(started) == 2


def test_an_error_of_the_disk_ends_the_command(tmp_path, monkeypatch):
    def full(self, run, told, beside):
        raise OSError(28, "No space left on device")

    feeding(monkeypatch, lambda run: ([], 1.0))
    monkeypatch.setattr(workers.Workers, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        workers.Workers(BUNDLED, results=tmp_path, processes=2).rows([runs.Run("infonce", 16, 1e-3, 1)])


def test_all_processes_are_used_and_large_batches_share_the_memory(tmp_path, monkeypatch):
    """Asked for in pieces by several, eight runs are all begun; of batch 16,384 only two are at once."""
    both, most, now, lock = threading.Barrier(8), [], [0], threading.Lock()

    def call(run):
        if run.batch == 16:
            both.wait(20)
        with lock:
            now[0] += run.batch
            most.append(now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= run.batch
        return [], 1.0

    feeding(monkeypatch, call)
    asked = workers.Workers(BUNDLED, results=tmp_path, processes=8)
    small = [runs.Run("infonce", 16, 1e-3, seed) for seed in range(8)]
    workers.side_by_side(asked.rows, [small[:3], small[3:4], small[4:5], small[5:]])
    most.clear()
    asked.rows([runs.Run("infonce", 16_384, 1e-3, seed) for seed in range(6)])
    assert len(most) == 6 and max(most) == workers.AT_ONCE


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_command_that_is_ended_takes_its_processes_with_it(sent, code, tmp_path):
    text = (
        "import pathlib, runs, signal, sys, workers\n"
        "from leanclip.data.datasets import BUNDLED\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "    results, config = map(pathlib.Path, sys.argv[1:])\n"
        "    asked = workers.Workers(BUNDLED, results=results, processes=2, config=config)\n"
        "    print('begun', flush=True)\n"
        "    wanted = [[runs.Run('infonce', 16, 1e-3, seed, epochs=10**4)] for seed in (1, 2)]\n"
        "    workers.side_by_side(asked.rows, wanted)\n"
    )
    config, script = tmp_path / "tiny.json", tmp_path / "endless.py"
    config.write_text(json.dumps(runs.TINY))
    script.write_text(text)
    path = os.pathsep.join([str(EVIDENCE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path}, start_new_session=True, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(12)  # both train
    os.kill(process.pid, sent)
    try:
        _, said = process.communicate(timeout=30)  # all that write to its pipes are gone
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code and (sent == signal.SIGKILL or "the same command goes on" in said)


def test_nobody_waits_for_the_trials_of_others(tmp_path):
    """The seeds of one are trained while a trial of another has not come back."""
    seeds_of_first = threading.Event()

    def finish(wanted):
        if wanted[0].loss == "siglip":
            assert seeds_of_first.wait(20)
        elif wanted[0].seed == 1:
            seeds_of_first.set()
        return {run: {"val_t2i10": "0.5"} for run in wanted}

    asked = experiment.Experiment(finish, pytest.fail, tmp_path, "", 2, False)
    chosen, rows = asked.search({loss: [runs.Run(loss, 16, 1e-3, 100)] for loss in ("siglip", "infonce")})
    assert {loss: [run.seed for run in several] for loss, several in chosen.items()} == {
        "siglip": [1, 2], "infonce": [1, 2],
    }  # fmt: skip
    assert len(rows) == 4


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(runs.TINY))
    good, bad = runs.Run("infonce", 16, 1e-3, 1), runs.Run("infonce", 16, 1e-3, 2, opt="nonsense")
    found = workers.Workers(BUNDLED, results=tmp_path, processes=2, steps=1, config=config).rows([bad, good])
    assert set(found) == {good}


def test_crops_stay_inside_and_keep_their_size():
    images = torch.zeros(64, 3, 64, 64, dtype=torch.uint8)
    images[:, :, :, 32:] = 200  # bright on the right
    found = runs.augmented(images, torch.Generator().manual_seed(0))
    assert found.shape == images.shape and found.dtype == torch.uint8
    bright_left = (found[:, 0, :, 0] > 100).all(1)
    assert 16 < bright_left.sum() < 48  # the mirrored ones


def test_a_run_is_trained_once(emoji, tmp_path, monkeypatch):
    (tmp_path / "tiny.json").write_text(json.dumps(runs.TINY))
    run = runs.Run("fastclip-v3", 16, 1e-3, 1)
    given = {"results": tmp_path, "processes": 1, "steps": 2, "config": tmp_path / "tiny.json"}
    first = workers.Workers(BUNDLED, **given).rows([run])
    monkeypatch.setattr(workers, "_trained", lambda *_: pytest.fail("trained again"))
    assert workers.Workers(BUNDLED, **given).rows([run]) == first
    assert first[run]["samples"] == "32" and first[run]["seed"] == "1" and first[run]["device"]


@pytest.mark.parametrize("command", [quality, components, batch_size, changes, everything, step_time, why])
def test_every_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command.__file__, "--quick"])
    command.main()
    said = capsys.readouterr().out
    assert "fastclip-v3" in said and ("±" in said or "ms a step" in said or "is off by" in said)
    assert list(tmp_path.iterdir()) == []
