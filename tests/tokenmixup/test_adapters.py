"""Models by other names than timm's: they mix, evaluate as they are, tell their own saliency."""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from tests.conftest import CLASSES
from tokenmixup import (
    Adapter,
    Output,
    Parts,
    attach,
    check_adapter,
    torch_encoder,
    training_loss,
    why_not,
)
from tokenmixup.adapters import adapter_of, timm_parts
from tokenmixup.encoder import find_encoder
from tokenmixup.module import BlockPass

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
UNUSED = "dinov2.embeddings.mask_token"  # in the model's own training as well
EVERYTHING: dict[str, Any] = {"tau": float("inf"), "rho": 0.0}
SIZES: dict[str, int] = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_labels": CLASSES},
}


class Encoded(nn.Module):
    """Patches, torch's own encoder, the mean of the tokens."""

    def __init__(self, **options: Any):
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, stride=8)
        told = {"norm_first": True, "batch_first": True, "dropout": 0.0, **options}
        layer = nn.TransformerEncoderLayer(32, 4, 64, **told)
        with warnings.catch_warnings(action="ignore"):  # of nested tensors, which nobody wants
            self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(images).flatten(2).mT).mean(dim=1))


def page() -> dict[str, Any]:
    """The example of the page, run as it stands there."""
    code = re.search(r"## A ViT by hand\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names


def by_function(attention: Any) -> Parts:
    """Parts of the page's attention by a function of its own."""

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers = (attention.to_queries, attention.to_keys, attention.to_values)
        q, k, v = (f(x).unflatten(-1, (attention.heads, -1)).transpose(1, 2) for f in layers)
        return q, k, v

    told = {"proj": attention.out, "training": attention.training, "scale": 16**-0.5}
    return Parts(num_heads=attention.heads, project=project, **told)


Built = tuple[Any, Adapter | None, bool]  # model, adapter, whether the class token is read


def torchvisions() -> Built:
    model = torchvision.models.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=CLASSES)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # zero: no pixel would matter
    return model, None, True


def hand_made(adapter: Callable[[Adapter], Adapter] = lambda x: x) -> Built:
    names = page()
    return names["HandMade"](CLASSES), adapter(names["adapter"]), True


MODELS: dict[str, Callable[[], Built]] = {
    "torchvision": torchvisions,
    "vit": lambda: (ViTForImageClassification(ViTConfig(**SIZES)), None, True),
    "deit": lambda: (DeiTForImageClassification(DeiTConfig(**SIZES)), None, True),
    "dinov2": lambda: (Dinov2ForImageClassification(Dinov2Config(**SIZES)), None, False),
    "encoder": lambda: (Encoded(), torch_encoder("encoder", 32, patch_embed="embed"), False),
    "by hand": hand_made,
    "by a function": lambda: hand_made(lambda adapter: replace(adapter, parts=by_function)),
}


LIKE_OTHERS = ("deit", "dinov2", "by a function")
PARAMS = [pytest.param(x, marks=pytest.mark.slow) if x in LIKE_OTHERS else x for x in MODELS]


@pytest.fixture(params=PARAMS)
def built(request: pytest.FixtureRequest) -> Built:
    torch.manual_seed(0)
    model, adapter, reads = MODELS[request.param]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, adapter, reads


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(4, CLASSES, generator=generator).softmax(dim=1)
    return torch.randn(4, 3, 32, 32, generator=generator), targets


def logits_of(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.logits


def train_output(module: Any, batch: tuple[Tensor, Tensor]) -> Output:
    return module.train()(*batch)


def test_a_step_mixes_and_evaluation_is_the_plain_model(built: Built, batch):
    model, adapter, _ = built
    plain = copy.deepcopy(model).eval()
    for more in ({}, {"detector": "gradient"}, {"rollout_steps": 1}):
        settings = {"htm": {"layer": 1, **EVERYTHING, **more}, "vtm": {"layer": 2, "kappa": 3}}
        module = attach(model, CLASSES, manifold_mixup={"layers": [0]}, adapter=adapter, **settings)
        output = train_output(module, batch)
        assert output.stats["mixed_samples"] == 4 and output.stats["mixed_tokens"] > 0
        training_loss(output, 0.5).backward()
        lost = {name for name, p in module.named_parameters() if p.grad is None}
        assert lost <= {f"model.{UNUSED}"}
    with torch.no_grad():
        assert torch.equal(module.eval()(batch[0]), logits_of(plain(batch[0])))


def test_a_pass_that_replaces_no_token_gives_the_models_logits_and_gradients(built: Built, batch):
    model, adapter, _ = built
    plain = copy.deepcopy(model).train()
    htm = {"layer": [0, 1], "tau": float("inf"), "rho": float("inf"), "stop_gradient": True}
    module = attach(model, CLASSES, htm=htm, adapter=adapter, checkpoint_blocks=True)
    output, expected = train_output(module, batch), logits_of(plain(batch[0]))
    torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=1e-4)
    F.cross_entropy(output.logits, batch[1]).backward()
    F.cross_entropy(expected, batch[1]).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name == UNUSED:
            continue
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=name)


def own_map(attention: Any, x: Tensor) -> Tensor:
    """What the model's own attention attends to, `b h n n`."""
    if isinstance(attention, nn.MultiheadAttention):
        return attention(x, x, x, need_weights=True, average_attn_weights=False)[1]
    if hasattr(attention, "config"):
        attention.config._attn_implementation = "eager"
        return attention(x)[1]
    q, k = (f(x).unflatten(-1, (attention.heads, -1)).transpose(1, 2) for f in attention.both)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)


def test_saliency_is_that_of_the_models_own_attention(built: Built, batch):
    model, adapter, reads = built
    encoder, seen = find_encoder(model.eval(), adapter), []
    block = encoder.blocks[1]
    hook = block.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(batch[0])
        hook.remove()
        if type(block.attn).__name__ == "Attention":
            block.attn.both = (block.attn.to_queries, block.attn.to_keys)
        found = BlockPass(encoder, 1, seen[0], {})
        weights = own_map(block.attn, block.norm(seen[0])).mean(dim=1)
    rows = weights[:, 0] if reads else weights.mean(dim=1)
    expected = rows[:, encoder.num_prefix_tokens :]
    torch.testing.assert_close(found.own_saliency(), expected, atol=1e-6, rtol=1e-4)


def test_torchvisions_vit_mixes_as_timms_with_the_same_weights(batch):
    """HTM and VTM, logits and labels; timm's is held against the forward pass written out."""
    torch.manual_seed(0)
    theirs, _, _ = torchvisions()
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 3, "num_heads": 4}
    name = "vit_tiny_patch16_224"
    ours = timm.create_model(name, embed_dim=32, mlp_ratio=2, num_classes=CLASSES, **sizes)
    renamed = {
        "conv_proj": "patch_embed.proj",
        "class_token": "cls_token",
        "encoder.pos_embedding": "pos_embed",
        "encoder.ln": "norm",
        "heads.head": "head",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj": "attn.proj",
        "mlp.0": "mlp.fc1",
        "mlp.3": "mlp.fc2",
    }
    state = {}
    for key, value in theirs.state_dict().items():
        name = re.sub(r"encoder\.layers\.encoder_layer_(\d+)", r"blocks.\1", key)
        for old, new in renamed.items():
            name = name.replace(old, new)
        state[name] = value
    ours.load_state_dict(state)
    outputs = []
    for model in (theirs, ours):
        torch.manual_seed(1)
        settings = {"htm": {"layer": 1, **EVERYTHING}, "vtm": {"layer": 2, "kappa": 3}}
        outputs.append(train_output(attach(model, CLASSES, **settings), batch))
    for one, other in ((x, y) for x, y in zip(*outputs, strict=True) if isinstance(x, Tensor)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_what_cannot_be_served_is_refused_with_the_reason(batch):
    encoder = torch_encoder("encoder", embed_dim=32)
    assert "norm_first=False" in str(why_not(Encoded(norm_first=False), adapter=encoder))
    assert "batch_first=True" in str(why_not(Encoded(batch_first=False), adapter=encoder))
    for field, path, reason in (
        (
            "blocks",
            "encode.layers",
            "Encoded has no 'encode', its modules are embed, encoder, head",
        ),
        ("attn", "attn.q", "TransformerEncoderLayer has no 'attn', its modules are self_attn"),
        ("norm", "self_attn.norm", "MultiheadAttention has no 'norm', its modules are out_proj"),
        ("norm", "training", "is bool, needs a module"),
        ("embed_dim", "head.width", "Linear has no 'width'"),
    ):
        told = str(why_not(Encoded(), adapter=replace(encoder, **{field: path})))
        assert told.startswith(f"Adapter.{field}='{path}': {reason}")
    told = str(why_not(Encoded(), adapter=replace(encoder, attn="linear1")))
    assert told == "Adapter.parts of linear1: is a Linear, not torch's own MultiheadAttention"
    wrong = replace(encoder, embed_dim="head.weight")
    assert "is not the path of an int" in str(why_not(Encoded(), adapter=wrong))
    assert "is Linear, needs a" in str(why_not(Encoded(), adapter=replace(encoder, blocks="head")))
    wrong = replace(encoder, reads_class_token=True)
    assert "needs num_prefix_tokens >= 1" in str(why_not(Encoded(), adapter=wrong))
    assert "a plain transformer needs an Adapter" in str(why_not(Encoded()))
    model = ViTForImageClassification(ViTConfig(**SIZES))
    attention: Any = model.vit.layers[0].attention
    attention.q_proj = nn.Sequential(attention.q_proj)
    assert "q_proj is Sequential" in str(why_not(model))
    del attention.o_proj
    assert "has no o_proj: needs transformers >= 5.18" in str(why_not(model))
    other = Encoded()
    other.encoder.layers[0].self_attn = nn.MultiheadAttention(
        32, 2, add_bias_kv=True, batch_first=True
    )
    assert "neither add_bias_kv nor" in str(why_not(other, adapter=encoder))
    with pytest.raises(ValueError, match="give either qkv"):
        Parts(num_heads=2, proj=nn.Identity(), training=True)
    layer = nn.Linear(4, 12)
    with pytest.raises(ValueError, match="scale must be a number"):
        Parts(num_heads=2, proj=layer, training=True, qkv=layer, scale=layer.bias)  # type: ignore
    repeating = DeiTForImageClassification(DeiTConfig(**SIZES))
    repeating.gradient_checkpointing_enable()
    module = attach(repeating, CLASSES, htm={"layer": 1})
    with pytest.raises(ValueError, match="checkpoint_blocks=True"):
        train_output(module, batch)


def test_an_adapter_that_fits_is_found_to(built: Built, batch):
    model, adapter, _ = built
    told = adapter or adapter_of(model)
    assert told is not None
    modes = [module.training for module in model.modules()]
    before, drawn = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    tokens = check_adapter(model, told, batch[0])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert tokens == (64 if hasattr(model, "patches") else 16)
    assert modes == [module.training for module in model.modules()]
    assert not any(module._forward_hooks for module in model.modules())


def test_an_adapter_that_does_not_fit_is_found_out(batch):
    model, adapter, _ = hand_made()
    for layer in model.layers:  # a new model's, in which any norm and any map give the same
        nn.init.zeros_(layer.mix.out.weight)

    def wrong(**parts: Any) -> Adapter:
        return replace(adapter, parts=lambda attention: replace(adapter.parts(attention), **parts))

    def swapped(attention: Any) -> Parts:
        found = adapter.parts(attention)
        return replace(found, q_proj=found.v_proj, v_proj=found.q_proj)

    def shifting(attention: Any) -> Parts:
        found = by_function(attention)
        assert found.project is not None
        own = found.project
        return replace(found, project=lambda x: own(x + torch.arange(x.shape[1])[:, None] / 10))

    refused = {
        "does not get between of the block": replace(adapter, norm="between"),
        "must be b n 63": replace(adapter, embed_dim=63),
        "output of Parts differs": wrong(scale=1.0),
        "output of Parts": replace(adapter, parts=swapped),
        "num_heads=5 must divide the width 64": wrong(num_heads=5, scale=None),
        "returned a NoneType, must be Parts": replace(adapter, parts=lambda attention: None),
        "Parts do not fit together": wrong(proj=nn.Linear(63, 64)),
        "Parts differs from that of its attention": replace(adapter, parts=shifting),
        "is the attention": replace(adapter, norm="mix"),
        r"Adapter\.parts of mlp: .* no attribute": replace(adapter, attn="mlp"),
        "must be an int >= 0": replace(adapter, num_prefix_tokens=-1),
        "num_prefix_tokens=99 leaves none": replace(adapter, num_prefix_tokens=99),
        "returns a Tensor and Adapter.returns a tuple": replace(
            adapter, returns=lambda x: (x, None)
        ),
    }
    for told, other in refused.items():
        with pytest.raises(ValueError, match=told):
            check_adapter(model, other, batch[0])
    layer = model.layers[0]
    layer.forward = lambda x: layer.before(x + layer.mix(x))  # post-norm
    with pytest.raises(ValueError, match=r"block 0 .* does not get before of"):
        check_adapter(model, adapter, batch[0])
    bare = replace(torch_encoder("encoder", embed_dim=32), returns=lambda x: x)
    with pytest.raises(ValueError, match=r"returns a tuple and Adapter\.returns a Tensor"):
        check_adapter(Encoded(), bare, batch[0])
    model.layers[1] = model.layers[2]
    with pytest.raises(ValueError, match="one block more than once"):
        check_adapter(model, adapter, batch[0])


def test_an_attention_that_returns_a_mapping_is_refused(batch):
    model, adapter, _ = hand_made()
    assert adapter is not None
    layer = model.layers[0]
    attention = type(layer.mix)

    class Telling(attention):  # type: ignore
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"tokens": super().forward(x)}

    layer.mix.__class__ = Telling
    layer.forward = lambda x: x + layer.mix(layer.before(x))["tokens"]
    mapping = replace(adapter, returns=lambda x: {"tokens": x})
    with pytest.raises(ValueError, match=r"block 0 .* returns a dict .* must both be tokens"):
        check_adapter(model, mapping, batch[0])


def test_a_rollout_is_without_the_dropout_of_a_projection(batch):
    def dropping(attention: Any) -> Parts:
        found = by_function(attention)
        assert found.project is not None
        own = found.project
        return replace(
            found, project=lambda x: own(nn.functional.dropout(x, 0.5, attention.training))
        )

    model, adapter, _ = hand_made(lambda adapter: replace(adapter, parts=dropping))
    assert adapter is not None
    htm = {"layer": 1, "rollout_steps": 1, **EVERYTHING}
    module = attach(model, CLASSES, htm=htm, adapter=adapter).train()
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(module.mixed_pairs(*batch))
    assert all(mix is not None and mix.mask.any() for mix in found)
    assert torch.equal(*(mix.gain for mix in found))


def test_tokens_by_name_are_refused(batch):
    class Named(Encoded):
        def forward(self, images: Tensor) -> Tensor:
            tokens = self.embed(images).flatten(2).mT
            for layer in self.encoder.layers:
                tokens = layer(src=tokens)
            return self.head(tokens.mean(dim=1))

    encoder = torch_encoder("encoder", embed_dim=32)
    with pytest.raises(ValueError, match=r"block 0 .* gets its tokens by keyword"):
        check_adapter(Named(), encoder, batch[0])
    module = attach(Named(), CLASSES, htm={"layer": 1}, adapter=encoder)
    with pytest.raises(ValueError, match="block 1 gets its tokens by keyword"):
        train_output(module, batch)


def test_an_adapter_fits_in_low_precision_too(batch):
    encoder = torch_encoder("encoder", embed_dim=32)
    assert check_adapter(Encoded().bfloat16(), encoder, batch[0].bfloat16()) == 16


def test_masks_and_causal_attention_are_refused(batch):
    class Masked(Encoded):
        def forward(self, images: Tensor) -> Tensor:
            tokens = self.embed(images).flatten(2).mT
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            return self.head(self.encoder(tokens, mask=mask).mean(dim=1))

    module = attach(
        Masked(), CLASSES, htm={"layer": 1}, adapter=torch_encoder("encoder", embed_dim=32)
    )
    with pytest.raises(ValueError, match="does not support the argument src_mask"):
        train_output(module, batch)


def test_what_an_attention_gets_beside_its_tokens_is_refused(batch):
    block = find_encoder(Encoded(), torch_encoder("encoder", embed_dim=32)).blocks[0]
    x, mask = torch.zeros(1, 4, 32), torch.zeros(4, 4)
    with pytest.raises(ValueError, match="argument 3 of the attention, such as a mask"):
        block.answer(lambda tokens: tokens, (x, x, x, mask), {})
    with pytest.raises(ValueError, match="tokens by keyword: must be its first argument"):
        block.answer(lambda tokens: tokens, (), {"query": x})


def test_blocks_that_change_after_attach_are_refused(batch):
    model = Encoded()
    module = attach(model, CLASSES, vtm={"layer": 1}, adapter=torch_encoder("encoder", 32))
    model.encoder.layers[1].self_attn = nn.Linear(32, 32)
    with pytest.raises(ValueError, match="of self_attn: is a Linear"):
        train_output(module, batch)
    model = Encoded()
    htm = {"layer": 0, "rollout_steps": 1}
    module = attach(model, CLASSES, htm=htm, adapter=torch_encoder("encoder", 32))
    model.encoder.layers[0].forward = lambda x, **given: (x,)
    with pytest.raises(ValueError, match=r"blocks that return their tokens, .* returns a tuple"):
        train_output(module, batch)


def test_a_wrapped_model_is_copied_and_saved_whole(tmp_path: Path, batch):
    model = ViTForImageClassification(ViTConfig(**SIZES))
    module = attach(model, CLASSES, htm={"layer": 1, **EVERYTHING}, vtm={"layer": 2})
    torch.save(module, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    outputs = [train_output(one, batch) for one in (module, copy.deepcopy(module), loaded)]
    for other in outputs[1:]:
        assert torch.equal(outputs[0].logits, other.logits)


def test_stock_models_need_no_adapter():
    assert adapter_of(timm.create_model("vit_tiny_patch16_224", depth=1)).parts is timm_parts
    assert why_not(torchvision.models.vit_b_16()) is None
