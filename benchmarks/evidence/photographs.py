"""Images with the statistics of photographs."""

import io

import numpy as np
from PIL import Image


def photograph(
    width: int, height: int, seed: int = 0, kind: str = "JPEG", mode: str = "RGB", **options: object
) -> bytes:
    """An encoded image of coloured noise whose strength falls with the frequency, as in photographs, with some hard
    edges."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequency[0, 0] = 1
    noise = np.fft.ifft2(np.fft.fft2(rng.standard_normal((3, height, width))) / frequency**1.2).real
    noise = noise.mean(0) + 0.4 * noise
    pixels = 127 + 50 * (noise - noise.mean((1, 2), keepdims=True)) / noise.std((1, 2), keepdims=True)
    for _ in range(6):
        top, left = rng.integers(0, height), rng.integers(0, width)
        pixels[:, top : top + height // 4, left : left + width // 4] = rng.integers(0, 256, (3, 1, 1))
    file = io.BytesIO()
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0)).convert(mode)
    image.save(file, kind, **(options or ({"quality": 88} if kind == "JPEG" else {})))
    return file.getvalue()
