"""The configuration of the model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from leanclip.models.saved import CONFIG_FILE
from leanclip.settings import setting

_RANK = "a rank, or 0 for none, and without --lock-{}: adapters freeze the tower themselves"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model"""

    model: str | None = setting(None, common=True, resume="free")
    """An open_clip model name, a config file or its directory, or hf-hub:ORG/NAME. Default: the model of the run that
    --pretrained names, else ViT-B-32; leanclip-tiny for the bundled data."""
    pretrained: str | None = setting(None, common=True, resume="free")
    """Initial weights: a checkpoint, a leanclip run, an open_clip tag, or hf-hub:ORG/NAME."""
    image_tower: str | None = setting(None, resume="fixed")
    """The image tower in place of that of --model: timm:NAME, or the open_clip model that it is taken from."""
    text_tower: str | None = setting(None, resume="fixed")
    """The text tower likewise: hf:DIRECTORY or hf:NAME of transformers (BERT, RoBERTa, mT5), or open_clip's."""
    pretrained_image: str | None = setting(None, resume="free")
    """Initial weights of the image tower alone: a file, a directory, timm:NAME or hf-hub:ORG/NAME."""
    pretrained_text: str | None = setting(None, resume="free")
    """Initial weights of the text tower alone: a file, a directory or hf-hub:ORG/NAME."""
    head: Literal["linear", "mlp"] = setting("linear", resume="fixed")
    """The trained projection of timm: and hf: towers."""
    embed_dim: int | None = setting(None, resume="fixed")
    """The size of the embeddings of towers that are named one by one. Default: that of --model."""
    lock_image: bool = setting(False, resume="fixed")
    """Freeze the image tower (LiT); its projection is trained."""
    lock_image_unlocked_groups: int = setting(0, resume="fixed")
    """With --lock-image: the number of its last groups of layers that are still trained. In open_clip's transformers
    the projection is the last group, as in OpenCLIP, so 2 trains it and one block."""
    lock_text: bool = setting(False, resume="fixed")
    """Freeze the text tower; its projection is trained."""
    lock_text_unlocked_layers: int = setting(0, resume="fixed")
    """With --lock-text: the number of its last layers that are still trained, counted likewise."""
    lora_image: int = setting(0, resume="fixed")
    """Train adapters of this rank (LoRA) in place of the image tower, and its projection; 0 trains the tower."""
    lora_text: int = setting(0, resume="fixed")
    """The rank of adapters of the text tower, likewise."""
    lora_weights: str | None = setting(None, resume="free")
    """Start the adapters, and what else was trained with them, from this file of leanclip export --format lora."""
    fix_batch_norm: bool | None = setting(None, resume="fixed")
    """Normalise with the stored averages of batch norms in training too. Default: where a tower starts from weights,
    whose other layers expect these averages."""
    force_image_size: int | None = None
    """Train at this image size in pixels. Default: the model's."""
    force_context_length: int | None = None
    """Train with captions of up to this many tokens. Default: the model's context length."""
    force_patch_dropout: float | None = None
    """The share of patches that a vision transformer drops in training."""
    force_quick_gelu: bool = False
    """Use QuickGELU in place of GELU, for weights that were trained with it."""
    force_custom_text: bool = False
    """Build the text tower as a separate module, as in open_clip's CustomTextCLIP."""
    image_mean: tuple[float, float, float] | None = None
    """Mean of the pixels, in [0, 1], for the normalisation of images. Default: the model's."""
    image_std: tuple[float, float, float] | None = None
    """Standard deviation of the pixels, likewise."""
    image_interpolation: Literal["bicubic", "bilinear", "random"] | None = None
    """Interpolation of evaluation images. Default: the model's."""
    image_resize_mode: Literal["shortest", "longest", "squash"] | None = None
    """Evaluation images: shortest crops the middle, longest pads, squash distorts. Default: the model's."""
    aug_scale: tuple[float, float] | None = None
    """Smallest and largest share of the image that a random training crop keeps. Default: (0.9, 1.0)."""
    aug_color_jitter: tuple[float, float, float, float] | None = None
    """Strength of the jitter of brightness, contrast, saturation and hue, as open_clip's color_jitter."""
    aug_color_jitter_prob: float = 0.0
    """The share of training images with colour jitter."""
    aug_gray_scale_prob: float = 0.0
    """The share of training images converted to grey."""

    @property
    def preprocess(self) -> dict[str, Any]:
        """The settings of open_clip's preprocessing that were given."""
        names = ("mean", "std", "interpolation", "resize_mode")
        return {name: value for name in names if (value := getattr(self, f"image_{name}")) is not None}

    @property
    def _towers(self) -> tuple[str | None, str | None]:
        return self.image_tower, self.text_tower

    @property
    def composed(self) -> bool:
        """Whether towers are named one by one."""
        return any(self._towers)

    @property
    def title(self) -> str | None:
        """The model, or the towers that are put together."""
        return " + ".join(filter(None, self._towers)) or self.model

    @property
    def from_weights(self) -> bool:
        """Whether a tower starts from trained weights."""
        return any((self.pretrained, self.pretrained_image, self.pretrained_text))

    @property
    def random_frozen(self) -> str | None:
        """The flag that freezes a tower that starts without weights."""
        image, text = self.pretrained or self.pretrained_image, self.pretrained or self.pretrained_text
        flags = {
            "--lock-image": self.lock_image and image is None,
            "--lock-text": self.lock_text and text is None,
            "--lora-image": self.lora_image and image is None,
            "--lora-text": self.lora_text and text is None,
        }
        return next((flag for flag, random in flags.items() if random), None)

    def resumed_from(self, checkpoint: Path) -> "ModelConfig":
        """The settings that load a checkpoint of a run with these. It carries what towers from elsewhere need."""
        model = str(checkpoint / CONFIG_FILE) if self.composed else self.model
        elsewhere = ("image_tower", "text_tower", "pretrained_image", "pretrained_text", "lora_weights", "embed_dim")
        sources = dict.fromkeys(elsewhere)
        return replace(self, model=model, pretrained=str(checkpoint), **sources)

    def __post_init__(self) -> None:
        if self.pretrained is not None and any((*self._towers, self.pretrained_image, self.pretrained_text)):
            raise ValueError(
                "--pretrained is a whole model; give the towers' weights as --pretrained-image and --pretrained-text"
            )
        invalid = {
            "aug_scale": (
                self.aug_scale and not 0 < self.aug_scale[0] <= self.aug_scale[1] <= 1,
                "two shares in (0, 1], the first at most the second",
            ),
            "embed_dim": (
                self.embed_dim is not None and (self.embed_dim < 1 or not self.composed),
                "at least 1, and with --image-tower or --text-tower",
            ),
            "lock_image_unlocked_groups": (
                _bad_count(self.lock_image_unlocked_groups, self.lock_image),
                "given with --lock-image, and 0 or more",
            ),
            "lock_text_unlocked_layers": (
                _bad_count(self.lock_text_unlocked_layers, self.lock_text),
                "given with --lock-text, and 0 or more",
            ),
            "lora_image": (self.lora_image < 0 or (self.lora_image and self.lock_image), _RANK.format("image")),
            "lora_text": (self.lora_text < 0 or (self.lora_text and self.lock_text), _RANK.format("text")),
            "lora_weights": (
                self.lora_weights is not None and not (self.lora_image or self.lora_text),
                "given with the ranks of its adapters, --lora-image and --lora-text",
            ),
            "force_patch_dropout": (not 0 <= (self.force_patch_dropout or 0) < 1, "a share in [0, 1)"),
            "force_context_length": (
                self.force_context_length is not None and self.force_context_length < 3,
                "at least 3",
            ),
            "image_mean": (not all(abs(value) < 1e6 for value in self.image_mean or ()), "three finite numbers"),
            "image_std": (not all(0 < value < 1e6 for value in self.image_std or ()), "three positive numbers"),
            "aug_color_jitter_prob": (not 0 <= self.aug_color_jitter_prob <= 1, "a share in [0, 1]"),
            "aug_gray_scale_prob": (not 0 <= self.aug_gray_scale_prob <= 1, "a share in [0, 1]"),
        }
        for name, (wrong, allowed) in invalid.items():
            if wrong:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {allowed}")


def _bad_count(unlocked: int, locked: bool) -> bool:
    return unlocked < 0 or (unlocked > 0 and not locked)
