"""The model card beside the weights."""

import yaml

from leanclip.runs.metrics import Result
from leanclip.runs.model_card import model_card
from refusal import exit_code
from run_records import records


def front_matter(card):
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_every_run_and_every_checkpoint_has_a_card_and_the_config(tmp_path):
    few = ["--max-steps", "4", "--eval-every", "2", "--save-every", "2", "--workers", "0", "--report-to", "none"]
    assert exit_code("train", "--recipe", "demo", "--logs", tmp_path, "--name", "run", "--warmup", "1", *few) == 0
    run = tmp_path / "run"
    config = (run / "config.toml").read_text()
    for name in ("best", "step_00000002", "step_00000004"):
        assert (run / "checkpoints" / name / "config.toml").read_text() == config
    early, card = ((run / "checkpoints" / f"step_0000000{n}" / "README.md").read_text() for n in (2, 4))
    assert "2 of 4" in early and (run / "README.md").read_text() == card
    assert front_matter(card) == {
        "library_name": "open_clip",
        "pipeline_tag": "zero-shot-image-classification",
        "license": "unknown",
        "tags": ["clip", "open_clip", "leanclip"],
    }
    recall = records(run, set="val")[-1]["metrics"]["text_to_image_recall@10"]
    assert f"| text_to_image_recall@10 | {100 * recall:.2f} % |" in card
    for fact in (
        "# run\n",
        "leanclip-tiny",
        "| Training pairs | 1,830 |",
        "unseen renders of known concepts",
        "after step 4",
    ):
        assert fact in card


def test_text_from_anywhere_means_itself():
    evil = "<script>alert(1)</script> | a\n# b"
    facts = {"name": evil, "model": evil, "notes": [evil], "environment": {evil: evil}}
    card = model_card(facts, {evil: Result(0, {evil: float("nan"), "top1": 1.0})}, step=0)
    assert "<script" not in card and "\n# b" not in card
    assert "not a number" in card and "| top1 | 100.00 % |" in card and "before training" in card
    assert card.count("\n# ") == 1


def test_a_run_without_evaluation_says_so():
    card = model_card({}, {}, step=7)
    assert "Not evaluated." in card and "| Steps | 7 |" in card and "None" not in card
