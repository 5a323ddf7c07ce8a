"""Attention is one op wherever an accelerator has a kernel for it, and has the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention, noop_mask
from torch.utils.checkpoint import checkpoint
from traced_models import check, counts, squares

from solver_shard.errors import InputError, TraceError
from solver_shard.ops.kernels import visible
from solver_shard.tracing.attention import function_text, read_function, unfused_flex
from solver_shard.tracing.torch import trace

X = torch.randn(3, 6, 8)
WORDS = torch.tensor([[1, 0, 2, 3, 0, 1], [2, 2, 0, 2, 2, 2], [0, 1, 0, 1, 0, 1]])
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Heads(nn.Module):
    """Four heads of queries of 4, as many or fewer of keys, and of values of another width."""

    def __init__(self, attend: Callable[..., torch.Tensor], *, kv: int = 4, width: int = 3) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 4 * kv), nn.Linear(8, width * kv)
        self.attend, self.kv = attend, kv
        self.bias = nn.Parameter(torch.randn(4, 6, 6))
        self.table, self.sinks = nn.Parameter(torch.randn(4, 12)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (n, -1)).transpose(1, 2) for layer, n in ((self.q, 4), (self.k, self.kv), (self.v, self.kv)))
        return self.attend(self, q, k, v, words).transpose(1, 2).flatten(2)


def sdpa(**settings: Any) -> Callable[..., torch.Tensor]:
    return lambda model, q, k, v, _: F.scaled_dot_product_attention(
        q, k, v, **{name: x(model) if callable(x) else x for name, x in settings.items()}
    )


FUSED: dict[str, Heads] = {
    "narrower values": Heads(sdpa()),
    "narrower values, causal": Heads(sdpa(is_causal=True)),
    "wider values": Heads(sdpa(is_causal=True), width=6),
    "narrower values of shared heads": Heads(sdpa(enable_gqa=True, scale=0.3), kv=2),
    "a mask of truths": Heads(sdpa(attn_mask=torch.ones(6, 6, dtype=torch.bool).tril())),
    "a learned mask": Heads(sdpa(attn_mask=lambda model: model.bias), width=4),
    "a learned mask of narrower values": Heads(sdpa(attn_mask=lambda model: model.bias[:1])),
    "a mask of three dims": Heads(sdpa(attn_mask=torch.randn(4, 6, 6)), width=4),
}


@pytest.mark.parametrize("name", FUSED)
def test_attention_that_the_cpu_has_no_kernel_for_is_one_op(name: str) -> None:
    program = check(FUSED[name], {"x": X, "words": WORDS}, loss_fn=squares)
    found = counts(program)
    assert (found["attention"], found["attention_backward"], found["_safe_softmax"]) == (1, 1, 0)


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(6, 6)}, {"attn_mask": lambda model: model.bias}])
@pytest.mark.parametrize("width", [3, 4])
def test_attention_with_dropout_is_one_op(settings: dict[str, Any], width: int) -> None:
    program = trace(Heads(sdpa(dropout_p=0.1, **settings), width=width), {"x": X, "words": WORDS}, name="drop", loss_fn=squares)
    assert sum("attention" in op.name for op in program.ops) == 2
    assert not [op.name for op in program.ops if "softmax" in op.name or "dropout" in op.name]


def test_attention_that_no_kernel_takes_is_left_as_torch_makes_it() -> None:
    class Flat(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return F.scaled_dot_product_attention(y, y, y)

    assert counts(check(Flat(8, 8), {"x": X}, loss_fn=squares))["_safe_softmax"] == 1


def causal(_b: Any, _h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def near(_b: Any, _h: Any, q: Any, kv: Any) -> Any:
    return q - kv < 3


compiled, compiled_mask = (torch.compile(function, backend="eager") for function in (flex_attention, create_block_mask))


def flex(score: Any = None, mask: Any = None, *, compiled: Any = flex_attention, blocks: Any = create_block_mask) -> Any:
    """A call of flex_attention whose functions are made from the model and its words."""

    def attend(model: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        made = None if mask is None else blocks(mask(model, words), q.shape[0], None, 6, 6, device=q.device)
        score_mod = None if score is None else score(model, words)
        found: torch.Tensor = compiled(q, k, v, score_mod=score_mod, block_mask=made, enable_gqa=True)
        return found

    return attend


def packed(_model: Heads, words: torch.Tensor) -> Any:
    number = (words == 0).cumsum(1)
    return and_masks(causal, lambda b, _h, q, kv: number[b, q] == number[b, kv])


def sinks(model: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _words: torch.Tensor) -> torch.Tensor:
    blocks = create_block_mask(causal, None, None, 6, 6, device=q.device)
    out, aux = flex_attention(q, k, v, block_mask=blocks, return_aux=AuxRequest(lse=True), enable_gqa=True)
    return out * torch.sigmoid(aux.lse.unsqueeze(-1) - model.sinks.view(1, -1, 1, 1))


def capped(_model: Heads, _words: torch.Tensor) -> Any:
    return lambda score, *_: 2.0 * torch.tanh(score / 2.0)


FLEX: dict[str, Heads] = {
    "plain": Heads(flex()),
    "no function": Heads(flex(mask=lambda *_: noop_mask)),
    "causal, compiled": Heads(flex(mask=lambda *_: causal, compiled=compiled, blocks=compiled_mask), kv=2),
    "a soft cap in a window": Heads(flex(capped, lambda *_: and_masks(causal, near)), kv=2, width=4),
    "packed documents": Heads(flex(mask=packed), width=4),
    "slopes by head": Heads(flex(lambda *_: lambda score, _b, h, q, kv: score - torch.tensor([1.0, 0.5, 0.2, 0.1])[h] * abs(q - kv))),
    "learned distances": Heads(flex(lambda model, _: lambda score, _b, h, q, kv: score + model.table[h, q - kv + 6], packed)),
    "a mask, dim by dim": Heads(flex(lambda model, _: lambda score, _b, h, q, kv: score + model.bias.detach()[h][q][kv]), kv=2),
    "sinks": Heads(sinks, kv=1),
}


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention_is_one_op_with_its_functions(name: str) -> None:
    with unfused_flex():
        program = check(FLEX[name], {"x": X, "words": WORDS}, loss_fn=squares)
    assert max(t.numel for t in program.tensors) <= X.numel() * 2, "no tensor of scores, and none of a mask"
    assert [op.name for op in program.ops if "attention" in op.name] == ["shard.attention.default", "shard.attention_backward.default"]


def test_a_checkpointed_attention_runs_again_before_its_backward_pass() -> None:
    attend = FLEX["packed documents"].attend
    program = trace(Heads(lambda *a: checkpoint(attend, *a, use_reentrant=False)), {"x": X, "words": WORDS}, name="again", loss_fn=squares)
    assert [(op.name.split(".")[1], op.recompute) for op in program.ops if "attention" in op.name] == [
        ("attention", False),
        ("attention", True),
        ("attention_backward", False),
    ]


def test_functions_are_kept_as_the_ops_of_one_score() -> None:
    like, ids = torch.empty(0), torch.zeros(2, 5)
    buffers: list[torch.Tensor] = []
    assert function_text(and_masks(causal, near), buffers, scored=False, like=like) == (
        '[["aten.ge.Tensor", {"self": "%q", "other": "%kv"}], ["aten.sub.Tensor", {"self": "%q", "other": "%kv"}], '
        '["aten.lt.Scalar", {"self": "%1", "other": 3}], ["aten.bitwise_and.Tensor", {"self": "%0", "other": "%2"}]]'
    )
    assert function_text(lambda b, _h, q, _kv: ids[b, q] > 0, buffers, scored=False, like=like) == (
        '[["aten.index.Tensor", {"self": "%x0", "indices": ["%b", "%q"]}], ["aten.gt.Scalar", {"self": "%0", "other": 0}]]'
    )
    assert buffers == [ids]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda _b, _h, q, kv: bool(q > kv), "control flow"),
        (lambda _b, _h, q, kv: torch.ones(5)[q:kv], "integers"),
        (lambda _b, _h, q, _kv: q.expand(3).sum() > 1, "aten.sum"),
    ],
)
def test_a_function_of_more_than_one_score_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(TraceError, match=rf"mask_mod.*{why}.*elementwise ops"):
        function_text(function, [], scored=False, like=torch.empty(0))


@pytest.mark.parametrize("text", ["", "7", '[["os.system", {"command": "true"}]]', '[["aten.sum.default", {"self": "%q"}]]'])
def test_only_elementwise_ops_are_read_from_text(text: str) -> None:
    with pytest.raises(InputError, match="elementwise ATen ops"):
        read_function(text)


def seen(function: Callable[..., Any], queries: int = 4096, keys: int = 4096) -> tuple[float, float]:
    """The mean of what queries see, and what the last ones do."""
    bands = visible(function_text(function, [], scored=False, like=torch.empty(0)), queries, keys)
    return round(sum(bands) / len(bands), 2), round(bands[-1], 2)


def test_what_a_mask_hides_is_not_paid_for() -> None:
    ids = torch.zeros(1, 4096)

    def same(b: Any, _h: Any, q: Any, kv: Any) -> Any:
        return ids[b, q] == ids[b, kv]

    def window(_b: Any, _h: Any, q: Any, kv: Any) -> Any:
        return (q - kv).abs() < 512

    assert seen(causal) == seen(and_masks(causal, same)) == seen(and_masks(same, causal)) == (0.5, 0.97)
    assert seen(window) == (0.23, 0.16)
    assert seen(and_masks(causal, window)) == (0.12, 0.12)
    assert seen(same) == seen(noop_mask) == (1.0, 1.0)
