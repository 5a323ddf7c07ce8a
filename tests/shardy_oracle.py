"""The reference implementation's passes, run from the jaxlib wheel in a child process, because some inputs abort it.

>>> oracle.run(text, "sdy-basic-propagate").text        # the module after the pass
>>> oracle.rules(text)                                  # the printed rule of every op, in program order; None without one

Only tests call this: the library itself never runs a reference pass.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the reference made of a module: its text, or the diagnostic, or (both None) an aborted process."""

    text: str | None = None
    error: str | None = None
    rules: tuple[str | None, ...] = ()

    @property
    def crashed(self) -> bool:
        return self.text is None and self.error is None


class Oracle:
    """A child process that answers one request after the other, and is started again where the reference aborts."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def run(self, text: str, *passes: str, seconds: float | None = None) -> Result:
        """Run passes over a module; none: parse and print it. Function passes are named as ``func.func(sdy-...)``."""
        return self._ask({"text": text, "passes": passes}, SECONDS if seconds is None else seconds)

    def rules(self, text: str, *, conservative: bool = False) -> Result:
        """The sharding rules of all ops, in pre-order of the module without functions and terminators."""
        option = "{conservative-propagation=true}" if conservative else ""
        return self._ask({"text": text, "passes": [f"func.func(sdy-populate-op-sharding-rules{option})"], "rules": True})

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            for stream in (self._child.stdin, self._child.stdout):
                if stream is not None:
                    stream.close()
            self._child.kill()
            self._child.wait()
            self._child = None

    def _ask(self, request: dict[str, Any], seconds: float = SECONDS) -> Result:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], seconds)
        answer = child.stdout.readline() if ready else ""
        if not answer:
            self.close()
            return Result()
        data = json.loads(answer)
        return Result(text=data.get("text"), error=data.get("error"), rules=tuple(data.get("rules", ())))


def main() -> None:
    """Answer requests, one JSON object a line."""
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    def serve(request: dict[str, Any]) -> dict[str, Any]:
        registry = ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(registry)
        with ir.Context() as context:
            context.append_dialect_registry(registry)
            context.load_all_available_dialects()
            sdy.register_dialect(context)
            stablehlo.register_dialect(context)
            chlo.register_dialect(context)
            mhlo.register_mhlo_dialect(context)
            try:
                module = ir.Module.parse(request["text"])
                if request["passes"]:
                    passmanager.PassManager.parse(f"builtin.module({','.join(request['passes'])})").run(module.operation)
            except (ir.MLIRError, ValueError) as error:
                return {"error": str(error)}
            return {"text": str(module), "rules": [_rule(op) for op in _ops(module.operation)] if request.get("rules") else []}

    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


def _ops(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name not in ("func.func", "func.return", "stablehlo.return", "sdy.return", "sdy.mesh"):
                    yield inner.operation
                yield from _ops(inner.operation)


def _rule(op: Any) -> str | None:
    return str(op.attributes["sdy.sharding_rule"]) if "sdy.sharding_rule" in op.attributes else None


if __name__ == "__main__":
    main()
