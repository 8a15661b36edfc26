"""The model of a run (frozen, recomputed, padded), its loss, and whether to compile it or to use a CUDA graph."""

import math
from pathlib import Path

import torch

from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.losses import ContrastiveLoss, loss_from_config
from leanclip.models import ModelConfig, TwoTower, check_vocabulary, create_model
from leanclip.models.text_length import text_tower
from leanclip.models.towers.layers import Side
from leanclip.models.towers.lora import start_from_adapters
from leanclip.runs.config import TrainConfig

COMPILE_SECONDS = 40.0  # to compile the towers, about
# Seconds that compiling saves: per operation, because neighbours are fused (ViT-B-32 at batch 2,048 on an H200: 40 ms
# of 61e12), and per step, because there are fewer kernels, which the host or a CUDA graph launches.
SAVED_PER_OPERATION, SAVED_LAUNCHES, SAVED_IN_GRAPH = 6e-16, 0.01, 0.0015
CAPTION, PATCH = 16, 16  # typical tokens of a caption, and pixels of a patch's side
GRAPH_OPERATIONS = 4e12  # of the towers in a step, about 10 ms on a fast GPU: below, a CUDA graph saves time


def model_for_run(config: TrainConfig, start: ModelConfig | None = None, *, shapes_only: bool = False) -> TwoTower:
    """On the CPU; without weights with `shapes_only`. `start` replaces the model settings of a resumed run."""
    model = create_model(
        start or config.model,
        siglip=config.run.loss == "siglip",
        double=config.run.precision == "fp64",
        shapes_only=shapes_only,
    )
    check_vocabulary(model)
    if config.model.lock_image:
        model.lock("image", config.model.lock_image_unlocked_groups)
    if config.model.lock_text:
        model.lock("text", config.model.lock_text_unlocked_layers)
    ranks: dict[Side, int] = {"image": config.model.lora_image, "text": config.model.lora_text}
    for side, rank in ranks.items():
        if rank:
            model.add_adapters(side, rank)
    given: dict[Side, str | None] = {"image": config.model.pretrained_image, "text": config.model.pretrained_text}
    for side, weights in given.items():
        starts_from_weights = (config.model.pretrained or weights) is not None
        if starts_from_weights if config.model.fix_batch_norm is None else config.model.fix_batch_norm:
            model.fixed_norms.add(side)
    if (adapters := (start or config.model).lora_weights) is not None and not shapes_only:
        start_from_adapters(model.clip, Path(adapters))
    if blocks := config.parallel.grad_checkpointing:
        model.checkpoint_activations(None if blocks is True else blocks)
    model.buckets = not config.parallel.fsdp
    if config.parallel.pad_text:
        model.end_of_text = model.padding = None
    return model


def loss_for_run(config: TrainConfig, samples: int) -> ContrastiveLoss:
    return loss_from_config(
        config.run.loss,
        config.loss,
        num_samples=samples,
        implementation=config.run.implementation,
        pair_weights=config.data.pair_weights_mode,
        captions_per_sample=config.data.scored_captions,
    )


def tower_depth(model: TwoTower) -> int | None:
    """Blocks of the deeper tower: how many can be recomputed. None where it is all or none."""
    if not model.blockwise_image or model.end_of_text is None:
        return None
    return max(len(tower.transformer.resblocks) for tower in (model.clip.visual, text_tower(model.clip)))


def uses_compile(config: TrainConfig, model: TwoTower, ranks: Ranks, device: torch.device, steps: int) -> bool:
    """Whether to compile the towers: as set, or if that saves more time than it takes."""
    setting, batch = config.parallel.compile, config.data.global_batch_size
    if setting != "auto" or device.type != "cuda":
        return setting == "on"
    if None not in model.feature_sizes:  # no tower runs
        return False
    assert batch is not None
    launches = SAVED_IN_GRAPH if uses_cuda_graph(config, model, ranks, device) else SAVED_LAUNCHES
    return steps * (tower_flops(model, batch / ranks.size) * SAVED_PER_OPERATION + launches) > COMPILE_SECONDS


def uses_cuda_graph(config: TrainConfig, model: TwoTower, ranks: Ranks, device: torch.device) -> bool:
    setting, batch = config.parallel.graph, config.data.global_batch_size
    assert batch is not None
    true_length = model.end_of_text is not None or model.feature_sizes[1] is not None
    possible = device.type == "cuda" and ranks.size == 1 and not config.parallel.fsdp and true_length
    if setting == "on" and not possible:
        message = "--graph on needs one GPU, without --fsdp, and a text tower that runs at true length; leave it out"
        raise UserError(message, code="training.graph_unsupported")
    return possible and (setting == "on" or (setting == "auto" and cuda_graph_pays(model, batch)))


def tower_flops(model: TwoTower, batch: float) -> float:
    """Estimated operations of the towers in a step, none where features are stored. In towers other than open_clip's
    transformers, each weight counts once per patch of 16 x 16 pixels, or once per token of a caption."""
    visual, texts = model.clip.visual, text_tower(model.clip)
    image_size, text_size = model.feature_sizes
    image_work = text_work = 0
    if text_size is None:
        text_work = CAPTION * sum(p.numel() for p in getattr(texts, "transformer", texts).parameters())
    if image_size is None and model.blockwise_image:
        image_work = len(visual.positional_embedding) * sum(p.numel() for p in visual.transformer.parameters())
    elif image_size is None:
        image_work = math.prod(model.image_size) // PATCH**2 * sum(p.numel() for p in visual.parameters())
    return 6 * batch * (image_work + text_work)


def cuda_graph_pays(model: TwoTower, batch: int) -> bool:
    """Whether launching takes longer than computing. Known for open_clip's own transformers and stored features."""
    image_size, text_size = model.feature_sizes
    known_image = model.blockwise_image or image_size is not None
    known_text = model.end_of_text is not None or text_size is not None
    return known_image and known_text and tower_flops(model, batch) < GRAPH_OPERATIONS
