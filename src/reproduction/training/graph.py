"""The training step as one CUDA graph: captured at the fourth batch of each size, then replayed.

A replay launches once what takes hundreds of launches otherwise, on the same memory. So what
differs between steps is copied into tensors that stay, or is on the device itself: the learning
rate, counts, the seeds of random numbers.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from reproduction.errors import PlainError, first_line

WARM_UP = 3  # steps of a size before its capture: libraries and the optimiser set themselves up


@dataclass
class Captured:
    """A step in a graph, for one shape of its inputs."""

    inputs: list[Any]  # leaves of the arguments; tensors are the memory that the graph reads
    run: Callable[[], Any]  # returns the memory that the graph writes

    def replay(self, leaves: Sequence[Any]) -> Any:
        for held, value in zip(self.inputs, leaves, strict=True):
            if isinstance(value, Tensor):
                held.copy_(value, non_blocking=True)
        return self.run()


class StepGraph:
    """Replays `step(*inputs, **numbers)`, captured after WARM_UP calls for each shape of `inputs`.

    Numbers change from step to step: the step gets them as tensors on the device, which stay. The
    calls before are steps as any other, on the stream of the capture; a capture itself computes
    nothing. The step draws from `generators` and the device's own generator, so that its numbers
    are those of an eager step. What it returns is overwritten by the next call.

    Raises PlainError if the step cannot be captured, such as one that waits for the device.
    """

    def __init__(
        self, step: Callable[..., Any], generators: Sequence[torch.Generator], device: torch.device
    ):
        self.step, self.generators, self.device = step, generators, device
        self.numbers: dict[str, Tensor] = {}
        self.stream: Any = None
        self.forget()

    def __call__(self, *inputs: Any, **numbers: float) -> Any:
        for name, number in numbers.items():
            if name not in self.numbers:
                self.numbers[name] = torch.full((), number, device=self.device)
            self.numbers[name].fill_(number)
        leaves, tree = tree_flatten(inputs)
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        self.calls[key] += 1
        if self.calls[key] <= WARM_UP:
            return self._warm_up(inputs)
        if key not in self.captured:
            held = tree_map_only(Tensor, lambda x: x.to(self.device, copy=True), leaves)
            self.captured[key] = Captured(held, self._capture(tree_unflatten(held, tree)))
        return self.captured[key].replay(leaves)

    def forget(self) -> None:
        """Captures anew, since the step or its memory has changed."""
        self.calls = Counter[Any]()
        self.captured: dict[tuple[Any, ...], Captured] = {}
        self.pool: Any = None  # one cannot be used again once its graphs are gone

    def _warm_up(self, inputs: Any) -> Any:
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of capturable optimisers outside of a graph
            outputs = self.step(*inputs, **self.numbers)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return outputs

    def _capture(self, inputs: Any) -> Callable[[], Any]:
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        if torch.__version__ < "2.15":  # compares versions, no text; newer ones do this
            for generator in self.generators:
                graph.register_generator_state(generator)
        try:
            # The loader's thread pins memory meanwhile, which would end a capture of all threads.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                outputs = self.step(*inputs, **self.numbers)
        except Exception as error:
            first = first_of(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise PlainError(
                f"compile=cuda-graph: the step cannot be captured ({first_line(first)}); "
                "allowed are false and true"
            ) from error
        outputs = tree_map_only(Tensor, Tensor.detach, outputs)

        def run() -> Any:
            graph.replay()
            return outputs

        return run


def first_of(error: BaseException) -> BaseException:
    """Returns the error that came first: the end of a failed capture raises one of its own."""
    earlier = error.__cause__ or error.__context__
    return error if earlier is None else first_of(earlier)
