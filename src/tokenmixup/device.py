"""Operators that a GPU runs as kernels of this package, without the host waiting for them.

They take CUDA tensors where Triton is there (it comes with torch for CUDA on Linux). Elsewhere, and
on a CPU, the functions of torch run that the kernels stand for.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
LIBRARY = torch.library.Library("tokenmixup", "FRAGMENT")


def operator(
    schema: str, kernel: str, reference: Callable[..., Tensor], like: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Defines `tokenmixup::<schema>`, which neither a compiler nor a CUDA graph cuts.

    `kernel`: `module.function` of this package, imported at the first call, for CUDA. `reference`:
    the same by functions of torch. `like`: returns an empty output.
    """
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    module, _, function = kernel.partition(".")

    def run_kernel(*args: Any) -> Tensor:
        with torch.cuda.device(args[0].device):  # Triton launches on the current one
            out: Tensor = getattr(import_module(f"tokenmixup.{module}"), function)(*args)
        return out

    LIBRARY.impl(name, run_kernel if HAS_TRITON else reference, "CUDA")
    LIBRARY.impl(name, reference, "CPU")
    torch.library.register_fake(f"tokenmixup::{name}", like, lib=LIBRARY)
    found: Callable[..., Tensor] = getattr(torch.ops.tokenmixup, name)
    return found
