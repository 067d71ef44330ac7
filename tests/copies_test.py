"""Whatever is put into a model, the model can be pickled and copied, and its copies train."""

import copy
import pickle

import pytest
import torch

from harness.benchmark.checking import DEVICE
from harness.cli.workload import Frozen
from harness.model.architecture import build_model
from next_steps.patches import offload
from next_steps.patches.apply_kernels import apply_kernels
from next_steps.patches.projections import fp8_layers, quantize_model
from next_steps.patches.recompute import set_recompute
from tests.fp8_layer_test import DTYPE
from tests.small_workloads import loss_and_gradients, smaller_config, with_adapters

KINDS = {
    "FP8 in the layer": lambda model: fp8_layers(apply_kernels(model)),
    "NF4": lambda model: with_adapters(quantize_model(model, Frozen.NF4)),
    "frozen FP8": lambda model: with_adapters(quantize_model(model, Frozen.FP8)),
    "recompute norm": lambda model: set_recompute(model, "norm"),
    "recompute mlp, offload": lambda model: set_recompute(model, "mlp", offload=True),
    "recompute layer": lambda model: set_recompute(model, "layer"),
}


@pytest.mark.parametrize("put_in", KINDS.values(), ids=KINDS)
def test_a_copy_trains_as_its_model(put_in, fp8_references, monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 256)
    model = put_in(build_model(smaller_config(), DTYPE, DEVICE).train())
    copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    expected = {name: t.clone() for name, t in loss_and_gradients(model).items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for each in copies:
        found = loss_and_gradients(each)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
