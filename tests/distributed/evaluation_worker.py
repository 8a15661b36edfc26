"""One rank of the evaluation tests: embed, retrieve and classify, with sizes that divide by nothing."""

import json
from pathlib import Path

import torch

from leanclip.data import DataConfig, Subset, open_source
from leanclip.distributed import wrap_fsdp
from leanclip.evaluation import (
    EvaluationSettings,
    classify,
    embed,
    open_labelled,
    prompts_for,
    retrieval_metrics,
)
from leanclip.models import ModelConfig, create_model

SMALL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def evaluated(ranks, folder, count, wrap, dtype):
    """The metrics of an untrained model on the first `count` samples of the captions, and on all classes."""
    folder = Path(folder)
    config = folder / f"model-{ranks.rank}-{ranks.size}.json"
    config.write_text(json.dumps(SMALL))
    torch.manual_seed(5)
    model = create_model(ModelConfig(model=str(config))).to(getattr(torch, dtype))
    device = torch.device("cpu")
    if wrap == "fsdp" and ranks.size > 1:
        wrap_fsdp(model, ranks, device, methods=("encode_image", "encode_text"))
    source = open_source(str(folder / "captions.tar"), DataConfig())
    data = Subset(source, torch.arange(len(source)).numpy()[:count])
    embedded = embed(model, data, EvaluationSettings(device=device, batch=4))
    metrics = dict(retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text, tile=5))
    labelled = open_labelled(str(folder / "classes"))
    classified, again = (
        classify(model, labelled, prompts_for(labelled), EvaluationSettings(device=device, batch=batch))
        for batch in (4, 3)
    )
    assert again.confusion.tolist() == classified.confusion.tolist()
    return {"retrieval": metrics | {"broken": embedded.broken}, "zero_shot": classified.to_json()}


def evaluated_all(ranks, folder, cases):
    return {f"{case}": evaluated(ranks, folder, *case) for case in cases}
