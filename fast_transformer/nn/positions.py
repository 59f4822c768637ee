"""Where a token stands: five ways to tell a model.

`SinusoidalPositions` and `LearnedPositions` give vectors that are added to embeddings; `RotaryPositions` turns queries and keys
(an argument of the twins); `RelativePositionBias` and `AlibiBias` give summands for scores (their argument position_bias).
In each, `offset` is the position of the first token or query, so that a decoder can go on where it stopped.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def check_size(name: str, value: int, low: int = 1) -> int:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return value


def _look_up(table: Tensor, length: int, offset: int, padding: Tensor | None) -> Tensor:
    """Rows offset ... offset + length - 1 of table; with `padding` (N,) a row's first token has that many before it."""
    if padding is None:
        return table[offset : offset + length]  # (L, E)
    places = torch.arange(offset, offset + length, device=table.device) - padding[:, None]  # (N, L)
    return F.embedding(places.clamp(min=0), table)  # (N, L, E)


def sinusoidal_positions(length: int, d_model: int, *, device: torch.device | str | None = None) -> Tensor:
    """The positional encoding of "Attention Is All You Need" (Vaswani et al. 2017, section 3.5), float32 (length, d_model).

    Entry 2i of position p is sin(p / 10000^(2i / d_model)), entry 2i + 1 its cosine; the last cosine of an odd width is left
    out. Computed in float64.
    """
    check_size("length", length, 0)
    check_size("d_model", d_model)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] / 10000.0 ** (even / d_model)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :d_model].float()


class SinusoidalPositions(nn.Module):
    """`sinusoidal_positions` of any length: the table is made when it is asked for, and doubled when it is too short.

    Args:
        d_model: width, even or odd.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = check_size("d_model", d_model)
        self.register_buffer("table", sinusoidal_positions(512, d_model), persistent=False)

    def forward(self, length: int, offset: int = 0, *, padding: Tensor | None = None) -> Tensor:
        """(length, d_model): the encodings of positions offset, offset + 1, ...

        With padding (N,), the number of padding tokens before each sequence, (N, length, d_model): positions count from a
        sequence's first token.
        """
        check_size("length", length, 0)
        check_size("offset", offset, 0)
        if offset + length > len(self.table):
            rows = max(2 * len(self.table), offset + length)
            with torch.inference_mode(False):  # it may be of use in training later
                self.table = sinusoidal_positions(rows, self.d_model, device=self.table.device).to(self.table.dtype)
        return _look_up(self.table, length, offset, padding)


class LearnedPositions(nn.Module):
    """A learned vector for each of max_len positions.

    Args:
        max_len: number of positions.
        d_model: width.
    """

    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__()
        self.max_len = check_size("max_len", max_len)
        self.weight = nn.Parameter(torch.empty(max_len, check_size("d_model", d_model)).normal_(std=0.02))

    def forward(self, length: int, offset: int = 0, *, padding: Tensor | None = None) -> Tensor:
        """(length, d_model), or with padding (N, length, d_model): as SinusoidalPositions.forward.

        Raises:
            ValueError: a position past max_len.
        """
        check_size("length", length, 0)
        check_size("offset", offset, 0)
        if offset + length > self.max_len:
            raise ValueError(f"there are learned positions for max_len = {self.max_len} tokens, got {offset + length}")
        return _look_up(self.weight, length, offset, padding)


class RotaryPositions:
    """Turns pairs of a head's entries by angles that grow with the position, so that scores depend on distances (RoFormer,
    Su et al. 2021, section 3.2.2). Entry i forms a pair with entry i + head_dim / 2. It has no parameters.

    Args:
        head_dim: size of a head, even.
        base: pair i turns by position / base^(2i / head_dim).
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        if check_size("head_dim", head_dim) % 2 != 0:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
        if not base > 0:
            raise ValueError(f"base must be a number > 0, got {base!r}")
        self.head_dim, self.base = head_dim, base
        self._tables: dict[torch.device, Tensor] = {}  # (positions, 2, head_dim / 2): cosines, sines

    def __call__(self, x: Tensor, offset: int = 0) -> Tensor:
        """x (N, H, L, head_dim), turned for positions offset, offset + 1, ...; computed in float32 or wider."""
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x must have a last dimension of size head_dim = {self.head_dim}, got {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        cosines, sines = self._table(offset + x.shape[-2], x.device)[offset:].to(dtype).unbind(1)
        a, b = x.to(dtype).chunk(2, dim=-1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1).to(x.dtype)

    def _table(self, positions: int, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling():
            return self._make_table(positions, device)  # a graph keeps no state
        table = self._tables.get(device)
        if table is None or len(table) < positions:
            with torch.inference_mode(False):  # it may be of use in training later
                table = self._tables[device] = self._make_table(max(512, 2 * positions), device)
        return table[:positions]

    def _make_table(self, positions: int, device: torch.device) -> Tensor:
        even = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] / self.base ** (even / self.head_dim)
        return torch.stack((angles.cos(), angles.sin()), dim=1)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_tables": {}}  # tables are made anew where they are needed


def check_rotary(rotary: RotaryPositions | None, head_dim: int) -> RotaryPositions | None:
    if rotary is not None and not isinstance(rotary, RotaryPositions):
        raise TypeError(f"rotary must be RotaryPositions or None, got {type(rotary).__name__}")
    if rotary is not None and rotary.head_dim != head_dim:
        raise ValueError(f"rotary must be for heads of size {head_dim}, got head_dim {rotary.head_dim}")
    return rotary


def _distances(L: int, S: int, offset: int, device: torch.device) -> Tensor:
    """int64 (L, S): the key's position less the query's."""
    return torch.arange(S, device=device) - torch.arange(offset, offset + L, device=device)[:, None]


class RelativePositionBias(nn.Module):
    """A learned number per head and distance, added to scores (T5, Raffel et al. 2020, section 2.1).

    Half of the buckets (with `bidirectional`: of each direction's) hold one distance each, the others ranges that grow
    logarithmically up to max_distance; farther keys share the last one.

    Args:
        n_heads: number of heads.
        bidirectional: keys after the query have buckets of their own (encoder); else they share that of distance 0.
        n_buckets, max_distance: as in T5.
    """

    def __init__(self, n_heads: int, *, bidirectional: bool, n_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        per_side = check_size("n_buckets", n_buckets, 4) // 2 if bidirectional else n_buckets
        check_size("max_distance", max_distance, per_side // 2 + 1)
        self.n_heads, self.bidirectional = check_size("n_heads", n_heads), bidirectional
        self.n_buckets, self.max_distance = n_buckets, max_distance
        self.weight = nn.Parameter(torch.empty(n_heads, n_buckets).normal_(std=0.02))

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance (key's position less query's), int64 of any shape."""
        buckets, first = self.n_buckets, 0
        if self.bidirectional:
            buckets //= 2
            first = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = exact + (growth * (buckets - exact)).long()
        return first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

    def forward(self, L: int, S: int, offset: int = 0) -> Tensor:
        """(1, n_heads, L, S): summands for the scores of queries at offset, offset + 1, ... and keys at 0, 1, ..."""
        buckets = self.bucket(_distances(L, S, offset, self.weight.device))
        return F.embedding(buckets, self.weight.T).permute(2, 0, 1)[None]


class AlibiBias(nn.Module):
    """Minus the distance times a slope per head (ALiBi, Press et al. 2022, section 3); no parameters.

    The slopes are 2^(-8/n), 2^(-16/n), ..., 2^-8 for n heads, a power of two; for other n those of the power of two below,
    and then every other one of the power of two above.

    Args:
        n_heads: number of heads.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        below = 2 ** (check_size("n_heads", n_heads).bit_length() - 1)
        slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
        slopes += [2 ** (-4 * i / below) for i in range(1, 2 * (n_heads - below), 2)]
        self.register_buffer("slopes", torch.tensor(slopes), persistent=False)  # (H,)

    def forward(self, L: int, S: int, offset: int = 0) -> Tensor:
        """(1, n_heads, L, S), as RelativePositionBias.forward; keys before and after a query count alike."""
        return -self.slopes[:, None, None] * _distances(L, S, offset, self.slopes.device).abs()[None, None]
