"""What benchmark_kernels.py measures of each kernel: sizes, least work, words of the table.

This imports no PyTorch.  In next_steps/comparisons/ are the inputs (benchmark_problems.py) and the
implementations (benchmark_contenders.py, and of other libraries benchmark_peers.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.profiling.kernel_facts import Launch, launch_of

TIMED_DTYPES = "bf16", "fp16", "fp32"
LLAMA_HIDDEN, LLAMA_INTERMEDIATE, LLAMA_VOCAB = 4096, 14_336, 128_256
Q_HEADS, K_HEADS, HEAD_DIM = 32, 8, 128  # of LLaMA 3.1 8B
MAX_SEQUENCE = 2048  # of RoPE's B x T tokens
# Without a GPU: sizes that Triton's interpreter can run in seconds.
CPU_TOKENS, CPU_HIDDEN, CPU_VOCAB, CPU_INTERMEDIATE, CPU_PARAMETERS = (4, 16), 256, 1000, 1000, 5000
CPU_NUMBERS = 2**22  # of an input: the interpreter takes one core a minute for them
CPU_QUANTIZED, CPU_COLUMNS = 64 * 80, 64

EAGER = "PyTorch, as Hugging Face writes it"
FORMULA = "PyTorch's formula"
OURS = "ours"
IN_PLACE = f"{OURS}, in place"
TWO_KERNELS = f"{OURS}, two kernels"
PLAIN_FORM = f"{OURS}, the plain form"
ONE_CHUNK = f"{OURS}, one chunk"
SEPARATE = f"{OURS}, casts apart"
NORM_APART = f"{OURS}, norm and RoPE apart"
WIDE_MOMENTS = f"{OURS}, bf16 moments"
ONE_TILE = "Triton, a row in one tile"
COMPILED = "torch.compile"
HOST_FLOOR = "autograd Function that does nothing"

Size = int | tuple[int, ...]  # of a kernel's dimensions: a number if it has one


def numbers(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


@dataclass(frozen=True)
class Rate:
    """The unit of a kernel's rate, and the ceiling beside which the rate is printed."""

    name: str
    format: str
    per_us: float  # bytes or FLOP in a microsecond that make 1 of the unit
    ceiling: str
    key: str  # in a row of the record
    ceiling_key: str  # in the record
    per_element: str  # in a section of the record: the work for each element of the input


BANDWIDTH = Rate("GB/s", ",.0f", 1e3, "copy", "gbs", "copy_gbs", "bytes_per_element")
COMPUTE = Rate("TFLOP/s", ",.1f", 1e6, "matmul", "tflops", "matmul_tflops", "flop_per_element")


@dataclass(frozen=True)
class Dimension:
    name: str
    gpu: tuple[int, ...]  # the sizes measured by default
    cpu: tuple[int, ...]  # the same without a GPU
    flag: str | None = None  # sets other sizes; None: no flag does


@dataclass(frozen=True)
class Spec:
    """One kernel's sizes, least work and words.

    The least work is what our kernels' launches move in kernel_facts.py.  Every implementation is
    given the same count.  So a column of GB/s compares times, and nothing else.
    """

    title: str
    gpu_tokens: tuple[int, ...]  # measured by default
    dimensions: tuple[Dimension, ...]  # of the input, after the tokens
    errors: tuple[str, ...]  # a problem's parts
    launches: tuple[str, ...] = ()  # beginnings of our kernels' names, forward and backward
    spared: int = 0  # passes of these launches that the benchmark does not ask for
    flops: int = 0  # for each element, of matrix products; then the rate is TFLOP/s
    cpu_tokens: tuple[int, ...] = CPU_TOKENS
    rows: str = "Tokens"  # what the first dimension counts; --tokens sets only tokens
    judged: str = "gradients' errors"
    notes: tuple[str, ...] = ()  # above the table
    swept_tokens: int | None = None  # by the sweep, on a GPU; None: it has none

    def tokens(self, on_gpu: bool) -> list[int]:
        return list(self.gpu_tokens if on_gpu else self.cpu_tokens)

    @property
    def rate(self) -> Rate:
        return COMPUTE if self.flops else BANDWIDTH

    @property
    def work(self) -> int:
        """The tensors as large as the input that must be read or written, or the FLOP."""
        return self.flops or sum(launch.passes for launch in self.moves()) - self.spared

    @property
    def beside(self) -> float:
        """Bytes for each element, of tensors that are not as large."""
        return sum(launch.beside for launch in self.moves())

    def moves(self) -> list[Launch]:
        return [launch_of(name)[1] for name in self.launches]

    def per_element(self, width: int) -> float:
        """Return the least work for each element of the input, a number being so wide."""
        return self.flops or self.work * width + self.beside


def columns(*gpu: int, cpu: int, flag: str | None = "hidden") -> Dimension:
    return Dimension("columns", gpu, (cpu,), flag)


HIDDEN = Dimension("hidden", (LLAMA_HIDDEN,), (CPU_HIDDEN,), "hidden")
VOCABULARY = Dimension("vocabulary", (LLAMA_VOCAB,), (CPU_VOCAB,), "vocab")
ROPE_COLUMNS = (Q_HEADS + K_HEADS) * HEAD_DIM
SPECS = {
    "rmsnorm": Spec(
        "RMSNorm",
        (256, 1024, 4096, 16_384, 65_536),
        (HIDDEN,),
        ("dx", "dW"),
        ("_rmsnorm_fwd", "_rmsnorm_bwd"),  # the weight and rstd are less than 0.1 % of that
        swept_tokens=16_384,
    ),
    "cross_entropy": Spec(
        "Cross-Entropy",
        (128, 256, 512, 1024, 8192),
        (VOCABULARY,),
        ("target", "other"),
        # The backward reads the logits again, since nothing stays on the chip between the two. An
        # implementation that computes the gradient in the forward can read a part from the cache.
        # So it can come closer to the copy rate, or pass it.
        ("_cross_entropy_fwd", "_cross_entropy_bwd"),
        notes=("in place: the gradient overwrites the logits, which are lost",),
        swept_tokens=8192,
    ),
    "swiglu": Spec(
        "SwiGLU",
        (1024, 16_384),
        (columns(LLAMA_INTERMEDIATE, cpu=CPU_INTERMEDIATE),),
        ("y", "dgate", "dup"),
        ("_swiglu_fwd", "_swiglu_bwd"),
        spared=1,  # only an MLP asks the backward for y
        judged="errors of y and the gradients",
        notes=("in place: the gradients overwrite gate and up, which are lost",),
    ),
    "rope": Spec(
        "RoPE",
        (512, 8192, 32_768),
        (columns(ROPE_COLUMNS, cpu=ROPE_COLUMNS, flag=None),),
        ("rotated", "gradient"),
        # cos and sin are as long as one head of 40, if all samples share them.
        ("_rope", "_rope"),
        judged="errors of the rotated and of the gradients",
        notes=(
            f"columns: of q ({Q_HEADS} heads x {HEAD_DIM}) and k ({K_HEADS} x {HEAD_DIM}), "
            f"transposed views of (B, T, heads, {HEAD_DIM}), T up to {MAX_SEQUENCE:,}",
            "in place: the results overwrite q and k, the gradients those that come in",
        ),
    ),
    "qk_norm_rope": Spec(
        "QK Norm + RoPE",
        (512, 8192, 32_768),
        (columns(ROPE_COLUMNS, cpu=ROPE_COLUMNS, flag=None),),
        ("rotated", "gradient", "dW"),
        ("_qk_norm_rope_fwd", "_qk_norm_rope_bwd"),
        judged="errors of the rotated and of the gradients",
        notes=(
            f"columns: of q ({Q_HEADS} heads x {HEAD_DIM}) and k ({K_HEADS} x {HEAD_DIM}) as "
            f"Qwen3-8B has them, (B, T, heads, {HEAD_DIM}) in memory, T up to {MAX_SEQUENCE:,}",
        ),
    ),
    "adamw": Spec(
        "AdamW",
        (LLAMA_HIDDEN * LLAMA_INTERMEDIATE,),  # an MLP's projection: 58.7 million
        (),
        ("update",),
        ("_adamw_kernel",),
        cpu_tokens=(CPU_PARAMETERS,),
        rows="Parameters",
        judged="error of what a step adds to the weights",
        notes=(
            "one call is one step, which has no forward and no backward; "
            "PyTorch's default on a GPU is foreach",
        ),
    ),
    "adamw8": Spec(
        "AdamW, 8-bit moments",
        (LLAMA_HIDDEN * LLAMA_INTERMEDIATE,),
        (),
        ("update",),
        ("_adamw8",),
        cpu_tokens=(CPU_PARAMETERS,),
        rows="Parameters",
        judged="error of what a step adds to the weights",
        notes=(
            "one call is one step; the bytes are those of 8-bit moments, also where moments are "
            "bf16; the moments before the step are bf16 numbers, in all rows the same",
        ),
    ),
    "linear_cross_entropy": Spec(
        "Linear + Cross-Entropy",
        (512, 8192),
        (HIDDEN, VOCABULARY),
        ("dhidden", "dW target", "dW other"),
        flops=6,  # three products, each with a multiply and an add per logit and hidden column
        notes=("Forward: those that keep no logits compute the gradients in it",),
    ),
    "reverse_kl": Spec(
        "Reverse KL",
        (4096,),
        (Dimension("vocabulary", (32_768, 65_536, 131_072), (CPU_VOCAB,), "vocab"),),
        ("probable", "other"),
        ("_reverse_kl_fwd",),
        notes=(
            "ours: one pass and the gradient in the forward; "
            "two kernels: the backward reads the logits again",
            f"{ONE_TILE}: up to 32,768 columns, both softmaxes and the gradient in one kernel "
            "of 512 threads",
        ),
    ),
    "nf4": Spec(
        "NF4",
        (LLAMA_HIDDEN * LLAMA_HIDDEN // 4, LLAMA_HIDDEN * LLAMA_INTERMEDIATE),  # k, up
        (),
        ("weight",),
        ("_nf4_dequantize",),
        cpu_tokens=(CPU_QUANTIZED,),
        rows="Numbers",
        judged="error of the weight",
        notes=("one call writes the weight out, and has no backward",),
    ),
    "fp8": Spec(
        "FP8",
        (512, 8192),
        (columns(LLAMA_HIDDEN, LLAMA_INTERMEDIATE, cpu=CPU_COLUMNS),),
        ("rows",),
        ("_fp8_quantize",),
        judged="error of the rows",
        notes=("one call finds scales and codes of all rows, and has no backward",),
    ),
    "fp8_casts": Spec(
        "FP8 Casts: SwiGLU",
        (512, 8192),
        (columns(LLAMA_INTERMEDIATE, cpu=CPU_COLUMNS),),
        ("y", "gradients", "y again"),
        ("_swiglu_fp8_fwd", "_swiglu_fp8_bwd"),
        judged="errors of what the codes stand for",
        notes=(
            "one call is a forward, and a backward that computes y again: codes and scales of all",
            f"{SEPARATE}: what the kernels of swiglu wrote in the inputs' dtype is quantized",
        ),
    ),
}
