"""capture_attention: the attention weights of a running model, taken down beside its results.

The weights come from a second pass: a hook before the module's forward runs it once more, asking for the weights, from the
same state of the random generators, so that both passes drop the same elements. What the model itself computes is not
touched. (To change the arguments of its own call would: a call that returns no weights may take another kernel, whose
results differ in the last bits.)
"""

import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from ..nn import AdditiveAttention, LuongAttention

Layers = str | Module | Iterable[str | Module]
ATTENTIONS = (torch.nn.MultiheadAttention, AdditiveAttention, LuongAttention)  # what is found without being named


@contextmanager
def capture_attention(
    model: Module, layers: Layers | None = None, *, average_heads: bool = False
) -> Iterator[dict[str, list[Tensor]]]:
    """Record the attention weights of every call inside the `with` block; outputs, gradients and random numbers stay the same.

    The attentions are the MultiheadAttention modules of this package and of torch.nn, and those of recurrent models. The
    forward of the former runs twice, so it must not change the module. (Stock encoder layers leave torch.nn's inference path
    while hooks are attached, which may change their last bits.) A block that is checkpointed and recomputed inside the context
    is recorded again.

    Args:
        model: the module to watch; every call of it or of its parts counts.
        layers: which attentions; None = all. A name as in `model.named_modules()`, or a module, stands for all attentions in
            it; names may hold the wildcards of fnmatch ("decoder.layers.*.multihead_attn"). A list joins several. A module
            that is no attention and holds none is recorded too if its forward returns a pair (output, weights), with weights
            (N, H, L, S), (N, L, S), or (N, S) for one query.
        average_heads: record the mean of the heads, which needs memory for one of them only.

    Yields:
        A dict from module name to a list of weights (N, H, L, S), one per call and detached; with average_heads (N, 1, L, S).
        As returned by the module: after dropout. N is 1 for a call without a batch.

    Raises:
        ValueError: nothing to record: the text lists the names there are.
        TypeError: model or layers of another type; in the block: a chosen module returned no pair with weights.

    Example:
        with capture_attention(model, "transformer.decoder.layers.*.multihead_attn") as weights:
            model(source, target)
        plot_attention(weights["transformer.decoder.layers.0.multihead_attn"][0], head=3, path="head3.png")
    """
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = _choose(model, layers)
    records = {name: [] for name in chosen}
    with ExitStack() as hooks:
        for name, module in chosen.items():
            if isinstance(module, torch.nn.MultiheadAttention):
                hook = partial(_run_for_weights, records[name], average_heads)
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                hooks.enter_context(module.register_forward_hook(partial(_take_weights, records[name], average_heads, name)))
        yield records
    if not any(records.values()):
        warnings.warn(
            "no attention was recorded: none of the chosen modules was called in the block. (A model compiled before does not "
            "see new hooks: call the uncompiled one.)",
            stacklevel=3,
        )


def _choose(model: Module, layers: Layers | None) -> dict[str, Module]:
    """The modules to record by name, in the model's order; a model that is an attention itself is named after its class."""
    modules = {name or type(model).__name__: module for name, module in model.named_modules()}
    attentions = {name: module for name, module in modules.items() if isinstance(module, ATTENTIONS)}
    if layers is None:
        if not attentions:
            raise ValueError(f"model holds no attention; its modules are {', '.join(modules)}: choose with layers=...")
        return attentions
    found: set[str] = set()
    for choice in [layers] if isinstance(layers, (str, Module)) else layers:
        if isinstance(choice, str):
            names = [name for name in modules if fnmatchcase(name, choice)]
        elif isinstance(choice, Module):
            names = [name for name, module in modules.items() if module is choice]
        else:
            raise TypeError(f"layers must hold names or modules, got {type(choice).__name__}")
        if not names:
            what = repr(choice) if isinstance(choice, str) else f"a {type(choice).__name__} that is no part of model"
            raise ValueError(f"layers: {what} matches nothing; there are {', '.join(attentions or modules)}")
        inside = [name for name in attentions if any(modules[name] in modules[outer].modules() for outer in names)]
        found.update(inside or names)
    if not found:
        raise ValueError(f"layers is empty; there are {', '.join(attentions or modules)}")
    return {name: module for name, module in modules.items() if name in found}


def _run_for_weights(record: list[Tensor], average_heads: bool, module: Module, args: tuple, kwargs: dict) -> None:
    call = inspect.signature(module.forward).bind(*args, **kwargs)
    call.arguments.update(need_weights=True, average_attn_weights=average_heads)
    if call.arguments.get("cache") is not None:
        call.arguments["cache"] = copy.deepcopy(call.arguments["cache"])  # this pass must not add its keys to it
    device = call.arguments["query"].device
    generators = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    autocast = {"enabled": torch.is_autocast_enabled(device.type), "dtype": torch.get_autocast_dtype(device.type)}
    # No cache: up to torch 2.10 or so, autocast would go on with the copies of parameters made here, which get no gradient.
    with torch.no_grad(), torch.random.fork_rng(**generators), torch.autocast(device.type, cache_enabled=False, **autocast):
        weights = module.forward(*call.args, **call.kwargs)[1]
    weights = weights.unsqueeze(-3) if average_heads else weights  # ([N,] H, L, S)
    record.append(weights if weights.dim() == 4 else weights[None])


def _take_weights(record: list[Tensor], average_heads: bool, name: str, module: Module, args: tuple, result: object) -> None:
    weights = result[1] if isinstance(result, tuple) and len(result) == 2 else None
    if not isinstance(weights, Tensor) or weights.dim() not in (2, 3, 4):
        got = [f"{type(x).__name__}{tuple(x.shape) if isinstance(x, Tensor) else ''}" for x in _as_tuple(result)]
        raise TypeError(f"layers: {name} must return (output, weights), weights of 2 to 4 dimensions, got {', '.join(got)}")
    weights = weights.detach()
    if weights.dim() < 4:
        weights = weights[:, None] if weights.dim() == 3 else weights[:, None, None]  # (N, 1, L, S)
    record.append(weights.mean(1, keepdim=True) if average_heads else weights)


def _as_tuple(x: object) -> tuple:
    return x if isinstance(x, tuple) else (x,)
