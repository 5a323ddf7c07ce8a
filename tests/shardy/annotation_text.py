"""The text of meshes, shardings and rules of the sdy dialect, read back: what tests write and what round trips need."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from solver_shard.errors import InputError
from solver_shard.shardy.graph import FactorDims, ShardingRule, check_rule
from solver_shard.shardy.sharding import AxisRef, DimSharding, Meshes, MeshSpec, TensorSharding, mesh_of

REDUCTIONS = ("sum", "max", "min")
_MAX_TEXT = 1_000_000
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|@[A-Za-z0-9_.$-]+|@"[^"]*"|[A-Za-z_#.]+|[0-9]+|->|[<>\[\]{}(),=?:])')
_FACTOR = re.compile(r"z_[0-9]{1,6}|[i-z]")
_SETS = ("reduction", "need_replication", "permutation", "blocked_propagation")
_RULE = re.compile(
    r"\s*(?:#sdy\.op_sharding_rule)?\s*<\s*\((?P<operands>[^()]*)\)\s*->\s*\((?P<results>[^()]*)\)\s*(?:\{(?P<sizes>[^{}]*)\})?(?P<rest>.*)>\s*\Z",
    re.DOTALL,
)
_SET = re.compile(rf"\s*(?P<name>{'|'.join(_SETS)})\s*=\s*\{{(?P<factors>[^{{}}]*)\}}")


def open_sharding(mesh: str | MeshSpec, rank: int) -> TensorSharding:
    """All dims open and empty.

    >>> open_sharding("mesh", 2).dims
    (DimSharding(axes=(), open=True, priority=None), DimSharding(axes=(), open=True, priority=None))
    """
    return TensorSharding(mesh=mesh, dims=(DimSharding(open=True),) * rank)


def parse_mesh(text: str) -> MeshSpec:
    """Read ``<["a"=2, "b"=4], device_ids=[...]>``, with or without ``mesh`` or ``#sdy.mesh`` before it.

    Raises:
        InputError: the text is no mesh, or the mesh breaks a law.
    """
    reader = AnnotationReader(text)
    reader.maybe("#sdy.mesh", "mesh")
    mesh = reader.mesh()
    reader.end()
    return mesh


def parse_sharding(text: str, meshes: Meshes) -> TensorSharding:
    """Read a sharding as printed, with or without ``#sdy.sharding``; axes are resolved against the meshes.

    Raises:
        InputError: the text is no sharding, or names an unknown mesh or axis. Other laws are ``check_sharding``'s.
    """
    reader = AnnotationReader(text)
    reader.maybe("#sdy.sharding")
    sharding = reader.sharding(meshes)
    reader.end()
    return sharding


class AnnotationReader:
    """A text, token after token."""

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_TEXT:
            raise InputError(f"an annotation of {len(text):,} characters was given; at most {_MAX_TEXT:,} are read")
        self._text = text
        self._tokens = list(self._split())
        self._at = 0

    def _split(self) -> Iterator[tuple[str, int]]:
        position, text = 0, self._text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise InputError(f"cannot read annotation {text[:200]!r} at {text[position : position + 40]!r}")
            yield match[1], match.start(1)
            position = match.end()

    def peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def fail(self, wanted: str) -> InputError:
        rest = self._text[self._tokens[self._at][1] :] if self._at < len(self._tokens) else "its end"
        return InputError(
            f"cannot read annotation {self._text[:200]!r} at {rest[:40]!r}: {wanted} was expected; "
            'write it as in \'<@mesh, [{"a", "b":(1)2, ?}p1, {}], replicated={"c"}>\''
        )

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if token not in wanted:
            raise self.fail(" or ".join(wanted))
        self._at += 1
        return token

    def maybe(self, *wanted: str) -> str:
        return self.take(*wanted) if self.peek() in wanted else ""

    def any(self) -> str:
        token = self.peek()
        self._at += 1
        return token

    def string(self) -> str:
        if not self.peek().startswith('"'):
            raise self.fail("a name in quotes")
        return self.any()[1:-1]

    def number(self) -> int:
        if not self.peek().isdigit() or len(self.peek()) > 18:
            raise self.fail("a number")
        return int(self.any())

    def end(self) -> None:
        if self.peek():
            raise self.fail("the end")

    def mesh(self) -> MeshSpec:
        self.take("<")
        self.take("[")
        axes, ids = list[tuple[str, int]](), list[int]()
        while not self.maybe("]"):
            name = self.string()
            self.take("=")
            axes.append((name, self.number()))
            if self.peek() != "]":
                self.take(",")
        if self.maybe(","):
            self.take("device_ids")
            self.take("=")
            self.take("[")
            while not self.maybe("]"):
                ids.append(self.number())
                if self.peek() != "]":
                    self.take(",")
        self.take(">")
        return MeshSpec(axes=tuple(axes), device_ids=tuple(ids))

    def sharding(self, meshes: Meshes) -> TensorSharding:
        self.take("<")
        mesh: str | MeshSpec
        if self.peek().startswith("@"):
            mesh = self.any()[1:].strip('"')
        else:
            self.take("mesh")
            mesh = self.mesh()
        sizes = dict(mesh_of(TensorSharding(mesh=mesh, dims=()), meshes).axes)
        self.take(",")
        self.take("[")
        dims = list[DimSharding]()
        while not self.maybe("]"):
            dims.append(self._dim(sizes))
            if self.peek() != "]":
                self.take(",")
        held: dict[str, tuple[AxisRef, ...]] = {}
        reduction = "sum"
        while self.maybe(","):
            name = self.take(*(n for n in ("replicated", "unreduced") if n not in held))
            self.take("=")
            if name == "unreduced":
                reduction = self.maybe(*REDUCTIONS) or "sum"
            held[name] = self._axes(sizes)[0]
        self.take(">")
        return TensorSharding(
            mesh=mesh,
            dims=tuple(dims),
            replicated=held.get("replicated", ()),
            unreduced=held.get("unreduced", ()),
            reduction=reduction,
        )

    def _dim(self, sizes: Mapping[str, int]) -> DimSharding:
        axes, is_open = self._axes(sizes, opens=True)
        priority = None
        if self.peek() == "p":
            self.any()
            priority = self.number()
        return DimSharding(axes, is_open, priority)

    def _axes(self, sizes: Mapping[str, int], *, opens: bool = False) -> tuple[tuple[AxisRef, ...], bool]:
        self.take("{")
        axes = list[AxisRef]()
        while not self.maybe("}"):
            if opens and self.maybe("?"):
                self.take("}")
                return tuple(axes), True
            name = self.string()
            if name not in sizes:
                raise InputError(
                    f"cannot read annotation {self._text[:200]!r}: unknown axis {name!r}; the mesh has {', '.join(sizes) or 'no axes'}"
                )
            if self.maybe(":"):
                self.take("(")
                pre = self.number()
                self.take(")")
                axes.append(AxisRef(name, pre, self.number()))
            else:
                axes.append(AxisRef(name, 1, sizes[name]))
            if self.peek() != "}":
                self.take(",")
        return tuple(axes), False


def parse_rule(text: str) -> ShardingRule:
    """Read a rule as printed, with or without ``#sdy.op_sharding_rule``.

    Raises:
        InputError: the text is no rule, or the rule breaks a law of ``check_rule``.
    """
    match = _RULE.match(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise InputError(
            f"cannot read sharding rule {text[:200]!r}; write it as in '<([i, k], [k, j])->([i, j]) {{i=8, j=4, k=2}} reduction={{k}}>'"
        )
    sizes = _parse_sizes(match["sizes"] or "", text)
    rest, held = match["rest"], dict[str, tuple[int, ...]]()
    while found := _SET.match(rest):
        held[found["name"]] = tuple(_parse_factor(name, text) for name in _split(found["factors"]))
        rest = rest[found.end() :].lstrip()
    custom = rest.strip().lstrip(",").strip()
    if custom not in ("", "custom"):
        raise InputError(
            f"cannot read sharding rule {text[:200]!r} at {custom[:60]!r}; after the sizes come {', '.join(_SETS)} or 'custom'"
        )
    rule = ShardingRule(
        sizes=sizes,
        operands=_parse_tensors(match["operands"], text),
        results=_parse_tensors(match["results"], text),
        reduction=held.get("reduction", ()),
        need_replication=held.get("need_replication", ()),
        permutation=held.get("permutation", ()),
        blocked=held.get("blocked_propagation", ()),
        custom=custom == "custom",
    )
    check_rule(rule, text)
    return rule


def _parse_sizes(body: str, text: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for part in _split(body):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if _parse_factor(name, text) != len(sizes) or not re.fullmatch(r"[0-9]{1,18}", size):
            raise InputError(
                f"cannot read sharding rule {text[:200]!r} at {part!r}; sizes are given in the order i, j, ... as in 'i=8, j=4'"
            )
        sizes.append(int(size))
    return tuple(sizes)


def _parse_tensors(body: str, text: str) -> tuple[FactorDims, ...]:
    tensors, rest = list[FactorDims](), body.strip()
    while rest:
        match = re.match(r"\[([^\[\]]*)\]\s*(,\s*(?=\[)|\Z)", rest)
        if match is None:
            raise InputError(f"cannot read sharding rule {text[:200]!r} at {rest[:60]!r}; a tensor is written as in '[i, jk]'")
        dims = []
        for part in match[1].split(",") if match[1].strip() else ():
            names = _FACTOR.findall(part)
            if "".join(names) != part.strip():
                raise InputError(f"cannot read sharding rule {text[:200]!r} at {part!r}; factors are i to z, then z_1, z_2, ...")
            dims.append(tuple(_parse_factor(name, text) for name in names))
        tensors.append(tuple(dims))
        rest = rest[match.end() :]
    return tuple(tensors)


def _parse_factor(name: str, text: str) -> int:
    if not _FACTOR.fullmatch(name):
        raise InputError(f"cannot read sharding rule {text[:200]!r} at {name[:60]!r}; factors are i to z, then z_1, z_2, ...")
    return ord(name) - ord("i") if len(name) == 1 else ord("z") - ord("i") + int(name[2:])


def _split(body: str) -> list[str]:
    return [part.strip() for part in body.split(",")] if body.strip() else []
