"""What the public functions refuse: the error names the argument, what was expected and what came."""

import math
import re

import numpy as np
import pytest
import torch

from fast_transformer import ops
from fast_transformer.functional import (
    _backends,
    activation_dropout,
    additive_attention,
    attention,
    dropout,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
)

META = torch.device("meta")


def q(B=2, H=4, L=5, D=8, **options):
    return torch.zeros(B, H, L, D, **options)


def kv(B=2, H=4, S=6, D=8, **options):
    return torch.zeros(B, H, S, D, **options)


def attend(query=None, key=None, value=None, **options):
    """A call in which everything that is not given is right: B=2, H=4, L=5, S=6, D=8."""
    return attention(q() if query is None else query, kv() if key is None else key, kv() if value is None else value, **options)


def additive(**options):
    return additive_attention(torch.zeros(2, 5, 8), torch.zeros(2, 6, 8), torch.zeros(2, 6, 3), torch.zeros(8), **options)


def norm(x=None, residual=None, weight=None, bias=None, **options):
    """A call in which everything that is not given is right: x (2, 3, 8)."""
    return dropout_add_layer_norm(torch.zeros(2, 3, 8) if x is None else x, residual, weight, bias, **options)


def rms_norm(x=None, residual=None, weight=None, **options):
    return dropout_add_rms_norm(torch.zeros(2, 3, 8) if x is None else x, residual, weight, **options)


def activate(x=None, bias=None, activation="relu", **options):
    return activation_dropout(torch.zeros(2, 3, 8) if x is None else x, bias, activation, **options)


def nested(dtype=torch.float32):
    return torch.nested.nested_tensor([torch.zeros(4, 3, 8), torch.zeros(4, 5, 8)], dtype=dtype)


def jagged():
    return torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged)


def yes(*shape, **options):
    return torch.ones(*shape, dtype=torch.bool, **options)


def in_autocast(call):
    with torch.autocast("cpu", torch.bfloat16):
        return call()


# fmt: off
BAD_CALLS = [  # id, call, exception, what the text says (.* stands for anything)
    # query, key, value: kind of object
    ("query-None", lambda: attention(None, kv(), kv()), TypeError, "query must be a torch.Tensor, got NoneType"),
    ("key-None", lambda: attention(q(), None, kv()), TypeError, "key must be a torch.Tensor, got NoneType"),
    ("value-None", lambda: attention(q(), kv(), None), TypeError, "value must be a torch.Tensor, got NoneType"),
    ("value-None-key-double", lambda: attention(q(), kv().double(), None), TypeError,
     "value must be a torch.Tensor, got NoneType"),
    ("query-list", lambda: attend([[1.0]]), TypeError, "query must be a torch.Tensor, got list"),
    ("key-array", lambda: attend(key=np.zeros((2, 4, 6, 8))), TypeError, "key must be a torch.Tensor, got ndarray"),
    ("query-nested", lambda: attend(nested()), TypeError, "query is a NestedTensor; pass a padded tensor"),
    ("query-jagged", lambda: attend(jagged()), TypeError, "query is a NestedTensor"),
    ("key-nested", lambda: attend(key=nested()), TypeError, "key is a NestedTensor"),
    ("value-nested", lambda: attend(value=nested()), TypeError, "value is a NestedTensor"),
    ("query-sparse", lambda: attend(q().to_sparse()), TypeError, "query must be a dense tensor, got layout torch.sparse_coo"),
    # ... dtype
    ("query-int", lambda: attend(q(dtype=torch.int64)), TypeError, "query must have a floating-point dtype, got torch.int64"),
    ("query-bool", lambda: attend(q(dtype=torch.bool)), TypeError, "query must have a floating-point dtype, got torch.bool"),
    ("key-int", lambda: attend(key=kv(dtype=torch.int8)), TypeError, "key must have a floating-point dtype, got torch.int8"),
    ("value-complex", lambda: attend(value=kv() + 1j), TypeError,
     "value must have a floating-point dtype, got torch.complex64"),
    ("key-double", lambda: attend(key=kv().double()), TypeError, "one dtype, got torch.float32, torch.float64, torch.float32"),
    ("value-half", lambda: attend(value=kv().half()), TypeError, "one dtype, got torch.float32, torch.float32, torch.float16"),
    # ... device
    ("query-meta", lambda: attend(q(device=META)), ValueError, "key must be on meta like the first argument, got cpu"),
    ("key-meta", lambda: attend(key=kv(device=META)), ValueError, "key must be on cpu like the first argument, got meta"),
    ("value-meta", lambda: attend(value=kv(device=META)), ValueError, "value must be on cpu like the first argument, got meta"),
    # ... rank and sizes
    ("query-3-dims", lambda: attend(q()[0]), ValueError,
     "query must have 4 dimensions (batch, heads, length, head_dim), got shape (4, 5, 8)"),
    ("query-5-dims", lambda: attend(q()[None]), ValueError, "query must have 4 dimensions"),
    ("query-0-dim", lambda: attend(torch.tensor(1.0)), ValueError,
     "query must have 4 dimensions (batch, heads, length, head_dim), got shape ()"),
    ("key-3-dims", lambda: attend(key=kv()[0]), ValueError, "key must have 4 dimensions"),
    ("value-2-dims", lambda: attend(value=kv()[0, 0]), ValueError, "value must have 4 dimensions"),
    ("key-batch", lambda: attend(key=kv(B=3)), ValueError,
     "key must have the batch size and head_dim of query, 2 and 8; got query (2, 4, 5, 8), key (3, 4, 6, 8)"),
    ("key-batch-1", lambda: attend(key=kv(B=1), value=kv(B=1)), ValueError,
     "key must have the batch size and head_dim of query, 2 and 8"),
    ("key-head_dim", lambda: attend(key=kv(D=7)), ValueError,
     "key must have the batch size and head_dim of query, 2 and 8; got query (2, 4, 5, 8), key (2, 4, 6, 7)"),
    ("value-length", lambda: attend(value=kv(S=7)), ValueError,
     "value must be (B, Hkv, S, Dv) = (2, 4, 6) + (Dv,) like key, got (2, 4, 7, 8)"),
    ("value-heads", lambda: attend(value=kv(H=2)), ValueError,
     "value must be (B, Hkv, S, Dv) = (2, 4, 6) + (Dv,) like key, got (2, 2, 6, 8)"),
    ("value-batch", lambda: attend(value=kv(B=1)), ValueError, "like key, got (1, 4, 6, 8)"),
    ("heads-3-for-4", lambda: attend(key=kv(H=3), value=kv(H=3)), ValueError,
     "query heads must be a multiple of key heads, both at least 1, got 4 and 3"),
    ("heads-8-for-4", lambda: attend(key=kv(H=8), value=kv(H=8)), ValueError,
     "query heads must be a multiple of key heads, both at least 1, got 4 and 8"),
    ("key-heads-0", lambda: attend(key=kv(H=0), value=kv(H=0)), ValueError, "both at least 1, got 4 and 0"),
    ("query-heads-0", lambda: attend(q(H=0), kv(H=2), kv(H=2)), ValueError, "both at least 1, got 0 and 2"),
    ("head_dim-0", lambda: attend(q(D=0), kv(D=0)), ValueError,
     "head_dim must be at least 1, got 0 for query and key, 8 for value"),
    ("value-head_dim-0", lambda: attend(value=kv(D=0)), ValueError,
     "head_dim must be at least 1, got 8 for query and key, 0 for value"),
    # mask
    ("mask-float", lambda: attend(mask=torch.ones(5, 6)), TypeError,
     "mask must be a bool tensor (True = attend), got torch.float32; additive scores go into bias="),
    ("mask-int", lambda: attend(mask=torch.ones(5, 6, dtype=torch.int64)), TypeError,
     "mask must be a bool tensor (True = attend), got torch.int64"),
    ("mask-list", lambda: attend(mask=[[True]]), TypeError, "mask must be a bool tensor (True = attend), got list"),
    ("mask-True", lambda: attend(mask=True), TypeError, "mask must be a bool tensor (True = attend), got bool"),
    ("mask-nested", lambda: attend(mask=nested(torch.bool)), TypeError, "mask is a NestedTensor"),
    ("mask-meta", lambda: attend(mask=yes(5, 6, device=META)), ValueError, "mask must be on cpu like query, got meta"),
    ("mask-(B,S)", lambda: attend(mask=yes(2, 6)), ValueError,
     "mask must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (2, 6)"),
    ("mask-(L,L)", lambda: attend(mask=yes(5, 5)), ValueError,
     "mask must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (5, 5)"),
    ("mask-(B,L,S)", lambda: attend(mask=yes(2, 5, 6)), ValueError,
     "mask must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (2, 5, 6)"),
    ("mask-5-dims", lambda: attend(mask=yes(1, 2, 4, 5, 6)), ValueError,
     "mask must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (1, 2, 4, 5, 6)"),
    ("mask-enlarges-the-batch", lambda: attend(q(B=1), kv(B=1), kv(B=1), mask=yes(3, 1, 5, 6)), ValueError,
     "mask must broadcast to (B, H, L, S) = (1, 4, 5, 6), got (3, 1, 5, 6)"),
    ("mask-empty", lambda: attend(mask=yes(5, 0)), ValueError,
     "mask must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (5, 0)"),
    # bias
    ("bias-bool", lambda: attend(bias=yes(5, 6)), TypeError, "bias must have a floating-point dtype, got torch.bool"),
    ("bias-int", lambda: attend(bias=torch.ones(5, 6, dtype=torch.int32)), TypeError,
     "bias must have a floating-point dtype, got torch.int32"),
    ("bias-float", lambda: attend(bias=0.5), TypeError, "bias must be a torch.Tensor, got float"),
    ("bias-nested", lambda: attend(bias=nested()), TypeError, "bias is a NestedTensor"),
    ("bias-meta", lambda: attend(bias=torch.ones(5, 6, device=META)), ValueError,
     "bias must be on cpu like the first argument, got meta"),
    ("bias-(S,L)", lambda: attend(bias=torch.ones(6, 5)), ValueError,
     "bias must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (6, 5)"),
    ("bias-(B*H,L,S)", lambda: attend(bias=torch.ones(8, 5, 6)), ValueError,
     "bias must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (8, 5, 6)"),
    ("bias-5-dims", lambda: attend(bias=torch.ones(1, 1, 1, 5, 6)), ValueError,
     "bias must broadcast to (B, H, L, S) = (2, 4, 5, 6), got (1, 1, 1, 5, 6)"),
    # numbers
    ("causal-tensor", lambda: attend(causal=yes(5, 6)), TypeError,
     "causal must be True or False, got Tensor; a tensor goes into mask="),
    ("causal-str", lambda: attend(causal="yes"), TypeError, "causal must be True or False, got str"),
    ("causal-None", lambda: attend(causal=None), TypeError, "causal must be True or False, got NoneType"),
    ("offset-float", lambda: attend(query_offset=1.0), TypeError, "query_offset must be an int, got 1.0"),
    ("offset-bool", lambda: attend(query_offset=True), TypeError, "query_offset must be an int, got True"),
    ("offset-None", lambda: attend(query_offset=None), TypeError, "query_offset must be an int, got None"),
    ("offset-tensor", lambda: attend(query_offset=torch.tensor(1)), TypeError, "query_offset must be an int, got tensor(1)"),
    ("window-int", lambda: attend(window=3), TypeError, "window must be a pair (left, right), got 3"),
    ("window-str", lambda: attend(window="ab"), TypeError, "window must be a pair (left, right), got 'ab'"),
    ("window-1", lambda: attend(window=(3,)), TypeError, "window must be a pair (left, right), got (3,)"),
    ("window-3", lambda: attend(window=(3, 3, 3)), TypeError, "window must be a pair (left, right), got (3, 3, 3)"),
    ("window-left-negative", lambda: attend(window=(-1, 3)), ValueError,
     "window must hold two integers in [0, 2**62) (or None for no limit), got (-1, 3)"),
    ("window-right-negative", lambda: attend(window=(None, -1)), ValueError,
     "window must hold two integers in [0, 2**62) (or None for no limit), got (None, -1)"),
    ("window-float", lambda: attend(window=(1.5, 3)), ValueError,
     "window must hold two integers in [0, 2**62) (or None for no limit), got (1.5, 3)"),
    ("scale-nan", lambda: attend(scale=math.nan), ValueError, "scale must be a finite number, got nan"),
    ("scale-inf", lambda: attend(scale=-math.inf), ValueError, "scale must be a finite number, got -inf"),
    ("scale-str", lambda: attend(scale="0.1"), ValueError, "scale must be a finite number, got '0.1'"),
    ("scale-tensor", lambda: attend(scale=torch.tensor(0.5)), ValueError, "scale must be a finite number, got tensor(0.5"),
    ("scale-huge", lambda: attend(scale=10**400), ValueError, "scale must be a finite number, got an integer past"),
    ("window-huge", lambda: attend(window=(2**70, 0)), ValueError, "window must hold two integers in [0, 2**62)"),
    ("offset-huge", lambda: attend(query_offset=2**70), ValueError, "query_offset must be in (-2**62, 2**62), got"),
    ("softcap-0", lambda: attend(softcap=0.0), ValueError, "softcap must be a finite number > 0, got 0.0"),
    ("softcap-negative", lambda: attend(softcap=-5.0), ValueError, "softcap must be a finite number > 0, got -5.0"),
    ("softcap-nan", lambda: attend(softcap=math.nan), ValueError, "softcap must be a finite number > 0, got nan"),
    ("softcap-inf", lambda: attend(softcap=math.inf), ValueError, "softcap must be a finite number > 0, got inf"),
    ("softcap-str", lambda: attend(softcap="50"), ValueError, "softcap must be a finite number > 0, got '50'"),
    ("weights-True", lambda: attend(return_weights=True), ValueError,
     'return_weights must be None, "mean" or "per_head", got True'),
    ("weights-unknown", lambda: attend(return_weights="all"), ValueError,
     "return_weights must be None, \"mean\" or \"per_head\", got 'all'"),
    # autocast casts the tensors that F.scaled_dot_product_attention would cast, and no others
    ("autocast-key-None", lambda: in_autocast(lambda: attention(q(), None, kv())), TypeError,
     "key must be a torch.Tensor, got NoneType"),
    ("autocast-query-int", lambda: in_autocast(lambda: attend(q(dtype=torch.int64))), TypeError,
     "query must have a floating-point dtype, got torch.int64"),
    ("autocast-key-double", lambda: in_autocast(lambda: attend(key=kv().double())), TypeError,
     "one dtype, got torch.bfloat16, torch.float64, torch.bfloat16"),
    ("autocast-key-meta", lambda: in_autocast(lambda: attend(key=kv(device=META))), ValueError,
     "key must be on cpu like the first argument, got meta"),
    # backend
    ("attention-backend-unknown", lambda: attend(backend="cudnn"), ValueError,
     "backend must be None or one of .*, got 'cudnn'"),
    ("attention-backend-True", lambda: attend(backend=True), ValueError, "backend must be None or one of .*, got True"),
    # dropout_add_layer_norm
    ("norm-x-None", lambda: dropout_add_layer_norm(None, None, None, None), TypeError,
     "x must be a torch.Tensor, got NoneType"),
    ("norm-x-list", lambda: norm([1.0, 2.0]), TypeError, "x must be a torch.Tensor, got list"),
    ("norm-x-int", lambda: norm(torch.ones(2, 8, dtype=torch.int64)), TypeError,
     "x must have a floating-point dtype, got torch.int64"),
    ("norm-x-nested", lambda: norm(nested()), TypeError, "x is a NestedTensor"),
    ("norm-x-sparse", lambda: norm(torch.zeros(2, 8).to_sparse()), TypeError,
     "x must be a dense tensor, got layout torch.sparse_coo"),
    ("norm-x-0-dim", lambda: norm(torch.tensor(1.0)), ValueError,
     "x must have a last dimension of size >= 1 to normalise, got shape ()"),
    ("norm-x-empty-rows", lambda: norm(torch.zeros(2, 0)), ValueError,
     "x must have a last dimension of size >= 1 to normalise, got shape (2, 0)"),
    ("residual-float", lambda: norm(residual=1.0), TypeError, "residual must be a torch.Tensor, got float"),
    ("residual-int", lambda: norm(residual=torch.ones(2, 3, 8, dtype=torch.int64)), TypeError,
     "residual must have a floating-point dtype, got torch.int64"),
    ("residual-shape", lambda: norm(residual=torch.zeros(2, 3, 7)), ValueError,
     "residual must have the shape of x, (2, 3, 8), got (2, 3, 7)"),
    ("residual-broadcast", lambda: norm(residual=torch.zeros(3, 8)), ValueError,
     "residual must have the shape of x, (2, 3, 8), got (3, 8)"),
    ("residual-meta", lambda: norm(residual=torch.zeros(2, 3, 8, device=META)), ValueError,
     "residual must be on cpu like the first argument, got meta"),
    ("residual-nested", lambda: norm(residual=nested()), TypeError, "residual is a NestedTensor"),
    ("weight-shape", lambda: norm(weight=torch.ones(7)), ValueError,
     "weight must have shape (8,), the last size of x, got (7,)"),
    ("weight-2-dims", lambda: norm(weight=torch.ones(3, 8)), ValueError,
     "weight must have shape (8,), the last size of x, got (3, 8)"),
    ("weight-0-dim", lambda: norm(weight=torch.tensor(1.0)), ValueError,
     "weight must have shape (8,), the last size of x, got ()"),
    ("weight-int", lambda: norm(weight=torch.ones(8, dtype=torch.int64)), TypeError,
     "weight must have a floating-point dtype, got torch.int64"),
    ("weight-float", lambda: norm(weight=1.0), TypeError, "weight must be a torch.Tensor, got float"),
    ("weight-meta", lambda: norm(weight=torch.ones(8, device=META)), ValueError,
     "weight must be on cpu like the first argument, got meta"),
    ("norm-bias-shape", lambda: norm(bias=torch.ones(1)), ValueError,
     "bias must have shape (8,), the last size of x, got (1,)"),
    ("norm-bias-bool", lambda: norm(bias=yes(8)), TypeError, "bias must have a floating-point dtype, got torch.bool"),
    ("norm-bias-meta", lambda: norm(bias=torch.ones(8, device=META)), ValueError,
     "bias must be on cpu like the first argument, got meta"),
    ("eps-negative", lambda: norm(eps=-1e-5), ValueError, "eps must be a finite number >= 0, got -1e-05"),
    ("eps-nan", lambda: norm(eps=math.nan), ValueError, "eps must be a finite number >= 0, got nan"),
    ("eps-inf", lambda: norm(eps=math.inf), ValueError, "eps must be a finite number >= 0, got inf"),
    ("eps-huge", lambda: norm(eps=10**400), ValueError, "eps must be a finite number >= 0, got an integer past"),
    ("eps-None", lambda: norm(eps=None), ValueError, "eps must be a finite number >= 0, got None"),
    ("eps-str", lambda: norm(eps="1e-5"), ValueError, "eps must be a finite number >= 0, got '1e-5'"),
    ("norm-prenorm", lambda: norm(prenorm=1), TypeError, "prenorm must be True or False, got 1"),
    ("norm-in_fp32", lambda: norm(residual_in_fp32=None), TypeError, "residual_in_fp32 must be True or False, got None"),
    ("in_fp32-residual-shape", lambda: norm(residual=torch.zeros(2, 3, 7), residual_in_fp32=True), ValueError,
     "residual must have the shape of x, (2, 3, 8), got (2, 3, 7)"),
    ("rms-x-None", lambda: dropout_add_rms_norm(None, None, None), TypeError, "x must be a torch.Tensor, got NoneType"),
    ("rms-x-empty-rows", lambda: rms_norm(torch.zeros(2, 0)), ValueError, "size >= 1 to normalise, got shape (2, 0)"),
    ("rms-residual-shape", lambda: rms_norm(residual=torch.zeros(3, 8)), ValueError,
     "residual must have the shape of x, (2, 3, 8), got (3, 8)"),
    ("rms-weight-shape", lambda: rms_norm(weight=torch.ones(7)), ValueError,
     "weight must have shape (8,), the last size of x, got (7,)"),
    ("rms-eps", lambda: rms_norm(eps=-1.0), ValueError, "eps must be None or a finite number >= 0, got -1.0"),
    ("rms-backend-unknown", lambda: rms_norm(backend="triton"), ValueError,
     "backend must be None or one of 'cpu', 'cuda', 'reference', got 'triton'"),
    ("norm-backend-unknown", lambda: norm(backend="triton"), ValueError, "backend must be None or one of .*, got 'triton'"),
    # activation_dropout, dropout
    ("activation-x-None", lambda: activation_dropout(None, None, "relu"), TypeError, "x must be a torch.Tensor, got NoneType"),
    ("activation-x-int", lambda: activate(torch.ones(8, dtype=torch.int64)), TypeError,
     "x must have a floating-point dtype, got torch.int64"),
    ("activation-x-nested", lambda: activate(nested()), TypeError, "x is a NestedTensor"),
    ("activation-bias-shape", lambda: activate(bias=torch.ones(3)), ValueError,
     "bias must have shape (8,), the last size of x, got (3,)"),
    ("activation-bias-int", lambda: activate(bias=torch.ones(8, dtype=torch.int64)), TypeError,
     "bias must have a floating-point dtype, got torch.int64"),
    ("activation-bias-float", lambda: activate(bias=1.0), TypeError, "bias must be a torch.Tensor, got float"),
    ("activation-bias-meta", lambda: activate(bias=torch.ones(8, device=META)), ValueError,
     "bias must be on cpu like the first argument, got meta"),
    ("activation-bias-for-0-dim", lambda: activate(torch.tensor(1.0), torch.ones(1)), ValueError,
     "bias needs an x with at least one dimension, got a 0-dim x"),
    ("activation-unknown", lambda: activate(activation="tanh"), ValueError,
     "activation must be one of 'none', 'relu', 'gelu', 'gelu_tanh', 'silu', got 'tanh'"),
    ("activation-None", lambda: activate(activation=None), ValueError, "activation must be one of .*, got None"),
    ("activation-list", lambda: activate(activation=["relu"]), ValueError, "activation must be one of .*, got ['relu']"),
    ("activation-function", lambda: activate(activation=torch.relu), ValueError, "activation must be one of .*, got <built-in"),
    ("activation-0-dim-unknown", lambda: activate(torch.tensor(1.0), activation="tanh"), ValueError,
     "activation must be one of .*, got 'tanh'"),
    ("activation-backend-unknown", lambda: activate(backend="triton "), ValueError,
     "backend must be None or one of .*, got 'triton '"),
    ("dropout-x-None", lambda: dropout(None, 0.1), TypeError, "x must be a torch.Tensor, got NoneType"),
    ("dropout-x-int", lambda: dropout(torch.ones(8, dtype=torch.int64), 0.1), TypeError,
     "x must have a floating-point dtype, got torch.int64"),
    ("dropout-x-nested", lambda: dropout(nested(), 0.1), TypeError, "x is a NestedTensor"),
    ("dropout-backend-unknown", lambda: dropout(torch.ones(8), 0.1, backend="gpu"), ValueError,
     "backend must be None or one of .*, got 'gpu'"),
]
# fmt: on


def says(text):
    """The regular expression for a text in which .* stands for anything."""
    return ".*".join(map(re.escape, text.split(".*")))


@pytest.mark.parametrize("call, exception, text", [pytest.param(*c, id=name) for name, *c in BAD_CALLS])
def test_error_says_what_is_wrong(call, exception, text):
    with pytest.raises(exception, match=says(text)) as caught:
        call()
    assert caught.type is exception


def test_the_calls_are_right_but_for_what_they_show():
    for call in (attend, norm, rms_norm, activate):
        call()
    in_autocast(attend)
    dropout(torch.ones(8), 0.1)


TAKE_DROPOUT = {
    "attention": lambda p: attend(dropout_p=p),
    "dropout_add_layer_norm": lambda p: norm(dropout_p=p),
    "dropout_add_rms_norm": lambda p: rms_norm(dropout_p=p),
    "activation_dropout": lambda p: activate(dropout_p=p),
    "activation_dropout-0-dim": lambda p: activate(torch.tensor(1.0), dropout_p=p),
    "dropout": lambda p: dropout(torch.ones(8), p),
}
BAD_PROBABILITIES = [1.0, 1, 1.5, -0.1, -1e-9, math.nan, math.inf, None, "0.1", torch.tensor(0.1)]


@pytest.mark.parametrize("p", BAD_PROBABILITIES, ids=repr)
@pytest.mark.parametrize("function", TAKE_DROPOUT)
def test_probability_outside_of_0_to_1(function, p):
    with pytest.raises(ValueError, match=says(f"dropout_p must be a number in [0, 1), got {p!r}")):
        TAKE_DROPOUT[function](p)


@pytest.mark.parametrize("p", [0, 0.0, 1e-9, 0.999999], ids=repr)
@pytest.mark.parametrize("function", TAKE_DROPOUT)
def test_probability_at_the_ends(function, p):
    TAKE_DROPOUT[function](p)


# Forcing a backend that cannot take the call

x = torch.ones(1, 2, 3, 4)
# fmt: off
CANNOT = [  # id, call, backend.*reason
    ("meta", lambda: attend(q(device=META), kv(device=META), kv(device=META), backend="cpu"),
     "'cpu'.*the tensors are on meta"),
    ("float8", lambda: attention(*[x.to(torch.float8_e4m3fn)] * 3, backend="cpu"),
     "'cpu'.*no kernel for torch.float8_e4m3fn"),
    ("vmap", lambda: torch.vmap(lambda t: attention(t, t, t, backend="cpu"))(x[None]),
     "'cpu'.*inside a torch.func transform"),
    ("func-grad", lambda: torch.func.grad(lambda t: attention(t, t, t, backend="cpu").sum())(x),
     "'cpu'.*inside a torch.func transform"),
    ("norm-meta", lambda: norm(torch.zeros(2, 8, device=META), backend="cpu"), "'cpu'.*the tensors are on meta"),
    ("norm-float8", lambda: norm(x.to(torch.float8_e4m3fn), backend="cpu"), "'cpu'.*no kernel for torch.float8_e4m3fn"),
    ("activation-meta", lambda: activate(torch.zeros(2, 8, device=META), backend="cpu"), "'cpu'.*the tensors are on meta"),
    ("dropout-meta", lambda: dropout(torch.zeros(2, 8, device=META), 0.1, backend="cpu"), "'cpu'.*the tensors are on meta"),
    ("rms-meta", lambda: rms_norm(torch.zeros(2, 8, device=META), backend="cpu"), "'cpu'.*the tensors are on meta"),
    ("norm-cuda", lambda: norm(backend="cuda"), "'cuda'.*the tensors are on cpu"),
    ("rms-cuda", lambda: rms_norm(backend="cuda"), "'cuda'.*the tensors are on cpu"),
    ("activation-cuda", lambda: activate(backend="cuda"), "'cuda'.*the tensors are on cpu"),
    ("norm-vmap", lambda: torch.vmap(lambda t: norm(t, backend="cpu"))(x), "'cpu'.*inside a torch.func transform"),
    ("activation-vmap", lambda: torch.vmap(lambda t: activate(t, backend="cpu"))(x), "'cpu'.*inside a torch.func transform"),
]
# fmt: on


@pytest.mark.parametrize("call, reason", [pytest.param(*c, id=name) for name, *c in CANNOT])
def test_forced_backend_gives_its_reason(call, reason, monkeypatch):
    monkeypatch.setattr(ops, "missing", None)  # as if the compiled module were there
    with pytest.raises(RuntimeError, match=says(f"backend={reason}".replace(".*", " cannot take this call: .*"))):
        call()


def test_forced_backend_follows_dual_numbers_nowhere():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="backend='cpu' cannot take this call: forward-mode differentiation"):
            attention(dual, x, x, backend="cpu")


@pytest.mark.parametrize(
    "call",
    [attend, additive, norm, rms_norm, activate, lambda **o: dropout(x, 0.1, **o)],
    ids=["attention", "additive_attention", "norm", "rms_norm", "activation", "dropout"],
)
def test_without_the_compiled_module(call, monkeypatch):
    """Everything works, and who insists is told how to build it."""
    reason = "the compiled module is not usable; build it with `pip install`"
    monkeypatch.setattr(ops, "missing", reason)
    call()
    with pytest.raises(RuntimeError, match=says(f"backend='cpu' cannot take this call: {reason}")):
        call(backend="cpu")


class OnGpu:
    """What `functional` asks of a tensor on a GPU, where there is none."""

    device, dtype, shape = torch.device("cuda", 0), torch.float32, (4, 8)


@pytest.mark.parametrize(
    "archs, gpu, reason",
    [
        (None, (9, 0), "the compiled module has no CUDA kernels; with a CUDA build of torch and nvcc"),
        ("8.0;9.0", (9, 0), None),
        ("8.0;9.0", (8, 9), None),
        ("8.0;9.0", (7, 5), "the CUDA kernels are built for 8.0;9.0, this GPU is a 7.5; `TORCH_CUDA_ARCH_LIST=7.5 pip install"),
        ("8.0;9.0", (10, 0), "this GPU is a 10.0"),
        ("8.0 9.0+PTX", (12, 0), None),
        ("9.0a", (9, 0), None),
        ("Hopper", (9, 0), None),  # a name: nothing known, so the driver decides
    ],
)
def test_gpus_that_the_kernels_were_not_built_for(archs, gpu, reason, monkeypatch):
    monkeypatch.setattr(ops, "missing", None)
    monkeypatch.setattr(ops, "cuda_archs", archs)
    monkeypatch.setattr(_backends, "_gpu_reasons", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpu)
    got = _backends._why_not_cuda(OnGpu)
    assert got is None if reason is None else reason in got


def test_what_no_cuda_kernel_takes(monkeypatch):
    monkeypatch.setattr(ops, "missing", None)
    monkeypatch.setattr(ops, "cuda_archs", "9.0")
    monkeypatch.setattr(OnGpu, "dtype", torch.float64)
    assert _backends._why_not_cuda(OnGpu) == "no CUDA kernel for torch.float64"
    monkeypatch.setattr(OnGpu, "dtype", torch.float16)
    monkeypatch.setattr(OnGpu, "shape", (1, 2**30 + 1))
    assert "rows of more than 2**30 elements" in _backends._why_not_cuda(OnGpu)
