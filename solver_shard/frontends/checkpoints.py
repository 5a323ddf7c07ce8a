"""Note on every traced op which ``torch.utils.checkpoint`` regions it runs in.

While tracing, torch ignores the hooks by which a region throws its values away: the joint graph looks as if there were no
region. But the hooks are entered, and that is where the regions are seen here, whoever opened them:
``checkpoint``, ``checkpoint_sequential``, Hugging Face layers, or ``checkpoint_wrapper`` of ``torch.distributed``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint as torch_checkpoint

from solver_shard.errors import TraceError

REGION = "checkpoint"
"""Annotation of traced nodes: the numbers of the open regions, outermost first."""


@contextlib.contextmanager
def regions() -> Iterator[None]:
    """While open, every traced node carries the regions it runs in, as the annotation ``REGION``; a reentrant region is a TraceError."""
    numbers = itertools.count()
    meta = fx_traceback.current_meta
    hook, reentrant = torch_checkpoint._checkpoint_hook, torch_checkpoint.CheckpointFunction

    class Region(hook):  # type: ignore[misc, valid-type]  # torch is not checked
        def __enter__(self) -> Any:
            self.outer = meta.get("custom")
            before = self.outer or {}
            meta["custom"] = {**before, REGION: (*before.get(REGION, ()), next(numbers))}
            return super().__enter__()

        def __exit__(self, *args: Any) -> Any:
            if self.outer is None:
                meta.pop("custom", None)
            else:
                meta["custom"] = self.outer
            return super().__exit__(*args)

    torch_checkpoint._checkpoint_hook, torch_checkpoint.CheckpointFunction = Region, _Reentrant
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_hook, torch_checkpoint.CheckpointFunction = hook, reentrant


class _Reentrant:
    """Stands in for the autograd function of reentrant checkpoints, which calls the engine from inside the engine."""

    @staticmethod
    def apply(*_args: Any) -> Any:
        raise TraceError(
            "the model checkpoints activations with use_reentrant=True (torch's default), which cannot be traced; call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
