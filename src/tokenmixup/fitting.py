"""Whether settings suit a model, and an adapter the model it describes, by running it.

Letters: b batch, h heads, n tokens with prefix, d width, e head width.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmixup.adapters import Adapter, adapter_of
from tokenmixup.attention import attend, positions, project
from tokenmixup.contexts import evaluating
from tokenmixup.encoder import Block, Encoder, find_encoder
from tokenmixup.settings import HTM, VTM, ManifoldMixup

CLOSE = 1e-3  # tolerance between two ways to compute a tensor, relative to its largest value


def encoder_for(
    model: nn.Module,
    told: Adapter | None,
    htm: HTM | None,
    vtm: VTM | None,
    manifold_mixup: ManifoldMixup | None,
    checkpoint_blocks: bool,
) -> Encoder | None:
    """Returns the model's encoder, None if nothing happens inside of it.

    Raises ValueError if blocks are missing, not supported or cannot serve a setting.
    """
    used = _used_layers(htm, vtm, manifold_mixup)
    if not used and not checkpoint_blocks:
        return None
    last = None if checkpoint_blocks else max(layer for _, layer in used)
    try:
        encoder = find_encoder(model, told, last)
    except ValueError as error:
        raise ValueError(f"TokenMixup does not support this model: {error}") from error
    check_settings(model, encoder, told or adapter_of(model), htm, vtm, manifold_mixup)
    return encoder


def _used_layers(
    htm: HTM | None, vtm: VTM | None, manifold_mixup: ManifoldMixup | None
) -> list[tuple[str, int]]:
    """Returns the blocks that settings use, each with the key that says so."""
    used = [("htm.layer", layer) for layer in (htm.layers if htm else ())]
    used += [("vtm.layer", layer) for layer in (vtm.layers if vtm else ())]
    mixed = manifold_mixup.layers if manifold_mixup else ()
    used += [("manifold_mixup.layers", layer) for layer in mixed]
    if htm is not None and htm.rollout_steps:
        used.append(("htm.layer + htm.rollout_steps", htm.layers[-1] + htm.rollout_steps))
    return used


def check_settings(
    model: nn.Module,
    encoder: Encoder,
    adapter: Adapter,
    htm: HTM | None = None,
    vtm: VTM | None = None,
    manifold_mixup: ManifoldMixup | None = None,
) -> None:
    """Raises ValueError if blocks are missing or cannot serve a setting."""
    kind, count = type(model).__name__, len(encoder.blocks)
    for key, layer in _used_layers(htm, vtm, manifold_mixup):
        if layer >= count:
            raise ValueError(f"{key}={layer}: {kind} has blocks 0..{count - 1}")
    for need in _unserved(encoder, adapter, htm, vtm):
        raise ValueError(f"{need}, which {kind} does not have")
    joined = {"htm": htm.layers if htm else [], "vtm": [*range(vtm.layers[-1] + 1)] if vtm else []}
    for method, layers in joined.items():
        if len({encoder.blocks[layer].width for layer in layers}) > 1:
            raise ValueError(f"{method}.layer: blocks {layers} of {kind} must lie in one stage")


def _unserved(
    encoder: Encoder, adapter: Adapter, htm: HTM | None, vtm: VTM | None
) -> Iterator[str]:
    """Yields what settings need and the encoder does not have."""
    over_all, class_token = "needs attention over all tokens", "needs a class token in the blocks"
    if vtm is not None:
        if not encoder.has_parts:
            yield f"vtm.layer={vtm.layers[0]}: {over_all}"
        if vtm.class_token_offset == "published" and not encoder.has_class_token:
            yield f"vtm.class_token_offset=published: {class_token}"
    if htm is None:
        return
    if htm.pooling == "class_token" and not encoder.has_class_token:
        yield f"htm.pooling=class_token: {class_token}"
    if (steps := htm.rollout_steps) and encoder.own_positions:
        yield f"htm.rollout_steps={steps}: needs blocks without rotary positions of their own"
    if steps and not encoder.has_parts:
        yield f"htm.rollout_steps={steps}: {over_all}"
    if htm.detector == "gradient" and not adapter.in_rows:
        yield "htm.detector=gradient: needs blocks with tokens in the order of the image"
    if htm.detector != "gradient" and not (encoder.has_parts or adapter.saliency):
        yield f"htm.detector={htm.detector}: needs Adapter.parts or Adapter.saliency"


class Trace(NamedTuple):
    """Records the calls of a block and of its attention: positional arguments and outputs."""

    block: list[tuple[Any, ...]]
    attn: list[tuple[Any, ...]]
    out: list[Any]


@torch.no_grad()
def check_adapter(model: nn.Module, adapter: Adapter, images: Tensor) -> int:
    """Runs the model in evaluation mode and returns the number of spatial tokens of a block.

    Raises ValueError, naming the block, unless each block is called once with `b n d`; its
    attention once with the norm of these tokens; the Parts reproduce the attention's output; and
    queries, keys and values of a token depend on that token alone. Of an adapter without Parts it
    checks tokens and saliency. During the check constant parameters, such as those of new norms,
    get other values, since any norm would fit otherwise. Evaluation does not show dropout, which
    tokens are the prefix, and whether the head reads token 0: compare the returned number with the
    number of patches.
    """
    encoder = find_encoder(model, adapter)
    traces = [Trace([], [], []) for _ in encoder.blocks]
    with ExitStack() as stack, evaluating(model), _constants_perturbed(model):
        for block, trace in zip(encoder.blocks, traces, strict=True):
            attn = block.attn or nn.Module()  # without Parts there may be none
            for handle in (
                block.module.register_forward_pre_hook(lambda _, x, t=trace: t.block.append(x)),
                attn.register_forward_pre_hook(lambda _, x, t=trace: t.attn.append(x)),
                attn.register_forward_hook(lambda _, x, y, t=trace: t.out.append(y)),
            ):
                stack.callback(handle.remove)
        model(images)
        for index, (block, trace) in enumerate(zip(encoder.blocks, traces, strict=True)):
            problems = _problems if encoder.has_parts else _problems_without_parts
            for reason in problems(block, trace):
                raise ValueError(f"block {index} ({type(block.module).__name__}): {reason}")
    return adapter.tokens[0](traces[0].block[0][0]).shape[1] - adapter.num_prefix_tokens


@contextmanager
def _constants_perturbed(model: nn.Module) -> Iterator[None]:
    """Adds noise to parameters whose values are all equal."""
    constant = [
        p for p in model.parameters() if p.numel() > 1 and bool((p == p.flatten()[0]).all())
    ]
    originals = [parameter.clone() for parameter in constant]
    generator = torch.Generator().manual_seed(0)
    for parameter in constant:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.1 * noise.to(parameter))
    try:
        yield
    finally:
        for parameter, original in zip(constant, originals, strict=True):
            parameter.copy_(original)


def _problems(block: Block, trace: Trace) -> Iterator[str]:
    """Yields the reasons why the adapter does not fit this block."""
    width = block.width
    if len(trace.block) != 1 or len(trace.attn) != 1:
        calls = f"{len(trace.block)} and {len(trace.attn)} times"
        yield f"it and its attention are called {calls}, must be once"
        return
    if not trace.block[0] or not trace.attn[0]:
        yield "it or its attention gets its tokens by keyword: must be the first argument"
        return
    tokens, normed, out = trace.block[0][0], trace.attn[0][0], trace.out[0]
    if not isinstance(tokens, Tensor) or tokens.ndim != 3 or tokens.shape[2] != width:
        shape = list(getattr(tokens, "shape", []))
        yield f"gets {shape}, must be b n {width} by Adapter.embed_dim={width}"
        return
    if block.adapter.num_prefix_tokens >= tokens.shape[1]:
        prefix = block.adapter.num_prefix_tokens
        yield f"gets {tokens.shape[1]} tokens, Adapter.num_prefix_tokens={prefix} leaves none"
    if not _same(normed, block.norm(tokens)):
        norm = block.adapter.norm
        yield f"its attention does not get {norm} of the block's input (Adapter.norm)"
    parts = block.parts()
    try:
        q, k, v = project(parts, normed)
        bias = positions(parts, normed.shape[1], {}).bias
        rebuilt = attend(parts, normed, q, k, v, bias)
    except (RuntimeError, ValueError, TypeError) as error:
        yield f"Parts do not fit together: {str(error).splitlines()[0]}"
        return
    first = out[0] if isinstance(out, tuple | list) and out else out
    kinds = [type(value).__name__ for value in (out, block.adapter.returns(rebuilt))]
    if kinds[0] != kinds[1] or not isinstance(first, Tensor):
        yield (
            f"its attention returns a {kinds[0]} and Adapter.returns a {kinds[1]}, must both be "
            "tokens, or a tuple or list that begins with them"
        )
        return
    if not _same(first, rebuilt):
        yield "the output of Parts differs from that of its attention (Adapter.parts)"
    flipped = [y.flip(2) for y in project(parts, normed.flip(1))]
    if not all(_same(y, z) for y, z in zip((q, k, v), flipped, strict=True)):
        yield "queries, keys or values of a token depend on its place or on other tokens"


def _problems_without_parts(block: Block, trace: Trace) -> Iterator[str]:
    """Yields the reasons why an adapter without Parts does not fit this block."""
    if len(trace.block) != 1 or not trace.block[0]:
        yield f"is called {len(trace.block)} times, must be once, with its tokens first"
        return
    adapter, args = block.adapter, trace.block[0]
    (flat, back), x = adapter.tokens, args[0]
    tokens = flat(x)
    if tokens.ndim != 3 or tokens.shape[2] != block.width:
        yield f"gives {[*tokens.shape]}, must be b n {block.width} (Adapter.tokens, embed_dim)"
        return
    if not torch.equal(back(tokens, x), x):
        yield "Adapter.tokens do not lead back to its input"
    if adapter.saliency is None:
        return
    saliency = adapter.saliency(block.module, *args)
    expected = [len(x), tokens.shape[1] - adapter.num_prefix_tokens]
    if [*saliency.shape] != expected:
        yield f"Adapter.saliency returns {[*saliency.shape]}, must be b t, {expected}"
    elif bool((saliency < 0).any()) or not _same(saliency.sum(1), torch.ones(len(x))):
        yield "Adapter.saliency must be >= 0 and sum to 1"


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max().clamp(min=1e-6))
    close = max(CLOSE, 4 * torch.finfo(one.dtype).eps)
    return bool(((one - other).abs() <= close * scale).all())
