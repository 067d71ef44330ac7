"""The facts about each kernel, one row for each.  Imports neither PyTorch nor the kernels.

Attribution, diagnosis, ladder, tables of memory, --kernels and the benchmark's list read these
rows.  What a kernel moves stands here alone: the ladder's floors and the benchmark's GB/s follow.
docs/add_a_kernel.md adds a kernel and all that belongs to it.  tests/kernel_facts_test.py says
what is missing.
"""

from dataclasses import dataclass, field

ADAPTERS = "adapters"  # LoRA's thin products and what adds their results
DEQUANTIZATION = "dequantization"  # of weights, with --quantize
FP8_CASTS = "fp8 casts"  # to codes and scales, and transposed, with --fp8
OTHER = "other elementwise and copies"
COMMUNICATION = "communication"  # between processes, by NCCL
UNATTRIBUTED = "unattributed"
PHASES = ["forward", "loss", "backward", "optimizer"]  # of a step
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # of a number: a code, and a share of its scales
CATEGORIES = [  # of a profile, in the order of its table
    *("matmul", "attention", "normalization", "loss", "activation", "rotary", ADAPTERS),
    *(DEQUANTIZATION, FP8_CASTS, OTHER, "optimizer", COMMUNICATION, UNATTRIBUTED),
]


@dataclass(frozen=True)
class Sizes:
    """Bytes of one pass over the tensors of a step, from the model's configuration."""

    weights: int  # all parameters that are trained
    stream: int  # (B*T, H), once per layer
    heads: int  # q and k, once per layer
    inner: int  # (B*T, I), once per layer
    logits: int  # (B*T, V)
    layers: int
    width: int  # of one number
    micro_batches: int = 1  # B*T are the tokens of all of them
    projection: int = 0  # (O, I), the mean of a layer's, once per layer and micro-batch
    quantized: int = 0  # what separate passes quantize to FP8, as bytes of the model's dtype
    transposed: int = 0  # what is transposed in FP8, in the same bytes
    unrotated: int = 0  # q and k of the layers that do not turn them
    head_norms: int = 0  # q and k, once per layer, where their heads have norms
    coded: int = 0  # what --moments 8bit saves in a pass over one of AdamW's moments


@dataclass(frozen=True)
class Launch:
    """What a Triton kernel of ours moves and computes; the profiler does not record its shapes."""

    prefix: str  # how the kernel's name begins
    # Of Sizes.  None: the kernel moves next to nothing in a step, or tensors of several sizes.
    tensor: str | None = None
    passes: float = 0  # over that tensor
    beside: float = 0  # bytes per number that do not depend on the dtype, as of codes
    flops: int = 0  # per number, counted in the kernel's source; an exponential is one
    every_launch: bool = True  # a launch does one layer's tensor; else a step's launches share it
    floor: int = 0  # how often a fused step does a layer's, or the step's, tensor

    def bytes_per_number(self, width: int) -> float:
        """Return the bytes it moves for each number of the tensor, a number being so wide."""
        return self.passes * width + self.beside


@dataclass(frozen=True)
class Facts:
    """The facts about one kernel."""

    name: str  # for --kernels and benchmark_kernels.py --kernel
    lesson: str  # its module
    # The profile's category that counts its kernels' time, and that it takes over.  None: it has no
    # kernels of its own.
    category: str | None
    patches: str | None = None  # "model", "loss" or "optimizer"; None: --kernels does not know it
    also_replaces: tuple[str, ...] = ()  # further categories that it takes over
    # Part of the name of an autograd Function -> the category of the Function's time, if neither a
    # range nor a kernel's name tells.
    functions: dict[str, str] = field(default_factory=dict)
    launches: tuple[Launch, ...] = ()
    module: tuple[str, str] | None = None  # (our module, the part of a family that it replaces)
    rung: int | None = None  # its place on the ladder, the largest cost of the baseline first
    # Beside its launches' floor: a tensor of Sizes, passes over it.
    floor: dict[str, int] = field(default_factory=dict)
    # A category that it makes smaller without taking it over -> the diagnosis's advice.
    advice: dict[str, str] = field(default_factory=dict)
    # A function, "module:name" -> what the tables of memory call the tensors that it asks for.
    allocates: dict[str, str] = field(default_factory=dict)
    # A part of the memory, or (part, phase) -> how the kernel makes it smaller.
    memory: dict[str | tuple[str, str], str] = field(default_factory=dict)

    @property
    def replaces(self) -> set[str]:
        """The categories that it takes over."""
        return {*self.also_replaces, *([self.category] if self.category else [])}

    def floor_bytes(self, sizes: Sizes) -> int:
        """Return the bytes that it still has to read and write in a step."""
        passes = [(each.tensor, each.floor * each.passes) for each in self.launches if each.floor]
        return sum(n * getattr(sizes, tensor) for tensor, n in (*passes, *self.floor.items()))


KERNEL_ROWS = [
    Facts(
        name="rmsnorm",
        lesson="rmsnorm_kernel",
        patches="model",
        category="normalization",
        functions={"RMSNorm": "normalization"},
        launches=(
            # a layer has two norms: x in, y out
            Launch("_rmsnorm_fwd", "stream", passes=2, flops=4, floor=2),
            Launch("_rmsnorm_bwd", "stream", passes=3, flops=9, floor=2),  # dy, x in, dx out
            Launch("_rmsnorm_dw"),  # sums the programs' parts of dW
        ),
        module=("TritonRMSNorm", "RMSNorm"),
        rung=2,
        allocates={"rmsnorm_kernel:rmsnorm_forward": "normalization"},
    ),
    Facts(
        name="cross_entropy",
        lesson="cross_entropy_kernel",
        patches="loss",
        category="loss",
        functions={"CrossEntropy": "loss"},
        launches=(
            # logits in, their gradient out
            Launch("_cross_entropy_inplace", "logits", passes=2, flops=9, every_launch=False),
            Launch("_cross_entropy_fwd", "logits", passes=1, flops=5, every_launch=False),
            # logits in, their gradient out
            Launch("_cross_entropy_bwd", "logits", passes=2, flops=4, every_launch=False),
            Launch("_cross_entropy_scale"),  # by 1, and then it does nothing
            Launch("_plain"),  # the lesson's first form: no step of training launches it
        ),
    ),
    Facts(
        name="swiglu",
        lesson="next_steps.lessons.swiglu_kernel",
        patches="model",
        category="activation",
        functions={"SwiGLU": "activation"},
        launches=(
            Launch("_swiglu_fwd", "inner", passes=3, flops=6, floor=1),  # gate, up in, y out
            # dy, gate, up in; dgate, dup, y out
            Launch("_swiglu_bwd", "inner", passes=6, flops=13, floor=1),
            # the same, with two and three thin products, which are not counted here
            Launch("_swiglu_lora_fwd", "inner", passes=3, flops=10),
            Launch("_swiglu_lora_bwd", "inner", passes=6, flops=19),
        ),
        module=("TritonLlamaMLP", "MLP"),
        rung=4,
        allocates={"next_steps.layers.llama_mlp:SwiGLUMLPFunction.forward": "MLP"},
    ),
    Facts(
        name="rope",
        lesson="next_steps.lessons.rope_kernel",
        patches="model",
        category="rotary",
        functions={"RoPE": "rotary"},
        # q, k in and out; then their gradients
        launches=(Launch("_rope", "heads", passes=2, flops=3, floor=2),),
        rung=3,
        floor={"unrotated": -4, "head_norms": 1},  # with norms, the backward reads q and k again
        allocates={"next_steps.lessons.rope_kernel:rope_forward": "q and k, rotated"},
    ),
    Facts(
        name="qk_norm_rope",
        lesson="next_steps.lessons.qk_norm_rope_kernel",
        patches=None,  # the patch of rope puts it in, where a model has norms of q and k
        category="rotary",
        functions={"QKNormRoPE": "rotary"},
        launches=(
            Launch("_qk_norm_rope_fwd", "heads", passes=2, flops=7),  # q, k in and out
            Launch("_qk_norm_rope_bwd", "heads", passes=3, flops=14),  # and dq_rot, dk_rot in
            Launch("_qk_norm_rope_dw"),  # sums the programs' parts of dW
        ),
        allocates={
            "next_steps.lessons.qk_norm_rope_kernel:qk_norm_rope_forward": "q and k, rotated"
        },
    ),
    Facts(
        name="adamw",
        lesson="next_steps.lessons.adamw_kernel",
        patches="optimizer",
        category="optimizer",
        # p, g, m, v in; p, m, v out
        launches=(
            Launch("_adamw_kernel", "weights", passes=7, flops=14, every_launch=False, floor=1),
        ),
        rung=1,
        floor={"coded": -4},  # m and v in and out
        memory={
            "gradients": "updates a weight as soon as its gradient is complete, "
            "which is then freed",
            ("temporaries", "optimizer"): "updates in one pass: no intermediate result as large as "
            "the weights",
        },
    ),
    Facts(
        name="adamw8",
        lesson="next_steps.lessons.adamw8",
        patches=None,  # --moments 8bit puts it in the place of adamw's kernel
        category="optimizer",
        launches=(
            # p, g in, p out; the codes of m and v, and two scales of 256 numbers, in and out
            Launch("_adamw8", "weights", passes=3, beside=4.0625, flops=42, every_launch=False),
        ),
    ),
    Facts(
        name="linear_cross_entropy",
        lesson="next_steps.lessons.linear_cross_entropy_kernel",
        patches="loss",
        category="loss",
        functions={"LinearCrossEntropy": "loss"},
        # by 1, and then it does nothing; the other kernels are cross_entropy's
        launches=(Launch("_scale"),),
        rung=5,
        floor={"logits": 2},  # logits in, their gradient out
        memory={
            "logits and loss": "takes the loss from the hidden states, a chunk of the logits at a "
            "time"
        },
    ),
    Facts(
        name="fused_layer",
        lesson="next_steps.layers.fused_layer",
        patches="model",
        category=None,  # its kernels are those of rmsnorm, swiglu and rope
        also_replaces=("normalization", "activation", "rotary"),
        # a norm, or SwiGLU, and matrix products, and these are told apart before
        functions={"NormLinear": "normalization", "SwiGLULinear": "activation"},
        rung=6,
        # Two additions of three passes less (q, k, v share an input), two norms of two passes
        # more: for the memory.
        floor={"stream": 2 * 2 - 2 * 3},
        advice={OTHER: "--kernels all: its fused layer needs fewer of them"},
        allocates={
            "next_steps.layers.fused_layer:norm_linear": "v, gate, up (norm_linear)",
            "next_steps.layers.fused_layer:swiglu_linear": "MLP",
            "next_steps.layers.fused_layer:norm_mlp": "v, gate, up (norm_linear)",
            "next_steps.layers.fused_layer:SwiGLULinearFunction.forward": "MLP",
        },
        memory={
            "activations": "computes the outputs of norms and SwiGLU again in the backward",
            "temporaries": "writes gradients over activations, and sums as the products store",
        },
    ),
    Facts(
        name="lora_linear",
        lesson="next_steps.layers.lora_linear",
        patches=None,  # the fused layer calls it where there are adapters
        category=None,  # no kernels of its own
        # what is no matrix product there: laying adapters one below the other
        functions={"LoRALinear": ADAPTERS},
    ),
    Facts(
        name="reverse_kl",
        lesson="next_steps.lessons.reverse_kl_kernel",
        patches=None,  # the loss of a model that has a teacher
        category="loss",
        functions={"ReverseKL": "loss"},
        launches=(
            # student and teacher in, the student's gradient out
            Launch("_reverse_kl_fwd", "logits", passes=3, flops=25, every_launch=False),
            Launch("_obvious"),  # the lesson's first form: no step of training launches it
            Launch("_reverse_kl_bwd"),  # for a grad_output of 1 it does nothing
        ),
    ),
    Facts(
        name="nf4",
        lesson="next_steps.lessons.nf4_kernel",
        patches=None,  # --quantize nf4 puts it in, when a model is loaded
        category=DEQUANTIZATION,
        functions={"NF4Linear": DEQUANTIZATION},  # and matrix products, told apart before
        launches=(
            # codes and scales in, the weight out
            Launch("_nf4_dequantize", "projection", passes=1, beside=NF4_BYTES, flops=1),
        ),
    ),
    Facts(
        name="fp8",
        lesson="next_steps.lessons.fp8_kernel",
        category=FP8_CASTS,
        # of weights, activations and gradients, all sizes together
        launches=(
            # a number in, a code out; a code in, a code out
            Launch("_fp8_quantize", "quantized", passes=1, beside=1, flops=3, every_launch=False),
            Launch("_fp8_transpose", "transposed", beside=2, flops=1, every_launch=False),
        ),
    ),
    Facts(
        name="fp8_casts",
        lesson="next_steps.lessons.fp8_casts",
        category=FP8_CASTS,
        launches=(
            Launch("_rmsnorm_fp8", "stream", passes=1, beside=1, flops=7),  # x in, its codes out
            # gate, up in, the codes of y out
            Launch("_swiglu_fp8_fwd", "inner", passes=2, beside=1, flops=9),
            # dy, gate, up in, the codes of dgate, dup and y out; each computed twice
            Launch("_swiglu_fp8_bwd", "inner", passes=3, beside=3, flops=35),
        ),
    ),
    Facts(
        name="fp8_layer",
        lesson="next_steps.layers.fp8_layer",
        patches=None,  # --fp8 puts it in the place of the fused layer
        category=None,  # its kernels are those of fp8 and fp8_casts
        # and matrix products, told apart before; what is left looks for the largest scales
        functions={"NormFP8Linear": FP8_CASTS, "FP8Linear": FP8_CASTS, "FP8MLP": FP8_CASTS},
        allocates={
            "next_steps.layers.fp8_layer:qkv_fp8": "v, gate, up (fp8)",
            "next_steps.layers.fp8_layer:mlp_fp8": "v, gate, up (fp8)",
            "next_steps.patches.projections:DecoderLayer.compute": "residual stream",
        },
    ),
]
FACTS_BY_NAME = {row.name: row for row in KERNEL_ROWS}

LOSS_KERNELS = [row.name for row in KERNEL_ROWS if row.patches == "loss"]
MODEL_KERNELS = [row.name for row in KERNEL_ROWS if row.patches in ("model", "loss")]
# what --kernels knows, the optimizer's last
KERNELS = [*MODEL_KERNELS, *(row.name for row in KERNEL_ROWS if row.patches == "optimizer")]
PLAYBOOK_KERNELS = "rmsnorm", "cross_entropy"  # which the playbook has: lesson 11's
RUNGS = sorted((row for row in KERNEL_ROWS if row.rung), key=lambda row: row.rung)


def launch_of(name: str) -> tuple[Facts, Launch] | None:
    """Return the row and the launch of a Triton kernel, by the kernel's name; None: not ours."""
    known = ((row, launch) for row in KERNEL_ROWS for launch in row.launches)
    return next((found for found in known if name.startswith(found[1].prefix)), None)
