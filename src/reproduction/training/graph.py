"""The training step as one CUDA graph: captured at the first batch of each size, then replayed.

A replay launches once what takes hundreds of launches otherwise, on the same memory. So what
differs between steps is copied into tensors that stay, or is on the device itself: the learning
rate, counts, the seeds of random numbers.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from reproduction.system import PlainError, first_line

WARM_UP = 3  # steps before a capture, in which libraries set themselves up and memory is allocated
Undo = Callable[[], None]


class StepGraph:
    """Replays `step(*inputs)`, which is captured at the first call for each shape of its tensors.

    `keep` returns what restores all that a step changes, since a capture is preceded by steps. The
    step draws from `generators` and from the device's own generator; their states are those of the
    eager step, so that it draws the same numbers. What `step` returns is overwritten by the next
    call.

    Raises PlainError if the step cannot be captured, such as one that waits for the device.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        keep: Callable[[], Undo],
        generators: Sequence[torch.Generator],
        device: torch.device,
    ):
        self.step, self.keep, self.generators, self.device = step, keep, generators, device
        self.forget()

    def __call__(self, *inputs: Any) -> Any:
        leaves, tree = tree_flatten(inputs)
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        if key not in self.captured:
            static = tree_map_only(Tensor, lambda x: x.to(self.device, copy=True), leaves)
            states = [generator.get_state() for generator in self.generators]
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                run = self._capture(tree_unflatten(static, tree))
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
            self.captured[key] = static, run
        static, run = self.captured[key]
        for own, value in zip(static, leaves, strict=True):
            if isinstance(value, Tensor):
                own.copy_(value, non_blocking=True)
        return run()

    def forget(self) -> None:
        """Captures anew from the next step on, since the step or its memory has changed."""
        self.captured: dict[tuple[Any, ...], tuple[list[Any], Callable[[], Any]]] = {}
        self.pool: Any = None  # one whose graphs are gone takes no others

    def _capture(self, inputs: Any) -> Callable[[], Any]:
        if self.pool is None:
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        undo, stream = self.keep(), self.stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of capturable optimisers outside of a graph
            for _ in range(WARM_UP):
                self.step(*inputs)
            undo()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:  # its own torch registers, from 2.15 on all of them
            graph.register_generator_state(generator)
        try:
            # The loader's thread pins memory meanwhile, which would end a capture of all threads.
            with torch.cuda.graph(
                graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"
            ):
                outputs = self.step(*inputs)
        except Exception as error:
            first: BaseException = error  # the end of a failed capture raises one of its own
            while (earlier := first.__cause__ or first.__context__) is not None:
                first = earlier
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


def keep(tensors: Sequence[Tensor], optimizer: Optimizer, scaler: torch.amp.GradScaler) -> Undo:
    """Returns what restores the tensors, the optimiser's state and the scaler, where they lie.

    What the optimiser has no state of yet begins as zeros.
    """

    def states() -> dict[tuple[Tensor, str], Tensor]:
        return {
            (parameter, name): value
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    before = [tensor.detach().clone() for tensor in tensors]
    states_before = {key: value.clone() for key, value in states().items()}
    scale = scaler.state_dict()

    @torch.no_grad()
    def undo() -> None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        for key, value in states().items():
            value.copy_(states_before[key]) if key in states_before else value.zero_()
        scaler.load_state_dict(scale)

    return undo
