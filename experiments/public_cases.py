"""Faults that others reported in public, run against this project: what each case does here.

    python experiments/public_cases.py [--only NAME,...] [--markdown experiments/public_cases.md]

Each case is small, of the kind that its address describes, and is judged by numbers: a plan is executed shard by shard and compared with
the unsharded model, an optimum with enumeration. The table says what was asked and what came out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

from measure import machine, table  # noqa: E402

import solver_shard  # noqa: E402

Module = type[nn.Module]
MESHES = ("2", "3", "a=2,b=2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One reported fault.

    Attributes:
        name: short.
        addresses: where it, or its like, was reported.
        asked: what is checked here.
        run: raises if it does not hold; returns what to say.
    """

    name: str
    addresses: tuple[str, ...]
    asked: str
    run: Callable[[], str]


class Loss(nn.Module):
    """A function of x, a target and a few parameters as a module."""

    def __init__(self, body: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.body = body
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.body(**dict(self.named_parameters()), **inputs)


def holds(model: nn.Module, inputs: dict[str, Any], meshes: tuple[str, ...] = MESHES, **options: Any) -> str:
    """Plan a model on each mesh, run the plan shard by shard, and compare."""
    for mesh in meshes:
        plan = solver_shard.optimize(model, inputs, mesh=mesh, cluster="h100", **options)
        verdict = solver_shard.verify(plan, model, inputs)
        if not verdict.holds:
            raise AssertionError(f"on {mesh}: {verdict}")
    return f"plans hold on {', '.join(meshes)}"


def false_optimum() -> str:
    from random_graphs import points, random_graph, some_limit

    from solver_shard.solve.engine import solve
    from solver_shard.solve.solution import Status

    rng, graphs = np.random.default_rng(0), 0
    for _ in range(150):
        graph = random_graph(rng, 6, 3)
        graph = replace(graph, usages=graph.usages * int(rng.choice([1, 2**20, 2**31])))
        every = points(graph)
        limit = some_limit(rng, every)
        graph = replace(graph, limit=limit)
        best = min((p.cost for p in every if limit is None or p.peak <= limit), default=None)
        found = solve(graph, gap=0.0, time_limit=None)
        if found.status is Status.INFEASIBLE if best is not None else found.feasible:
            raise AssertionError(f"{found.status}, by enumeration {best}")
        if best is not None and found.cost != best:
            raise AssertionError(f"{found.status} at {found.cost}, by enumeration {best}")
        graphs += 1
    return f"{graphs} graphs equal enumeration"


def weighted_loss() -> str:
    torch.manual_seed(0)
    weight = torch.rand(5) + 0.1

    def flat(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(x @ w, -1), y, weight=weight.to(x.dtype))

    def image(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        logits = torch.einsum("nhwc,ck->nkhw", x, w)
        return F.cross_entropy(logits, y, weight=weight.to(x.dtype), ignore_index=1)

    first = holds(Loss(flat, w=torch.randn(6, 5)), {"x": torch.randn(12, 6), "y": torch.randint(5, (12,))})
    holds(Loss(image, w=torch.randn(6, 5)), {"x": torch.randn(6, 4, 4, 6), "y": torch.randint(5, (6, 4, 4))})
    return first


def transposed_logits() -> str:
    torch.manual_seed(0)

    def body(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).transpose(1, 2), y)

    return holds(Loss(body, w=torch.randn(6, 5)), {"x": torch.randn(6, 4, 6), "y": torch.randint(5, (6, 4))})


def batch_norm_first() -> str:
    torch.manual_seed(0)
    said = ""
    for norm in (nn.BatchNorm2d(6), nn.InstanceNorm2d(6, affine=True)):
        model = nn.Sequential(norm, nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten())
        said = holds(Scored(model), {"x": torch.randn(6, 6, 6, 6)})
    return said


class Scored(nn.Module):
    """The mean square of a model's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        found = self.model(x)
        return (found[0] if isinstance(found, tuple) else found).square().mean()


def recurrent() -> str:
    torch.manual_seed(0)
    said = ""
    for kind, bias in itertools.product((nn.LSTM, nn.GRU), (True, False)):
        said = holds(Scored(kind(6, 6, bias=bias, batch_first=True)), {"x": torch.randn(6, 3, 6)}, ("2",))
    return said


def linear_algebra() -> str:
    torch.manual_seed(0)

    def body(w: Tensor, x: Tensor) -> Tensor:
        spd = x @ x.mT + 6 * torch.eye(6, dtype=x.dtype)
        lower = torch.linalg.cholesky(spd)
        solved = torch.linalg.solve_triangular(lower, x @ w, upper=False)
        return (solved + torch.linalg.inv(spd) + torch.linalg.solve(spd, x)).square().mean() + torch.logdet(spd).mean()

    return holds(Loss(body, w=torch.randn(6, 6)), {"x": torch.randn(4, 6, 6)}, ("2", "a=2,b=2"))


def fourier() -> str:
    torch.manual_seed(0)

    def body(w: Tensor, x: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(x @ w) * 0.5).square().mean()

    return holds(Loss(body, w=torch.randn(6, 6)), {"x": torch.randn(4, 6, 6)})


def one_hot() -> str:
    torch.manual_seed(0)

    def body(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        torch._assert_async((y >= 0).all())
        return ((x @ w) - F.one_hot(y, 5).to(x.dtype)).square().mean()

    return holds(Loss(body, w=torch.randn(6, 5)), {"x": torch.randn(12, 6), "y": torch.randint(5, (12,))})


def complex_parameters() -> str:
    torch.manual_seed(0)

    def body(w: Tensor, x: Tensor) -> Tensor:
        z = torch.fft.fft(x) @ w
        return (z * z.conj()).real.mean()

    model = Loss(body, w=torch.randn(6, 6, dtype=torch.complex64))
    return holds(model, {"x": torch.randn(12, 6)}, ("2",), clip=True)


def dropout() -> str:
    torch.manual_seed(0)

    def body(w: Tensor, x: Tensor) -> Tensor:
        q = F.dropout(x @ w, 0.3)
        attended = F.scaled_dot_product_attention(q, x, x, dropout_p=0.2)
        return (attended + torch.randn_like(attended)).square().mean()

    return holds(Loss(body, w=torch.randn(8, 8)), {"x": torch.randn(4, 2, 4, 8)}, ("2", "a=2,b=2"))


def clipped_ties() -> str:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.lm_head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
            self.lm_head.weight = self.embed_tokens.weight

        def forward(self, ids: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.lm_head(self.embed_tokens(ids)).flatten(0, 1), y.flatten())

    inputs = {"ids": torch.randint(12, (4, 6)), "y": torch.randint(12, (4, 6))}
    said = holds(Tied(), inputs, ("2",), pins=["embed_tokens.weight=S(0)"], clip=True)
    try:
        solver_shard.optimize(Tied(), inputs, mesh="2", cluster="h100", pins=["lm_head.weight=S(0)"])
    except solver_shard.SolverShardError as error:
        if "embed_tokens.weight" not in str(error):
            raise
    return said + "; a pin on the tie's other name is taken, or the message names embed_tokens.weight"


def foreach_memory() -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))

        def plan(optimizer: str) -> solver_shard.Plan:
            return solver_shard.optimize(
                path, batch=8, seq=16, dtype="f32", mesh="8", memory="16GB", reserve=0, template="zero3", optimizer=optimizer
            )

        try:
            plan("adamw")
        except solver_shard.InfeasibleError:
            fused = plan("adamw-fused")
            return f"foreach AdamW does not fit 16 GB; fused does, with a peak of {fused.memory.peak / 1e9:.1f} GB"
    raise AssertionError("foreach AdamW is said to fit")


TORCH, ORTOOLS = "https://github.com/pytorch/pytorch", "https://github.com/google/or-tools"
CASES = (
    Case(
        name="false optimum of an integer program",
        addresses=(f"{ORTOOLS}/issues/5293", f"{ORTOOLS}/issues/5274"),
        asked="150 random graphs with bytes up to 2**31 and more against enumeration",
        run=false_optimum,
    ),
    Case(
        name="mean loss with class weights or ignored labels",
        addresses=(f"{TORCH}/issues/185167",),
        asked="nll_loss of rows, cross entropy of pixels",
        run=weighted_loss,
    ),
    Case(
        name="loss over permuted classes",
        addresses=(f"{TORCH}/issues/175084",),
        asked="training with logits.transpose(1, 2)",
        run=transposed_logits,
    ),
    Case(
        name="batch norm backward",
        addresses=(f"{TORCH}/issues/182739",),
        asked="batch norm and instance norm as the first layer, in training",
        run=batch_norm_first,
    ),
    Case(name="recurrent layers in f64", addresses=(f"{TORCH}/issues/98979",), asked="LSTM and GRU, with and without bias", run=recurrent),
    Case(
        name="linear algebra over batches",
        addresses=(f"{TORCH}/pull/176955",),
        asked="cholesky, solve_triangular, inv, solve, logdet of [4, 6, 6]",
        run=linear_algebra,
    ),
    Case(name="Fourier transforms", addresses=(f"{TORCH}/issues/188182",), asked="rfft2 and irfft2, trained through", run=fourier),
    Case(
        name="one_hot and assertions",
        addresses=(f"{TORCH}/issues/115817", f"{TORCH}/pull/186306"),
        asked="both trace, and the plan holds",
        run=one_hot,
    ),
    Case(
        name="complex parameters",
        addresses=(f"{TORCH}/issues/80080", "https://github.com/google-deepmind/optax/issues/144"),
        asked="c64 weights, conjugates, gradient clipping",
        run=complex_parameters,
    ),
    Case(
        name="random numbers",
        addresses=(f"{TORCH}/issues/146190",),
        asked="dropout, attention with dropout and randn_like are drawn alike",
        run=dropout,
    ),
    Case(
        name="tied weights",
        addresses=(
            "https://github.com/foundation-model-stack/foundation-model-stack/pull/331",
            "https://github.com/pytorch/torchtitan/issues/1524",
        ),
        asked="tied embedding and head, pinned by either name",
        run=clipped_ties,
    ),
    Case(
        name="temporaries of the optimizer",
        addresses=(f"{TORCH}/issues/97712", "https://github.com/meta-pytorch/torchtune/pull/389"),
        asked="Llama-2-7B in f32, zero3 on eight devices of 16 GB, foreach and fused AdamW",
        run=foreach_memory,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of names, by commas")
    parser.add_argument("--markdown", type=Path, default=HERE / "public_cases.md")
    given = parser.parse_args()
    starts = tuple(given.only.split(",")) if given.only else ("",)
    rows = []
    for case in CASES:
        if not case.name.startswith(starts):
            continue
        try:
            outcome = case.run()
        except Exception as error:  # a study says what failed and goes on
            traceback.print_exc()
            outcome = f"**fails**: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        rows.append([case.name, " ".join(f"<{address}>" for address in case.addresses), case.asked, outcome])
        print(case.name, "|", outcome, flush=True)
    lines = [
        "# Faults that others reported in public, run here",
        "",
        f"By `python experiments/public_cases.py`, {machine()}, torch {torch.__version__}. Plans are run shard by shard (`verify`) and",
        "compared with the unsharded model: outputs, losses, gradients, parameters after a step.",
        "",
        *table(["case", "reported at", "asked here", "outcome"], rows),
    ]
    given.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
