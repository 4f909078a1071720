"""The kernels for a GPU beside functions of torch and scipy; on a CPU in Triton's interpreter."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from scripts.on_gpu.matrices import Matrix, deficit, matrices
from tokenmixup.assignment import gain_by_distance
from tokenmixup.attention import Parts, received_exactly
from tokenmixup.horizontal import (
    Exchange,
    exchange_by_rows,
    exchange_gradient_by_rows,
    ratio_by_sums,
)
from tokenmixup.output import totals_by_sums

pytest.importorskip("triton")

from tokenmixup import attention, device_assignment, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PTXAS = Path(str(device_assignment.triton.__file__)).parent / "backends/nvidia/bin/ptxas"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """numpy warns in the interpreter where a mask hides the value, or an integer would overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def loss_of(matrix: Matrix, module: ModuleType = device_assignment) -> float:
    return deficit(matrix, module.device_donors(matrix.gain.to(DEVICE), matrix.is_easy.to(DEVICE)))


@pytest.mark.parametrize(("b", "share"), [(1, 1.0), (2, 0.5), (7, 0.1), (7, 1.0), (9, 0.6)])
def test_donors_gain_as_much_as_scipys(b: int, share: float):
    worst = max((loss_of(matrix), matrix.kind) for matrix in matrices(b, share))
    assert worst[0] <= b * 2**-28, worst


@pytest.mark.slow
@pytest.mark.parametrize(("b", "share"), [(16, 0.9), (33, 0.5), (64, 0.05), (64, 1.0)])
def test_donors_of_larger_batches_gain_as_much_as_scipys(b: int, share: float):
    worst = max((loss_of(matrix), matrix.kind) for matrix in matrices(b, share))
    assert worst[0] <= b * 2**-28, worst


def test_donors_are_right_in_several_tiles_and_in_every_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_assignment, "TILE", 64)  # 4 of 16 rows
    for matrix in islice(matrices(13, 0.8), 4):
        assert loss_of(matrix) <= 13 * 2**-28, matrix.kind
        one, other = (device_assignment.device_donors(*matrix[1:]) for _ in range(2))
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_gain_that_is_not_finite_gives_easy_samples_no_donor(bad: float):
    gain = torch.rand(6, 6, dtype=torch.float64)
    gain[2, 3] = bad
    is_easy = torch.ones(6, dtype=torch.bool)
    is_easy[4] = False
    donor = device_assignment.device_donors(gain.to(DEVICE), is_easy.to(DEVICE))
    assert donor.tolist() == [-1, -1, -1, -1, 4, -1]
    is_easy[2] = False  # the gains of a hard sample do not matter
    donor = device_assignment.device_donors(gain.to(DEVICE), is_easy.to(DEVICE))
    assert (donor >= 0).all()


MISTAKES = {
    "a price is forgotten": (
        "tl.where(is_open, label + price, FAR)",
        "tl.where(is_open, label, FAR)",
    ),
    "bids have an epsilon": (
        "tl.minimum(lead, ONE)[:, None]",
        "tl.minimum(lead + ONE // 8, ONE)[:, None]",
    ),
    "searches stop early": ("while row >= 0:", "while (row >= 0) & (reached <= 0):"),
    "cheap donors stay free": ("if easy_rows < b:", "if easy_rows < 0:"),
}


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="a mistake may never end on a GPU")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_assignment_are_noticed(mistake: str, tmp_path: Path):
    """A search that never ends is noticed, too."""
    right, wrong = MISTAKES[mistake]
    text = Path(str(device_assignment.__file__)).read_text()
    assert text.count(right) == 1
    (tmp_path / "mistaken.py").write_text(text.replace(right, wrong))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mistaken\n"
        "from tests.tokenmixup.test_kernels import loss_of, matrices\n"
        "for b, share in ((9, 1.0), (9, 0.5), (24, 1.0)):\n"
        "    for matrix in matrices(b, share):\n"
        "        if loss_of(matrix, mistaken) > b * 2**-28: sys.exit(3)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    try:
        end = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    except subprocess.TimeoutExpired:
        return
    assert end.returncode == 3 or "share a donor, or have none" in end.stderr, end.stderr


@pytest.mark.parametrize(("b", "t", "rho"), [(5, 7, 0.0), (20, 33, 0.005), (1, 1, 0.1)])
def test_gains_equal_those_by_a_distance(b: int, t: int, rho: float):
    saliency = torch.randn(b, t, device=DEVICE).softmax(dim=1)
    expected = gain_by_distance(saliency, rho)
    torch.testing.assert_close(kernels.gain(saliency, rho), expected, atol=1e-14, rtol=0)
    saliency[0, 0] = torch.nan
    assert b == 1 or not kernels.gain(saliency, rho).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "keys", "e"), [(5, 5, 8), (1, 20, 16), (70, 70, 24)])
def test_attention_received_equals_the_mean_of_the_map(dtype, rows: int, keys: int, e: int):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bf16")
    qkv = torch.randn(2, keys, 3, 2, e, device=DEVICE).to(dtype)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)  # b h n e, as views of the projections
    q = q[:, :, :rows]
    found = kernels.received(q, k, 0.7)
    torch.testing.assert_close(found, received_exactly(q, k, 0.7), atol=1e-6, rtol=1e-5)


def test_scores_that_float16_cannot_hold_are_no_problem():
    q, k = torch.full((1, 1, 2, 16), 200.0), torch.full((1, 1, 3, 16), 200.0)
    k[0, 0, 1] = -200
    found = kernels.received(q.half().to(DEVICE), k.half().to(DEVICE), 1.0)
    assert found.tolist() == [[0.5, 0, 0.5]]


@pytest.mark.parametrize(("n", "t", "d"), [(6, 6, 4), (7, 5, 3), (1, 1, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_exchange_and_its_gradient_equal_those_by_rows(n: int, t: int, d: int, dtype):
    donor = torch.tensor([2, 0, 1, 3, 4], device=DEVICE)  # 3 and 4 are hard
    mask = (torch.rand(5, t, device=DEVICE) < 0.5) & (donor < 3)[:, None]
    x, grad = torch.randn(2, 5, n, d, device=DEVICE).to(dtype)
    assert torch.equal(kernels.exchange(x, donor, mask), exchange_by_rows(x, donor, mask))
    found = kernels.exchange_backward(grad, donor, mask)
    assert torch.equal(found, exchange_gradient_by_rows(grad, donor, mask))


def test_the_gradient_adds_up_over_several_receivers_of_a_donor():
    donor = torch.tensor([3, 3, 0, 3], device=DEVICE)
    mask = torch.rand(4, 5, device=DEVICE) < 0.5
    grad = torch.randn(4, 5, 2, device=DEVICE)
    found, expected = (
        f(grad, donor, mask) for f in (kernels.exchange_backward, exchange_gradient_by_rows)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("b", "t"), [(3, 5), (1, 1), (70, 64)])
def test_ratios_and_totals_equal_those_by_functions_of_torch(b: int, t: int):
    saliency = torch.rand(b, t, device=DEVICE)
    mask = torch.rand(b, t, device=DEVICE) < 0.5
    mask[0] = True
    found = kernels.ratio(saliency, mask)
    assert found[0] == 0
    torch.testing.assert_close(found, ratio_by_sums(saliency, mask))
    of_none = kernels.ratio(torch.zeros_like(saliency), torch.zeros_like(mask))
    assert (of_none == 1).all() and kernels.ratio(saliency * torch.nan, mask)[0] == 1
    gain, difficulty = mask * saliency, torch.rand(2 * b, device=DEVICE)
    is_easy = mask.any(dim=1)
    found = kernels.totals(is_easy, mask, gain, difficulty)
    torch.testing.assert_close(found, totals_by_sums(is_easy, mask, gain, difficulty))
    gain[-1, -1] = torch.nan
    found = kernels.totals(is_easy, mask, gain, difficulty)
    assert found.isnan().tolist() == [False, False, False, True, True]


OPERATORS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gain": lambda: (torch.rand(4, 5), 0.1),
    "donors": lambda: (torch.rand(4, 4, dtype=torch.float64), torch.tensor([True] * 3 + [False])),
    "ratio": lambda: (torch.rand(4, 5), torch.rand(4, 5) < 0.5),
    "totals": lambda: (torch.ones(4) > 0, torch.ones(4, 5) > 0, torch.rand(4, 5), torch.rand(4)),
    "received": lambda: (*torch.rand(2, 2, 3, 4, 8).half(), 0.5),
    **dict.fromkeys(
        ("exchange", "exchange_backward"),
        lambda: (torch.rand(4, 5, 2), torch.tensor([2, 0, 1, 3]), torch.rand(4, 5) < 0.5),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_say_what_they_return(name: str):
    operator, arguments = getattr(torch.ops.tokenmixup, name), OPERATORS[name]()
    here, nowhere = (
        operator(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments))
        for device in (DEVICE, "meta")  # as a compiler asks
    )
    assert here.shape == nowhere.shape and here.stride() == nowhere.stride()
    assert here.dtype == nowhere.dtype


def test_the_exchange_passes_gradients_to_the_tokens_that_were_read():
    donor, mask = torch.tensor([2, 0, 1, 3]), torch.rand(4, 5) < 0.5
    mask[3] = False
    tokens = torch.randn(4, 5, 2, dtype=torch.float64, requires_grad=True)
    arguments = [x.to(DEVICE) for x in (tokens, donor, mask)]
    assert torch.autograd.gradcheck(Exchange.apply, arguments)


@pytest.mark.parametrize(("keys", "width", "is_held"), [(512, 64, True), (257, 65, False)])
def test_keys_that_the_kernel_cannot_hold_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, keys: int, width: int, is_held: bool
):
    monkeypatch.setattr(attention, "has_kernels", lambda x: True)
    monkeypatch.setattr(attention, "received_on_device", lambda q, k, scale: None)
    layer = nn.Linear(width, width)
    parts = Parts(num_heads=1, proj=layer, training=True, q_proj=layer, k_proj=layer, v_proj=layer)
    q = k = torch.randn(1, 1, keys, width).half()
    assert (attention.received(parts, q, k, None) is None) is is_held


COMPILE = """
import subprocess, sys, triton
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from tokenmixup import device_assignment as assignment, kernels
arch = int(sys.argv[1])

def compiled(function, types, constants, warps):
    names = function.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(function, signature, {(names.index(k),): v for k, v in constants.items()})
    target, options = GPUTarget("cuda", arch, 32), {"num_warps": warps}
    kernel = triton.compile(source, target=target, options=options)
    flag = f"-arch=sm_{arch}" + "a" * (arch == 90)
    command = [get_ptxas(arch).path, flag, "-v", "-o", "/dev/null", "/dev/stdin"]
    ptx = kernel.asm["ptx"].encode()
    end = subprocess.run(command, input=ptx, capture_output=True, check=True)
    print(function.__name__, kernel.metadata.shared, *end.stderr.decode().split())

types = {"gain": "*fp64", "easy": "*i1", "cost": "*i32", "kernel": "*fp32", "donor": "*i64"}
types = {f"{name}_ptr": kind for name, kind in types.items()}
for b in (128, 512):
    constants = {"B": b, "R": min(b, assignment.TILE // b), "N": assignment.ITERATIONS}
    constants |= {"BIDS": assignment.BIDS}
    compiled(assignment._assign, types, constants, assignment.WARPS)
types = {"saliency_ptr": "*fp32", "gain_ptr": "*fp64"}
compiled(kernels._gain, types, {"RHO": 0.005, "S": 16, "T": 16}, 4)
types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "out_ptr": "*fp32", "scale": "fp32"}
for keys, e, rows in ((256, 64, 64), (512, 64, 32), (256, 128, 64)):
    compiled(kernels._received, types, {"R": rows, "M": keys, "E": e}, 8)
names = ("x_ptr", "grad_ptr", "out_ptr")
types = {"donor_ptr": "*i64", "mask_ptr": "*i1"} | dict.fromkeys(names, "*bf16")
compiled(kernels._exchange, types, {"N": 8, "D": 512}, 4)
compiled(kernels._exchange_backward, types, {"B": 128, "N": 8, "D": 512}, 4)
names = ("saliency_ptr", "gain_ptr", "difficulty_ptr", "out_ptr")
types = {"mask_ptr": "*i1", "easy_ptr": "*i1"} | dict.fromkeys(names, "*fp32")
compiled(kernels._ratio, types, {"T": 256}, 4)
compiled(kernels._totals, types, {"S": 4096}, 16)
"""


@pytest.mark.slow
@pytest.mark.skipif(not PTXAS.is_file(), reason="needs ptxas, which comes with Triton")
@pytest.mark.parametrize(("arch", "shared"), [(80, 163 * 1024), (90, 227 * 1024)])
def test_kernels_compile_without_spills(arch: int, shared: int):
    """For A100 and H100; Triton's compiler needs no GPU."""
    command = [sys.executable, "-c", COMPILE, str(arch)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    end = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert end.returncode == 0, end.stderr
    lines = end.stdout.splitlines()
    assert len(lines) == 10
    for line in lines:
        name, held = line.split()[:2]
        assert int(held) <= shared, line
        assert re.search(r" 0 bytes spill stores, 0 bytes spill loads", line), f"{name}: {line}"
