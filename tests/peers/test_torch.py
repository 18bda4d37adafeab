"""The clips of gradients in PyTorch."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from clipjax import functional
from tests.peers.draws import SEEDS, assert_close, draw

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("torch") is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def torch() -> Any:
    return importlib.import_module("torch")


def parameters_with(torch: Any, grads: Any) -> list[Any]:
    parameters = [torch.nn.Parameter(torch.zeros(x.shape)) for x in grads]
    for parameter, x in zip(parameters, grads, strict=True):
        parameter.grad = torch.tensor(x)
    return parameters


@SEEDS
@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
def test_clip_grad_norm(torch: Any, seed: int, ord: float) -> None:
    leaves, bound = draw(seed)
    bound *= {1: 8.0, np.inf: 0.2}.get(ord, 1.0)
    parameters = parameters_with(torch, leaves)
    theirs = torch.nn.utils.clip_grad_norm_(parameters, bound, norm_type=float(ord))
    ours, norm = functional.clip_by_global_norm(leaves, bound, ord=ord)
    assert_close([norm], [theirs])
    # torch multiplies by bound / (norm + 1e-6), so its result is smaller by 1e-6 /
    # norm.
    assert_close(
        ours, [parameter.grad for parameter in parameters], extra=1e-6 / float(theirs)
    )


@SEEDS
def test_clip_grad_value(torch: Any, seed: int) -> None:
    leaves, bound = draw(seed)
    parameters = parameters_with(torch, leaves)
    torch.nn.utils.clip_grad_value_(parameters, bound / 20)
    assert_close(
        functional.clip_by_value(leaves, -bound / 20, bound / 20),
        [p.grad for p in parameters],
    )
