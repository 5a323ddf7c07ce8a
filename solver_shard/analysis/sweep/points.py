"""The points of a sweep: mesh shapes of a number of devices, batch sizes, memory limits and clusters, all combinations.

>>> factorings(8, (2, 3))
((2, 4), (4, 2), (2, 2, 2))
>>> [str(mesh) for mesh in meshes(8, (2,))]
['d0=2,d1=4', 'd0=4,d1=2']
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from solver_shard.api import Request, read_request
from solver_shard.costs.cluster import PRESETS, Cluster, load_cluster
from solver_shard.errors import InputError
from solver_shard.mesh import MAX_AXES, MAX_DEVICES, Mesh
from solver_shard.options import shown

DEFAULT_AXES = (1, 2)
MAX_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination: what is asked of it, ready to be solved.

    Attributes:
        name: stable, different for every point, fit for a file's name.
        request: its mesh, its cluster and its options.
    """

    name: str
    request: Request

    @property
    def file(self) -> str:
        """The plan's file in the folder of the sweep."""
        return f"{self.name}.json"


def factorings(devices: int, axes: Sequence[int] = DEFAULT_AXES) -> tuple[tuple[int, ...], ...]:
    """All ways to write a number of devices as an ordered product of as many factors as ``axes`` says, each larger than 1.

    >>> len(factorings(64, (2,))), len(factorings(64, (3,)))
    (5, 10)

    Raises:
        InputError: not a number of devices, or of axes, or there is no such product.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or not 1 <= devices <= MAX_DEVICES:
        raise InputError(f"{devices!r} devices are not legal; give a whole number, 1 to {MAX_DEVICES}, as in --devices 64")
    wanted = sorted(set(axes))
    if not wanted or not all(isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= MAX_AXES for k in wanted):
        raise InputError(f"{', '.join(map(str, axes)) or 'no'} axes are not legal; give whole numbers, 1 to {MAX_AXES}, as in --axes 2,3")
    found = tuple(made for k in wanted for made in _products(devices, k))
    if not found:
        raise InputError(
            f"{devices} devices have no factoring into {' or '.join(map(str, wanted))} axes larger than 1; give other --axes, or name "
            "the meshes with --mesh"
        )
    return found


def meshes(devices: int, axes: Sequence[int] = DEFAULT_AXES) -> tuple[Mesh, ...]:
    """A mesh for every factoring: axes d0, d1, ..., the rightmost with the fastest links."""
    return tuple(Mesh.parse(",".join(map(str, sizes))) for sizes in factorings(devices, axes))


def grid(
    model: Any,
    *,
    meshes: Sequence[str | int | Mesh],
    batches: Sequence[int | None],
    memories: Sequence[str | int | None],
    clusters: Sequence[str | os.PathLike[str] | Cluster],
    workers: int = 1,
    options: Mapping[str, Any],
) -> tuple[Point, ...]:
    """Every combination once, with the arguments of ``optimize`` that all of them share; those of one batch size follow each other.

    Raises:
        InputError, RuleError: an argument is not usable, by itself or with a point's mesh, which is then named; or there are too
            many points.
    """
    for kind, values in (("mesh", meshes), ("batch", batches), ("memory limit", memories), ("cluster", clusters)):
        if not values:
            raise InputError(f"a sweep needs at least one {kind}")
    count = len(meshes) * len(batches) * len(memories) * len(clusters)
    if count > MAX_POINTS:
        raise InputError(f"{count:,} points were asked; a sweep has at most {MAX_POINTS:,}: give fewer axes, meshes or sizes")
    _check(options)
    loaded = [load_cluster(cluster) for cluster in clusters]
    points: dict[str, Point] = {}
    for batch, cluster, memory, mesh in itertools.product(batches, loaded, memories, meshes):
        try:
            what = read_request(model, mesh=mesh, batch=batch, memory=memory, cluster=cluster, workers=workers, **options)
        except InputError as error:
            raise InputError(f"{error} (at mesh {mesh})" if len(meshes) > 1 and str(mesh) not in str(error) else str(error)) from None
        point = Point(name=_name(what, limited=memory is not None), request=what)
        points.setdefault(point.name, point)
    return tuple(points.values())


def _products(number: int, factors: int) -> list[tuple[int, ...]]:
    """Ordered products, the first factor ascending."""
    if factors == 1:
        return [(number,)] if number > 1 else []
    return [(first, *rest) for first in _divisors(number) if 1 < first < number for rest in _products(number // first, factors - 1)]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _check(options: Mapping[str, Any]) -> None:
    """Refuse what points differ in, or what a sweep does not have."""
    legal = [entry.name for entry in shown("sweep")]
    unknown = [name for name in options if name not in legal]
    if unknown:
        raise InputError(f"a sweep has no argument {unknown[0]!r}; those of optimize that it takes are {', '.join(legal)}")


def _name(what: Request, *, limited: bool) -> str:
    """``d0=8,d1=8_b64_70GiB_h100``; what is not asked is left out, and a cluster that is no preset shows its content's digest."""
    options, cluster = what.options, what.cluster
    parts = [str(what.mesh)]
    parts += [f"b{options.batch}"] if options.batch is not None else []
    parts += [_exact(options.memory_limit)] if limited else []
    parts += [cluster.name if _is_preset(cluster) else f"{_plain(cluster.name)}-{_digest(cluster)}"]
    name = "_".join(parts)
    return name if len(name) <= 120 else f"{name[:100]}-{_digest(name)}"


def _is_preset(cluster: Cluster) -> bool:
    return cluster.name in PRESETS and load_cluster(cluster.name) == cluster


def _exact(nbytes: int) -> str:
    """Bytes with the largest binary unit in which they are a whole number."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift}{unit}"
    return f"{nbytes}B"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", text)[:40]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
