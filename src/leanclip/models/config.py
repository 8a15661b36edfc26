"""The model's part of the configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str | None = None
    """An open_clip model name, or the path of a config file in its format.
    Default: ViT-B-32; leanclip-tiny for the bundled data."""
    pretrained: str | None = None
    """Weights to start from: a local checkpoint, a leanclip run, or an open_clip tag."""
    lock_image: bool = False
    """Freeze the image tower (LiT)."""
    lock_text: bool = False
    """Freeze the text tower."""
    force_image_size: int | None = None
    """Train at another image size than the model's own."""
    aug_scale: tuple[float, float] | None = None
    """Smallest and largest share of the image that a random training crop keeps. Default: (0.9, 1.0)."""

    aug_color_jitter: tuple[float, float, float, float] | None = None
    """How much brightness, contrast, saturation and hue of training images vary, as open_clip's color_jitter."""
    aug_color_jitter_prob: float = 0.0
    """The share of training images whose colours vary."""
    aug_gray_scale_prob: float = 0.0
    """The share of training images that lose their colours."""

    def __post_init__(self) -> None:
        if self.lock_image and self.lock_text:
            raise ValueError("--lock-image and --lock-text together leave nothing to train; choose one")
        if self.aug_scale is not None and not 0 < self.aug_scale[0] <= self.aug_scale[1] <= 1:
            raise ValueError(f"aug_scale is {self.aug_scale}; give two shares with 0 < smallest <= largest <= 1")
        for name in ("aug_color_jitter_prob", "aug_gray_scale_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a share in [0, 1]")
        if self.aug_color_jitter_prob and self.aug_color_jitter is None:
            raise ValueError("--aug-color-jitter-prob needs --aug-color-jitter, for example 0.32 0.32 0.32 0.08")
        jitter = self.aug_color_jitter or (0, 0, 0, 0)
        if min(jitter) < 0 or jitter[3] > 0.5:
            raise ValueError(f"aug_color_jitter is {jitter}; give four numbers of 0 or more, the last at most 0.5")
