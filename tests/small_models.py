"""Forty small models of other kinds than language models, with random weights and the inputs of one training step.

>>> model, inputs = make("graph attention")
>>> model(**inputs)
tensor(1.0986, grad_fn=...)

Each is a function of its name alone: the same weights and inputs every time. They are a few ops each, of sizes that two and four devices
can cut, and together they read and write tensors in the ways that models do: by index, in windows, over time, along a graph, twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Built = tuple[nn.Module, Inputs]

B, C, W, N, E = 8, 8, 16, 16, 32
"""Batch, channels, width (of features and of images), nodes and edges of a graph."""


class Step(nn.Module):
    """Layers by name, and a function of them and the inputs that returns the loss."""

    def __init__(self, loss: Callable[..., Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.loss = loss

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.loss(self, **inputs)


def make(name: str) -> Built:
    """A model and the inputs of one step."""
    torch.manual_seed(sum(map(ord, name)))
    return MODELS[name]()


def labels(count: int = B, classes: int = 4) -> Tensor:
    return torch.randint(0, classes, (count,))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


def images() -> Inputs:
    return {"x": torch.randn(B, 4, W, W), "y": labels()}


def rows() -> Inputs:
    return {"x": torch.randn(B, W), "y": labels()}


def graph() -> Inputs:
    return {"x": torch.randn(N, W), "a": torch.randint(0, N, (E,)), "b": torch.randint(0, N, (E,)), "y": labels(N)}


def over_time() -> Inputs:
    return {"x": torch.randn(B, 4, W), "y": labels()}


# Convolutions


def convolution_with_batch_norm() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(m.norm(m.second(F.relu(m.first(x)))))
        return F.cross_entropy(m.head(x.mean((2, 3))), y)

    layers = {"first": nn.Conv2d(4, C, 3, padding=1), "second": nn.Conv2d(C, C, 3, padding=1), "norm": nn.BatchNorm2d(C)}
    return Step(loss, **layers, head=nn.Linear(C, 4)), images()


def residual_block() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        x = F.relu(x + m.inner(F.relu(m.one(x))))
        return F.cross_entropy(m.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), y)

    layers = {"stem": nn.Conv2d(4, C, 3, padding=1), "one": nn.Conv2d(C, C, 3, padding=1), "inner": nn.Conv2d(C, C, 3, padding=1)}
    return Step(loss, **layers, head=nn.Linear(C, 4)), images()


def group_norm() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.head(F.silu(m.norm(m.first(x))).mean((2, 3))), y)

    return Step(loss, first=nn.Conv2d(4, C, 3, padding=1), norm=nn.GroupNorm(2, C), head=nn.Linear(C, 4)), images()


def max_pooling() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(m.first(x)), 2)
        x = F.max_pool2d(F.relu(m.second(x)), 2)
        return F.cross_entropy(m.head(x.flatten(1)), y)

    layers = {"first": nn.Conv2d(4, C, 3, padding=1), "second": nn.Conv2d(C, C, 3, padding=1)}
    return Step(loss, **layers, head=nn.Linear(C * W, 4)), images()


def upsampling() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = F.interpolate(F.relu(m.down(x)), scale_factor=2, mode="nearest")
        return F.mse_loss(m.out(x), y)

    layers = {"down": nn.Conv2d(4, C, 3, stride=2, padding=1), "out": nn.Conv2d(C, 4, 3, padding=1)}
    return Step(loss, **layers), {"x": torch.randn(B, 4, W, W), "y": torch.randn(B, 4, W, W)}


def bilinear_upsampling() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = F.interpolate(F.gelu(m.down(x)), scale_factor=2, mode="bilinear", align_corners=False)
        return F.l1_loss(m.out(x), y)

    layers = {"down": nn.Conv2d(4, C, 2, stride=2), "out": nn.Conv2d(C, 4, 1)}
    return Step(loss, **layers), {"x": torch.randn(B, 4, W, W), "y": torch.randn(B, 4, W, W)}


def transposed_convolution() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(m.up(F.relu(m.down(x))), y)

    layers = {"down": nn.Conv2d(4, C, 2, stride=2), "up": nn.ConvTranspose2d(C, 4, 2, stride=2)}
    return Step(loss, **layers), {"x": torch.randn(B, 4, W, W), "y": torch.randn(B, 4, W, W)}


def unet() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        high = F.relu(m.first(x))
        low = F.relu(m.second(F.avg_pool2d(high, 2)))
        return F.mse_loss(m.out(torch.cat([high, F.interpolate(low, scale_factor=2)], 1)), y)

    layers = {"first": nn.Conv2d(4, C, 3, padding=1), "second": nn.Conv2d(C, C, 3, padding=1), "out": nn.Conv2d(2 * C, 4, 1)}
    return Step(loss, **layers), {"x": torch.randn(B, 4, W, W), "y": torch.randn(B, 4, W, W)}


def depthwise_convolution() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.head(F.hardswish(m.point(F.hardswish(m.depth(m.stem(x))))).mean((2, 3))), y)

    layers = {"stem": nn.Conv2d(4, C, 1), "depth": nn.Conv2d(C, C, 3, padding=1, groups=C), "point": nn.Conv2d(C, 2 * C, 1)}
    return Step(loss, **layers, head=nn.Linear(2 * C, 4)), images()


def convolution_over_time() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = F.pad(m.first(x), (2, 0))
        x = torch.tanh(m.second(x)) * torch.sigmoid(m.gate(x))
        return F.cross_entropy(m.head(x.amax(-1)), y)

    layers = {"first": nn.Conv1d(4, C, 1), "second": nn.Conv1d(C, C, 3), "gate": nn.Conv1d(C, C, 3)}
    return Step(loss, **layers, head=nn.Linear(C, 4)), {"x": torch.randn(B, 4, 4 * W), "y": labels()}


def pixel_shuffle() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(F.pixel_shuffle(m.out(F.leaky_relu(m.down(x))), 2), y)

    layers = {"down": nn.Conv2d(4, C, 3, stride=2, padding=1), "out": nn.Conv2d(C, 16, 1)}
    return Step(loss, **layers), {"x": torch.randn(B, 4, W, W), "y": torch.randn(B, 4, W, W)}


# Graphs, and tensors that are read and written by index


def message_passing() -> Built:
    def loss(m: nn.Module, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        for layer in (m.first, m.second):
            sent = F.relu(layer(x))[a]
            x = x + torch.zeros_like(x).index_add(0, b, sent)
        return F.cross_entropy(m.head(x), y)

    return Step(loss, first=nn.Linear(W, W), second=nn.Linear(W, W), head=nn.Linear(W, 4)), graph()


def mean_aggregation() -> Built:
    def loss(m: nn.Module, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        degree = torch.zeros(N).index_add(0, b, torch.ones(E)).clamp(min=1)
        x = F.relu(m.first(x))
        near = torch.zeros_like(x).index_add(0, b, x.index_select(0, a)) / degree[:, None]
        return F.cross_entropy(m.head(torch.cat([x, near], 1)), y)

    return Step(loss, first=nn.Linear(W, W), head=nn.Linear(2 * W, 4)), graph()


def graph_attention() -> Built:
    def loss(m: nn.Module, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        x = m.first(x)
        score = F.leaky_relu((x @ m.left)[a] + (x @ m.right)[b]).exp()
        total = torch.zeros(N).index_add(0, b, score) + 1e-6
        x = torch.zeros_like(x).index_add(0, b, x[a] * (score / total[b])[:, None])
        return F.cross_entropy(m.head(x), y)

    return Step(loss, first=nn.Linear(W, W), left=weight(W), right=weight(W), head=nn.Linear(W, 4)), graph()


def edge_convolution() -> Built:
    def loss(m: nn.Module, x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        edge = m.first(torch.cat([x[b], x[a] - x[b]], 1)).relu()
        index = b[:, None].expand(E, W)
        x = torch.zeros(N, W).scatter_reduce(0, index, edge, "amax", include_self=True)
        return F.cross_entropy(m.head(x), y)

    return Step(loss, first=nn.Linear(2 * W, W), head=nn.Linear(W, 4)), graph()


def scatter_and_gather() -> Built:
    def loss(m: nn.Module, x: Tensor, i: Tensor, y: Tensor) -> Tensor:
        x = m.first(x)
        x = torch.zeros(B, 2 * W).scatter(1, i, x)
        return F.cross_entropy(m.head(torch.tanh(x).gather(1, i)), y)

    index = torch.stack([torch.randperm(2 * W)[:W] for _ in range(B)])
    return Step(loss, first=nn.Linear(W, W), head=nn.Linear(W, 4)), {**rows(), "i": index}


def writing_by_index() -> Built:
    def loss(m: nn.Module, x: Tensor, i: Tensor, y: Tensor) -> Tensor:
        table = torch.zeros(2 * B, W).index_put((i,), m.first(x))
        return F.cross_entropy(m.head(torch.relu(table)[i]), y)

    return Step(loss, first=nn.Linear(W, W), head=nn.Linear(W, 4)), {**rows(), "i": torch.randperm(2 * B)[:B]}


def adding_by_index() -> Built:
    def loss(m: nn.Module, x: Tensor, i: Tensor, y: Tensor) -> Tensor:
        table = m.memory.index_put((i,), m.first(x), accumulate=True)
        return F.cross_entropy(m.head(table), y)

    inputs = {"x": torch.randn(B, W), "i": torch.randint(0, N, (B,)), "y": labels(N)}
    return Step(loss, first=nn.Linear(W, W), memory=weight(N, W), head=nn.Linear(W, 4)), inputs


def sparse_mixture() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = m.router(x).softmax(-1)
        top, chosen = scores.topk(2, -1)
        hidden = torch.einsum("bw,ewh->beh", x, m.up).relu()
        out = torch.einsum("beh,ehw->bew", hidden, m.down)
        out = (out.gather(1, chosen[:, :, None].expand(B, 2, W)) * top[:, :, None]).sum(1)
        return F.cross_entropy(m.head(x + out), y)

    layers = {"router": nn.Linear(W, 4), "up": weight(4, W, 2 * W), "down": weight(4, 2 * W, W)}
    return Step(loss, **layers, head=nn.Linear(W, 4)), rows()


def top_and_sort() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = m.first(x)
        return F.cross_entropy(m.head(torch.cat([x.topk(4, -1).values, x.sort(-1).values], 1)), y)

    return Step(loss, first=nn.Linear(W, W), head=nn.Linear(W + 4, 4)), rows()


# Over time


def recurrent_cell() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        state = torch.zeros(B, W)
        for moment in x.unbind(1):
            state = torch.tanh(m.inside(moment) + m.recurrent(state))
        return F.cross_entropy(m.head(state), y)

    return Step(loss, inside=nn.Linear(W, W), recurrent=nn.Linear(W, W), head=nn.Linear(W, 4)), over_time()


def gated_recurrent_cell() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        state = torch.zeros(B, W)
        for moment in x.unbind(1):
            gates = m.inside(moment) + m.recurrent(state)
            update, reset, new = gates.chunk(3, -1)
            update = torch.sigmoid(update)
            state = update * state + (1 - update) * torch.tanh(torch.sigmoid(reset) * new)
        return F.cross_entropy(m.head(state), y)

    return Step(loss, inside=nn.Linear(W, 3 * W), recurrent=nn.Linear(W, 3 * W), head=nn.Linear(W, 4)), over_time()


def long_short_term_memory() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        state, cell, all_states = torch.zeros(B, W), torch.zeros(B, W), []
        for moment in x.unbind(1):
            i, f, g, o = (m.inside(moment) + m.recurrent(state)).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            all_states.append(state)
        return F.cross_entropy(m.head(torch.stack(all_states, 1).mean(1)), y)

    return Step(loss, inside=nn.Linear(W, 4 * W), recurrent=nn.Linear(W, 4 * W), head=nn.Linear(W, 4)), over_time()


def linear_recurrence() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        decay, inside = torch.sigmoid(m.decay(x)), m.inside(x)
        logs = decay.log().cumsum(1)
        x = (inside * (-logs).exp()).cumsum(1) * logs.exp()
        return F.cross_entropy(m.head(x[:, -1]), y)

    return Step(loss, decay=nn.Linear(W, W), inside=nn.Linear(W, W), head=nn.Linear(W, 4)), over_time()


# Attention and products


def attention() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (t.view(B, W, 2, W // 2).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, W, W)
        return F.cross_entropy(m.head(m.out(x).mean(1)), y)

    inputs = {"x": torch.randn(B, W, W), "y": labels()}
    return Step(loss, qkv=nn.Linear(W, 3 * W), out=nn.Linear(W, W), head=nn.Linear(W, 4)), inputs


def written_attention() -> Built:
    def loss(m: nn.Module, x: Tensor, context: Tensor, y: Tensor) -> Tensor:
        scores = torch.einsum("bqw,bkw->bqk", m.query(x), m.key(context)) / math.sqrt(W)
        hidden = torch.ones(W, 2 * W, dtype=torch.bool).tril()
        x = scores.masked_fill(~hidden, float("-inf")).softmax(-1) @ m.value(context)
        return F.cross_entropy(m.head(x.mean(1)), y)

    layers = {name: nn.Linear(W, W) for name in ("query", "key", "value")}
    return Step(loss, **layers, head=nn.Linear(W, 4)), {"x": torch.randn(B, W, W), "context": torch.randn(B, 2 * W, W), "y": labels()}


def matrix_factorisation() -> Built:
    def loss(m: nn.Module, u: Tensor, v: Tensor, y: Tensor) -> Tensor:
        score = (m.users(u) * m.things(v)).sum(-1) + m.bias(v).squeeze(-1)
        return F.binary_cross_entropy_with_logits(score, y)

    layers = {"users": nn.Embedding(64, W), "things": nn.Embedding(64, W), "bias": nn.Embedding(64, 1)}
    inputs = {"u": torch.randint(0, 64, (E,)), "v": torch.randint(0, 64, (E,)), "y": torch.rand(E)}
    return Step(loss, **layers), inputs


def factorisation_machine() -> Built:
    def loss(m: nn.Module, fields: Tensor, y: Tensor) -> Tensor:
        vectors = m.table(fields)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        return F.binary_cross_entropy_with_logits(pairs + m.linear(vectors.flatten(1)).squeeze(1), y)

    layers = {"table": nn.Embedding(64, W), "linear": nn.Linear(4 * W, 1)}
    return Step(loss, **layers), {"fields": torch.randint(0, 64, (E, 4)), "y": torch.rand(E)}


def embedding_bag() -> Built:
    def loss(m: nn.Module, words: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.head(m.bag(words)), y)

    return Step(loss, bag=nn.EmbeddingBag(64, W, mode="mean"), head=nn.Linear(W, 4)), {"words": torch.randint(0, 64, (B, 4)), "y": labels()}


def deep_and_wide() -> Built:
    def loss(m: nn.Module, fields: Tensor, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([m.bottom(x).relu()[:, None], m.table(fields)], 1)
        crossed = (both @ both.transpose(1, 2)).flatten(1)
        return F.binary_cross_entropy_with_logits(m.top(crossed).squeeze(1), y)

    layers = {"table": nn.Embedding(64, W), "bottom": nn.Linear(W, W), "top": nn.Linear(25, 1)}
    return Step(loss, **layers), {"fields": torch.randint(0, 64, (B, 4)), "x": torch.randn(B, W), "y": torch.rand(B)}


# Norms, weights that are computed, distances, frequencies


def weight_normalisation() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.second(torch.relu(m.first(x))), y)

    normed = nn.utils.parametrizations.weight_norm
    return Step(loss, first=normed(nn.Linear(W, 4 * W)), second=normed(nn.Linear(4 * W, 4))), rows()


def written_weight_normalisation() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        for v, g in ((m.v1, m.g1), (m.v2, m.g2)):
            x = torch.relu(x @ (v * (g / v.norm(dim=1, keepdim=True))).T)
        return F.cross_entropy(x, y)

    layers = {"v1": weight(4 * W, W), "g1": weight(4 * W, 1), "v2": weight(4, 4 * W), "g2": weight(4, 1)}
    return Step(loss, **layers), rows()


def layer_norm() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x + m.down(F.gelu(m.up(m.norm(x))))
        return F.cross_entropy(m.head(m.last(x).mean(1)), y)

    layers = {"norm": nn.LayerNorm(W), "up": nn.Linear(W, 2 * W), "down": nn.Linear(2 * W, W), "last": nn.LayerNorm(W)}
    return Step(loss, **layers, head=nn.Linear(W, 4)), over_time()


def low_rank_weights() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.head(torch.relu(x @ (m.frozen + m.left @ m.right))), y)

    layers = {"frozen": nn.Parameter(torch.randn(W, 2 * W), requires_grad=False), "left": weight(W, 2), "right": weight(2, 2 * W)}
    return Step(loss, **layers, head=nn.Linear(2 * W, 4)), rows()


def hyper_network() -> Built:
    def loss(m: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        made = m.maker(z).view(W, 4)
        return F.cross_entropy(torch.tanh(m.first(x)) @ made, y)

    return Step(loss, first=nn.Linear(W, W), maker=nn.Linear(4, 4 * W)), {**rows(), "z": torch.randn(4)}


def prototypes_by_distance() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(-torch.cdist(m.first(x), m.prototypes), y)

    return Step(loss, first=nn.Linear(W, W), prototypes=weight(4, W)), rows()


def frequencies() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(m.first(x), dim=-1)
        x = torch.fft.irfft(spectrum * m.filter, n=W, dim=-1)
        return F.cross_entropy(m.head(x), y)

    return Step(loss, first=nn.Linear(W, W), filter=weight(W // 2 + 1), head=nn.Linear(W, 4)), rows()


def contrastive() -> Built:
    def loss(m: nn.Module, x: Tensor, z: Tensor) -> Tensor:
        a, b = F.normalize(m.left(x), dim=-1), F.normalize(m.right(z), dim=-1)
        scores = a @ b.T * m.scale.exp()
        target = torch.arange(B)
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2

    layers = {"left": nn.Linear(W, W), "right": nn.Linear(W, W), "scale": nn.Parameter(torch.zeros(()))}
    return Step(loss, **layers), {"x": torch.randn(B, W), "z": torch.randn(B, W)}


def variational() -> Built:
    def loss(m: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = m.encoder(x).chunk(2, -1)
        z = mean + noise * (0.5 * log_variance).exp()
        apart = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(m.decoder(torch.relu(z)), x) + 0.1 * apart

    return Step(loss, encoder=nn.Linear(W, 2 * W), decoder=nn.Linear(W, W)), {"x": torch.randn(B, W), "noise": torch.randn(B, W)}


# Several losses, several ways


def several_losses() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        x = torch.relu(m.trunk(x))
        return F.cross_entropy(m.classes(x), y) + 0.5 * F.mse_loss(m.values(x), z) + 0.1 * F.l1_loss(m.values(x), z)

    layers = {"trunk": nn.Linear(W, 2 * W), "classes": nn.Linear(2 * W, 4), "values": nn.Linear(2 * W, 8)}
    return Step(loss, **layers), {**rows(), "z": torch.randn(B, 8)}


def early_exits() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer, head in ((m.first, m.head1), (m.second, m.head2), (m.third, m.head3)):
            x = torch.relu(layer(x))
            total = total + F.cross_entropy(head(x), y)
        return total

    layers = {name: nn.Linear(W, W) for name in ("first", "second", "third")}
    return Step(loss, **layers, **{f"head{k}": nn.Linear(W, 4) for k in (1, 2, 3)}), rows()


def shared_trunk() -> Built:
    def loss(m: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        left, right = m.trunk(x), m.trunk(z)
        near = (left - right).square().sum(-1)
        return F.cross_entropy(m.head(torch.cat([left, right], 1)), y) + F.relu(1 - near).mean()

    trunk = nn.Sequential(nn.Linear(W, 2 * W), nn.ReLU(), nn.Linear(2 * W, W))
    return Step(loss, trunk=trunk, head=nn.Linear(2 * W, 4)), {**rows(), "z": torch.randn(B, W)}


def tied_autoencoder() -> Built:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return F.mse_loss(torch.sigmoid(x @ m.code) @ m.code.T, x)

    return Step(loss, code=weight(W, 2 * W)), {"x": torch.randn(B, W)}


def segmentation() -> Built:
    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(m.out(F.relu(m.first(x))), y)

    layers = {"first": nn.Conv2d(4, C, 3, padding=1), "out": nn.Conv2d(C, 4, 1)}
    return Step(loss, **layers), {"x": torch.randn(B, 4, W, W), "y": torch.randint(0, 4, (B, W, W))}


MODELS: Mapping[str, Callable[[], Built]] = {
    made.__name__.replace("_", " "): made
    for made in (
        convolution_with_batch_norm, residual_block, group_norm, max_pooling, upsampling, bilinear_upsampling, transposed_convolution, unet,
        depthwise_convolution, convolution_over_time, pixel_shuffle, message_passing, mean_aggregation, graph_attention, edge_convolution,
        scatter_and_gather, writing_by_index, adding_by_index, sparse_mixture, top_and_sort, recurrent_cell, gated_recurrent_cell,
        long_short_term_memory, linear_recurrence, attention, written_attention, matrix_factorisation, factorisation_machine, embedding_bag,
        deep_and_wide, weight_normalisation, written_weight_normalisation, layer_norm, low_rank_weights, hyper_network,
        prototypes_by_distance, frequencies, contrastive, variational, several_losses, early_exits, shared_trunk, tied_autoencoder,
        segmentation,
    )
}  # fmt: skip
