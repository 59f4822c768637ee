"""Heat maps of attention weights, masks and positions.

Every function draws into new axes, or into `axes`; saves the figure if there is a `path`; and returns the axes, whose `.figure`
is the figure. Nothing goes through pyplot: no state, no window, no choice of a backend. Rows are queries, columns are keys.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from .. import functional
from .text import printable, shorten, visible

Path = str | os.PathLike | None
COLORS = "YlGnBu"
ATTEND, HIDDEN = "#e4f1e1", "#3b4a5a"
CELL = 0.3  # inches of a token, where there is room
LABEL = 0.12  # inches that a label needs
MOST_LABELS, MOST_NUMBERS = 60, 16  # on one axis
MOST_PIXELS = 1024  # of a side of an image; more would not be seen


def plot_attention(
    weights: Tensor,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    head: int | None = None,
    sample: int | None = None,
    title: str | None = None,
    axes: Axes | None = None,
    path: Path = None,
) -> Axes:
    """Draw one head's attention weights, or the mean of all heads, as a heat map.

    In pictures of more than 1024 queries or keys a pixel shows the largest weight that falls on it. Along a long side every
    n-th token is written, after its position.

    Args:
        weights: (L, S), (H, L, S) or (N, H, L, S).
        query_tokens, key_tokens: L and S strings; None = positions. Spaces, tabs and line ends are drawn as symbols.
        head: which head; None = the mean of all.
        sample: which sample of the batch; needed where N > 1.
        title: above the picture.
        axes: where to draw; None = in a new figure.
        path: where to save the figure: a PNG, unless the suffix says otherwise.

    Returns:
        The Axes.

    Raises:
        ValueError, TypeError: shapes, tokens, head or sample do not fit, or a weight is not finite.
    """
    heads = _finite("weights", _matrices("weights", weights, sample))
    H, L, S = heads.shape
    _check_tokens(L, S, query_tokens, key_tokens)
    matrix = heads.mean(0) if head is None else heads[_check_index("head", head, H)]
    new = axes is None
    axes = _new_axes(L, S) if new else _check_axes(axes)
    image = _draw(axes, _shrink(matrix, F.adaptive_max_pool2d), L, S, cmap=COLORS, vmin=0)
    which = f", head {head}" if head is not None else f", mean of {H} heads" if H > 1 else ""
    axes.figure.colorbar(image, ax=axes, label=f"attention weight{which}")
    _annotate([axes], L, S, query_tokens, key_tokens, [title], grow=new)
    return _finish(axes, path)


def plot_attention_grid(
    weights: Tensor,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    sample: int | None = None,
    title: str | None = None,
    axes: Iterable[Axes] | None = None,
    path: Path = None,
) -> np.ndarray:
    """Draw the attention weights of all heads, a heat map each, on one scale of colours.

    Args:
        weights, query_tokens, key_tokens, sample, path: as in `plot_attention`.
        title: above the whole figure.
        axes: H axes of one figure, in an array of any shape; None = in a new figure.

    Returns:
        An array (H,) of Axes.

    Raises:
        ValueError, TypeError: as in `plot_attention`, or another number of axes than heads.
    """
    heads = _finite("weights", _matrices("weights", weights, sample))
    H, L, S = heads.shape
    _check_tokens(L, S, query_tokens, key_tokens)
    columns = math.ceil(H / math.ceil(H / max(4, math.ceil(math.sqrt(H)))))  # at most 4, or a square; rows of equal length
    new = axes is None
    panels = _new_panels(H, columns, L, S) if new else np.ravel(np.asarray(axes, dtype=object))
    if len(panels) != H:
        raise ValueError(f"axes must hold {H} axes, one per head, got {len(panels)}")
    for axes, matrix in zip(map(_check_axes, panels), heads, strict=True):
        image = _draw(axes, _shrink(matrix, F.adaptive_max_pool2d), L, S, cmap=COLORS, vmin=0, vmax=heads.max().item())
    panels[0].figure.colorbar(image, ax=list(panels), label="attention weight", aspect=40)
    names = [f"head {head}" for head in range(H)]
    _annotate(panels, L, S, query_tokens, key_tokens, names, heading=title, grow=new)
    if new:
        for head, axes in enumerate(panels):  # inner panels share the labels of those at the edge
            if head % columns:
                axes.set_ylabel("")
                axes.tick_params(labelleft=False)
            if head + columns < H:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)
    _finish(panels[0], path)
    return panels


def plot_mask(
    hidden: Tensor,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    *,
    head: int | None = None,
    sample: int | None = None,
    title: str | None = None,
    axes: Axes | None = None,
    path: Path = None,
) -> Axes:
    """Draw which query may attend to which key; the picture says what its colours mean.

    Args:
        hidden: (L, S), (H, L, S) or (N, H, L, S), or (S,) for padding, the same for all queries, as the masks of this package's
            and torch.nn's modules. bool: True = hidden. (`functional.attention` takes the opposite: pass ~mask.) Float: added
            to the scores; -inf hides, and so does anything below -10 000, whose weight is zero beside any other.
        head, sample: which mask of several.
        query_tokens, key_tokens, title, axes, path: as in `plot_attention`.

    Returns:
        The Axes.

    Raises:
        ValueError, TypeError: shapes, tokens, head or sample do not fit, or a mask of integers, with NaN or +inf.
    """
    if isinstance(hidden, Tensor) and hidden.dim() == 1:
        hidden, query_tokens = hidden[None], query_tokens or ["all"]
    boolean = isinstance(hidden, Tensor) and hidden.dtype == torch.bool
    masks = _matrices("hidden", torch.zeros(hidden.shape).masked_fill(hidden.cpu(), -math.inf) if boolean else hidden, sample)
    H, L, S = masks.shape
    _check_tokens(L, S, query_tokens, key_tokens)
    if head is None and H > 1:
        raise ValueError(f"head must say which of the {H} masks to draw")
    mask = masks[_check_index("head", head or 0, H)]
    is_hidden = mask < -1e4
    bias = _finite("hidden", mask.masked_fill(is_hidden, 0.0))

    new = axes is None
    axes = _new_axes(L, S) if new else _check_axes(axes)
    handles = [Patch(facecolor=HIDDEN, label="hidden (True)" if boolean else "hidden (-inf)")]
    seen = _shrink((~is_hidden).float(), F.adaptive_avg_pool2d)  # the share of it, where a pixel holds many
    if bias.any():
        mean = np.ma.array(_shrink(bias, F.adaptive_avg_pool2d) / seen, mask=seen == 0)
        colors = matplotlib.colormaps["RdBu_r"].with_extremes(bad=HIDDEN)
        image = _draw(axes, mean, L, S, cmap=colors, vmin=-abs(mean).max(), vmax=abs(mean).max())
        axes.figure.colorbar(image, ax=axes, label="added to the score")
        handles = handles if is_hidden.any() else []
    else:
        colors = LinearSegmentedColormap.from_list("mask", [HIDDEN, ATTEND])
        _draw(axes, seen, L, S, cmap=colors, vmin=0, vmax=1)
        handles.insert(0, Patch(facecolor=ATTEND, edgecolor="grey", label="attend (False)" if boolean else "attend (0)"))
    if max(L, S) <= MOST_LABELS:
        axes.set_xticks(np.arange(1, S) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, L) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
    if handles:
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.2)
    _annotate([axes], L, S, query_tokens, key_tokens, [title], grow=new)
    axes.tick_params(which="minor", length=0)
    return _finish(axes, path)


def plot_positions(encoding: Tensor, *, title: str | None = None, axes: Axes | None = None, path: Path = None) -> Axes:
    """Draw positional encodings: a row per position, a column per dimension.

    Args:
        encoding: (L, d_model), or (1, L, d_model).
        title, axes, path: as in `plot_attention`.

    Returns:
        The Axes.

    Raises:
        ValueError, TypeError: another shape, or a value that is not finite.
    """
    matrices = _finite("encoding", _matrices("encoding", encoding, None))
    H, L, E = matrices.shape
    if H != 1:
        raise ValueError(f"encoding must have shape (L, d_model) or (1, L, d_model), got {tuple(encoding.shape)}")
    most = matrices.abs().max().item()
    axes = Figure(figsize=(8, 5), dpi=150, layout="constrained").subplots() if axes is None else _check_axes(axes)
    image = _draw(axes, _shrink(matrices[0], F.adaptive_avg_pool2d), L, E, cmap="RdBu_r", vmin=-most, vmax=most)
    axes.figure.colorbar(image, ax=axes, label="value")
    _annotate([axes], L, E, None, None, [title])
    axes.set(xlabel="dimension", ylabel="position")
    return _finish(axes, path)


# Checks: ValueError or TypeError with the argument's name, what was expected and what came.


def _matrices(name: str, x: Tensor, sample: int | None) -> Tensor:
    """x, of 2 to 4 dimensions, as float32 (H, L, S) on the CPU."""
    functional.check_tensor(name, x)
    if x.dim() not in (2, 3, 4):
        raise ValueError(f"{name} must have shape (L, S), (H, L, S) or (N, H, L, S), got {tuple(x.shape)}")
    if x.dim() < 4 and sample is not None:
        raise ValueError(f"sample must be None where {name} has no batch dimension, got {sample!r} and {tuple(x.shape)}")
    if x.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {tuple(x.shape)}")
    if x.dim() == 4:
        if sample is None and len(x) > 1:
            raise ValueError(f"sample must say which of the {len(x)} samples to draw ({name} has shape {tuple(x.shape)})")
        x = x[_check_index("sample", sample or 0, len(x))]
    x = x.detach().to("cpu", torch.float32)
    return x[None] if x.dim() == 2 else x


def _finite(name: str, x: Tensor) -> Tensor:
    wrong = (~x.isfinite()).nonzero()
    if len(wrong):
        place = tuple(wrong[0].tolist())
        raise ValueError(f"{name} must be finite, got {x[place].item()} at {place} ({len(wrong)} such values)")
    return x


def _check_index(name: str, index: int, size: int) -> int:
    if not isinstance(index, int):
        raise TypeError(f"{name} must be an integer, got {index!r}")
    if not 0 <= index < size:
        raise ValueError(f"{name} must be in 0 to {size - 1}, got {index}")
    return index


def _check_tokens(L: int, S: int, query_tokens: Sequence[str] | None, key_tokens: Sequence[str] | None) -> None:
    for name, tokens, size, what in (("query_tokens", query_tokens, L, "row"), ("key_tokens", key_tokens, S, "column")):
        if tokens is None:
            continue
        for token in tokens:
            if not isinstance(token, str):
                raise TypeError(f"{name} must hold strings, got {token!r}")
        if len(tokens) != size:
            raise ValueError(f"{name} must have {size} tokens, one per {what} of ({L}, {S}), got {len(tokens)}")


def _check_axes(axes: Axes) -> Axes:
    if not isinstance(axes, Axes):
        raise TypeError(f"axes must be matplotlib Axes, got {type(axes).__name__}")
    return axes


# Drawing.


def _new_axes(L: int, S: int) -> Axes:
    size = (min(max(CELL * S, 3.0), 11.0) + 1.5, min(max(CELL * L, 1.5), 9.0) + 0.8)
    return Figure(figsize=size, dpi=150, layout="constrained").subplots()


def _new_panels(count: int, columns: int, L: int, S: int) -> np.ndarray:
    """`count` axes in a new figure of that many columns."""
    rows = math.ceil(count / columns)
    width, height = min(max(CELL * S, 1.6), 14 / columns), min(max(CELL * L, 1.4), 14 / columns)
    figure = Figure(figsize=(width * columns + 1.5, height * rows + 0.8), dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[count:]:
        axes.remove()
    return panels[:count]


def _shrink(matrix: Tensor, pool: Callable[..., Tensor]) -> Tensor:
    return pool(matrix[None], [min(size, MOST_PIXELS) for size in matrix.shape])[0]


def _draw(axes: Axes, matrix: Tensor | np.ndarray, L: int, S: int, **colors):
    return axes.imshow(np.ma.asarray(matrix), aspect="auto", extent=(-0.5, S - 0.5, L - 0.5, -0.5), **colors)


def _annotate(
    panels: Sequence[Axes],
    L: int,
    S: int,
    query_tokens: Sequence[str] | None,
    key_tokens: Sequence[str] | None,
    titles: list[str | None],
    *,
    heading: str | None = None,
    grow: bool = False,
) -> None:
    """Ticks, labels and titles of axes that are alike; with `grow` the figure gets the room that the labels need."""
    figure = panels[0].figure.figure  # the whole of it, should they sit in a subfigure
    box = panels[0].get_window_extent()
    width, height = box.width / figure.dpi, box.height / figure.dpi  # inches
    rows, columns = _ticks(L, height, query_tokens), _ticks(S, width, key_tokens)
    texts = [heading or "", *(title or "" for title in titles), *_names(rows, query_tokens), *_names(columns, key_tokens)]
    (heading, *texts), families = printable(texts)
    titles, names = texts[: len(panels)], list(map(shorten, texts[len(panels) :]))
    row_names, column_names = names[: len(rows)], names[len(rows) :]
    size = max(6.0, min(10.0, 60 * width / len(columns), 60 * height / len(rows)))  # points
    row_space, column_space = (max(map(len, names)) * 0.6 * size / 72 for names in (row_names, column_names))
    upright = column_space < 0.9 * width / len(columns)
    if grow:
        figure.set_size_inches(figure.get_size_inches() + [row_space, size / 72 if upright else column_space])
    font = {"fontfamily": families, "parse_math": False}
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xticks(columns, column_names, rotation=0 if upright else 90, fontsize=size, **font)
        axes.set_yticks(rows, row_names, fontsize=size, **font)
        axes.tick_params(length=2 if max(L, S) > MOST_LABELS else 0)
        axes.set(xlabel="key", ylabel="query")
        axes.set_title(title, fontsize=11, pad=6 if axes.get_legend() is None else 26, **font)
    if heading:
        figure.suptitle(heading, **font)


def _ticks(size: int, inches: float, tokens: Sequence[str] | None) -> range:
    """Every, every 2nd, 5th, 10th, ... position, as many as there is room for."""
    most = max(1, min(int(inches / LABEL), MOST_NUMBERS if tokens is None else MOST_LABELS))
    step = next(s * 10**power for power in range(20) for s in (1, 2, 5) if s * 10**power * most >= size)
    return range(0, size, step)


def _names(ticks: range, tokens: Sequence[str] | None) -> list[str]:
    if tokens is None:
        return [str(position) for position in ticks]
    return [visible(tokens[i]) if ticks.step == 1 else f"{i} {visible(tokens[i])}" for i in ticks]


def _finish(axes: Axes, path: Path) -> Axes:
    if path is not None:
        axes.figure.figure.savefig(path)
    return axes
