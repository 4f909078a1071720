"""CUDA graphs on a CPU: the steps run that a graph would replay."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from reproduction.training import graph, step
from reproduction.training.graph import StepGraph


@contextmanager
def rehearsed() -> Iterator[None]:
    """Lets `compile=cuda-graph` train on a CPU, without compiling; captures the second steps."""
    with (
        mock.patch.object(graph, "WARM_UP", 1),
        mock.patch.object(
            StepGraph, "_warm_up", lambda self, inputs: self.step(*inputs, **self.numbers)
        ),
        mock.patch.object(
            StepGraph, "_capture", lambda self, inputs: partial(self.step, *inputs, **self.numbers)
        ),
        mock.patch.object(step, "compile_module", lambda module: None),
    ):
        yield
