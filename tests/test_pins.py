"""Pins: what they say, what they match, and what every wrong one is told."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from solver_shard.costs.layouts import is_ordered
from solver_shard.errors import InputError
from solver_shard.graph.pins import Pin, parse_pin, resolve_pins
from solver_shard.layout import Layout, P, R, S, strided
from solver_shard.mesh import Mesh
from solver_shard.program import Op, Phase, Program, Ref, Role, Tensor

MESH = Mesh.parse("dp=4,tp=2")


def program() -> Program:
    """Two blocks of one product each, then the loss; ``h0`` and ``h1`` are what the blocks hand on."""

    def product(left: int, right: int, result: int, module: str) -> Op:
        return Op(
            name="aten.einsum.default",
            operands=(left, right),
            results=(result,),
            attributes={"equation": "ab,cb->ac", "tensors": (Ref(0), Ref(1))},
            module=module,
        )

    tensors = (
        Tensor(name="x", shape=(64, 32), dtype="f32", role=Role.INPUT),
        Tensor(name="blocks.0.fc.weight", shape=(32, 32), dtype="f32", role=Role.PARAMETER, trainable=True),
        Tensor(name="blocks.1.fc.weight", shape=(32, 32), dtype="f32", role=Role.PARAMETER, trainable=True),
        Tensor(name="head.bias", shape=(3,), dtype="f32", role=Role.PARAMETER),
        Tensor(name="h0", shape=(64, 32), dtype="f32"),
        Tensor(name="h1", shape=(64, 32), dtype="f32"),
        Tensor(name="loss", shape=(), dtype="f32", role=Role.OUTPUT),
        Tensor(name="grad(blocks.1.fc.weight)", shape=(32, 32), dtype="f32", role=Role.GRADIENT),
    )
    total = Op(name="aten.sum.default", operands=(5,), results=(6,), attributes={"self": Ref(0)})
    back = Op(
        name="aten.einsum.default",
        operands=(4, 5),
        results=(7,),
        attributes={"equation": "ab,ac->bc", "tensors": (Ref(0), Ref(1))},
        phase=Phase.BACKWARD,
        module="blocks.1.fc",
    )
    ops = (product(0, 1, 4, "blocks.0.fc"), product(4, 2, 5, "blocks.1.fc"), total, back)
    built = Program(name="two blocks", tensors=tensors, ops=ops, outputs=(6,), gradients={2: 7})
    built.validate()
    return built


@pytest.mark.parametrize("pattern", ["lm_head.weight", "lm_head.*"])
def test_another_name_of_a_tied_tensor_is_answered_with_the_one_that_it_has(pattern: str) -> None:
    tied = dataclasses.replace(program(), ties={"lm_head.weight": "blocks.0.fc.weight"})
    with pytest.raises(InputError, match=r"'lm_head.weight' is tied to 'blocks.0.fc.weight': one tensor, which has that name"):
        resolve_pins([parse_pin(f"{pattern}=R,R", MESH)], tied, MESH)


def pinned(*texts: str, mesh: Mesh = MESH) -> dict[str, set[str]]:
    """Tensor name to the printed layouts that the pins leave, among all with placements of that many dims."""
    model = program()
    left = {}
    for position, allowed in resolve_pins([parse_pin(text, mesh) for text in texts], model, mesh).items():
        dims = len(model.tensors[position].shape)
        axis = [R, P("sum"), *(S(d) for d in range(dims)), *(strided(d) for d in range(dims))]
        every = (Layout(x) for x in itertools.product(axis, repeat=len(mesh.axes)))
        left[model.tensors[position].name] = {str(x) for x in every if is_ordered(x, mesh.wholes) and allowed.allows(x)}
    return left


@pytest.mark.parametrize(
    ("text", "pattern", "choices"),
    [
        ("w=S(0),R", "w", ("S(0)", "R")),
        ("w=S(0)R", "w", ("S(0)", "R")),
        (" w = S( 0 ) , R ", "w", ("S(0)", "R")),
        ("w=tp=S(1)", "w", ("*", "S(1)")),
        ("w=tp=S(1),dp=R", "w", ("R", "S(1)")),
        ("w=tp=S(*)", "w", ("*", "S(*)")),
        ("w=S(*)*", "w", ("S(*)", "*")),
        ("w=*,R", "w", ("*", "R")),
        ("w=_S(0)S(0)", "w", ("_S(0)", "S(0)")),
        ("w=dp=_S( 0 ),tp=S(0)", "w", ("_S(0)", "S(0)")),
        ("y=P,P(max)", "y", ("P(sum)", "P(max)")),
        ("grad(a.*.w)=R,S(0)", "grad(a.*.w)", ("R", "S(0)")),
    ],
)
def test_pin_text_is_read(text: str, pattern: str, choices: tuple[str, ...]) -> None:
    assert parse_pin(text, MESH) == Pin(pattern=pattern, choices=choices, text=text)


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("w=R,S(0)", ("R", "S(0)", "S(0)")),
        ("w=tp=S(0)", ("*", "S(0)", "S(0)")),
        ("w=tp.1=S(0)", ("*", "*", "S(0)")),
        ("w=_S(0),S(0)", ("_S(0)", "S(0)", "S(0)")),
        ("w=R,S(0),S(1)", ("R", "S(0)", "S(1)")),
        ("w=dp=R,tp.0=S(*)", ("R", "S(*)", "*")),
    ],
)
def test_a_placement_of_a_split_axis_is_one_of_each_part(text: str, choices: tuple[str, ...]) -> None:
    assert parse_pin(text, Mesh.parse("dp=4,tp=8x2")).choices == choices


@pytest.mark.parametrize(
    ("text", "mesh", "message"),
    [
        ("w=tp=R,tp.1=R", "dp=4,tp=8x2", "names axis 'tp.1' twice"),
        ("w=R,R,R,R", "dp=4,tp=8x2", "has 4 placements, mesh dp=4,tp=8x2 has 3 axes"),
        ("w=tp.0=R", "dp=4,tp=16", "unknown mesh axis 'tp.0'; this mesh has dp, tp; tp has parts to pin once .* --split tp=8x2"),
    ],
)
def test_wrong_pins_of_parts_say_what_is_legal(text: str, mesh: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_pin(text, Mesh.parse(mesh))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w", r"cannot read pin 'w'; write PATTERN=LAYOUT, as in .*'lm_head.weight=tp=S\(0\)'"),
        ("w=", "cannot read pin 'w='"),
        ("=R,R", "cannot read pin '=R,R'"),
        ("w=R", r"has 1 placement, mesh dp=4,tp=2 has 2 axes; .*as in 'w=tp=R'"),
        ("w=R,R,R", "has 3 placements, mesh dp=4,tp=2 has 2 axes"),
        ("w=S(x),R", r"at 'S\(x\),R'; write one of R, S\(dim\)"),
        ("w=S(-1),R", r"at 'S\(-1\),R'"),
        ("w=_S(*),R", r"at '_S\(\*\),R'; write one of R, S\(dim\), S\(\*\) for any cut dim, _S\(dim\)"),
        ("w=R,R,", "cannot read pin"),
        ("w=P(mean),R", r"P\(mean\) is not a placement; legal reductions: sum, avg, max, min"),
        ("w=pp=R", "unknown mesh axis 'pp'; this mesh has dp, tp"),
        ("w=tp=R,tp=S(0)", "names axis 'tp' twice"),
        ("w=tp=R,S(0)", r"at 'S\(0\)'; name every axis"),
        ("w=tp=RR", "at 'tp=RR'"),
        (f"{'w' * 1000}=R,R", r"a pin has 1,004 characters, 'w{60}'\.\.\.; at most 1,000 are read"),
    ],
)
def test_wrong_pin_text_says_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_pin(text, MESH)


@pytest.mark.parametrize(
    ("texts", "left"),
    [
        (("x=S(0),R",), {"x": {"S(0)R"}}),
        (("x=dp=S(0)",), {"x": {"S(0)R", "S(0)P(sum)", "S(0)S(0)", "S(0)S(1)"}}),
        (("blocks.0.*=_S(0)S(0)",), {"blocks.0.fc.weight": {"_S(0)S(0)"}}),
        (("blocks.0.*=dp=_S(1)",), {"blocks.0.fc.weight": {"_S(1)S(1)"}}),
        (("blocks.0.*=tp=S(0)",), {"blocks.0.fc.weight": {"RS(0)", "P(sum)S(0)", "S(0)S(0)", "S(1)S(0)", "_S(0)S(0)"}}),
        (("blocks.0.*=S(*),S(1)",), {"blocks.0.fc.weight": {"S(0)S(1)", "S(1)S(1)", "_S(1)S(1)"}}),
        (("grad(*)=_S(0),S(0)",), {"grad(blocks.1.fc.weight)": {"_S(0)S(0)"}}),
        (("x=S(*),R",), {"x": {"S(0)R", "S(1)R"}}),
        (("blocks.*.weight=R,S(1)",), {"blocks.0.fc.weight": {"RS(1)"}, "blocks.1.fc.weight": {"RS(1)"}}),
        (("grad(*)=S(0),R",), {"grad(blocks.1.fc.weight)": {"S(0)R"}}),
        (("x=dp=S(0)", "x=tp=S(1)"), {"x": {"S(0)S(1)"}}),
        (("x=S(*),*", "x=S(0),R"), {"x": {"S(0)R"}}),
        (("blocks.0:out=S(0),P(sum)",), {"h0": {"S(0)P(sum)"}}),
        (("blocks.0.fc:out=S(0),R",), {"h0": {"S(0)R"}}),
        (("blocks:out=R,R",), {"h1": {"RR"}}),
        (("loss=R,R",), {"loss": {"RR"}}),
    ],
)
def test_pins_leave_these_layouts(texts: tuple[str, ...], left: dict[str, set[str]]) -> None:
    assert pinned(*texts) == left


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("fc.weight=R,R",), r"no tensor of two blocks is called 'fc.weight'; '\*fc.weight' matches 2 of them"),
        (("blocks.0.fc.wieght=R,R",), "the closest names are blocks.0.fc.weight"),
        (("blocks.7:out=R,R",), "no module of two blocks is called 'blocks.7'; the closest names are blocks.1, blocks.0, blocks"),
        (("x=S(2),R",), r"x f32\[64, 32\] has dims 0 to 1; S\(2\) is not one of them"),
        (("head.bias=S(1),R",), r"head.bias f32\[3\] has dim 0; S\(1\)"),
        (("loss=S(0),R",), "loss f32.* has no dims: pin it R"),
        (("x=_S(0)S(0)",), r"input x cannot be _S\(0\); only parameters and the gradients of parameters .*; legal: S\(0\)"),
        (("h0=_S(0)S(0)",), r"activation h0 cannot be _S\(0\)"),
        (("head.bias=_S(1),S(1)",), r"head.bias f32\[3\] has dim 0; _S\(1\)"),
        (("head.bias=_S(0),S(0)",), r"asks for 8 shards on dp=4, tp=2, but head.bias f32\[3\] has too few elements"),
        (("blocks.0.*=S(0),_S(0)",), r"_S\(0\) of blocks.0.fc.weight on tp means that axes to its right cut dim 0 first, but none"),
        (("blocks.0.*=_S(0)R",), r"_S\(0\) of .* on dp means .*; write dp=S\(0\), or give S\(0\) to an axis to the right"),
        (("blocks.0.*=dp=_S(0)", "blocks.0.*=tp=S(1)"), r"_S\(0\) of .* on dp means that axes to its right cut dim 0 first"),
        (("loss=S(*),R",), "loss is a scalar and has no dim to cut"),
        (("head.bias=S(0),R",), r"asks for 4 shards on dp=4, but head.bias f32\[3\] has too few elements"),
        (("head.bias=tp=S(0)", "head.bias=dp=S(*)"), r"ask for 8 shards on dp=4, tp=2"),
        (("x=P(sum),R",), r"input x is stored, not computed, so it cannot be P\(sum\)"),
        (("x=S(0),R", "*=tp=S(*)"), "'x=S.0.,R' and '.=tp=S...' conflict on x, axis tp; drop one"),
    ],
)
def test_pins_that_cannot_hold_say_why(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pinned(*texts)


def test_globs_that_are_held_against_too_many_names_are_refused_and_names_never_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solver_shard.text.MAX_VISITS", len(program().tensors))
    assert pinned(*["x=R,*"] * 100)
    with pytest.raises(InputError, match="the patterns have been held against more than"):
        pinned("h*=*,*", "h*=*,*")


def test_an_uneven_cut_is_legal_up_to_one_shard_per_element() -> None:
    assert pinned("head.bias=tp=S(0),dp=R") == {"head.bias": {"RS(0)"}}
