"""A cluster of equal devices: what one device computes and holds, and the links between them, level by level.

>>> cluster = load_cluster("h100")
>>> cluster.device.name, [(level.name, level.size) for level in cluster.levels]
('NVIDIA H100 SXM5 80GB', [('NVLink 4', 8), ('InfiniBand NDR', None)])

Devices are numbered as the mesh numbers them, so the mesh's rightmost axis gets the fastest links. A level of size k
joins the devices of every block of k neighbours (0 to k-1, k to 2k-1, ...); the last level joins all of them.

The presets are TOML files; :func:`load_cluster` shows one.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from solver_shard.arguments import checked
from solver_shard.codec import MAY_LACK
from solver_shard.errors import InputError
from solver_shard.files import read_toml
from solver_shard.program import DTYPE_BYTES

Kernel = Literal["matmul", "attention", "streaming", "reduction"]


PRESETS = ("a100", "ethernet", "gb200", "h100", "tpu-v5p")
TOPOLOGIES = ("switch", "torus")
MAX_FILE_BYTES = 1 << 20
MAX_LEVELS = 8
_EFFICIENCIES = ("matmul", "attention", "streaming", "reduction")


ASSUMED_KAPPA = 0.15
"""Of cluster files that do not say theirs: what those of NVIDIA's clusters do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Links that join blocks of devices.

    Attributes:
        size: devices per block; None for the last level, which joins all.
        bandwidth: bytes per second that one device sends (and, at the same time, receives) at this level while all
            devices do; a network card that g devices share counts 1/g of it. Efficiency included.
        latency_ns: nanoseconds per hop.
        topology: ``switch`` (any device reaches any other directly) or ``torus`` (each axis is a ring).
    """

    name: str
    size: int | None
    bandwidth: float
    latency_ns: float
    topology: str = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The part of a device's peaks that kernels of each kind reach, 0 to 1.

    Attributes:
        matmul, attention: of the matrix units' operations per second.
        streaming, reduction: of the memory bandwidth; matmul and attention kernels read and write as streaming ones do.
    """

    matmul: float = 1.0
    attention: float = 1.0
    streaming: float = 1.0
    reduction: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        memory: bytes.
        reserve: bytes of it that no tensor can have: the driver's context, buffers of the collective library, fragmentation.
        memory_bandwidth: bytes per second, peak.
        vector_flops: operations per second of everything that is not a matrix product.
        matmul_flops: operations per second of dense matrix products by operand dtype, peak.
        efficiency: the part of the peaks that kernels reach.
    """

    name: str
    memory: int
    reserve: int = 0
    memory_bandwidth: float
    vector_flops: float
    matmul_flops: Mapping[str, float]
    efficiency: Efficiency = Efficiency()

    def flops(self, dtype: str, kernel: Kernel) -> float:
        """Operations per second, efficiency included; dtypes that the matrix units do not have run on the vector units.

        >>> load_cluster("h100").device.flops("bf16", "matmul") > load_cluster("h100").device.flops("bf16", "streaming")
        True
        """
        if kernel not in ("matmul", "attention") or dtype not in self.matmul_flops:
            return self.vector_flops
        return self.matmul_flops[dtype] * (self.efficiency.matmul if kernel == "matmul" else self.efficiency.attention)

    def bandwidth(self, kernel: Kernel) -> float:
        """Bytes per second that kernels of this kind read and write, efficiency included."""
        return self.memory_bandwidth * (self.efficiency.reduction if kernel == "reduction" else self.efficiency.streaming)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices and the levels of links between them, fastest and innermost first.

    Attributes:
        name: preset name or file stem.
        title: one line for reports.
        launch_ns: nanoseconds that every collective takes before its first hop.
        kappa: of the time of a collective that runs beside compute, the part by which compute takes longer: its kernels take
            multiprocessors and memory bandwidth. 0: none; 1: as if nothing ran beside compute.
    """

    name: str
    title: str
    device: Device
    levels: tuple[Level, ...]
    launch_ns: float
    kappa: float = field(default=ASSUMED_KAPPA, metadata=MAY_LACK)


@checked
def load_cluster(name_or_path: str | os.PathLike[str] | Cluster) -> Cluster:
    """A preset by name, or a cluster from the user's TOML file (anything with a ``.toml`` ending or a slash).

    >>> load_cluster("h100").device.memory
    84932978278

    The presets are TOML files in ``solver_shard/costs/clusters``; a user's own file has the same keys:

        title = "Two boxes under my desk"
        launch_ns = 6600                      # once per collective: launch and first synchronisation
        kappa = 0.15                          # part of a collective's time that it takes from compute beside it, 0 to 1 (0.15 if not said)

        [device]
        name = "my GPU"
        memory_gib = 24.0                     # GiB = 2**30 bytes
        reserve_gib = 2.0                     # of it, what no tensor can have: context, collective library, fragmentation
        memory_gb_per_s = 1000.0              # GB = 10**9 bytes
        vector_tflops = 40.0                  # everything that is not a matrix product
        matmul_tflops = { bf16 = 160.0, f16 = 160.0, f32 = 40.0 }   # dense, without sparsity

        [device.efficiency]                   # part of these peaks that kernels reach
        matmul = 0.7                          # of matmul_tflops: large matrix products and convolutions
        attention = 0.5                       # of matmul_tflops: fused attention
        streaming = 0.85                      # of memory_gb_per_s: pointwise ops, copies, gathers, optimizer updates, and matmul operands
        reduction = 0.75                      # of memory_gb_per_s: sums, norms, softmax, losses

        [[links]]                             # innermost first
        name = "PCIe"
        size = 4                              # devices per block; the last level has no size
        gb_per_s = 25.0                       # per device and direction, with all devices active
        efficiency = 0.8
        latency_ns = 2000                     # per hop
        topology = "switch"                   # or "torus": no direct links, so no trees and dearer all-to-all

        [[links]]
        name = "Ethernet"
        gb_per_s = 3.125
        efficiency = 0.9
        latency_ns = 15000

    Args:
        name_or_path: a100, ethernet, gb200, h100, tpu-v5p, or a path; a Cluster comes back as it is.

    Returns:
        The cluster: bytes of memory, operations and bytes per second of a device, its links from the innermost on.

    Raises:
        InputError: no such preset or file, or a field is wrong; the message names the file, the key and what is legal.
    """
    if isinstance(name_or_path, Cluster):
        return name_or_path
    text = os.fspath(name_or_path)
    if text in PRESETS:
        source = resources.files("solver_shard.costs") / "clusters" / f"{text}.toml"
        return parse_cluster(source.read_text(encoding="utf-8"), name=text, source=f"preset {text}")
    path = Path(text)
    if path.suffix != ".toml" and "/" not in text:
        close = difflib.get_close_matches(text, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "for a cluster of your own give a path that ends in .toml"
        raise InputError(f"unknown cluster {text!r}; presets are {', '.join(PRESETS)}; {hint}")
    return parse_cluster(_read(path), name=path.stem, source=text)


def parse_cluster(text: str, *, name: str, source: str) -> Cluster:
    """The cluster of a TOML text; ``source`` is what messages call it."""
    try:
        top = _ClusterTable(read_toml(text), source, "")
    except ValueError as error:
        raise InputError(f"{source}: not valid TOML: {error}; see `python -m pydoc solver_shard.costs.cluster` for an example") from None
    title = top.text("title", default=name)
    launch_ns = top.number("launch_ns", low=0.0, high=1e9)
    kappa = top.number("kappa", low=0.0, high=1.0, default=ASSUMED_KAPPA)
    device = _device(top.table("device"))
    links = top.tables("links")
    if not 1 <= len(links) <= MAX_LEVELS:
        raise InputError(f"{source}: {len(links)} [[links]] tables; legal: 1 to {MAX_LEVELS}, innermost first, the last without a size")
    levels = tuple(_level(link, last=i == len(links) - 1) for i, link in enumerate(links))
    for inner, outer, link in zip(levels, levels[1:], links[1:], strict=False):
        assert inner.size is not None
        if outer.size is not None and (outer.size <= inner.size or outer.size % inner.size):
            raise link.wrong("size", outer.size, f"a multiple of the inner level's {inner.size}, and larger")
    top.done()
    return Cluster(name=name, title=title, device=device, levels=levels, launch_ns=launch_ns, kappa=kappa)


def check_cluster(cluster: Cluster) -> None:
    """Check the numbers of a cluster that does not come from a cluster file; InputError names the first that no such file could give."""
    numbers = [("launch_ns", cluster.launch_ns, 0.0, 1e9), ("kappa", cluster.kappa, 0.0, 1.0)]
    for i, level in enumerate(cluster.levels):
        numbers += [(f"levels[{i}].bandwidth", level.bandwidth, 10.0, 1e18), (f"levels[{i}].latency_ns", level.latency_ns, 0.0, 1e9)]
        if level.topology not in TOPOLOGIES:
            raise InputError(f"levels[{i}].topology = {level.topology!r} is not legal; legal: {' or '.join(map(repr, TOPOLOGIES))}")
    for key, value, low, high in numbers:
        if not low <= value <= high:
            raise InputError(f"{key} = {value:g} is not legal; legal: a number from {low:g} to {high:g}")
    sizes = [level.size for level in cluster.levels]
    inner = [size for size in sizes[:-1] if size is not None and size >= 2]
    nested = len(inner) == len(sizes) - 1 and all(b > a and b % a == 0 for a, b in itertools.pairwise(inner))
    if not 1 <= len(sizes) <= MAX_LEVELS or sizes[-1] is not None or not nested:
        raise InputError(
            f"levels of sizes {sizes} are not legal; legal: 1 to {MAX_LEVELS}, each a multiple of the one before, the last null"
        )


def _device(table: _ClusterTable) -> Device:
    rates = table.table("matmul_tflops")
    flops = {}
    for dtype in rates.keys:
        if dtype not in DTYPE_BYTES:
            raise InputError(f"{rates.source}: key {rates.path(dtype)!r} is not a dtype; legal: {', '.join(DTYPE_BYTES)}")
        flops[dtype] = rates.number(dtype, low=1e-6, high=1e9) * 1e12
    parts = table.table("efficiency")
    memory = table.number("memory_gib", low=1e-6, high=1e6)
    device = Device(
        name=table.text("name"),
        memory=int(memory * 2**30),
        reserve=int(table.number("reserve_gib", low=0.0, high=memory) * 2**30),
        memory_bandwidth=table.number("memory_gb_per_s", low=1e-6, high=1e9) * 1e9,
        vector_flops=table.number("vector_tflops", low=1e-6, high=1e9) * 1e12,
        matmul_flops=flops,
        efficiency=Efficiency(**{name: parts.number(name, low=0.01, high=1.0) for name in _EFFICIENCIES}),
    )
    rates.done()
    parts.done()
    table.done()
    return device


def _level(table: _ClusterTable, *, last: bool) -> Level:
    level = Level(
        name=table.text("name"),
        size=None if last else table.whole("size", low=2, high=1_000_000_000),
        bandwidth=table.number("gb_per_s", low=1e-6, high=1e9) * 1e9 * table.number("efficiency", low=0.01, high=1.0),
        latency_ns=table.number("latency_ns", low=0.0, high=1e9),
        topology=table.choice("topology", TOPOLOGIES, default="switch"),
    )
    table.done("; the last level joins all devices and has no size" if last else "")
    return level


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read cluster file {str(path)!r}: {error.strerror}; presets are {', '.join(PRESETS)}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"cluster file {str(path)!r} is larger than {MAX_FILE_BYTES} bytes; is it the right file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"cluster file {str(path)!r} is not UTF-8 text; save it as UTF-8") from None


class _ClusterTable:
    """One TOML table read key by key; every error names the source, the key and what is legal."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str) -> None:
        self.source, self._values, self._prefix = source, values, prefix
        self._seen: set[str] = set()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def path(self, key: str) -> str:
        return f"{self._prefix}.{key}" if self._prefix else key

    def wrong(self, key: str, value: object, legal: str) -> InputError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return InputError(f"{self.source}: {self.path(key)} = {shown} is not legal; legal: {legal}")

    def _take(self, key: str, legal: str) -> Any:
        self._seen.add(key)
        if key not in self._values:
            raise InputError(f"{self.source}: key {self.path(key)!r} is missing; legal: {legal}")
        return self._values[key]

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        legal = f"a number from {low:g} to {high:g}"
        self._seen.add(key)
        if default is not None and key not in self._values:
            return default
        value = self._take(key, legal)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(key, value, legal)
        return float(value)

    def whole(self, key: str, *, low: int, high: int) -> int:
        legal = f"a whole number from {low} to {high}"
        value = self._take(key, legal)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, value, legal)
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        legal = "a text of 1 to 200 characters"
        if default is not None and key not in self._values:
            return default
        value = self._take(key, legal)
        if not isinstance(value, str) or not 1 <= len(value) <= 200:
            raise self.wrong(key, value, legal)
        return value

    def choice(self, key: str, options: tuple[str, ...], *, default: str) -> str:
        value = self.text(key, default=default)
        if value not in options:
            raise self.wrong(key, value, " or ".join(repr(option) for option in options))
        return value

    def table(self, key: str) -> _ClusterTable:
        value = self._take(key, "a table")
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a table")
        return _ClusterTable(value, self.source, self.path(key))

    def tables(self, key: str) -> list[_ClusterTable]:
        value = self._take(key, f"one or more [[{key}]] tables")
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, value, f"one or more [[{key}]] tables")
        return [_ClusterTable(item, self.source, f"{self.path(key)}[{i}]") for i, item in enumerate(value)]

    def done(self, more: str = "") -> None:
        """Refuse keys that nothing read: a misspelt key must not fall back on a default."""
        for key in self._values:
            if key not in self._seen:
                legal = ", ".join(sorted(self._seen))
                raise InputError(f"{self.source}: unknown key {self.path(key)!r}; legal here: {legal}{more}")
