"""What several tests share: the rule by which a number is right, and the test data that goes with it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fast_transformer import functional, ops, reference

# The activations of `functional`, by name, as torch.nn has them.
PLAIN = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}

need_extension = pytest.mark.skipif(ops.missing is not None, reason=str(ops.missing))

# The floor of `assert_accurate`, relative to the largest element. Half precision: a correctly rounded result is off by the
# unit roundoff (2^-8, 2^-11), and plain PyTorch can be exactly right by luck, for instance where a softmax has one key.
# float32: 8 units of roundoff (2^-24), because the sums of a fused op run in another order than PyTorch's and its exp is right
# to one or two units in the last place, so that small cases differ by a few roundings either way. float64: the truth is float64
# too, with errors of its own, so only a limit remains that a wrong formula or a float32 step (1e-8) on the way exceeds.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 8 * 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}


def assert_accurate(name: str, got: Tensor, plain: Tensor, exact: Tensor, *, factor: float, floor: float = 0.0) -> None:
    """The largest error of `got` is at most `factor` times that of `plain`, plus a floor; infinities stand where they should.

    exact: the float64 truth. plain: what plain PyTorch gives in the dtype under test. factor: 2 for a forward result; 3 for a
    gradient, which reads rounded forward results too. What rounding does to a result depends on how the inputs condition it,
    which no constant knows; plain PyTorch on the same inputs measures it, and a fused op that keeps its accumulators in
    float32 has no reason to lose more. The factor leaves room for the luck of one largest error out of many. floor: added to
    that of TOLERANCES, with its derivation where it is passed.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    dtype, got, plain = plain.dtype, got.detach().double().cpu(), plain.detach().double().cpu()
    finite = exact.isfinite()
    assert torch.equal(got[~finite], exact[~finite]), f"{name}: infinities differ"
    assert got[finite].isfinite().all(), f"{name}: {(~got[finite].isfinite()).sum()} elements are not finite"
    if not finite.any():
        return
    error, plain_error = ((x[finite] - exact[finite]).abs().max().item() for x in (got, plain))
    size = exact[finite].abs().max().item() or 1.0  # where the truth is 0, what cancels is of the size of the data, about 1
    limit = factor * plain_error + (TOLERANCES[dtype] + floor) * size
    assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g} = {factor} x {plain_error:.3g} + floor"


def randn(*shape: int) -> Tensor:
    """Normal float64 numbers that bfloat16 and float16 hold exactly: one exact answer serves every dtype."""
    return torch.randn(shape).bfloat16().half().double()


def keep_count_is_likely(kept: int, n: int, p_keep: float) -> bool:
    """Whether `kept` of n independent decisions is within 5 standard deviations (1 in 1.7 million) of a binomial's mean."""
    return abs(kept - n * p_keep) <= 5 * (n * p_keep * (1 - p_keep)) ** 0.5


def drawn_keep_mask(seed: int, shape: tuple[int, ...], dropout_p: float) -> Tensor | None:
    """What an op called right after torch.manual_seed(seed) multiplies by: 0 or 1 / keep probability, in float64."""
    if dropout_p == 0.0:
        return None
    torch.manual_seed(seed)
    drawn = functional._random.draw_seed(dropout_p, torch.device("cpu"))
    return reference.keep_mask(drawn, shape, dropout_p).double() * (65536 / reference.keep_threshold(dropout_p))
