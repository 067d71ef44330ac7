"""The product with a weight in NF4: of five tensors, and a gradient for x alone."""

import torch

from harness.cli.device import DEVICE, HAS_GPU
from next_steps.lessons import nf4_kernel
from next_steps.lessons.nf4_kernel import (
    NF4,
    NF4LinearFunction,
    nf4_dequantize_reference,
    nf4_linear_reference,
    nf4_quantize,
)
from subjects.subject import PADDED_WIDTHS, Subject, bad_call


def make(rows, size, dtype, seed=0):
    """x, and a weight quantized from bf16, whose rows are of several magnitudes; size: (O, I)."""
    O, I = size
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 + torch.randn((*rows, I), generator=generator)
    weight = torch.randn(size, generator=generator) * 2 * torch.rand((O, 1), generator=generator)
    dy = 0.25 + torch.randn((*rows, O), generator=generator)
    nf4 = nf4_quantize((weight / I**0.5).to(DEVICE, torch.bfloat16))
    return {"x": x.to(DEVICE, dtype), **nf4._asdict()}, {"y": dy.to(DEVICE, dtype)}


def shape_of(x, codes):
    return 2 * codes.numel() // x.shape[-1], x.shape[-1]


def product(x, *nf4):
    return NF4LinearFunction.apply(x, shape_of(x, nf4[0]), *nf4)


def reference(x, *nf4):
    return nf4_linear_reference(x, shape_of(x, nf4[0]), *nf4)


def wrong_answers(inputs, douts, right):
    x, *nf4 = inputs.values()
    nf4, shape, dy = NF4(*nf4), shape_of(x, nf4[0]), douts["y"]

    def with_weight(weight):
        return {"y": x @ weight.t(), "dx": dy @ weight}

    def with_parts(**changed):
        weight = nf4_dequantize_reference(nf4._replace(**changed), shape, torch.float64)
        return with_weight(weight)

    weight = nf4_dequantize_reference(nf4, shape, torch.float64)
    halves_exchanged = nf4.codes << 4 | nf4.codes >> 4
    unwritten = weight.clone()
    unwritten.view(-1)[-64:] = 0
    return {
        "low half first": with_parts(codes=halves_exchanged),
        "high half twice": with_parts(codes=nf4.codes >> 4 | nf4.codes & 240),
        "absmax without its mean": with_parts(absmax_mean=0 * nf4.absmax_mean),
        "absmax without its scale": with_parts(absmax_scales=nf4.absmax_scales**0),
        "the mean for every absmax": with_parts(absmax_scales=0 * nf4.absmax_scales),
        "the next block's absmax": with_parts(absmax_codes=nf4.absmax_codes.roll(-1)),
        "the next value of absmax": with_parts(absmax_codes=(nf4.absmax_codes + 1).clamp(max=255)),
        "16 equal steps": with_parts(
            tables=torch.cat([torch.linspace(-1, 1, 16).to(nf4.tables), nf4.tables[16:]])
        ),
        "the last block unwritten": with_weight(unwritten),
        "dx of y": {"dx": right["y"] @ weight},
    }


def bad_input():
    inputs, _ = make((2,), (4, 64), torch.float32)
    x, *nf4 = inputs.values()
    nf4 = NF4(*nf4)

    def bad(error, sentence, **changed):
        return bad_call(inputs, error, sentence, **changed)

    in_bf16 = nf4.absmax_scales.bfloat16()
    too_few = r"absmax_codes has shape \(3,\), expected \(4,\)"
    dtype = "absmax_scales is torch.bfloat16, expected torch.float32"
    one_table = r"tables has shape \(16,\), expected \(272,\)"
    mean = r"absmax_mean has shape \(\), expected \(1,\)"
    shape = r"shape is \(4, 60\) and codes holds 256 numbers, expected as many"
    nowhere = {name: t.to("meta") for name, t in inputs.items()}
    integers = "codes is torch.int32, expected torch.uint8"
    return {
        "x is float64": bad(TypeError, "the weight is wanted in torch.float64", x=x.double()),
        "codes are int32": bad(TypeError, integers, codes=nf4.codes.int()),
        "too few absmax codes": bad(ValueError, too_few, absmax_codes=nf4.absmax_codes[1:]),
        "scales in bf16": bad(TypeError, dtype, absmax_scales=in_bf16),
        "one table": bad(ValueError, one_table, tables=nf4.tables[:16]),
        "a mean of no dimension": bad(ValueError, mean, absmax_mean=nf4.absmax_mean[0]),
        "another shape": bad(ValueError, shape, x=x[:, :60]),
        "without memory": bad(ValueError, "codes is on meta, expected a GPU", **nowhere),
    }


SUBJECTS = (
    Subject(
        name="nf4",
        kernels=(nf4_kernel,),
        function=product,
        reference=reference,
        make=make,
        differentiable=("x",),
        wrong_answers=wrong_answers,
        made_by_kernels_alone=False,
        size=(6, 64),
        # of blocks: one, next to a tile's 4 and to a group's 256; of rows: parts of a block
        ragged_sizes=((1, 64), (64, 1), (16, 12), (5, 64), (2, 192), (255, 64), (3, 5504)),
        large_sizes=((160, 960),),
        saved=NF4._fields,
        activations=("x",),
        # an H200 in fp32: eager PyTorch multiplies one row by another kernel than the compiler
        exact_compiled=not HAS_GPU,
        # several groups of absmaxes, and no two lengths alike: the compiler would rely on that
        compiled_first=tuple(((5,), (192, width)) for width in PADDED_WIDTHS),
        compiled_next=(((4,), (64, 2048)), ((16,), (128, 384))),
        gpu_size=(1024, 4096),
        workspace=lambda inputs: 4 * inputs["codes"].numel() + 2**20,  # the weight in bf16
        row_inputs=("x",),
        bad_input=bad_input,
        bad_when_compiled="too few absmax codes",
        refused_on_cpu="codes",
        multiplied=("x",),
        exempt={
            "rows_beyond_int32": "rows are x's, which only PyTorch's product reads",
            "rows_beyond_int32_in_memory": "its own test has a weight of so many numbers",
            "forward_mode_is_refused": "compiled, it is right: the operator takes no x",
            "frozen_inputs_leave_the_others_their_gradients": "there is one gradient, that of x",
        },
    ),
)
