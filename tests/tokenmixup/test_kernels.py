"""The kernels for a GPU beside functions of torch and scipy; on a CPU in Triton's interpreter."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.conftest import slow
from tests.tokenmixup.matrices import Matrix, loss_of, matrices

pytest.importorskip("triton")

from tokenmixup import assignment_kernel, attention_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PTXAS = Path(str(assignment_kernel.triton.__file__)).parent / "backends/nvidia/bin/ptxas"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """numpy warns in the interpreter where a mask hides the value, or an integer would overflow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def loss(matrix: Matrix) -> float:
    return loss_of(matrix, assignment_kernel, DEVICE)


LARGER = [(1, 1.0), (7, 1.0), (16, 0.9), (33, 0.5), (64, 0.05), (64, 1.0)]
if DEVICE == "cuda":  # the interpreter would take minutes for each
    LARGER += [(128, 1.0), (504, 0.6), (504, 1.0)]
SIZES: list[Any] = [(9, 0.6)]  # samples, share of easy ones
SIZES += [slow(*size) for size in LARGER]


@pytest.mark.parametrize(("b", "share"), SIZES)
def test_donors_gain_as_much_as_scipys(b: int, share: float):
    for matrix in matrices(b, share):
        assert loss(matrix) <= b * 2**-28, matrix.name


def test_donors_are_right_in_several_tiles_and_in_every_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(assignment_kernel, "TILE", 64)  # 4 of 16 rows
    for matrix in islice(matrices(13, 0.8), 2):
        assert loss(matrix) <= 13 * 2**-28, matrix.name
        given = (matrix.gain.to(DEVICE), matrix.is_easy.to(DEVICE))
        one = assignment_kernel.device_donors(*given)
        other = assignment_kernel.device_donors(*given)
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_gain_that_is_not_finite_gives_easy_samples_no_donor(bad: float):
    gain = torch.rand(6, 6, dtype=torch.float64)
    gain[2, 3] = bad
    is_easy = torch.ones(6, dtype=torch.bool)
    is_easy[4] = False
    donor = assignment_kernel.device_donors(gain.to(DEVICE), is_easy.to(DEVICE))
    assert donor.tolist() == [-1, -1, -1, -1, 4, -1]
    is_easy[2] = False  # the gains of a hard sample do not matter
    donor = assignment_kernel.device_donors(gain.to(DEVICE), is_easy.to(DEVICE))
    assert (donor >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "keys", "e"), [(5, 5, 8), (1, 20, 16), (70, 70, 24)])
def test_attention_received_equals_the_mean_of_the_map(dtype, rows: int, keys: int, e: int):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bf16")
    qkv = torch.randn(2, keys, 3, 2, e, device=DEVICE).to(dtype)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)  # b h n e, as views of the projections
    q = q[:, :, :rows]
    found = attention_kernel.received(q, k, 0.7)
    scores = q.float() @ k.float().mT * 0.7
    expected = scores.softmax(dim=-1).mean(dim=(1, 2))
    assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_scores_that_float16_cannot_hold_are_no_problem():
    q = torch.full((1, 1, 2, 16), 200.0)
    k = torch.full((1, 1, 3, 16), 200.0)
    k[0, 0, 1] = -200
    found = attention_kernel.received(q.half().to(DEVICE), k.half().to(DEVICE), 1.0)
    assert found.tolist() == [[0.5, 0, 0.5]]


COMPILE = """
import subprocess, sys, triton
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from tokenmixup import assignment_kernel as assignment, attention_kernel as attention
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

types = {"gain_ptr": "*fp64", "easy_ptr": "*i1", "gibbs_ptr": "*fp32", "donor_ptr": "*i64"}
types |= {"int_gain_ptr": "*i32", "price_ptr": "*i32", "owner_ptr": "*i32"}
for b in (128, 512):
    tile = {"B": b, "R": min(b, assignment.TILE // b)}
    rounds = {"N": assignment.ITERATIONS, "BIDS": assignment.BIDS}
    compiled(assignment._start, types, tile | rounds, assignment.WARPS)
    compiled(assignment._search, types, {"B": b}, max(1, b // assignment.SEARCHED))
types = {"q_ptr": "*bf16", "k_ptr": "*bf16", "out_ptr": "*fp32", "scale": "fp32"}
for keys, e, rows in ((256, 64, 64), (512, 64, 32), (256, 128, 64)):
    compiled(attention._received, types, {"R": rows, "K": keys, "E": e}, attention.WARPS)
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
    assert len(lines) == 7
    for line in lines:
        _, held, *_ = line.split()
        assert int(held) <= shared, line
        assert " 0 bytes spill stores, 0 bytes spill loads" in line
