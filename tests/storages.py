"""Bytes of the storages that ops make, each from when it is made until nothing refers to it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Held(TorchDispatchMode):
    """The most bytes that were made and not freed again; those of the tensors that are ``given`` are not counted."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata: 0 for tensor in given}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else (made,):
            if isinstance(item, torch.Tensor) and (storage := item.untyped_storage())._cdata not in self.known:
                self.known[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.known.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.known.values()))
        return made
