"""Small blocks, and what DTensor really does with them: eager forward and backward on rank 0 of a fake process group."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

from solver_shard.baselines.dtensor_greedy import WalkedCollective
from solver_shard.layout import Layout
from solver_shard.mesh import Mesh
from solver_shard.tracing.joint_graph import RawGraph

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY = 8, 8, 32, 4, 64, 48


class MLP(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, fused: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (m(x).view(b, s, HEADS, WIDTH // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS), dim=-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, s, WIDTH))


class GPT2Block(nn.Module):
    """Layer norms, attention and MLP with biases, two residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(bias=True), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions, attention without biases, gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (m(h).view(b, s, HEADS, WIDTH // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), dim=-1) * sin for t in (q, k))
        y = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS), dim=-1) @ v
        x = x + self.o(y.transpose(1, 2).reshape(b, s, WIDTH))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    if isinstance(model, LlamaBlock):
        return {"x": x, "cos": torch.randn(LENGTH, WIDTH // HEADS), "sin": torch.randn(LENGTH, WIDTH // HEADS)}
    return {"x": x}


MODELS: dict[str, Any] = {
    "mlp": MLP,
    "attention": Attention,
    "sdpa": lambda: Attention(fused=True),
    "gpt2": GPT2Block,
    "llama": LlamaBlock,
}


KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}
"""Functional collectives that DTensor runs on a CPU."""


def mlp_step() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """An entry point."""
    model = MLP()
    return model, inputs_of(model), lambda output: (output**2).mean()


def sdpa_step() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """An entry point whose attention DTensor cannot shard on a CPU."""
    model = Attention(fused=True)
    return model, inputs_of(model), lambda output: (output**2).mean()


class Recorder(TorchDispatchMode):
    """Functional collectives: kind, axis and bytes, and the last op that came through."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.found: list[WalkedCollective] = []
        self._axes = {mesh.get_group(axis).group_name: axis for axis in range(mesh.ndim)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("_c10d_functional::") and (kind := KINDS.get(name.partition("::")[2].rstrip("_"))):
            buffer = result if kind == "all_gather" else args[0]
            self.found.append(WalkedCollective(kind=kind, axis=self._axes[args[-1]], nbytes=buffer.numel() * buffer.element_size()))
        return result


def really(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], mesh: Mesh, pins: Mapping[str, Layout], devices: DeviceMesh
) -> tuple[list[WalkedCollective], Counter[str]]:
    """Run the step with DTensor: the collectives that it issues, and how many of each kind its own CommDebugMode counts."""

    def placed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        layout = pins.get(name, Layout.replicated(len(mesh.axes)))
        return distribute_tensor(tensor.detach(), devices, layout.to_dtensor(mesh.shape))

    for path, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            made = nn.Parameter(placed(f"{path}.{key}" if path else key, parameter))
            module.register_parameter(key, made)
    given = {name: placed(name, tensor) for name, tensor in inputs.items()}
    with CommDebugMode() as debug, Recorder(devices) as recorder, implicit_replication():
        loss = (model(**given) ** 2).mean()
        loss.backward()
    counted = {KINDS[str(op).rpartition(".")[2]]: count for op, count in debug.get_comm_counts().items()}
    return recorder.found, Counter({kind: count for kind, count in counted.items() if count})


def seen_on_cpu(collectives: tuple[WalkedCollective, ...], mesh: Mesh) -> Counter[WalkedCollective]:
    """The same as the CPU backend runs them: an all-to-all is an all-gather, from which each device keeps its part."""
    return Counter(
        WalkedCollective(kind="all_gather", axis=c.axis, nbytes=c.nbytes * mesh.shape[c.axis]) if c.kind == "all_to_all" else c
        for c in collectives
    )


def random_pins(raw: RawGraph, mesh: Mesh, rng: random.Random) -> dict[str, Layout]:
    """Every source is cut or replicated at random."""
    sources = [node.source for node in raw.nodes if node.source is not None]
    return {
        source.name: Layout.parse("".join(rng.choice(["R", "R", *(f"S({d})" for d in range(len(source.shape)))]) for _ in mesh.axes))
        for source in sources
    }
