"""A stand-in for CUDA graphs: on a CPU the steps run that a graph would replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from reproduction.training import step
from reproduction.training.graph import WARM_UP, StepGraph


def _rehearse(graph: StepGraph, inputs: Any) -> Callable[[], Any]:
    """Does what a capture does around it: some steps, which are undone."""
    undo = graph.keep()
    for _ in range(WARM_UP):
        graph.step(*inputs)
    undo()
    return lambda: graph.step(*inputs)


@contextmanager
def rehearsed() -> Iterator[None]:
    """Lets `compile=cuda-graph` train on a CPU, without compiling."""
    with (
        mock.patch.object(StepGraph, "_capture", _rehearse),
        mock.patch.object(step, "compile_module", lambda module: None),
    ):
        yield
