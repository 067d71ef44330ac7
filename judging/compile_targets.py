"""The GPUs that every kernel is compiled for, and how their code accesses the memory."""

import re
from dataclasses import dataclass

# the environment of a process that compiles: Triton does not interpret, and leaves a GPU alone
COMPILING = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Target:
    backend: str  # as Triton's GPUTarget has it
    arch: int | str
    warp_size: int
    max_shared: int  # bytes of shared memory of one program, by the vendor's documentation
    gpus: str
    allowed_spills: int = 0  # 32-bit registers per thread in memory, with Triton 3.7.1's assembler


COMPILE_TARGETS = {
    "sm_89": Target("cuda", 89, 32, 99 << 10, "RTX 4090, L4, L40S", allowed_spills=2),
    "sm_90": Target("cuda", 90, 32, 227 << 10, "H100, H200"),
    "sm_100": Target("cuda", 100, 32, 227 << 10, "B200, GB200", allowed_spills=2),
    "sm_103": Target("cuda", 103, 32, 227 << 10, "B300, GB300"),
    "sm_120": Target("cuda", 120, 32, 99 << 10, "RTX 5090, RTX PRO 6000", allowed_spills=2),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10, "MI300X, MI325X"),
}


# part of a case's name: its addresses are multiples of one number's bytes only
UNALIGNED = "size not divisible by 16"


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel, or (with `error`) a case that did not compile."""

    kernel: str
    case: str
    target: str
    registers: int | None = None  # per thread
    spills: int | None = None  # 32-bit registers per thread that live in memory
    shared: int | None = None  # bytes per program
    widest: int | None = None  # bytes of a thread's widest access to memory; None: not read
    error: str | None = None
    binary: str = ""  # its SHA-256


def access_of(instruction: str) -> tuple[str, int] | None:
    """Return the bytes of a thread's access to the GPU's memory, behind "LDG", "STG" or "LDGSTS".

    LDG: load; STG: store; LDGSTS: load into a program's shared memory.  None: no such access.
    """
    found = re.search(r"\b(LDG|STG|LDGSTS)\.E([.\w]*)", instruction)
    if not found:
        return None
    bits = re.search(r"\.[US]?(\d+)\b", found[2])  # 32 bits are not written
    return found[1], int(bits[1] if bits else 32) // 8


def widest_access(ptx: str) -> int:
    """Return the most bytes that a thread loads or stores in the GPU's memory at once, by PTX.

    PTX is the text that NVIDIA's assembler gets: ld.global.v4.b32 loads 4 x 4 bytes.
    """
    vectors = re.findall(r"\b(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    copies = re.findall(r"\bcp\.async\.\w+\.shared\.global[^;]*?\], (\w+)", ptx)
    widths = [int(many or 1) * int(bits) // 8 for many, bits in vectors]
    return max([*widths, *(int(n_bytes, 0) for n_bytes in copies)], default=0)
