"""TwoTower: an open_clip model behind a small interface."""

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from leanclip.errors import UserError
from leanclip.models.kernel_barriers import add_kernel_barriers
from leanclip.models.open_clip_api import PreprocessCfg, VisionTransformer, image_transform_v2
from leanclip.models.saved import CONFIG_FILE
from leanclip.models.text_length import (
    SAVED_ON_CPU,
    SAVED_ON_GPU,
    Buckets,
    EndOfText,
    Texts,
    by_length,
    padding_reason,
    pooling,
    text_tower,
)
from leanclip.models.towers.layers import (
    Side,
    TowerSummary,
    lock,
    roots,
    summarise,
    train_unfrozen,
    unlocked_of_trunk,
)
from leanclip.models.towers.lora import add_adapters
from leanclip.models.towers.projection import Projection
from leanclip.models.transformer_towers import Block, adopt_blocks, embed_images, embed_texts, normalised

PLACES = {"hf_model_name", "hf_tokenizer_name", "hf_model_pretrained", "timm_model_pretrained"}
PROJECTIONS = {"hf_proj_type", "timm_proj", "proj_type"}
PROBE = "Two dogs, 3 cats: a photo"  # which tokenizers of different vocabularies or rules take differently


class TwoTower(nn.Module):
    """An image tower and a text tower that map to unit vectors of one space, with preprocessing and tokenizer.

    The temperature belongs to the loss: the open_clip model's own `logit_scale` and `logit_bias` are frozen, and
    `with_temperature` fills them in on saving. A CoCa model's decoder is frozen too; `untrained_decoder` is its
    number of parameters, and 0 for other models.
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(self, clip: Any, name: str, config: dict[str, Any], tokenizer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.clip: Any = clip  # open_clip's classes share an interface but no base class
        self.name, self.config, self.tokenizer = name, config, tokenizer
        self.locked: list[Side] = []
        self.ranks: dict[Side, int] = {}  # of adapters
        self.fixed_norms: set[Side] = set()  # whose batch norms keep their averages
        self.weights: dict[Side, str | None] = {"image": None, "text": None}  # where they come from; None: random
        self.new_projections: set[Side] = set()  # behind a tower that came with weights
        self.preprocess = PreprocessCfg(**clip.visual.preprocess_cfg)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(self.preprocess, name)).view(-1, 1, 1)
            self.register_buffer(f"image_{name}", values, persistent=False)
        decoder: nn.Module | None = getattr(clip, "text_decoder", None)  # of CoCa: the loss does not reach it
        for untrained in (clip.logit_scale, clip.logit_bias, decoder):
            if untrained is not None:
                untrained.requires_grad_(False)
        self.untrained_decoder = 0 if decoder is None else sum(p.numel() for p in decoder.parameters())
        self.recomputed_blocks, self.compiled = 0, False
        self.projections = Projection.of_images(clip), Projection.of_texts(clip)
        self.feature_sizes: tuple[int | None, int | None] = (None, None)  # of towers whose features come from tables
        self.blockwise_image = _runs_by_blocks(clip.visual) and adopt_blocks(clip.visual.transformer)
        self.padding_reason = padding_reason(clip)
        if self.padding_reason is None and not adopt_blocks(text_tower(clip).transformer):
            self.padding_reason = "the text tower has blocks of an unknown type"
        self.end_of_text: EndOfText | None = None if self.padding_reason else pooling(clip)  # None: runs padded
        text: Any = getattr(clip, "text", None)
        self.padding: int | None = text.config.pad_token_id if hasattr(text, "pooler") else None
        if self.padding is not None:  # transformers' own, which masks padding: trimmed to the longest of a batch
            self.padding_reason = None
        self.buckets = True  # such texts by length; not with FSDP, where all ranks run the tower equally often

    def architecture(self, side: Side) -> dict[str, Any]:
        """What decides the features of a tower beside its weights."""
        config = self.config["vision_cfg" if side == "image" else "text_cfg"]
        facts = {name: value for name, value in config.items() if name not in PLACES | PROJECTIONS}
        tokens = self.tokenizer([PROBE]).tolist() if side == "text" else None
        return facts | {"quick_gelu": self.config.get("quick_gelu", False), "tokens": tokens}

    def train(self, mode: bool = True) -> "TwoTower":
        super().train(mode)
        for side in self.locked:
            train_unfrozen(roots(self.clip, side), mode)
        for norm in (norm for side in self.fixed_norms | self.ranks.keys() for norm in self._norms(side)):
            norm.eval()
        return self

    def _norms(self, side: Side) -> Iterator[nn.Module]:
        modules = (module for root in roots(self.clip, side) for module in root.modules())
        return (module for module in modules if isinstance(module, _BatchNorm))

    def forward(
        self, images: Tensor, tokens: Tensor | Texts | Buckets, between: Callable[[Tensor], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both embeddings; `between` is called with those of the images before the text tower runs."""
        image = self.encode_image(images)
        if between is not None:
            between(image)
        return image, self.encode_text(tokens)

    def encode_image(self, images: Tensor) -> Tensor:
        """Unit vectors of images: uint8 pixels, the output of `transform`, or that of `image_features`."""
        return F.normalize(self._projected(0, images) if images.ndim == 2 else self._images(images), dim=-1)

    def encode_text(self, tokens: Tensor | Texts | Buckets) -> Tensor:
        """Unit vectors of texts: padded tokens (B, L), the output of `texts`, or that of `text_features`."""
        if isinstance(tokens, Tensor) and tokens.is_floating_point():
            return F.normalize(self._projected(1, tokens), dim=-1)
        return F.normalize(self._texts(tokens), dim=-1)

    def image_features(self, images: Tensor) -> Tensor:
        """What the image tower computes before its projection, (B, D)."""
        with self.projection(0).left_out():
            return self._images(images)

    def text_features(self, tokens: Tensor | Texts | Buckets) -> Tensor:
        """What the text tower computes before its projection, (B, D)."""
        with self.projection(1).left_out():
            return self._texts(tokens)

    def _images(self, images: Tensor) -> Tensor:
        visual = self.clip.visual
        if not self.blockwise_image:
            return self.clip.encode_image(self.normalised(images), normalize=False)
        options = {"recomputed": self.recomputed_blocks, "compile": self.compiled}
        return embed_images(visual, images, self.image_mean, self.image_std, **options)

    def _texts(self, tokens: Tensor | Texts | Buckets) -> Tensor:
        texts = self.texts(tokens) if isinstance(tokens, Tensor) else tokens
        if isinstance(texts, Tensor):
            return self.clip.encode_text(texts, normalize=False)
        if isinstance(texts, Buckets):
            return texts.embedded(lambda tokens: self.clip.encode_text(tokens, normalize=False))
        return embed_texts(text_tower(self.clip), texts, recomputed=self.recomputed_blocks)

    def projection(self, side: int) -> Projection:
        """Of the image tower (0) or the text tower (1)."""
        projection = self.projections[side]
        if projection is None:
            tower = ("image", "text")[side]
            raise UserError(
                f"the {tower} tower of {self.name} has no projection that can run by itself, so its features cannot"
                " be cached; give --cache-locked 0, with which the frozen tower runs in every step",
                code="model.no_features",
            )
        return projection

    def _projected(self, side: int, features: Tensor) -> Tensor:
        """Embeddings from stored features, in the precision of the projection's weights."""
        return self.projection(side)(features.to(self.image_mean.dtype))

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of its images, in pixels."""
        size: Any = self.preprocess.size
        return (size, size) if isinstance(size, int) else tuple(size)

    def normalised(self, images: Tensor) -> Tensor:
        dtype = next(self.clip.visual.parameters()).dtype
        return normalised(images, self.image_mean, self.image_std, dtype)

    def texts(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor | Texts | Buckets:
        """Padded tokens without their padding, where the text tower allows it, on the model's device.

        Tokens or `lengths` on the host avoid a synchronisation with the device.
        """
        device = self.image_mean.device
        if self.padding is not None and not tokens.is_floating_point():
            lengths = (tokens != self.padding).sum(-1).clamp(min=1).cpu()
            tokens = tokens[:, : int(lengths.max())].to(device, non_blocking=True)
            rows = by_length(lengths, least=SAVED_ON_CPU if device.type == "cpu" else SAVED_ON_GPU)
            return Buckets.split(tokens, lengths, rows) if self.buckets and len(rows) > 1 else tokens
        if self.end_of_text is None or tokens.is_floating_point():
            return tokens.to(device, non_blocking=True)
        if lengths is None:
            lengths = self.end_of_text(tokens).cpu()
        return Texts.pack(tokens.to(device, non_blocking=True), lengths, few_sizes=device.type == "cuda")

    def transform(self) -> Callable[..., Tensor]:
        """open_clip's transform for inference, from a PIL image to a normalised tensor."""
        transform: Any = image_transform_v2(self.preprocess, is_train=False)
        return transform

    def decode(self, tokens: Tensor) -> str:
        """The text of one row of tokens, without start, end and padding."""
        inner = getattr(self.tokenizer, "tokenizer", None)  # transformers' own, in open_clip's wrapper
        if inner is not None:
            return inner.decode(tokens, skip_special_tokens=True)
        special = {*getattr(self.tokenizer, "all_special_ids", ()), 0}
        return self.tokenizer.decode([t for t in tokens.tolist() if t not in special]).strip()  # pyright: ignore[reportFunctionMemberAccess]

    def lock(self, side: Side, unlocked: int = 0) -> None:
        """Freeze the trunk of a tower except its last layers: parameters, batch-norm statistics, dropout."""
        tower = self.config["vision_cfg" if side == "image" else "text_cfg"]
        lock(self.clip, side, unlocked_of_trunk(tower, unlocked))
        self.locked.append(side)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise UserError(
                "--lock-image and --lock-text leave nothing to train: neither tower ends in a projection; unlock the"
                " last layers of one",
                code="model.nothing_to_train",
            )

    def add_adapters(self, side: Side, rank: int) -> None:
        """Train low-rank adapters in place of the trunk of a tower (`merged` makes plain weights of them)."""
        add_adapters(self.clip, side, rank)
        self.ranks[side] = rank

    def summary(self) -> tuple[TowerSummary, ...]:
        """What is trained of each tower, and where its weights come from."""
        fixed = self.fixed_norms - self.ranks.keys()
        return tuple(
            summarise(
                self.clip, side, weights, self.ranks.get(side, 0), new=side in self.new_projections,
                fixed_norms=side in fixed and any(p.requires_grad for m in self._norms(side) for p in m.parameters()),
            )
            for side, weights in self.weights.items()
        )  # fmt: skip

    def checkpoint_activations(self, blocks: int | None = None) -> None:
        """Recompute each tower's first blocks (default: all) in the backward pass; only their inputs are kept.

        Towers that do not run block by block recompute all of their blocks or none.
        """
        self.clip.set_grad_checkpointing(blocks != 0)
        self.recomputed_blocks = sys.maxsize if blocks is None else blocks

    def compile_towers(self, *, whole: bool = True) -> None:
        """Compile the towers' blocks, and an image tower without such blocks as a `whole`, at their first use."""
        self.compiled = True
        for module in self.modules():
            if isinstance(module, Block):
                module.compiled = True
        if whole and not self.blockwise_image:
            add_kernel_barriers()
            self.clip.visual.compile()

    def temperature(self) -> float:
        return math.exp(-float(self.clip.logit_scale.detach().reshape(())))

    def bias(self) -> float | None:
        bias = self.clip.logit_bias
        return float(bias.detach().reshape(())) if isinstance(bias, Tensor) else None

    def open_clip_config(self) -> dict[str, Any]:
        """The config that open_clip's `local-dir:` reads beside the weights."""
        return {"model_cfg": self.config, "preprocess_cfg": asdict(self.preprocess)}

    def config_files(self, home: Path) -> dict[str, bytes]:
        """The files beside the weights in a directory that will be `home`: the config, and for a text tower of
        transformers its configuration and tokenizer, so that nothing else is needed to load the model."""
        files, config = {}, self.open_clip_config()
        if "hf_model_name" in self.config["text_cfg"]:
            files = text_files(self.clip.text.config, self.tokenizer)
            text = self.config["text_cfg"] | dict.fromkeys(
                ("hf_model_name", "hf_tokenizer_name"), str(home.absolute())
            )
            config |= {"model_cfg": self.config | {"text_cfg": text}}
        return {CONFIG_FILE: json.dumps(config, indent=1).encode()} | files


def text_files(config: Any, tokenizer: Any) -> dict[str, bytes]:
    """What transformers saves of a text tower besides its weights."""
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        tokenizer.tokenizer.save_pretrained(name)
        return {path.name: path.read_bytes() for path in sorted(Path(name).iterdir())}


def _runs_by_blocks(visual: Any) -> bool:
    return (
        type(visual) is VisionTransformer
        and visual.attn_pool is None
        and not visual.output_tokens
        and visual.conv1.bias is None
        and visual.conv1.stride == visual.conv1.kernel_size
    )
