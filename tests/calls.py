"""Which of PyTorch's operations run, and how often."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = "mm", "addmm", "addmm_"


class Calls(TorchDispatchMode):
    """How often each operation is called, in the forward and the backward, by its name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        """Of two matrices; of many ("bmm") is attention's, where it is no operation of its own."""
        return sum(self.counts[name] for name in PRODUCTS)
