"""The model of a run as its configuration wants it trained: what is frozen, recomputed, padded."""

from leanclip.models import ModelConfig, TwoTower, create_model
from leanclip.training.config import TrainConfig


def build_towers(config: TrainConfig, start: ModelConfig | None = None, *, shapes_only: bool = False) -> TwoTower:
    """On the CPU, or with `shapes_only` without weights; `start` is the model's part where a run is resumed."""
    model = create_model(
        start or config.model,
        siglip=config.run.loss == "siglip",
        double=config.run.precision == "fp64",
        shapes_only=shapes_only,
    )
    if config.model.lock_image:
        model.lock_image(config.model.lock_image_unlocked_groups)
    if config.model.lock_text:
        model.lock_text(config.model.lock_text_unlocked_layers)
    if blocks := config.parallel.grad_checkpointing:
        model.checkpoint_activations(None if blocks is True else blocks)
    if config.parallel.pad_text:
        model.pad_texts()
    return model
