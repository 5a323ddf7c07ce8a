"""Small models of the kinds whose plans are hardest to run: norms before anything that trains, recurrence, draws, permuted operands,
complex numbers, asserted values.

>>> model, inputs, options = build("batch norm first, 1d", torch.float32)
>>> subject_of(model, inputs, name="norm", **options)

``experiments/runnable.py`` runs plans of all of them; a slice of it is in ``tests/runtime/test_runnable.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Inputs = dict[str, torch.Tensor]
Built = tuple[nn.Module, Inputs, dict[str, Any]]


def squared(output: Any) -> torch.Tensor:
    """A loss of any output, whole complex tensors included: the mean of squares of its first tensor."""
    found = output if isinstance(output, torch.Tensor) else output[0]
    if found.is_complex():
        found = torch.view_as_real(found)
    return (found**2).mean()


class Chain(nn.Module):
    """Layers in turn, of which some are frozen."""

    def __init__(self, *layers: nn.Module, frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for layer in layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Flat(nn.Module):
    """All but the batch in one dim, averaged over space where there is any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).mean(-1) if x.ndim > 2 else x


class Recurrent(nn.Module):
    """A recurrent layer between two projections; the state it ends in is in the result."""

    def __init__(self, kind: type[nn.RNNBase], *, width: int = 6, hidden: int = 4, head: int = 3, **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.cell = kind(width, hidden, **options)
        size = (options.get("proj_size") or hidden) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(size, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, state = self.cell(self.up(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.head(made) + last.sum()


class Given(nn.Module):
    """A recurrent layer with a state that it is given, and inputs that need no gradient."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(5, 4, **options)
        self.lstm = kind is nn.LSTM

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.cell(x, (h, h * 0.5) if self.lstm else h)[0]


class Cells(nn.Module):
    """Recurrent cells, written out."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(5, 4)
        self.lstm = kind is nn.LSTMCell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1], 4)
        state: Any = (h, h) if self.lstm else h
        made = []
        for row in x:
            state = self.cell(row, state)
            made.append(state[0] if self.lstm else state)
        return torch.stack(made)


class Drawing(nn.Module):
    """A linear layer, a function that draws, and another."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.draw(self.up(x)))


def permuted_rows(x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(x.shape[0])]


def permuted_columns(x: torch.Tensor) -> torch.Tensor:
    return x.index_select(1, torch.randperm(x.shape[1]))


def mixed_up(x: torch.Tensor) -> torch.Tensor:
    """Mixup: two rows of a batch in one, by a share that is drawn."""
    share = torch.rand(x.shape[0], 1, dtype=x.dtype)
    return share * x + (1 - share) * x[torch.randperm(x.shape[0])]


def normal_in_place(x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty_like(x).normal_(0.5, 0.1)


def normal_of_tensors(x: torch.Tensor) -> torch.Tensor:
    return x + torch.normal(torch.zeros_like(x), torch.ones_like(x) * 0.2)


def normal_of_means(x: torch.Tensor) -> torch.Tensor:
    return x + torch.normal(x.detach() * 0.1, 0.2) + torch.normal(0.1, torch.ones_like(x))


def sampled(x: torch.Tensor) -> torch.Tensor:
    """The reparametrised draw of a variational model."""
    mean, scale = x, F.softplus(x) + 0.1
    return torch.distributions.Normal(mean, scale, validate_args=False).rsample()


def sampled_uniform(x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Uniform(x - 1, x + 1, validate_args=False).rsample()


def sampled_gumbel(x: torch.Tensor) -> torch.Tensor:
    return F.gumbel_softmax(x, tau=0.7, dim=-1)


def sampled_laplace(x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Laplace(x, torch.ones_like(x), validate_args=False).rsample()


def exponential_in_place(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).exponential_(2.0)


def other_in_place(x: torch.Tensor) -> torch.Tensor:
    """Draws of the other distributions that a tensor has."""
    noise = torch.empty_like(x)
    return (
        x
        + noise.cauchy_(0.0, 0.1).clamp(-3, 3)
        + torch.empty_like(x).log_normal_(0.0, 0.2)
        + torch.empty_like(x).geometric_(0.4)
        + torch.empty_like(x).random_(5) * 0.1
        + torch.empty_like(x).random_(2, 7) * 0.1
    )


def random_like(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x) + torch.randn_like(x)


def whole_numbers(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randint(0, 5, x.shape).to(x.dtype) + torch.randint_like(x, 3) + torch.randint_like(x, 2, 9)


def made_by_size(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape[0], 1, dtype=x.dtype) + torch.randn(x.shape[1], dtype=x.dtype)


def coins(x: torch.Tensor) -> torch.Tensor:
    kept = torch.bernoulli(torch.full_like(x, 0.7)) + torch.empty_like(x).bernoulli_(0.3)
    return x * kept + torch.bernoulli(torch.sigmoid(x.detach()))


def drop_path(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_empty(x.shape[0], 1).bernoulli_(0.8) / 0.8


def noise_and_dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.alpha_dropout(F.feature_dropout(x, 0.2) if hasattr(F, "feature_dropout") else x, 0.2), 0.3)


def randomised_leak(x: torch.Tensor) -> torch.Tensor:
    return F.rrelu(x, 0.1, 0.4, training=True)


def picked(x: torch.Tensor) -> torch.Tensor:
    """A class drawn by its probability, as in sampling."""
    return x * torch.multinomial(torch.softmax(x.detach(), -1), 1).to(x.dtype)


def poisson(x: torch.Tensor) -> torch.Tensor:
    return x + torch.poisson(torch.ones_like(x) * 3)


class Checkpointed(nn.Module):
    """Dropout that is drawn again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda y: F.dropout(torch.tanh(self.up(y)), 0.4), F.dropout(x, 0.1), use_reentrant=False)
        return checkpoint(lambda y: F.dropout(torch.tanh(self.down(y)), 0.2), h, use_reentrant=False)


class DropoutAttention(nn.Module):
    """Fused attention with dropout; ``mask`` and ``causal`` as the fused op takes them."""

    def __init__(self, *, causal: bool = False, mask: bool = False, groups: int = 0, p: float = 0.3) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.causal, self.mask, self.groups, self.p = causal, mask, groups, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 4, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.groups:
            k, v = k[:, : self.groups], v[:, : self.groups]
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril(1) if self.mask else None
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.p if self.training else 0.0, is_causal=self.causal, enable_gqa=bool(self.groups)
        )
        return self.out(y.transpose(1, 2).reshape(b, s, 8))


class HeadAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Segmentation(nn.Module):
    """Scores with the classes in dim 1, from a permuted projection."""

    def __init__(self, *, image: bool = False, weights: bool = False, reduction: str = "mean", smoothing: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.image, self.reduction, self.smoothing = image, reduction, smoothing
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 5) if weights else None)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(x).movedim(-1, 1)
        if self.image:
            scores, labels = scores.unflatten(-1, (2, -1)), labels.unflatten(-1, (2, -1))
        weight = None if self.weight is None else self.weight.to(scores.dtype)
        loss = F.cross_entropy(scores, labels, weight=weight, reduction=self.reduction, label_smoothing=self.smoothing)
        return loss if loss.ndim == 0 else loss.mean()


class Permuted(nn.Module):
    """An op that reads a permuted projection, as a model with its channels last does."""

    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor], *, image: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)
        self.op, self.image = op, image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.up(x).movedim(-1, 1))


class Convolved(nn.Module):
    """A module of torch that reads and gives channels first, between two that have them last."""

    def __init__(self, op: nn.Module, made: int = 4) -> None:
        super().__init__()
        self.up, self.op, self.down = nn.Linear(6, 4), op, nn.Linear(made, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.op(self.up(x).movedim(-1, 1)).movedim(1, -1))


class ComplexLinear(nn.Module):
    """A matrix of complex numbers; ``twist`` does something to what comes out."""

    def __init__(self, twist: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=dtype, generator=numbers))
        self.shift = nn.Parameter(torch.randn(4, dtype=dtype, generator=numbers))
        self.twist = twist

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twist(x @ self.weight + self.shift)


def conjugated(x: torch.Tensor) -> torch.Tensor:
    return x.conj() * x.real + x.conj()


def resolved(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.conj().resolve_conj())


def negated(x: torch.Tensor) -> torch.Tensor:
    return x.conj().imag.resolve_neg() + x.imag


def products(x: torch.Tensor) -> torch.Tensor:
    return x.conj().transpose(-1, -2) @ x


def parts(x: torch.Tensor) -> torch.Tensor:
    return x.abs() + x.angle() + torch.complex(x.imag, x.real).abs()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x


class Fourier(nn.Module):
    """Filters in the frequencies of a permuted projection."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 3)
        self.kind = kind
        numbers = torch.Generator().manual_seed(3)
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        self.filter = nn.Parameter(torch.randn(4, 1, dtype=wide, generator=numbers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.up(x).transpose(1, 2)
        if self.kind == "real":
            mixed = torch.fft.irfft(torch.fft.rfft(rows) * self.filter, n=rows.shape[-1])
        elif self.kind == "plane":
            mixed = torch.fft.fft2(rows).real
        else:
            mixed = torch.fft.ifft(torch.fft.fft(rows, dim=-1).conj() * self.filter, dim=-1).real
        return self.down(mixed.transpose(1, 2))


class OneHot(nn.Module):
    """Classes as vectors, and their loss as a mean of squares."""

    def __init__(self, *, asserted: bool = False, functional: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Linear(5, 6, bias=False), nn.Linear(6, 5)
        self.asserted, self.functional = asserted, functional

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.asserted:
            torch._assert_async((labels >= 0).all(), "labels are whole numbers")
        codes = F.one_hot(labels, 5).to(x.dtype)
        if self.asserted:
            torch._assert_async(codes.sum() > 0)
        found = self.head(torch.tanh(x + self.table(codes)))
        return ((found - codes) ** 2).mean()


class Solved(nn.Module):
    """Linear algebra on symmetric positive matrices that come from a projection."""

    def __init__(self, op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(5, 4)
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.up(x)
        square = rows.transpose(-1, -2) @ rows + 3 * torch.eye(4, dtype=x.dtype)
        return self.op(square, rows)


class Everything(nn.Module):
    """A norm first, a recurrent layer with dropout, shuffled rows, attention with dropout, asserted labels, and classes in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.BatchNorm1d(6), nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.attention, self.head = DropoutAttention(causal=True), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)[torch.randperm(x.shape[0])]
        scores = self.head(self.attention(self.cell(x)[0])).transpose(1, 2)
        counts = F.one_hot(labels, 5).sum((0, 1)).to(x.dtype)
        return F.cross_entropy(scores, labels) + (scores.mean((0, 2)) * counts).mean()


def inverse(a: torch.Tensor, _b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(a)


def solution(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(a, b.transpose(-1, -2))


def root(a: torch.Tensor, _b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(a)


def log_determinant(a: torch.Tensor, _b: torch.Tensor) -> torch.Tensor:
    return torch.logdet(a) + torch.linalg.slogdet(a)[1]


def pseudo_inverse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cholesky_solve(b.transpose(-1, -2), torch.linalg.cholesky(a))


def _floats(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=numbers, dtype=torch.float64).to(dtype)


def _labels(*shape: int, ignored: bool = False) -> torch.Tensor:
    made = torch.randint(5, shape, generator=torch.Generator().manual_seed(2))
    if ignored:
        made[0, :2] = -100
    return made


def _loss(model: nn.Module, dtype: torch.dtype, *shape: int, training: bool = True, forward_only: bool = False) -> Built:
    model.train(training)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # a module's own ``to`` takes the imaginary part of complex numbers away
            tensor.data = tensor.data.to(dtype)
    return model, {"x": _floats(dtype, *shape)}, {"forward_only": True} if forward_only else {"loss_fn": squared}


def _norms(rank: int, name: str) -> tuple[Callable[..., nn.Module], tuple[int, ...]]:
    space = (3, 4, 2)[:rank] if rank else ()
    classes = {"batch": (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank]}
    if rank:
        classes["instance"] = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[rank - 1]
    return classes[name], space


def _norm_case(rank: int, name: str, *, frozen: bool = False, **options: Any) -> Callable[[torch.dtype], Built]:
    def make(dtype: torch.dtype) -> Built:
        kind, space = _norms(rank, name)
        training = options.get("training", True)
        norm = kind(4, **{k: v for k, v in options.items() if k != "training"})
        before = [nn.BatchNorm1d(4) if not rank else (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](4, 4, 1)] if frozen else []
        return _loss(Chain(*before, norm, Flat(), nn.Linear(4, 3), frozen=len(before)), dtype, 5, 4, *space, training=training)

    return make


def _chain_case(make_layers: Callable[[], list[nn.Module]], *shape: int, frozen: int = 0) -> Callable[[torch.dtype], Built]:
    return lambda dtype: _loss(Chain(*make_layers(), Flat(), frozen=frozen), dtype, *shape)


def _recurrent_case(kind: type[nn.RNNBase], *, training: bool = True, forward_only: bool = False, **options: Any) -> Any:
    return lambda dtype: _loss(Recurrent(kind, **options), dtype, 3, 4, 5, training=training, forward_only=forward_only)


def _given_case(kind: type[nn.RNNBase], **options: Any) -> Callable[[torch.dtype], Built]:
    def make(dtype: torch.dtype) -> Built:
        model, inputs, more = _loss(Given(kind, **options), dtype, 3, 4, 5)
        return model, inputs | {"h": _floats(dtype, 1, 4, 4)}, more

    return make


def _labelled_case(make_model: Callable[[], nn.Module], *shape: int, ignored: bool = False) -> Callable[[torch.dtype], Built]:
    return lambda dtype: (make_model().to(dtype), {"x": _floats(dtype, *shape, 6), "labels": _labels(*shape, ignored=ignored)}, {})


def _complex_case(twist: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.dtype], Built]:
    def make(dtype: torch.dtype) -> Built:
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        return ComplexLinear(twist, wide), {"x": _floats(wide, 4, 3, 6)}, {"loss_fn": squared}

    return make


_KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
_FORMS: Mapping[str, dict[str, Any]] = {
    "": {},
    ", two layers, both ways, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    ", without bias": {"bias": False},
    ", forward only": {"forward_only": True},
    ", evaluation, two layers": {"training": False, "num_layers": 2},
    ", dropout between layers": {"num_layers": 2, "dropout": 0.3},
}
_READERS: Mapping[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(4, 4, 2),
    "grouped convolution": lambda: nn.Conv2d(4, 4, 2, groups=2),
    "transposed convolution": lambda: nn.ConvTranspose2d(4, 4, 2),
    "max pooling": lambda: nn.MaxPool2d(2),
    "mean pooling": lambda: nn.AvgPool2d(2),
    "adaptive mean pooling": lambda: nn.AdaptiveAvgPool2d(2),
    "adaptive max pooling": lambda: nn.AdaptiveMaxPool2d(2),
    "nearest upsampling": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    "bilinear upsampling": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic upsampling": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "softmax over channels": lambda: nn.Softmax(1),
    "log softmax over channels": lambda: nn.LogSoftmax(1),
    "layer norm over space": lambda: nn.LayerNorm([4, 4]),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "reflection padding": lambda: nn.ReflectionPad2d(1),
    "replication padding": lambda: nn.ReplicationPad2d(1),
    "local response norm": lambda: nn.LocalResponseNorm(2),
    "gated halves": lambda: nn.GLU(1),
    "channel dropout": lambda: nn.Dropout2d(0.3),
    "prelu": lambda: nn.PReLU(4),
    "unfolding": lambda: nn.Unfold(2),
    "lp pooling": lambda: nn.LPPool2d(2, 2),
    "fractional max pooling": lambda: nn.FractionalMaxPool2d(2, output_size=2),
}
_MADE = {"pixel shuffle": 1, "gated halves": 2, "unfolding": 16}
_DRAWS = (
    permuted_rows, permuted_columns, mixed_up, normal_in_place, normal_of_tensors, normal_of_means, sampled, sampled_uniform,
    sampled_gumbel, sampled_laplace, exponential_in_place, other_in_place, random_like, whole_numbers, made_by_size, coins, drop_path,
    noise_and_dropout, randomised_leak, picked, poisson,
)  # fmt: skip
_TWISTS = (plain, conjugated, resolved, negated, products, parts)
_ALGEBRA = (inverse, solution, root, log_determinant, pseudo_inverse)


def _said(function: Callable[..., Any]) -> str:
    return function.__name__.replace("_", " ")


CASES: Mapping[str, Callable[[torch.dtype], Built]] = {
    **{f"batch norm first, {d}d": _norm_case(d, "batch") for d in (0, 1, 2, 3)},
    **{f"batch norm behind frozen layers, {d}d": _norm_case(d, "batch", frozen=True) for d in (0, 1, 2, 3)},
    **{f"instance norm first, {d}d": _norm_case(d, "instance", affine=True) for d in (1, 2, 3)},
    "instance norm behind frozen layers": _norm_case(2, "instance", affine=True, frozen=True),
    "instance norm with statistics first": _norm_case(2, "instance", affine=True, track_running_stats=True),
    "batch norm first, without statistics": _norm_case(2, "batch", track_running_stats=False),
    "batch norm first, without scale": _norm_case(2, "batch", affine=False),
    "batch norm first, evaluation": _norm_case(2, "batch", training=False),
    "batch norm with a frozen scale": _chain_case(lambda: [nn.BatchNorm1d(4), nn.Linear(4, 3)], 5, 4, frozen=1),
    "group norm first": _chain_case(lambda: [nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 1)], 5, 4, 3, 2),
    "layer norm first": _chain_case(lambda: [nn.LayerNorm(4), nn.Linear(4, 3)], 5, 4),
    "rms norm first": _chain_case(lambda: [nn.RMSNorm(4), nn.Linear(4, 3)], 5, 4),
    "convolution and batch norm": _chain_case(lambda: [nn.Conv2d(3, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU()], 4, 3, 4, 4),
    "convolution behind a frozen one": _chain_case(lambda: [nn.Conv2d(3, 4, 2), nn.Conv2d(4, 4, 2)], 4, 3, 4, 4, frozen=1),
    "convolution without bias first": _chain_case(lambda: [nn.Conv1d(3, 4, 2, bias=False)], 4, 3, 5),
    **{f"{k}{f}": _recurrent_case(kind, **o) for k, kind in _KINDS.items() for f, o in _FORMS.items()},
    "LSTM, projected": _recurrent_case(nn.LSTM, proj_size=2),
    "LSTM, projected, both ways": _recurrent_case(nn.LSTM, proj_size=2, bidirectional=True, batch_first=True, bias=False, num_layers=2),
    "LSTM, projected, forward only": _recurrent_case(nn.LSTM, proj_size=2, bias=False, forward_only=True),
    "RNN, relu": _recurrent_case(nn.RNN, nonlinearity="relu"),
    **{f"{k} with a given state": _given_case(kind) for k, kind in _KINDS.items()},
    **{f"{c.__name__} written out": lambda d, c=c: _loss(Cells(c), d, 3, 4, 5) for c in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)},
    **{f"draws: {_said(f)}": lambda d, f=f: _loss(Drawing(f), d, 5, 6) for f in _DRAWS},
    "draws again in backward": lambda d: _loss(Checkpointed(), d, 5, 6),
    "draws in columns first": lambda d: _loss(Drawing(lambda x: F.dropout(x.t(), 0.3).t() + torch.rand_like(x.t()).t()), d, 5, 6),
    "attention with dropout": lambda d: _loss(DropoutAttention(), d, 3, 5, 8),
    "causal attention with dropout": lambda d: _loss(DropoutAttention(causal=True), d, 3, 5, 8),
    "masked attention with dropout": lambda d: _loss(DropoutAttention(mask=True), d, 3, 5, 8),
    "grouped attention with dropout": lambda d: _loss(DropoutAttention(groups=2), d, 3, 5, 8),
    "multi-head attention with dropout": lambda d: _loss(HeadAttention(dropout=0.2), d, 3, 5, 8),
    "transformer layer with dropout": lambda d: _loss(Chain(nn.TransformerEncoderLayer(8, 2, 12, 0.2, batch_first=True)), d, 3, 5, 8),
    "classes in dim 1": _labelled_case(Segmentation, 4, 6),
    "classes in dim 1, ignored labels": _labelled_case(Segmentation, 4, 6, ignored=True),
    "classes in dim 1, sum": _labelled_case(lambda: Segmentation(reduction="sum"), 4, 6),
    "classes in dim 1, none": _labelled_case(lambda: Segmentation(reduction="none"), 4, 6),
    "classes in dim 1, smoothed": _labelled_case(lambda: Segmentation(smoothing=0.1), 4, 6),
    "classes in dim 1, images": _labelled_case(lambda: Segmentation(image=True), 4, 6),
    "classes in dim 1, images, none": _labelled_case(lambda: Segmentation(image=True, reduction="none"), 4, 6),
    **{f"permuted: {n}": lambda d, n=n, m=m: _loss(Convolved(m(), _MADE.get(n, 4)), d, 3, 4, 4, 6) for n, m in _READERS.items()
       if n != "unfolding"},
    **{f"fft: {kind}": lambda d, kind=kind: _loss(Fourier(kind, d), d, 3, 4, 6) for kind in ("real", "plane", "whole")},
    **{f"complex: {_said(f)}": _complex_case(f) for f in _TWISTS},
    "one hot": _labelled_case(OneHot, 4, 3),
    "one hot, asserted": _labelled_case(lambda: OneHot(asserted=True), 4, 3),
    "all of these at once": _labelled_case(Everything, 4, 3),
    **{f"algebra: {_said(f)}": lambda d, f=f: _loss(Solved(f), d, 3, 6, 5) for f in _ALGEBRA},
}  # fmt: skip
"""By name, from the dtype of their floats to model, inputs, and what ``subject_of`` takes besides."""


def build(name: str, dtype: torch.dtype = torch.float32) -> Built:
    """A model with numbers that depend on nothing but its name and dtype, one batch, and its loss."""
    torch.manual_seed(0)
    return CASES[name](dtype)
