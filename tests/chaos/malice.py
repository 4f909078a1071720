"""Files that execute code or exhaust memory in a careless reader."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BIG = 2**40  # number of elements that a file claims to hold


class Call:
    """Calls a function when unpickled without restrictions."""

    def __init__(self, function: Any, *args: Any):
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def malicious_files(executed: Path) -> Iterator[tuple[str, bytes]]:
    """Yields (kind, content); executed code would create the folder or file `executed`."""
    for name, pickled in _pickles(str(executed)):
        yield f"{name}, pickle", pickled
        yield f"{name}, torch zip", _torch_zip(pickled)
        yield f"{name}, torch legacy", _torch_legacy(pickled)
        yield f"{name}, npz", _object_npz(pickled)
    yield "object array, npz", _npz_of(np.array([{}], dtype=object))
    yield from _bombs()
    yield from _headers()


def _pickles(target: str) -> Iterator[tuple[str, bytes]]:
    """Yields a pickle for each opcode that can call a function."""
    line = f"mkdir {target}"
    code = f"__import__('os').mkdir({target!r})"
    yield "os.system by REDUCE", pickle.dumps(Call(os.system, line), 2)
    yield "eval by REDUCE", pickle.dumps(Call(eval, code), 2)
    yield "exec by REDUCE", pickle.dumps(Call(exec, code), 2)
    yield "open by REDUCE", pickle.dumps(Call(open, target, "w"), 2)
    yield "os.mkdir by REDUCE", pickle.dumps(Call(os.mkdir, target), 2)
    text = target.encode()
    yield "os.mkdir by INST", b"(S'" + text + b"'\nios\nmkdir\n."
    yield "os.mkdir by OBJ", b"(cos\nmkdir\nS'" + text + b"'\no."
    yield "os.mkdir by STACK_GLOBAL", pickle.dumps(Call(os.mkdir, target), 4)
    yield "os.mkdir by NEWOBJ", b"\x80\x02cos\nmkdir\n(S'" + text + b"'\nt\x81."
    build = b"\x80\x02cargparse\nNamespace\n)\x81}S'x'\ncos\nmkdir\n(S'" + text + b"'\ntRsb."
    yield "os.mkdir by BUILD", build
    yield "a setstate by BUILD", b"\x80\x02ctorch.nn\nModule\n)\x81}S'x'\nK\x01sb."
    yield "torch.load by REDUCE", b"\x80\x02ctorch\nload\nS'" + text + b"'\n\x85R."
    yield "getattr by REDUCE", b"\x80\x02cbuiltins\ngetattr\ncos\nmkdir\nS'__call__'\n\x86R."
    yield "a bytearray", b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R."
    yield "a huge tensor", b"\x80\x02ctorch\nTensor\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R."


def _torch_zip(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return file.getvalue()


def _torch_legacy(pickled: bytes) -> bytes:
    """The format of torch.save before zip archives: a sequence of pickles."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    head = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, system)
    return b"".join(pickle.dumps(part, 2) for part in head) + pickled + pickle.dumps([], 2)


def _npz_of(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, cls=array)
    return file.getvalue()


def _npy_header(shape: tuple[int, ...], kind: str) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _zip_of(name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def _object_npz(pickled: bytes) -> bytes:
    return _zip_of("cls.npy", _npy_header((1,), "|O") + pickled)


def _bombs() -> Iterator[tuple[str, bytes]]:
    """Yields small files that claim to be large, or unpack to a large size."""
    yield "huge array, npz", _zip_of("cls.npy", _npy_header((BIG,), "<f4") + b"1234")
    zeros = bytes(2**24)
    shape = (len(zeros) // 4,)
    array = _npy_header(shape, "<f4") + zeros
    yield "zip bomb, npz", _zip_of("cls.npy", array, zipfile.ZIP_DEFLATED)
    yield "zip bomb, torch", _zip_of("archive/data.pkl", zeros, zipfile.ZIP_DEFLATED)
    honest = bytearray(_zip_of("cls.npy", _npy_header((1,), "<f4") + b"1234"))
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        place = honest.index(signature) + offset
        honest[place : place + 4] = (2**32 - 2).to_bytes(4, "little")
    yield "huge declared size, npz", bytes(honest)
    file = io.BytesIO()
    torch.save({"head.bias": torch.zeros(1).expand(BIG)}, file)
    yield "tensor of repeated values, torch", file.getvalue()
    file = io.BytesIO()
    names = [f"classifier.blocks.0.self_attn.{part}.bias" for part in ("query", "key", "value")]
    torch.save({name: torch.zeros(1).expand(BIG) for name in names}, file)
    yield "three of them to be joined, torch", file.getvalue()


def _headers() -> Iterator[tuple[str, bytes]]:
    """Yields safetensors files with bad headers."""

    def written(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
        text = json.dumps(header).encode()
        return (len(text) if length is None else length).to_bytes(8, "little") + text + data

    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    yield "header of 2^60 bytes, safetensors", written({"a": one}, b"1234", 2**60)
    yield "header of 2^64 - 1 bytes, safetensors", written({"a": one}, b"1234", 2**64 - 1)
    huge = {"dtype": "F32", "shape": [BIG], "data_offsets": [0, 4 * BIG]}
    yield "huge tensor, safetensors", written({"a": huge}, b"1234")
    overflow = {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}
    yield "shape that overflows, safetensors", written({"a": overflow}, b"1234")
    yield "offsets that overlap, safetensors", written({"a": one, "b": one}, b"1234")
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    yield "deep header, safetensors", written(deep)
    yield (
        "odd metadata, safetensors",
        written({"__metadata__": {"classes": "{"}, "a": one}, b"1234"),
    )
