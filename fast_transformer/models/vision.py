"""The Vision Transformer (Dosovitskiy et al. 2021): an image is a sentence of patches."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import functional
from ..nn import Dropout, LearnedPositions, TransformerEncoder, TransformerEncoderLayer
from ..nn.positions import check_size


@dataclass(frozen=True)
class VisionConfig:
    """The arguments of VisionTransformer under names: `VisionTransformer.from_config(VisionConfig.tiny(n_classes=10))`.

    The sizes tiny and small are those of DeiT (Touvron et al. 2021, table 1), base is that of ViT-B/16.
    """

    n_classes: int = 1000
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    d_model: int = 768
    n_heads: int = 12
    n_layers: int = 12
    d_ff: int = 3072
    dropout: float = 0.1

    @classmethod
    def _sized(cls, n_classes, d_model, changes) -> "VisionConfig":
        return cls(n_classes, **({"d_model": d_model, "n_heads": d_model // 64, "d_ff": 4 * d_model} | changes))

    @classmethod
    def tiny(cls, n_classes: int, **changes: Any) -> "VisionConfig":
        return cls._sized(n_classes, 192, changes)

    @classmethod
    def small(cls, n_classes: int, **changes: Any) -> "VisionConfig":
        return cls._sized(n_classes, 384, changes)

    @classmethod
    def base(cls, n_classes: int, **changes: Any) -> "VisionConfig":
        return cls._sized(n_classes, 768, changes)


class VisionTransformer(nn.Module):
    """Classifies images: patches and a class token with learned positions, a pre-norm encoder, and a head on the class token.

    Args:
        n_classes: number of labels.
        image_size: height and width in training; images of other sizes get interpolated positions.
        patch_size: height and width of a patch.
        channels: of the images.
        d_model, n_heads, n_layers, d_ff: sizes.
        dropout: of embeddings, weights, activations and block ends, in [0, 1).

    Raises:
        ValueError, TypeError: a size or dropout; image_size that is no multiple of patch_size.
    """

    def __init__(
        self,
        n_classes: int = 1000,
        image_size: int = 224,
        patch_size: int = 16,
        channels: int = 3,
        d_model: int = 768,
        n_heads: int = 12,
        n_layers: int = 12,
        d_ff: int = 3072,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if check_size("image_size", image_size) % check_size("patch_size", patch_size) != 0:
            raise ValueError(f"image_size must be a multiple of patch_size = {patch_size}, got {image_size}")
        self.patch_size, self.channels = patch_size, check_size("channels", channels)
        self.grid = image_size // patch_size  # patches along each side in training
        layer = TransformerEncoderLayer(
            d_model, n_heads, check_size("d_ff", d_ff), dropout, F.gelu, layer_norm_eps=1e-6, batch_first=True, norm_first=True
        )
        self.patches = nn.Conv2d(channels, d_model, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(d_model))
        self.positions = LearnedPositions(1 + self.grid**2, d_model)  # of the class token, then row by row
        self.dropout = Dropout(dropout)
        self.encoder = TransformerEncoder(layer, check_size("n_layers", n_layers), nn.LayerNorm(d_model, eps=1e-6))
        self.head = nn.Linear(d_model, check_size("n_classes", n_classes))
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.trunc_normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    @classmethod
    def from_config(cls, config: VisionConfig) -> "VisionTransformer":
        return cls(**vars(config))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, n_classes) of images (N, channels, height, width); arguments as in `features`."""
        return self.head(self.features(images)[:, 0])

    def features(self, images: Tensor) -> Tensor:
        """What the encoder makes of the class token and of each patch, row by row.

        Args:
            images: floating-point (N, channels, height, width), height and width multiples of patch_size.

        Returns:
            (N, 1 + patches, d_model).

        Raises:
            TypeError, ValueError: another dtype, shape or size.
        """
        functional.check_tensor("images", images)
        P, shape = self.patch_size, tuple(images.shape)
        if len(shape) != 4 or shape[1] != self.channels or 0 in shape[2:] or shape[2] % P or shape[3] % P:
            expected = f"(N, {self.channels}, height, width), height and width multiples of {P},"
            raise ValueError(f"images must have shape {expected} got {shape}")
        x = self.patches(images)  # (N, E, rows, columns)
        positions = self._positions(*x.shape[2:])
        x = torch.cat((self.class_token.expand(len(x), 1, -1), x.flatten(2).transpose(1, 2)), dim=1)  # (N, 1 + patches, E)
        return self.encoder(self.dropout(x + positions))

    def _positions(self, rows: int, columns: int) -> Tensor:
        """(1 + rows * columns, E): those of the patches interpolated in two dimensions where the grid is another one."""
        table = self.positions.weight
        if (rows, columns) == (self.grid, self.grid):
            return table
        square = table[1:].T.reshape(1, -1, self.grid, self.grid)  # (1, E, grid, grid)
        patches = F.interpolate(square, (rows, columns), mode="bicubic")[0].flatten(1).T
        return torch.cat((table[:1], patches))
