"""jaxlib's MLIR bindings, loaded when the first StableHLO module is read.

They parse and print modules. No pass of the reference implementation is ever run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from solver_shard.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """The modules ``jaxlib.mlir.ir``, ``.dialects.sdy`` and ``.dialects.stablehlo``, and a function that makes a context."""

    ir: Any
    sdy: Any
    stablehlo: Any
    dialects: tuple[Any, ...]
    register: Any

    def context(self) -> Any:
        """A new context that knows the dialects."""
        registry = self.ir.DialectRegistry()
        self.register(registry)
        context = self.ir.Context()
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        for dialect in self.dialects:
            dialect(context)
        return context


@functools.cache
def bindings() -> Bindings:
    """The bindings; InputError with the line to install them where jaxlib is missing."""
    try:
        from jaxlib.mlir import ir
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
        from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo
    except ImportError as error:
        raise InputError(
            f"StableHLO modules are read through jaxlib, which cannot be imported ({error}); pip install 'solver-shard[jax]'"
        ) from None
    return Bindings(
        ir=ir,
        sdy=sdy,
        stablehlo=stablehlo,
        dialects=(sdy.register_dialect, stablehlo.register_dialect, chlo.register_dialect, mhlo.register_mhlo_dialect),
        register=_jax_mlir_ext.register_dialects,
    )
