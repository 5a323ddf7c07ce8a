"""Checkpointed regions are computed again in backward: same loss and gradients, nothing inside a region kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from traced_models import MLP, check, squares

from solver_shard.errors import InputError, TraceError
from solver_shard.ops.run import run
from solver_shard.program import Phase, Program, Role
from solver_shard.tracing.huggingface import load
from solver_shard.tracing.torch import trace

X = torch.randn(4, 6, 8)
once = partial(checkpoint, use_reentrant=False)


def saved(program: Program) -> set[str]:
    """Names of forward results that backward ops read, themselves or through views; without constants."""
    sources = set(program.sources())
    forward: set[int] = set()
    viewed: dict[int, int] = {}
    for op in program.ops:
        if op.phase is Phase.FORWARD and (forward | sources) & set(op.operands):
            forward.update(op.results)
        if op.name in ("aten.view.default", "aten.permute.default", "aten.expand.default"):
            viewed[op.results[0]] = viewed.get(op.operands[0], op.operands[0])
    read = {viewed.get(t, t) for op in program.ops if op.phase is Phase.BACKWARD for t in op.operands}
    return {program.tensors[t].name for t in forward & read}


def saved_bytes(program: Program) -> int:
    names = saved(program)
    return sum(tensor.nbytes for tensor in program.tensors if tensor.name in names)


def again(program: Program) -> Counter[str]:
    """Names of the ops that are executed again."""
    return Counter(op.name.split(".")[1] for op in program.ops if op.recompute)


class Part(MLP):
    """Checkpoints its hidden layer; what comes before and after is kept."""

    def __init__(self, how: Callable[..., Any] = once) -> None:
        super().__init__()
        self.head, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(self.head(x))
        return torch.tanh(self.how(super().forward, hidden)) * 2


def test_a_region_is_computed_again_right_before_its_backward() -> None:
    program = check(Part(), {"x": X}, loss_fn=squares)
    ops = program.ops
    first = next(i for i, op in enumerate(ops) if op.recompute)
    block = [op for op in ops if op.recompute]
    assert [op.name.split(".")[1] for op in block] == ["einsum", "add", "relu"]  # down is not needed
    assert list(ops[first : first + 3]) == block
    assert {op.module for op in block} == {"up", ""}
    assert all(op.phase is Phase.BACKWARD for op in block)
    assert program.tensors[block[2].results[0]].name == "recompute.relu"
    reader = ops[first + 3]
    assert not reader.recompute
    assert set(reader.operands) & {t for op in block for t in op.results}
    assert saved(program) == {"head.add", "sin", "tanh", "mul"}


def test_without_checkpoints_nothing_is_computed_again() -> None:
    program = check(Part(lambda function, *args: function(*args)), {"x": X}, loss_fn=squares)
    assert not again(program)
    assert "relu" in saved(program)


def test_in_forward_only_nothing_is_computed_again() -> None:
    assert not again(trace(Part(), {"x": X}, name="part", forward_only=True))


def test_an_op_outside_keeps_the_output_that_it_reads() -> None:
    class Kept(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = once(lambda t: torch.tanh(self.up(t)), x)
            return self.down(made)

    program = check(Kept(), {"x": X}, loss_fn=squares)
    assert again(program) == {"einsum": 1, "add": 1, "tanh": 1}
    assert saved(program) == {"tanh", "down.add"}
    readers = program.readers()
    tanh = [op.results[0] for op in program.ops if op.name == "aten.tanh.default"]
    assert [program.ops[i].name for i, _ in readers[tanh[0]]] == ["aten.einsum.default", "aten.einsum.default"]
    assert [program.ops[i].name for i, _ in readers[tanh[1]]] == ["aten.tanh_backward.default"]


def test_regions_in_a_row_keep_their_inputs_only() -> None:
    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MLP() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = once(lambda t, layer=layer: t + layer(torch.sin(t)), x)
            return x

    program = check(Row(), {"x": X}, loss_fn=squares)
    assert saved(program) == {"add", "add.1", "add.2"}
    assert again(program) == {"sin": 3, "einsum": 3, "add": 3, "relu": 3}


def test_sequential_checkpoints() -> None:
    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    program = check(Sequential(), {"x": X}, loss_fn=squares)
    assert again(program)["tanh"] == 2  # torch does not checkpoint the last segment
    assert sum(name.startswith(("layers.0", "layers.1.1")) for name in saved(program)) == 1


def test_a_region_in_a_region_is_computed_twice_more() -> None:
    class Nested(MLP):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.tanh(self.up(x)))

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cos(self.down(once(self.inner, torch.exp(x))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return once(self.outer, x) * 3

    program = check(Nested(), {"x": X}, loss_fn=squares)
    found = again(program)
    assert [found[name] for name in ("exp", "tanh", "sin", "cos")] == [1, 2, 1, 0]
    assert saved(program) == {"mul"}
    tanh = [op for op in program.ops if op.name == "aten.tanh.default"]
    readers = program.readers()
    assert [[program.ops[i].name for i, _ in readers[op.results[0]]] for op in tanh[:2]] == [["aten.sin.default"]] * 2


def keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_policies_are_followed() -> None:
    class Selective(MLP):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.down(torch.relu(self.up(torch.sin(x)))))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            return once(self.body, once(torch.exp, x), context_fn=contexts) * 2

    program = check(Selective(), {"x": X}, loss_fn=squares)
    assert again(program) == {"sin": 1, "relu": 1, "tanh": 1}
    assert saved(program) == {"up.add", "down.add", "mul", "exp"}


def test_reentrant_checkpoints_are_refused() -> None:
    with pytest.raises(TraceError, match="use_reentrant=False"):
        trace(Part(partial(checkpoint, use_reentrant=True)), {"x": X}, name="part", loss_fn=squares)
    assert torch.utils.checkpoint.CheckpointFunction.__name__ == "CheckpointFunction"


def test_dropout_draws_the_same_again() -> None:
    class Dropped(MLP):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(F.dropout(torch.tanh(self.up(x)), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(once(self.body, x))

    model = Dropped()
    program = trace(model, {"x": X}, name="dropped", loss_fn=squares)
    assert again(program)["native_dropout"] == 1
    state = dict(model.named_parameters()) | {"x": X}
    values = run(program, {t: state[program.tensors[t].name].detach() for t in program.sources()})
    one, two = (op.results for op in program.ops if op.name == "aten.native_dropout.default")
    assert all(torch.equal(values[a], values[b]) for a, b in zip(one, two, strict=True))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes), use_cache=False, pad_token_id=None, bos_token_id=1, eos_token_id=2))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_layers_of_a_library_model(make: Callable[[], Any]) -> None:
    ids = torch.randint(0, 64, (2, 16))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    model = make()
    model.train()
    plain = trace(model, inputs, name="plain")
    model.activation_checkpointing_enable({"use_reentrant": False})
    program = check(model, inputs)
    layers = model.config.num_hidden_layers
    attentions = [op for op in program.ops if op.recompute and "scaled_dot_product" in op.name]
    assert len(attentions) == layers
    assert len({op.module for op in attentions}) == layers
    forward = [op for op in program.ops if op.phase is Phase.FORWARD]
    assert [op.name for op in forward] == [op.name for op in plain.ops if op.phase is Phase.FORWARD]
    inside = [name for name in saved(program) if any(f".{i}." in name for i in range(layers))]
    outputs = {program.tensors[op.results[0]].name for op in forward if op.name == "aten.add.Tensor"}
    assert set(inside) <= outputs
    assert len(inside) <= layers
    assert saved_bytes(program) < saved_bytes(plain) / 3


def test_presets_and_configs() -> None:
    model, inputs, name = load("gpt2", batch=2, seq=32, checkpoint=True)
    model.config.n_layer = 2
    del model.transformer.h[2:]
    program = trace(model, inputs, name=name)
    assert sum("scaled_dot_product" in op.name for op in program.ops if op.recompute) == 2


def test_parameters_have_their_gradients_once() -> None:
    program = trace(Part(), {"x": X}, name="part", loss_fn=squares)
    trained = [t for t, tensor in enumerate(program.tensors) if tensor.role is Role.PARAMETER]
    assert sorted(program.gradients) == trained


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (MLP(), {"inputs": {"x": X}}, "torch.utils.checkpoint"),
        ("some.module:build", {}, "torch.utils.checkpoint"),
        ("gpt2", {"batch": 2, "seq": 8, "forward_only": True}, "nothing to checkpoint"),
    ],
)
def test_where_the_option_does_not_apply(model: Any, options: dict[str, Any], words: str) -> None:
    from solver_shard.tracing.load import program_of

    with pytest.raises(InputError, match=words):
        program_of(model, checkpoint=True, **options)


class Experts(nn.Module):
    """Products with the parts of one weight, and with their transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(4 * 16, 8))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.weight.view(4, 16, 8)
        return torch.bmm(F.gelu(torch.bmm(x, parts.transpose(1, 2))), parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.head(x))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_view_of_a_weight_is_made_anew_in_backward(checkpointed: bool) -> None:
    """A gathered weight need not be held from forward to backward because a view of it is."""
    model = Experts()
    if checkpointed:
        model.part = partial(once, model.part)  # type: ignore[method-assign]
    program = check(model, {"x": X}, loss_fn=squares)
    weight = next(t for t in program.sources() if program.tensors[t].name == "weight")
    views = [op for op in program.ops if op.operands == (weight,)]
    assert [(op.name, op.phase, op.recompute) for op in views] == [("aten.view.default", phase, False) for phase in Phase]
    for view in views:
        assert {op.phase for op in program.ops if view.results[0] in op.operands} == {view.phase}
    assert views[1].module == views[0].module
