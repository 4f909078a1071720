"""Whether an adapter tells the truth about a model, found out by running it.

Letters: b batch, h heads, n tokens with prefix, d width, e head width.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tokenmixup.adapters import AdaptedBlock, Adapter
from tokenmixup.attention import attend, project
from tokenmixup.contexts import evaluating
from tokenmixup.structure import view_of, why_not

CLOSE = 1e-3  # tolerance between two ways to compute a tensor, of its largest value


@torch.no_grad()
def check_adapter(model: nn.Module, adapter: Adapter, images: Tensor) -> int:
    """Runs the model in evaluation on `images` and returns how many spatial tokens a block gets.

    Raises ValueError, naming the block, unless each is called once with `b n d`, its attention once
    with the norm of these tokens, the Parts give what the attention gives, and queries, keys and
    values of a token depend on that token alone. Parameters that are constant, as norms of a new
    model are, have other values meanwhile: with them one norm would be as good as another. Which
    tokens are the prefix, whether the class is read from token 0, and dropout are not seen in
    evaluation: compare the returned number with the patches that the model makes.
    """
    if reason := why_not(model, None, adapter):
        raise ValueError(reason)
    view = view_of(model, adapter)
    seen: list[dict[str, list[Any]]] = [{"block": [], "given": [], "made": []} for _ in view.blocks]
    with ExitStack() as stack, evaluating(model), _uneven(model):
        for block, found in zip(view.blocks, seen, strict=True):
            for handle in (
                block.module.register_forward_pre_hook(lambda _, x, f=found: f["block"].append(x)),
                block.attention.register_forward_pre_hook(
                    lambda _, x, f=found: f["given"].append(x)
                ),
                block.attention.register_forward_hook(
                    lambda _, x, out, f=found: f["made"].append(out)
                ),
            ):
                stack.callback(handle.remove)
        model(images)
        for index, (block, found) in enumerate(zip(view.blocks, seen, strict=True)):
            for reason in _problems(block, view.embed_dim, found):
                raise ValueError(f"block {index} ({type(block.module).__name__}): {reason}")
    return seen[0]["block"][0][0].shape[1] - adapter.num_prefix_tokens


@contextmanager
def _uneven(model: nn.Module) -> Iterator[None]:
    """Other values, for the moment, in parameters whose values are all the same."""
    constant = [
        p for p in model.parameters() if p.numel() > 1 and bool((p == p.flatten()[0]).all())
    ]
    before = [parameter.clone() for parameter in constant]
    generator = torch.Generator().manual_seed(0)
    for parameter in constant:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.1 * noise.to(parameter))
    try:
        yield
    finally:
        for parameter, own in zip(constant, before, strict=True):
            parameter.copy_(own)


def _problems(block: AdaptedBlock, width: int, seen: dict[str, list[Any]]) -> Iterator[str]:
    """What of the adapter does not hold in this block."""
    if len(seen["block"]) != 1 or len(seen["given"]) != 1:
        calls = f"{len(seen['block'])} and {len(seen['given'])} times"
        yield f"it and its attention are called {calls}, must be once"
        return
    if not seen["block"][0] or not seen["given"][0]:
        yield "it or its attention gets its tokens by name: must be the first argument"
        return
    tokens, given, made = seen["block"][0][0], seen["given"][0][0], seen["made"][0]
    if not isinstance(tokens, Tensor) or tokens.ndim != 3 or tokens.shape[2] != width:
        shape = list(getattr(tokens, "shape", []))
        yield f"gets {shape}, Adapter.embed_dim={width} promises b n {width}"
        return
    if block.adapter.num_prefix_tokens >= tokens.shape[1]:
        prefix = block.adapter.num_prefix_tokens
        yield f"gets {tokens.shape[1]} tokens, Adapter.num_prefix_tokens={prefix} leaves none"
    if not _same(given, block.norm1(tokens)):
        norm = block.adapter.norm
        yield f"its attention does not get {norm} of what enters the block (Adapter.norm)"
    parts = block.attn
    try:
        q, k, v = project(parts, given)
        rebuilt = attend(parts, given, q, k, v, None)
    except (RuntimeError, ValueError, TypeError) as error:
        yield f"Parts do not fit together: {str(error).splitlines()[0]}"
        return
    first = made[0] if isinstance(made, tuple | list) and made else made
    kinds = [type(out).__name__ for out in (made, block.adapter.returns(rebuilt))]
    if kinds[0] != kinds[1] or not isinstance(first, Tensor):
        yield (
            f"its attention returns a {kinds[0]} and Adapter.returns a {kinds[1]}, must both be "
            "tokens, or a tuple or list that begins with them"
        )
        return
    if not _same(first, rebuilt):
        yield "Parts give other tokens than its attention (Adapter.parts)"
    turned = [y.flip(2) for y in project(parts, given.flip(1))]
    if not all(_same(y, z) for y, z in zip((q, k, v), turned, strict=True)):
        yield "queries, keys or values of a token depend on its place or on other tokens"


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max().clamp(min=1e-6))
    close = max(CLOSE, 4 * torch.finfo(one.dtype).eps)
    return bool(((one - other).abs() <= close * scale).all())
