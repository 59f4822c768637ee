"""Checkpoints: a folder with the weights (model.safetensors) and all else that training needs (state.pt).

A folder is written under another name, flushed to the disk and renamed; what it replaces stays beside it as NAME.previous. So a
crash at any moment leaves a whole checkpoint behind. Reading compares checksums and shapes before anything is changed.
"""

import os
import random
import shutil
import zipfile
import zlib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

WEIGHTS, STATE = "model.safetensors", "state.pt"


def optional(module: str) -> ModuleType:
    """Import a module of the extra `train`, or say in one sentence how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f'this needs {error.name}: pip install "fast-transformer-kernels[train]"') from error


def save_weights(model: Module, path: str | os.PathLike) -> None:
    """Write the state dict of a model to a safetensors file; tensors that are tied are written once.

    Args:
        model: any module, compiled by torch.compile or not: the file is the same.
        path: of the file.
    """
    optional("safetensors.torch").save_file({name: x.contiguous() for name, x in _distinct(model).items()}, path)


def load_weights(model: Module, path: str | os.PathLike) -> None:
    """Read what `save_weights` wrote into a model of the same shape, on any device.

    Raises:
        ValueError: the file is of another model; the text names the parameters. RuntimeError: the file is damaged. In both
            cases the model is as before.
    """
    put(model, read_weights(model, path))


def read_weights(model: Module, path: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors in a file, by name; checked against the model, which is not changed. Raises as `load_weights` does."""
    safetensors = optional("safetensors.torch")
    try:
        stored = safetensors.load_file(path)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise _damaged(Path(path), error) from error
    own = _distinct(model)
    problems = [f"{name} is only in the file" for name in stored.keys() - own.keys()]
    problems += [f"{name} is only in the model" for name in own.keys() - stored.keys()]
    for name in stored.keys() & own.keys():
        if stored[name].shape != own[name].shape:
            problems.append(f"{name} is {tuple(stored[name].shape)} in the file, {tuple(own[name].shape)} in the model")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"{path} holds another model: {'; '.join(sorted(problems)[:8])}{more}")
    return stored


def put(model: Module, weights: dict[str, Tensor]) -> None:
    """Copy into the model what `read_weights` has found to fit."""
    _plain(model).load_state_dict(weights, strict=False)  # the second names of tied tensors are not in the file


def save(folder: Path, model: Module, state: dict[str, Any]) -> None:
    """Write a checkpoint; the one that was there becomes NAME.previous."""
    new, previous = folder.with_name(f"{folder.name}.new"), _previous(folder)
    shutil.rmtree(new, ignore_errors=True)  # of a run that died while writing
    new.mkdir(parents=True)
    save_weights(model, new / WEIGHTS)
    torch.save(state | {"weights_checksum": _checksum(new / WEIGHTS)}, new / STATE)
    for path in (new / WEIGHTS, new / STATE, new):
        _flush(path)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(folder, previous)
    os.replace(new, folder)
    _flush(folder.parent)


def find(folder: Path) -> Path | None:
    """The checkpoint of this name; or its predecessor, if writing was interrupted between the two renames; or None."""
    return next((path for path in (folder, _previous(folder)) if path.exists()), None)


def read(folder: Path, model: Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the weights of a checkpoint, both checked; nothing is changed.

    Raises:
        RuntimeError: a file is damaged; the text names it, and the previous checkpoint. ValueError: as in `load_weights`.
    """
    path = folder / STATE
    try:
        if zipfile.ZipFile(path).testzip() is not None:  # torch.load does not compare the checksums in its files
            raise ValueError("wrong checksum")
        state = torch.load(path, map_location="cpu", weights_only=True)
        path = folder / WEIGHTS
        if _checksum(path) != state["weights_checksum"]:
            raise ValueError(f"not what was written together with {STATE}")
    except Exception as error:
        raise _damaged(path, error) from error
    return state, read_weights(model, path)


def random_state(generator: torch.Generator | None = None) -> dict[str, Any]:
    """The state of torch's and Python's global random generators, and of one more."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if generator is not None:
        state["generator"] = generator.get_state()
    return state


def set_random_state(state: dict[str, Any], generator: torch.Generator | None = None) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "generator" in state and generator is not None:
        generator.set_state(state["generator"])


def _plain(model: Module) -> Module:
    return getattr(model, "_orig_mod", model)  # torch.compile's wrapper would add its prefix to every name


def _distinct(model: Module) -> dict[str, Tensor]:
    """The state dict with each tied tensor once, under the first of its names, which is the one that safetensors keeps, too."""
    state, kept = _plain(model).state_dict(), {}
    for name in sorted(state):
        x = state[name]
        kept.setdefault((x.device, x.data_ptr(), x.shape, x.stride()) if x.numel() else name, name)
    return {name: state[name] for name in kept.values()}


def _previous(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.previous")


def _damaged(path: Path, error: Exception) -> RuntimeError:
    previous = _previous(path.parent)
    hint = f"; the checkpoint before it is {previous}" if previous.exists() else ""
    return RuntimeError(f"{path} is damaged or incomplete ({str(error) or type(error).__name__}){hint}")


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name != "posix":
        return  # only there can a folder be opened
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
