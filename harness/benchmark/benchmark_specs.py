"""What benchmark_kernels.py measures of each kernel: sizes, the least work, the words of its table.

Imports no PyTorch.  In next_steps/comparisons/ are the inputs (benchmark_problems.py) and the
implementations (benchmark_contenders.py, benchmark_peers.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

DTYPES = "bf16", "fp16", "fp32"
LLAMA_HIDDEN, LLAMA_INTERMEDIATE, LLAMA_VOCAB = 4096, 14_336, 128_256
Q_HEADS, K_HEADS, HEAD_DIM = 32, 8, 128  # of LLaMA 3.1 8B
MAX_SEQUENCE = 2048  # of RoPE's B x T tokens
# Without a GPU: what Triton's interpreter does in seconds.
CPU_TOKENS, CPU_HIDDEN, CPU_VOCAB, CPU_INTERMEDIATE, CPU_PARAMETERS = (4, 16), 256, 1000, 1000, 5000
CPU_QUANTIZED = 64 * 80
CPU_COLUMNS = 64  # of rows in FP8

EAGER = "PyTorch, as Hugging Face writes it"
FORMULA = "PyTorch's formula"
OURS = "ours"
IN_PLACE = f"{OURS}, in place"
TWO_KERNELS = f"{OURS}, two kernels"
PLAIN = f"{OURS}, the plain form"
SEPARATE = f"{OURS}, casts apart"
ONE_TILE = "Triton, a row in one tile"
COMPILED = "torch.compile"
HOST_FLOOR = "autograd Function that does nothing"

Size = int | tuple[int, ...]  # of a kernel's dimensions: a number if it has one


def numbers(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


@dataclass(frozen=True)
class Rate:
    """What a kernel's time is turned into, and the ceiling beside which it is printed."""

    name: str
    format: str
    per_us: float  # bytes or FLOP in a microsecond that are one of it
    ceiling: str
    key: str  # in a row of the record
    ceiling_key: str  # in the record
    per_element: str  # in a section of the record: the work for each element of the input


BANDWIDTH = Rate("GB/s", ",.0f", 1e3, "copy", "gbs", "copy_gbs", "bytes_per_element")
COMPUTE = Rate("TFLOP/s", ",.1f", 1e6, "matmul", "tflops", "matmul_tflops", "flop_per_element")


@dataclass(frozen=True)
class Dimension:
    name: str
    gpu: tuple[int, ...]  # each measured, unless told
    cpu: tuple[int, ...]  # the same without a GPU
    flag: str | None = None  # of the command line; None: it is what it is

    def defaults(self, on_gpu: bool) -> tuple[int, ...]:
        return self.gpu if on_gpu else self.cpu


@dataclass(frozen=True)
class Spec:
    title: str
    gpu_tokens: tuple[int, ...]  # unless told
    dimensions: tuple[Dimension, ...]  # of the input, after the tokens
    work: int  # see WORK
    errors: tuple[str, ...]  # a problem's parts
    cpu_tokens: tuple[int, ...] = CPU_TOKENS
    beside: float = 0  # bytes for each element, of tensors that are not as large
    rate: Rate = BANDWIDTH
    rows: str = "Tokens"  # what the first dimension counts; if anything else, not --tokens
    judged: str = "gradients' errors"
    notes: tuple[str, ...] = ()  # above the table
    swept_tokens: int | None = None  # of --sweep on a GPU; None: it does not know the settings

    def tokens(self, on_gpu: bool) -> list[int]:
        return list(self.gpu_tokens if on_gpu else self.cpu_tokens)

    def tokens_to_sweep(self, on_gpu: bool) -> int:
        return self.swept_tokens if on_gpu else self.cpu_tokens[-1]


# WORK.  Tensors as large as the input that must be read or written, forward and backward together.
# Every implementation is given the same count, so that a column of GB/s compares times and nothing
# else.
#   RMSNorm, 5: the forward reads x and writes y, the backward reads x and dy and writes dx.  The
#   weight and one number per row are less than 0.1 % of that.
#   Cross-entropy, 3: the forward reads the logits; the backward reads them again, since nothing
#   stays on the chip between the two, and writes their gradient.  Who computes the gradient in the
#   forward can have part of the second read from the cache, and so come closer to the copy rate, or
#   pass it.
#   Reverse KL, 3: student and teacher are read, the gradient is written.
#   SwiGLU, 8: the forward reads gate and up and writes y, the backward reads dy, gate and up and
#   writes dgate and dup.
#   RoPE, 4: the forward reads q and k and writes both, the backward does so with their gradients.
#   cos and sin are as long as one head of 40, if all samples share them.
#   AdamW, 7: reads p, g, m and v, writes p, m and v.
#   NF4, 1, the weight that is written; and beside it half a byte, 1 / 64 and 4 / (64 * 256) bytes
#   for each number of it.
#   FP8, 1, the matrix that is read; and beside it a byte for each number, its code.
#   FP8 casts, 5: of SwiGLU, whose forward reads gate and up, whose backward reads dy, gate and up;
#   and beside them 1 and 3 bytes of codes.
#   Linear + cross-entropy, 6, but FLOP: three products, each of which multiplies and adds per logit
#   and hidden column.
HIDDEN = Dimension("hidden", (LLAMA_HIDDEN,), (CPU_HIDDEN,), "hidden")
VOCABULARY = Dimension("vocabulary", (LLAMA_VOCAB,), (CPU_VOCAB,), "vocab")
ROPE_COLUMNS = (Q_HEADS + K_HEADS) * HEAD_DIM
SPECS = {
    "rmsnorm": Spec(
        "RMSNorm",
        gpu_tokens=(256, 1024, 4096, 16_384, 65_536),
        dimensions=(HIDDEN,),
        work=5,
        errors=("dx", "dW"),
        swept_tokens=16_384,
    ),
    "cross_entropy": Spec(
        "Cross-Entropy",
        gpu_tokens=(128, 256, 512, 1024, 8192),
        dimensions=(VOCABULARY,),
        work=3,
        errors=("target", "other"),
        notes=("in place: the gradient overwrites the logits, which are lost",),
        swept_tokens=8192,
    ),
    "swiglu": Spec(
        "SwiGLU",
        gpu_tokens=(1024, 16_384),
        dimensions=(Dimension("columns", (LLAMA_INTERMEDIATE,), (CPU_INTERMEDIATE,), "hidden"),),
        work=8,
        errors=("y", "dgate", "dup"),
        judged="errors of y and the gradients",
        notes=("in place: the gradients overwrite gate and up, which are lost",),
    ),
    "rope": Spec(
        "RoPE",
        gpu_tokens=(512, 8192, 32_768),
        dimensions=(Dimension("columns", (ROPE_COLUMNS,), (ROPE_COLUMNS,)),),
        work=4,
        errors=("rotated", "gradient"),
        judged="errors of the rotated and of the gradients",
        notes=(
            f"columns: of q ({Q_HEADS} heads x {HEAD_DIM}) and k ({K_HEADS} x {HEAD_DIM}), "
            f"transposed views of (B, T, heads, {HEAD_DIM}), T up to {MAX_SEQUENCE:,}",
            "in place: the results overwrite q and k, the gradients those that come in",
        ),
    ),
    "adamw": Spec(
        "AdamW",
        gpu_tokens=(LLAMA_HIDDEN * LLAMA_INTERMEDIATE,),  # an MLP's projection: 58.7 million
        cpu_tokens=(CPU_PARAMETERS,),
        dimensions=(),
        work=7,
        errors=("update",),
        rows="Parameters",
        judged="error of what a step adds to the weights",
        notes=(
            "one call is one step, which has no forward and no backward; "
            "PyTorch's default on a GPU is foreach",
        ),
    ),
    "linear_cross_entropy": Spec(
        "Linear + Cross-Entropy",
        gpu_tokens=(512, 8192),
        dimensions=(HIDDEN, VOCABULARY),
        work=6,
        errors=("dhidden", "dW target", "dW other"),
        rate=COMPUTE,
        notes=("Forward: those that keep no logits compute the gradients in it",),
    ),
    "reverse_kl": Spec(
        "Reverse KL",
        gpu_tokens=(4096,),
        dimensions=(Dimension("vocabulary", (32_768, 65_536, 131_072), (CPU_VOCAB,), "vocab"),),
        work=3,
        errors=("probable", "other"),
        notes=(
            "ours: one pass and the gradient in the forward; "
            "two kernels: the backward reads the logits again",
            f"{ONE_TILE}: up to 32,768 columns, both softmaxes and the gradient in one kernel "
            "of 512 threads",
        ),
    ),
    "nf4": Spec(
        "NF4",
        gpu_tokens=(LLAMA_HIDDEN * LLAMA_HIDDEN // 4, LLAMA_HIDDEN * LLAMA_INTERMEDIATE),  # k, up
        cpu_tokens=(CPU_QUANTIZED,),
        dimensions=(),
        work=1,
        beside=1 / 2 + 1 / 64 + 4 / (64 * 256),
        errors=("weight",),
        rows="Numbers",
        judged="error of the weight",
        notes=("one call writes the weight out, and has no backward",),
    ),
    "fp8": Spec(
        "FP8",
        gpu_tokens=(512, 8192),
        dimensions=(
            Dimension("columns", (LLAMA_HIDDEN, LLAMA_INTERMEDIATE), (CPU_COLUMNS,), "hidden"),
        ),
        work=1,
        beside=1,
        errors=("rows",),
        judged="error of the rows",
        notes=("one call finds scales and codes of all rows, and has no backward",),
    ),
    "fp8_casts": Spec(
        "FP8 Casts: SwiGLU",
        gpu_tokens=(512, 8192),
        dimensions=(Dimension("columns", (LLAMA_INTERMEDIATE,), (CPU_COLUMNS,), "hidden"),),
        work=5,
        beside=4,
        errors=("y", "gradients", "y again"),
        judged="errors of what the codes stand for",
        notes=(
            "one call is a forward, and a backward that computes y again: codes and scales of all",
            f"{SEPARATE}: what the kernels of swiglu wrote in the inputs' dtype is quantized",
        ),
    ),
}
