"""Every family, and every op of the model families' joint graphs, as small numeric cases."""

from __future__ import annotations

import torch
from rulebook.cases import Case, case, flags, ints, pos, t


def einsums() -> list[Case]:
    x = t(4, 6)
    return [
        case("aten.einsum.default", equation="abc,dc->abd", tensors=(t(4, 6, 8), t(5, 8))),
        case("aten.einsum.default", equation="abd,dc->abc", tensors=(t(4, 6, 5), t(5, 8))),
        case("aten.einsum.default", equation="abd,abc->dc", tensors=(t(4, 6, 5), t(4, 6, 8))),
        case("aten.einsum.default", equation="abcd,abed->abce", tensors=(t(2, 4, 6, 5), t(2, 4, 3, 5))),
        case("aten.einsum.default", equation="ab,bc->ac", tensors=(t(4, 1), t(1, 6))),
        case("aten.einsum.default", equation="ab,ab->", tensors=(t(4, 6), t(4, 6))),
        case("aten.einsum.default", equation="ab,cb->ac", tensors=(x, x)),
        case("aten.mm.default", self=t(4, 6), mat2=t(6, 8)),
        case("aten.mv.default", self=t(4, 6), vec=t(6)),
        case("aten.dot.default", self=t(6), tensor=t(6)),
        case("aten.bmm.default", self=t(2, 4, 6), mat2=t(2, 6, 8)),
        case("aten.addmm.default", self=t(5), mat1=t(4, 6), mat2=t(6, 5), beta=1, alpha=1),
        case("aten.addmm.default", self=t(4, 1), mat1=t(4, 6), mat2=t(6, 5), beta=2, alpha=3),
        case("aten.addmm.default", self=t(4, 5), mat1=t(4, 6), mat2=t(6, 5), beta=1, alpha=1),
        case("aten.baddbmm.default", self=t(2, 1, 5), batch1=t(2, 4, 6), batch2=t(2, 6, 5), beta=1, alpha=1),
        case("aten.addmv.default", self=t(4), mat=t(4, 6), vec=t(6), beta=1, alpha=1),
    ]


def grouped() -> list[Case]:
    """Products per expert of a mixture: tokens by expert weights, token gradients, and weight gradients."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    half = torch.bfloat16
    tokens, weights, left = t(8, 16, dtype=half), t(2, 16, 16, dtype=half), t(16, 8, dtype=half)
    return [
        case("aten._grouped_mm.default", self=tokens, mat2=weights, offs=ends, bias=None, out_dtype=None),
        case("aten._grouped_mm.default", self=left, mat2=t(8, 16, dtype=half), offs=ends, bias=None, out_dtype=None),
        case("aten._grouped_mm.default", self=weights, mat2=t(2, 16, 16, dtype=half), offs=None, bias=None, out_dtype=None),
    ]


def pointwise() -> list[Case]:
    x, y, row, scalar = t(4, 6), t(4, 6), t(6), t()
    cases = [
        case("aten.add.Tensor", self=x, other=y, alpha=1),
        case("aten.add.Tensor", self=x, other=row, alpha=2.5),
        case("aten.add.Tensor", self=x, other=x, alpha=1),
        case("aten.add.Tensor", self=x, other=1.5, alpha=1),
        case("aten.add.Tensor", self=t(4, 1, 6), other=t(3, 1), alpha=1),
        case("aten.sub.Tensor", self=x, other=y, alpha=1),
        case("aten.sub.Tensor", self=ints(9, 4, 6), other=ints(9, 6), alpha=1),
        case("aten.mul.Tensor", self=x, other=y),
        case("aten.mul.Tensor", self=x, other=x),
        case("aten.mul.Tensor", self=x, other=t(4, 1)),
        case("aten.mul.Tensor", self=x, other=scalar),
        case("aten.mul.Tensor", self=x, other=3.0),
        case("aten.mul.Tensor", self=flags(4, 6), other=x),
        case("aten.mul.Scalar", self=x, other=3.0),
        case("aten.div.Tensor", self=x, other=pos(6)),
        case("aten.div.Tensor", self=scalar, other=pos()),
        case("aten.div.Scalar", self=x, other=3.0),
        case("aten.neg.default", self=x),
        case("aten.where.self", condition=flags(4, 6), self=x, other=scalar),
        case("aten.where.self", condition=flags(4, 1), self=x, other=y),
        case("aten.masked_fill.Scalar", self=x, mask=flags(4, 6), value=0),
        case("aten.masked_fill.Scalar", self=x, mask=flags(6), value=-1.0),
        case("aten._to_copy.default", self=x, dtype="f32"),
        case("aten._to_copy.default", self=t(4, 6, dtype=torch.float32), dtype="f64"),
        case("aten._to_copy.default", self=x, dtype="i64"),
        case("aten._to_copy.default", self=x, dtype="bool"),
        case("aten._to_copy.default", self=flags(4, 6), dtype="f32"),
        case("aten._to_copy.default", self=ints(9, 4, 6), dtype="f32"),
        case("aten.clone.default", self=x),
        case("aten.copy.default", self=x, src=row),
        case("aten.fill.Tensor", self=x, value=scalar),
        case("aten.fill.Scalar", self=x, value=2.0),
        case("aten.pow.Tensor_Scalar", self=x, exponent=2),
        case("aten.pow.Tensor_Scalar", self=x, exponent=3.0),
        case("aten.native_dropout.default", input=x, p=0.0, train=True),
        case("aten.native_dropout_backward.default", grad_output=x, mask=flags(4, 6), scale=2.0),
        case("aten.gelu_backward.default", grad_output=x, self=y, approximate="none"),
        case("aten.gelu_backward.default", grad_output=x, self=y, approximate="tanh"),
        case("aten.silu_backward.default", grad_output=x, self=y),
        case("aten.tanh_backward.default", grad_output=x, output=y),
        case("aten.sigmoid_backward.default", grad_output=x, output=y),
        case("aten.threshold_backward.default", grad_output=x, self=y, threshold=0),
        case("aten.softplus_backward.default", grad_output=x, self=y, beta=1, threshold=20),
        case("aten.bitwise_and.Tensor", self=flags(4, 6), other=flags(6)),
        case("aten.bitwise_not.default", self=flags(4, 6)),
        case("aten.minimum.default", self=x, other=y),
        case("aten.floor_divide.default", self=ints(9, 4, 6), other=2),
        case("aten.lerp.Scalar", self=x, end=y, weight=0.25),
        case("aten.addcmul.default", self=x, tensor1=y, tensor2=row, value=2),
        case("aten.addcdiv.default", self=x, tensor1=y, tensor2=pos(6), value=2),
        case(
            "aten._amp_update_scale.default",
            self=pos(1).float(),
            growth_tracker=torch.zeros(1, dtype=torch.int32),
            found_inf=torch.zeros(1),
            scale_growth_factor=2.0,
            scale_backoff_factor=0.5,
            growth_interval=5,
        ),
    ]
    for name in ("gelu", "silu", "relu", "tanh", "sigmoid", "exp", "cos", "sin", "abs", "softplus"):
        cases.append(case(f"aten.{name}.default", self=x))
    for name in ("rsqrt", "log", "sqrt", "reciprocal"):
        cases.append(case(f"aten.{name}.default", self=pos(4, 6)))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        cases.append(case(f"aten.{name}.Scalar", self=ints(3, 4, 6), other=1))
        cases.append(case(f"aten.{name}.Tensor", self=ints(3, 4, 6), other=ints(3, 4, 1)))
    return cases


def views() -> list[Case]:
    pairs = [
        ((4, 6), (24,)),
        ((24,), (4, 6)),
        ((4, 6, 8), (24, 8)),
        ((24, 8), (4, 6, 8)),
        ((4, 6, 8), (4, 6, 2, 4)),
        ((4, 6, 2, 4), (4, 6, 8)),
        ((4, 2, 3, 6, 5), (4, 6, 6, 5)),
        ((6, 4), (4, 6)),
        ((4, 6), (2, 12)),
        ((1, 4, 1, 6), (4, 6)),
        ((4, 6), (1, 4, 6, 1)),
        ((3, 4, 6), (12, 6)),
        ((4, 9), (6, 6)),
        ((), (1, 1)),
        ((2, 3, 5), (30,)),
        ((1, 8), (2, 4)),
    ]
    cases = [case("aten.view.default", self=t(*a), size=b) for a, b in pairs]
    return [
        *cases,
        case("aten.view.default", self=flags(4, 6), size=(24,)),
        case("aten.permute.default", self=t(4, 2, 6), dims=(2, 0, -2)),
        case("aten.permute.default", self=t(4, 6), dims=(1, 0)),
        case("aten.transpose.int", self=t(4, 2, 6), dim0=-1, dim1=1),
        case("aten.t.default", self=t(4, 6)),
        case("aten.expand.default", self=t(4, 1, 6), size=(4, 3, 6), implicit=False),
        case("aten.expand.default", self=t(6), size=(4, 6), implicit=False),
        case("aten.expand.default", self=t(), size=(4,), implicit=False),
        case("aten.expand.default", self=t(2, 4, 1, 3, 5), size=(2, 4, 3, 3, 5), implicit=False),
        case("aten.repeat.default", self=t(4, 6), repeats=(3, 1, 2)),
        case("aten.repeat.default", self=t(1, 6), repeats=(4, 1)),
    ]


def along() -> list[Case]:
    x = t(4, 6, 8)
    soft, log = torch.softmax(x, -1), torch.log_softmax(x, -1)
    return [
        case("aten._log_softmax.default", self=x, dim=-1, half_to_float=False),
        case("aten._softmax.default", self=x, dim=1, half_to_float=False),
        case("aten._safe_softmax.default", self=x, dim=-1, dtype=None),
        case("aten._softmax_backward_data.default", grad_output=t(4, 6, 8), output=soft, dim=-1, input_dtype="f64"),
        case("aten._log_softmax_backward_data.default", grad_output=t(4, 6, 8), output=log, dim=-1, input_dtype="f64"),
        case("aten.cumsum.default", self=x, dim=1, dtype=None),
        case("aten.cumsum.default", self=ints(4, 4, 6), dim=-1, dtype=None),
        case("aten.cumsum.default", self=t(4, 6) * 9, dim=-1, dtype="i32"),
        case("aten.sort.default", self=x, dim=-1, descending=True),
        case("aten.topk.default", self=x, k=2, dim=-1, largest=True, sorted=True),
        case("aten.max.dim", self=x, dim=1, keepdim=False),
        case("aten.argmax.default", self=x, dim=2, keepdim=True),
        case("aten.var.correction", self=x, dim=(1,), correction=1, keepdim=False),
        case("aten.slice.Tensor", self=x, dim=1, start=1, end=4, step=1),
        case("aten.slice_backward.default", grad_output=t(4, 3, 8), input_sizes=(4, 6, 8), dim=1, start=1, end=4, step=1),
        case("aten.slice_scatter.default", self=x, src=t(4, 3, 8), dim=1, start=1, end=4, step=1),
        case("aten.select_scatter.default", self=x, src=t(4, 8), dim=1, index=2),
        case("aten.select.int", self=x, dim=1, index=0),
        case("aten.select.int", self=x, dim=-1, index=3),
        case("aten.select_backward.default", grad_output=t(4, 8), input_sizes=(4, 6, 8), dim=1, index=2),
        case("aten.glu_backward.default", grad_output=t(4, 3, 8), self=t(4, 6, 8), dim=1),
        case("aten.view_as_complex.default", self=t(4, 6, 2)),
        case("aten.view_as_real.default", self=torch.view_as_complex(t(4, 6, 2))),
        case("aten.unbind.int", self=t(4, 3, 6), dim=1),
        case("aten.split.Tensor", self=x, split_size=4, dim=-1),
        case("aten.split_with_sizes.default", self=x, split_sizes=(1, 5), dim=1),
        case("aten.stack.default", tensors=(t(4, 6), t(4, 6), t(4, 6)), dim=1),
        case("aten.tril.default", self=t(4, 6, 6), diagonal=0),
        case("aten.triu.default", self=t(4, 5, 6), diagonal=1),
        case("aten.flip.default", self=x, dims=(1,)),
        case("aten.roll.default", self=x, shifts=(1,), dims=(2,)),
        case("aten.cat.default", tensors=(t(4, 2, 8), t(4, 6, 8)), dim=1),
        case("aten.cat.default", tensors=(x, x), dim=-1),
        case("aten.constant_pad_nd.default", self=x, pad=(0, 1), value=0),
        case("aten.constant_pad_nd.default", self=x, pad=(0, 0, 2, -1), value=-100),
    ]


def reductions() -> list[Case]:
    x = t(4, 6, 8)
    cases = [
        case("aten.sum.dim_IntList", self=x, dim=(0, 1), keepdim=False, dtype=None),
        case("aten.sum.dim_IntList", self=x, dim=(-1,), keepdim=True, dtype=None),
        case("aten.sum.dim_IntList", self=ints(5, 4, 6), dim=None, keepdim=False, dtype=None),
        case("aten.sum.default", self=x, dtype=None),
        case("aten.sum.default", self=flags(4, 6), dtype=None),
        case("aten.mean.dim", self=x, dim=(-1,), keepdim=True, dtype=None),
        case("aten.mean.dim", self=x, dim=(0, 2), keepdim=False, dtype=None),
        case("aten.mean.default", self=x, dtype=None),
        case("aten.any.dim", self=flags(4, 6), dim=1, keepdim=False),
    ]
    for name in ("amax", "amin"):
        cases.append(case(f"aten.{name}.default", self=x, dim=(1,), keepdim=False))
        cases.append(case(f"aten.{name}.default", self=x, dim=(), keepdim=False))
    return cases


def norms() -> list[Case]:
    x, w, b, g = t(4, 6, 8), t(8), t(8), t(4, 6, 8)
    _, mean, rstd = torch.ops.aten.native_layer_norm.default(x, [8], w, b, 1e-5)
    image, cw, cb, cm, cv = t(4, 6, 3, 3), t(6), t(6), t(6), pos(6)
    batch = torch.ops.aten._native_batch_norm_legit_functional.default(image, cw, cb, cm, cv, True, 0.1, 1e-5)
    layer = "aten.native_layer_norm_backward.default"
    return [
        case("aten.native_layer_norm.default", input=x, normalized_shape=(8,), weight=w, bias=b, eps=1e-5),
        case("aten.native_layer_norm.default", input=x, normalized_shape=(6, 8), weight=None, bias=None, eps=1e-5),
        case(layer, grad_out=g, input=x, normalized_shape=(8,), mean=mean, rstd=rstd, weight=w, bias=b, output_mask=(True, True, True)),
        case("aten._fused_rms_norm.default", input=x, normalized_shape=(8,), weight=w, eps=1e-5),
        case(
            "aten._native_batch_norm_legit_functional.default",
            input=image, weight=cw, bias=cb, running_mean=cm, running_var=cv, training=True, momentum=0.1, eps=1e-5,
        ),
        case(
            "aten.native_batch_norm_backward.default",
            grad_out=t(4, 6, 3, 3), input=image, weight=cw, running_mean=cm, running_var=cv,
            save_mean=batch[1], save_invstd=batch[2], train=True, eps=1e-5, output_mask=(True, True, True),
        ),
    ]  # fmt: skip


def attention() -> list[Case]:
    cases = []
    flash = "aten._scaled_dot_product_flash_attention_for_cpu"
    for heads, causal, mask in ((4, True, None), (4, False, t(4, 1, 6, 6)), (4, False, t(6, 6)), (4, False, t(1, 4, 6, 6))):
        q, k, v, g = (t(4, heads, 6, 8) for _ in range(4))
        settings = {"dropout_p": 0.0, "is_causal": causal, "attn_mask": mask, "scale": None}
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, attn_mask=mask)
        cases.append(case(f"{flash}.default", query=q, key=k, value=v, **settings))
        cases.append(case(f"{flash}_backward.default", grad_out=g, query=q, key=k, value=v, out=out, logsumexp=lse, **settings))
    q, k = t(4, 8, 6, 8), t(4, 2, 6, 8)
    math_op = "aten._scaled_dot_product_attention_math.default"
    rest = {"dropout_p": 0.0, "is_causal": False, "dropout_mask": None, "scale": None}
    cases.append(case(math_op, query=q, key=k, value=t(4, 2, 6, 8), attn_mask=None, **rest, enable_gqa=True))
    cases.append(case(math_op, query=q, key=q, value=t(4, 8, 6, 8), attn_mask=t(4, 1, 6, 6), **rest, enable_gqa=False))
    return cases


def indexing() -> list[Case]:
    table, rows = t(10, 6), ints(10, 4, 6)
    x = t(4, 6, 8)
    return [
        case("aten.embedding.default", weight=table, indices=rows, padding_idx=-1, scale_grad_by_freq=False, sparse=False),
        case(
            "aten.embedding_dense_backward.default",
            grad_output=t(4, 6, 8), indices=rows, num_weights=10, padding_idx=3, scale_grad_by_freq=False,
        ),
        case(
            "aten.embedding_dense_backward.default",
            grad_output=t(4, 6, 8), indices=rows, num_weights=10, padding_idx=-1, scale_grad_by_freq=True,
        ),
        case("aten.gather.default", self=x, dim=-1, index=ints(8, 4, 6, 2), sparse_grad=False),
        case("aten.gather.default", self=x, dim=1, index=ints(6, 3, 4, 8), sparse_grad=False),
        case("aten.scatter.src", self=x, dim=-1, index=ints(8, 4, 6, 8).argsort(-1), src=t(4, 6, 8)),
        case("aten.scatter.value", self=x, dim=-1, index=ints(8, 4, 6, 2), value=0),
        case("aten.scatter.value", self=x, dim=-1, index=ints(8, 4, 6, 2), value=1.0),
        case("aten.scatter_add.default", self=x, dim=1, index=ints(6, 4, 6, 8), src=t(4, 6, 8)),
        case("aten.index.Tensor", self=x, indices=(ints(4, 6),)),
        case("aten.index.Tensor", self=x, indices=(None, ints(6, 4))),
        case("aten.index.Tensor", self=x, indices=(ints(4, 4, 1), ints(6, 6))),
        case("aten.index.Tensor", self=x, indices=(ints(4, 6), None, ints(8, 6))),
        case("aten.index.Tensor", self=t(4, 6), indices=(flags(4),)),
        case("aten.index_put.default", self=x, indices=(None, ints(6, 4)), values=t(4, 4, 8), accumulate=True),
        case("aten.index_put.default", self=x, indices=(ints(4, 6), None, ints(8, 6)), values=t(1), accumulate=True),
        case("aten.index_put.default", self=x, indices=(ints(4, 6),), values=t(6, 6, 8), accumulate=True),
        case("aten.scatter_add.default", self=x, dim=1, index=ints(6, 4, 5, 8), src=t(4, 5, 8)),
        case("aten.index_select.default", self=x, dim=1, index=ints(6, 4)),
        case("aten.index_add.default", self=x, dim=1, index=ints(6, 4), source=t(4, 4, 8), alpha=2),
        case("aten.index_put.default", self=x, indices=(torch.tensor([2, 0]),), values=t(2, 6, 8), accumulate=False),
        case("aten.histc.default", self=t(4, 6), bins=4, min=-2, max=2),
        case("aten.histc.default", self=t(4, 6), bins=4, min=0, max=0),
    ]  # fmt: skip


def losses() -> list[Case]:
    logs, target = torch.log_softmax(t(4, 6, 5), -1), ints(5, 4, 6)
    target[1, 2] = -100
    total, weight = t(), torch.tensor(11.0, dtype=torch.float64)
    flat, rows = logs.reshape(24, 5), target.reshape(24)
    cases = []
    for classes in (None, pos(5)):
        cases.append(case("shard.nll_loss_forward", self=logs, target=target, weight=classes, ignore_index=-100))
        for kind in ("mean", "sum"):
            cases.append(
                case(
                    "shard.nll_loss_backward", grad_output=total, self=logs, target=target, weight=classes,
                    ignore_index=-100, total_weight=weight, reduction=kind,
                )
            )  # fmt: skip
    for reduction in (0, 1, 2):
        cases.append(case("aten.nll_loss_forward.default", self=flat, target=rows, weight=None, reduction=reduction, ignore_index=-100))
        gradient = t(24) if reduction == 0 else total
        cases.append(
            case(
                "aten.nll_loss_backward.default", grad_output=gradient, self=flat, target=rows, weight=None,
                reduction=reduction, ignore_index=-100, total_weight=weight,
            )
        )  # fmt: skip
    return cases


def convolutions() -> list[Case]:
    cases = []
    kinds = [(1, None, False), (1, t(6), False), (2, t(6), False), (1, None, True), (1, t(6), True), (4, t(8), False), (4, t(8), True)]
    for groups, bias, transposed in kinds:
        image, outputs = t(4, 4, 6, 6), 8 if groups == 4 else 6
        kernel = t(4, outputs // groups, 2, 2) if transposed else t(outputs, 4 // groups, 2, 2)
        settings = {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "transposed": transposed, "output_padding": (0, 0)}
        cases.append(case("aten.convolution.default", input=image, weight=kernel, bias=bias, **settings, groups=groups))
        out = torch.ops.aten.convolution.default(image, kernel, bias, *settings.values(), groups)
        cases.append(
            case(
                "aten.convolution_backward.default", grad_output=t(*out.shape), input=image, weight=kernel,
                bias_sizes=None if bias is None else (outputs,), **settings, groups=groups, output_mask=(True, True, bias is not None),
            )
        )  # fmt: skip
    line = {"stride": (1,), "padding": (1,), "dilation": (1,), "transposed": False, "output_padding": (0,), "groups": 6}
    cases.append(case("aten.convolution.default", input=t(4, 6, 9), weight=t(6, 1, 3), bias=t(6), **line))
    image = t(4, 6, 6, 6)
    group = {"N": 4, "C": 6, "HxW": 36, "group": 3}
    _, mean, rstd = torch.ops.aten.native_group_norm.default(image, t(6), t(6), *group.values(), 1e-5)
    cases.append(case("aten.native_group_norm.default", input=image, weight=t(6), bias=t(6), **group, eps=1e-5))
    cases.append(
        case(
            "aten.native_group_norm_backward.default", grad_out=t(4, 6, 6, 6), input=image, mean=mean, rstd=rstd, weight=t(6),
            **group, output_mask=(True, True, True),
        )
    )  # fmt: skip
    up = {"output_size": (12, 12), "scales_h": None, "scales_w": None}
    cases.append(case("aten.upsample_nearest2d.default", self=image, **up))
    cases.append(
        case(
            "aten.upsample_bilinear2d_backward.default", grad_output=t(4, 6, 12, 12), output_size=(12, 12), input_size=(4, 6, 6, 6),
            align_corners=False, scales_h=None, scales_w=None,
        )
    )  # fmt: skip
    pooling = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "ceil_mode": False}
    _, where = torch.ops.aten.max_pool2d_with_indices.default(image, *pooling.values())
    cases.append(case("aten._adaptive_avg_pool2d.default", self=image, output_size=(2, 3)))
    cases.append(case("aten._adaptive_avg_pool2d_backward.default", grad_output=t(4, 6, 2, 3), self=image))
    averages = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "ceil_mode": False, "count_include_pad": True}
    cases.append(case("aten.avg_pool2d.default", self=image, **averages, divisor_override=None))
    cases.append(case("aten.avg_pool2d_backward.default", grad_output=t(4, 6, 3, 3), self=image, **averages, divisor_override=None))
    cases.append(case("aten.max_pool2d_with_indices.default", self=image, **pooling))
    cases.append(case("aten.max_pool2d_with_indices_backward.default", grad_output=t(4, 6, 3, 3), self=image, **pooling, indices=where))
    return cases


def factories() -> list[Case]:
    x = t(4, 6)
    return [
        case("aten.full.default", size=(4, 6), fill_value=2.0, dtype="f64"),
        case("aten.zeros.default", size=(4, 6)),
        case("aten.ones.default", size=(4,)),
        case("aten.arange.default", end=6),
        case("aten.arange.start_step", start=1, end=13, step=2, dtype="i64"),
        case("aten.scalar_tensor.default", s=2.0, dtype="f64"),
        case("aten.zeros_like.default", self=x),
        case("aten.full_like.default", self=x, fill_value=3.0),
        case("aten.new_ones.default", self=x, size=(2, 4)),
        case("aten.new_zeros.default", self=x, size=(4, 6)),
    ]


FAMILIES = {
    "einsum": einsums,
    "grouped": grouped,
    "pointwise": pointwise,
    "views": views,
    "along": along,
    "reductions": reductions,
    "norms": norms,
    "attention": attention,
    "indexing": indexing,
    "losses": losses,
    "convolutions": convolutions,
    "factories": factories,
}
