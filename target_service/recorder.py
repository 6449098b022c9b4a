"""The one place where CUDA graphs are made: everything around them runs on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Recorder(Protocol):
    """Turns a function into one that repeats what the first did on the device.

    The function's kernels read and write memory that was there before; it returns nothing.
    """

    @property
    def nbytes(self) -> int:
        """Of the device's memory, taken by all recordings made."""

    def rehearse(self, function: Callable[[], None]) -> None:
        """Run it once, and raise where it waits for the device: no recording can."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """What repeats it. Whether it has run meanwhile is open; it may have, twice.

        Recordings share memory between their first and last kernel, so one runs at a time.
        """


class CudaRecorder:
    """Records on a stream of its own, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def rehearse(self, function: Callable[[], None]) -> None:
        """Only while no other thread uses CUDA: the mode is the whole process's."""
        # Lazily loaded kernels and workspaces first.
        self._run_aside(function)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._run_aside(function)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            self._run_aside(function)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            current = torch.cuda.current_stream()
            cause: Exception | None = None
            try:
                # Other threads copy features meanwhile, which is no business of this stream's.
                with torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ):
                    try:
                        function()
                    except Exception as error:
                        cause = error
                        raise
            except Exception as error:
                # A broken recording fails once more as it is ended, which says nothing of why,
                # and leaves its stream behind.
                torch.cuda.set_stream(current)
                raise cause or error from None
            self._nbytes += max(0, torch.cuda.memory_reserved() - before)
        return graph.replay

    def _run_aside(self, function: Callable[[], None]) -> None:
        """On the stream that records, so that what libraries set up for a stream is there."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)
