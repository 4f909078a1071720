"""Verdicts on timm's models, one of each kind; `make check-models` tries all of them."""

import sys

import pytest

from reproduction.models.survey import (
    Verdict,
    count_of,
    page_of,
    smallest_of_families,
    survey,
    try_out,
)
from scripts import list_models

REFUSED = {
    "resnet18": "its layers form stages",
    "swinv2_cr_tiny_224": "its layers form stages",
    "vgg11": "it has none",
    "xcit_nano_12_p16_224": "block 0 is XCABlock, not pre-norm self-attention",
    "mixer_s32_224": "block 0 is MixerBlock, which has no self-attention",
    "vit_base_patch16_rpn_224": "block 0 is ResPostBlock, not pre-norm self-attention",
    "vit_base_patch16_xp_224": "block 0 is ParallelScalingBlock, which has no self-attention",
    "vit_dwee_patch16_reg1_gap_256": "whose DiffAttention is not a softmax of q k^T",
    "convit_tiny": "block 0 is Block, not pre-norm self-attention",
    "qwen3_vit_88m_enc": "is an encoder without a classifier",
}
SERVED = [
    "vit_tiny_patch16_224",
    "eva02_tiny_patch14_224",
    "cait_xxs24_224",
    "beit_base_patch16_224",
]
HTM_ALONE = [
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "pvt_v2_b0",
    "hiera_tiny_224",
]


def test_survey_gives_the_reason_of_refusals():
    verdicts = {verdict.name: verdict for verdict in survey([*REFUSED, *SERVED, *HTM_ALONE])}
    served = {verdict for verdict in verdicts.values() if verdict.reason is None}
    assert {verdict.name for verdict in served if verdict.takes_vtm} == set(SERVED)
    assert {verdict.name for verdict in served if not verdict.takes_vtm} == set(HTM_ALONE)
    assert "8 of 18 models take HTM, 4 HTM and VTM" in count_of([*verdicts.values()])
    assert "| hiera | 1 | 0 | 1 |  |" in page_of([*verdicts.values()])
    for name, part in REFUSED.items():
        reason = verdicts[name].reason
        assert reason is not None and part in reason and "\n" not in reason
    assert verdicts["vit_tiny_patch16_224"].parameters == 5_526_346  # with 10 classes


def test_smallest_of_families_chooses_the_smallest_supported_models():
    verdicts = [
        Verdict("vit_base_patch16_siglip_224", "vision_transformer", 90, None),
        Verdict("vit_small_patch16_siglip_256", "vision_transformer", 20, None),
        Verdict("vit_tiny_patch16_224", "vision_transformer", 5, None),
        Verdict("vit_atto_siglip", "vision_transformer", 1, "some reason"),
        Verdict("eva02_tiny_patch14_224", "eva", 5, None),
    ]
    chosen = {verdict.family: verdict.parameters for verdict in smallest_of_families(verdicts)}
    assert chosen == {
        "vision_transformer: vit_siglip": 20,
        "vision_transformer: vit": 5,
        "eva: eva02": 5,
    }


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("test_vit", None),
        ("naflexvit_base_patch16_gap", 3),
        ("vit_tiny_r_s16_p8_224", 3),
        ("swin_tiny_patch4_window7_224", None),
    ],
)
def test_try_out_trains_and_evaluates_a_model(name: str, depth: int | None):
    try_out(name, depth)


def test_try_out_notices_a_changed_evaluation(monkeypatch: pytest.MonkeyPatch):
    from tokenmixup import TokenMixup

    def forward(self, images, targets=None):
        if not self.training:
            return self.model(images) * 2
        return original(self, images, targets)

    original = TokenMixup.forward
    monkeypatch.setattr(TokenMixup, "forward", forward)
    with pytest.raises(AssertionError):
        try_out("test_vit")


def test_list_models_prints_verdicts_and_their_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["list_models.py", "test_vit*"])
    list_models.main()
    printed = capsys.readouterr().out
    assert "test_vit: supported" in printed
    assert "5 of 5 models take HTM, 5 HTM and VTM" in printed
    monkeypatch.setattr(sys, "argv", ["list_models.py", "no_such_model"])
    with pytest.raises(SystemExit) as end:
        list_models.main()
    refusal = "list_models.py: no_such_model: timm has no such model\n"
    assert (end.value.code, capsys.readouterr().err) == (2, refusal)
