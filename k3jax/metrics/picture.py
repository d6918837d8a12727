"""A matrix as a heat map: on axes that the caller has, or as PNG bytes."""

import io
from typing import Any

import numpy as np


def heat_map(axes: Any, matrix: np.ndarray) -> Any:
    """Draws the AttnRes weights [sublayers, sources] on matplotlib axes, shallow layers on top; the image.

    Rows are attention and FFN of every layer in turn, the last one is the mix in front of the head.
    """
    sublayers, sources = matrix.shape
    drawn = axes.imshow(matrix, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0)
    names = ["embed", *(f"block {at}" for at in range(1, sources - 1)), "partial"]
    axes.set_xticks(range(sources), names[-sources:], rotation=45 if sources > 4 else 0)
    rows = range(0, sublayers - 1, 2 * max(1, sublayers // 32))
    axes.set_yticks([*rows, sublayers - 1], [*(f"{row // 2 + 1}" for row in rows), "head"])
    axes.set_ylabel("layer: attention, FFN")
    return drawn


def heat_map_png(matrix: np.ndarray, title: str) -> bytes:
    """The heat map with a colour bar as PNG, 384 x 512 pixels."""
    from matplotlib.figure import Figure  # half a second to import, and needed at few steps only

    figure = Figure(figsize=(4.8, 6.4), dpi=80, layout="constrained")
    axes = figure.subplots()
    figure.colorbar(heat_map(axes, matrix))
    axes.set_title(title, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
