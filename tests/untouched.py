"""What a model is, in full: to compare before and after, when nothing may have changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
FUNCTIONS = ("linear", "conv2d", "embedding", "multi_head_attention_forward")


def portrait(model: nn.Module) -> dict[str, Any]:
    """Modes, flags, hooks, gradients, attributes and values of every module, parameter and buffer."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    return {
        "modes": {name: module.training for name, module in modules.items()},
        "classes": {name: type(module) for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {(name, kind): list(getattr(m, kind)) for name, m in modules.items() for kind in HOOKS},
        "parameters": {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in parameters.items()},
        "gradients": {name: (id(p.grad), values(p.grad)) for name, p in parameters.items()},
        "buffers": {name: (id(buffer), buffer.data_ptr()) for name, buffer in model.named_buffers()},
        "state": {name: values(tensor) for name, tensor in model.state_dict().items()},
    }


def values(tensor: Tensor | None) -> bytes | None:
    """Every bit, so that NaN equals itself."""
    return None if tensor is None else tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Fails when the models, torch's random numbers, its functions or its gradient mode are not left as found."""
    before = [portrait(model) for model in models]
    random_state, functions = torch.get_rng_state(), [getattr(nn.functional, name) for name in FUNCTIONS]
    grad_mode = torch.is_grad_enabled()
    yield
    for model, old in zip(models, before, strict=True):
        new = portrait(model)
        assert {key: new[key] for key in new if new[key] != old[key]} == {}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [getattr(nn.functional, name) for name in FUNCTIONS] == functions
    assert torch.is_grad_enabled() == grad_mode
