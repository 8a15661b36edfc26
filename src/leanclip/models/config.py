"""The model's part of the configuration."""

from dataclasses import dataclass
from typing import Any, Literal

from leanclip.settings import common


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str | None = common(None)
    """An open_clip model name, or the path of a config file in its format. Default: the model of the run that
    --pretrained names, else ViT-B-32; leanclip-tiny for the bundled data."""
    pretrained: str | None = common(None)
    """Initial weights: a checkpoint, a leanclip run or an open_clip tag."""
    lock_image: bool = False
    """Freeze the image tower (LiT)."""
    lock_image_unlocked_groups: int = 0
    """With --lock-image: train this many of its last groups of layers nevertheless."""
    lock_text: bool = False
    """Freeze the text tower."""
    lock_text_unlocked_layers: int = 0
    """With --lock-text: train this many of its last layers nevertheless."""
    force_image_size: int | None = None
    """Train at another image size than the model's own."""
    force_context_length: int | None = None
    """Train with longer or shorter texts than the model's own."""
    force_patch_dropout: float | None = None
    """The share of its patches that a vision transformer does not see while it trains."""
    force_quick_gelu: bool = False
    """QuickGELU in place of GELU, for weights that were trained with it."""
    force_custom_text: bool = False
    """The text tower as a module of its own, as in open_clip's CustomTextCLIP."""
    image_mean: tuple[float, float, float] | None = None
    """Mean of the pixels, in [0, 1], that images are normalised with. Default: the model's own."""
    image_std: tuple[float, float, float] | None = None
    """Their standard deviation."""
    image_interpolation: Literal["bicubic", "bilinear", "random"] | None = None
    """How images to evaluate are resized. Default: the model's own way."""
    image_resize_mode: Literal["shortest", "longest", "squash"] | None = None
    """What of images to evaluate is seen: their middle, all of them padded, or all of them distorted."""
    aug_scale: tuple[float, float] | None = None
    """Smallest and largest share of the image that a random training crop keeps. Default: (0.9, 1.0)."""

    aug_color_jitter: tuple[float, float, float, float] | None = None
    """How much brightness, contrast, saturation and hue of training images vary, as open_clip's color_jitter."""
    aug_color_jitter_prob: float = 0.0
    """The share of training images whose colours vary."""
    aug_gray_scale_prob: float = 0.0
    """The share of training images that lose their colours."""

    @property
    def preprocess(self) -> dict[str, Any]:
        """What of open_clip's preprocessing was given."""
        names = ("mean", "std", "interpolation", "resize_mode")
        return {name: value for name in names if (value := getattr(self, f"image_{name}")) is not None}

    def __post_init__(self) -> None:
        if self.lock_image and self.lock_text:
            raise ValueError("--lock-image and --lock-text together leave nothing to train; choose one")
        if self.aug_scale is not None and not 0 < self.aug_scale[0] <= self.aug_scale[1] <= 1:
            raise ValueError(f"aug_scale is {self.aug_scale}; give two shares with 0 < smallest <= largest <= 1")
        for name, lock in (("lock_image_unlocked_groups", "lock_image"), ("lock_text_unlocked_layers", "lock_text")):
            value = getattr(self, name)
            if value < 0 or (value and not getattr(self, lock)):
                raise ValueError(f"{name} is {value}; it must be 0 or more, and goes with --{lock.replace('_', '-')}")
        if self.force_patch_dropout is not None and not 0 <= self.force_patch_dropout < 1:
            raise ValueError(f"force_patch_dropout is {self.force_patch_dropout}; give a share in [0, 1)")
        if self.force_context_length is not None and self.force_context_length < 3:
            raise ValueError(f"force_context_length is {self.force_context_length}; it must be at least 3")
        if self.image_std is not None and min(self.image_std) <= 0:
            raise ValueError(f"image_std is {self.image_std}; give three positive numbers")
        for name in ("aug_color_jitter_prob", "aug_gray_scale_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a share in [0, 1]")
        if self.aug_color_jitter_prob and self.aug_color_jitter is None:
            raise ValueError("--aug-color-jitter-prob needs --aug-color-jitter, for example 0.32 0.32 0.32 0.08")
        jitter = self.aug_color_jitter or (0, 0, 0, 0)
        if min(jitter) < 0 or jitter[3] > 0.5:
            raise ValueError(f"aug_color_jitter is {jitter}; give four numbers of 0 or more, the last at most 0.5")
