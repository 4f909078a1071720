"""For all tests: small models, batches, errors of one line, and the texts drawn in figures."""

import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import timm
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from omegaconf import OmegaConf
from torch import Tensor, nn

from reproduction.models.cct import CCT
from tokenmixup import HTM
from tokenmixup.settings import RULES, choices_of

CLASSES = 5
slow = partial(pytest.param, marks=pytest.mark.slow)  # a case that `make test` leaves out

# Workers share the cores, and ranks are forked from them: OpenMP threads would not survive that.
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
torch.set_num_threads(1)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, for programs that tests start too
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in background jobs

# No deadline, as machines are shared; derandomized, so that failures reproduce.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("project")


def pytest_configure(config: pytest.Config) -> None:
    """Collects what killed processes leave behind in a temporary folder, removed at the end."""
    if hasattr(config, "workerinput"):  # of xdist, which inherits the folder
        return
    folder = tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays there
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name


load = OmegaConf.load


@cache
def parsed(text: str) -> Any:
    return load(io.StringIO(text))


def load_once(file: Any) -> Any:
    """Hydra reads the files of conf/ again for each command: here each text is parsed once."""
    return deepcopy(parsed(file.read())) if isinstance(file, io.IOBase) else load(file)


setattr(OmegaConf, "load", load_once)


def of_each(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """All of `names`, those that are not `quick` marked slow."""
    return [x if x in quick else slow(x) for x in names]


def settled(chosen: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the choices of HTM, with those changed that the others do not allow beside them."""
    chosen = dict(chosen)
    if chosen.get(f"{prefix}rollout_steps"):
        chosen[f"{prefix}detector"] = "attention"
    if isinstance(chosen.get(f"{prefix}layer"), list):
        for option, value in (("detector", "gradient"), ("order", "published")):
            if chosen.get(prefix + option) == value:
                chosen[prefix + option] = getattr(HTM, option)
    return chosen


def small_cct(attn_drop: float = 0.0, drop_path: float = 0.0, depth: int = 4) -> nn.Module:
    """A CCT with 64 tokens of width 32."""
    torch.manual_seed(0)
    model = CCT(
        num_classes=CLASSES,
        image_size=16,
        embed_dim=32,
        depth=depth,
        num_heads=2,
        mlp_ratio=2.0,
        conv_layers=1,
        positional_embedding="learnable",
        attn_drop=attn_drop,
        drop_path=drop_path,
    )
    return sharpened(model)


def small_vit_lite() -> nn.Module:
    """A ViT-Lite with 16 tokens of width 32 and a class token."""
    torch.manual_seed(0)
    model = CCT(
        num_classes=CLASSES,
        image_size=16,
        embed_dim=32,
        depth=4,
        num_heads=2,
        mlp_ratio=2.0,
        conv_layers=None,
        patch_size=4,
        positional_embedding="learnable",
        pooling="class_token",
        attn_drop=0.0,
        drop_path=0.0,
    )
    return sharpened(model)


def small_vit(**options: Any) -> nn.Module:
    """A timm ViT with 16 tokens of width 48 and a class token."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
    settings: dict[str, Any] = {**sizes, "num_classes": CLASSES, **options}
    model = timm.create_model("vit_tiny_patch16_224", **settings)
    return sharpened(model)


def sharpened(model: nn.Module) -> nn.Module:
    """Scales the QKV weights in place until saliency clearly differs between tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("qkv.weight"):
                parameter.mul_(12)
    return model


def normal(*shape: int, seed: int) -> Tensor:
    """Numbers of a normal distribution, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn_batch(samples: int, pixels: int) -> tuple[Tensor, Tensor]:
    """Images `b 3 h w` and soft targets `b c`, always the same."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(samples, CLASSES, generator=generator).softmax(dim=1)
    images = torch.randn(samples, 3, pixels, pixels, generator=generator)
    return images, targets


def other_rules() -> dict[str, dict[str, Any]]:
    """Every value of a rule of HTM that is not the paper's, by its text."""
    rules: dict[str, dict[str, Any]] = {}
    for name in (*RULES, "order"):
        for value in choices_of(HTM, name)[1:]:
            rules[f"{name}={value}"] = {name: value}
    return rules


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the parameters that have one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Runs(list[int]):
    """Counts; a plain list would be state of a block, which is to change once in a step."""


def runs_of(modules: Iterable[nn.Module]) -> list[int]:
    """How often each module has run, which goes on counting."""
    runs = Runs()

    def count(index: int, *_: Any) -> None:
        runs[index] += 1

    for index, module in enumerate(modules):
        runs.append(0)
        module.register_forward_pre_hook(partial(count, index))
    return runs


def assert_nothing_is_left(model: nn.Module) -> None:
    """Of a pass: no wrapper of a `forward`, and no hook."""
    for part in model.modules():
        assert "forward" not in vars(part)
        assert not part._forward_pre_hooks
        assert not part._forward_hooks


@contextmanager
def refused(line: str, error_type: type[Exception] = ValueError) -> Iterator[None]:
    """Expects an error of one line, in which a pattern is found."""
    with pytest.raises(error_type, match=line) as error:
        yield
    assert "\n" not in str(error.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, which is empty; modules that lie in it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which this folder may be appended
    yield tmp_path
    inside = f"{tmp_path}{os.sep}"
    for name, module in [*sys.modules.items()]:
        file = vars(module).get("__file__")
        if file is not None and file.startswith(inside):
            del sys.modules[name]


@pytest.fixture
def drawn_texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Maps the name of each saved figure to its texts."""
    texts_of: dict[str, list[str]] = {}
    save = Figure.savefig

    def record(figure: Figure, path: Path, **settings: Any) -> None:
        save(figure, path, **settings)
        texts = (text.get_text() for text in figure.findobj(Text) if text.get_visible())
        texts_of[path.name.split(".")[1]] = [text for text in texts if text]  # .NAME.svg.tmp

    monkeypatch.setattr(Figure, "savefig", record)
    return texts_of
