"""What the machine can do: processor, devices, dtypes, transports, kernels."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import mmap
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from flashduet.errors import TransportError
from flashduet_cli.doctor_checks import Check

PROBE_BYTES = 1 << 20
# The default pair in float32, with its KV and the three processes' own memory.
DEFAULT_PAIR_BYTES = 4 << 30


def machine_checks() -> list[Check]:
    """All of this module's checks; imports torch, which takes a second."""
    return [
        _processor(),
        _memory(),
        *_devices(),
        *_dtypes(),
        _memfd(),
        Check("transports", "inline", "OK", "always there; bytes travel inside the messages"),
        _cuda_ipc(),
        *_kernels(),
    ]


def _processor() -> Check:
    import torch

    threads = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    return Check(
        "machine",
        "processor",
        "OK",
        f"{platform.machine()}, {threads}, vector level {torch.backends.cpu.get_cpu_capability()}",
    )


def _memory() -> Check:
    memory = psutil.virtual_memory()
    detail = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    if memory.available >= DEFAULT_PAIR_BYTES:
        return Check("machine", "memory", "OK", detail)
    return Check(
        "machine",
        "memory",
        "WARN",
        detail,
        f"the default pair is comfortable with {DEFAULT_PAIR_BYTES >> 30} GiB; end what else runs",
    )


def _devices() -> Iterator[Check]:
    import torch

    yield Check("devices", "cpu", "OK", "always there")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch sees no GPU" if built else "this torch is built for CPUs"
        yield Check("devices", "cuda", "WARN", why, "for a GPU: its driver and a CUDA torch")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Check(
            "devices",
            f"cuda:{index}",
            "OK",
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"capability {properties.major}.{properties.minor}",
        )


def _dtypes() -> Iterator[Check]:
    import torch

    flags = _cpu_flags()
    fast = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    for name in ("float32", "bfloat16", "float16"):
        size = 256
        weight = torch.ones(size, size, dtype=getattr(torch, name))
        weight @ weight  # the first product also picks and builds its kernel
        began = time.perf_counter()
        product = weight @ weight
        milliseconds = (time.perf_counter() - began) * 1e3
        right = float(product[0, 0]) == float(size)
        detail = f"a {size}x{size} product on the CPU took {milliseconds:.1f} ms"
        if not right:
            yield Check("dtypes", name, "FAIL", "wrong product on the CPU", "reinstall torch")
        elif name == "bfloat16" and not fast:
            yield Check(
                "dtypes",
                name,
                "WARN",
                f"{detail}; no bfloat16 instructions",
                "float32 may be faster here: --dtype float32",
            )
        elif name == "bfloat16":
            yield Check("dtypes", name, "OK", f"{detail}; {', '.join(fast)}")
        else:
            yield Check("dtypes", name, "OK", detail)


def _cpu_flags() -> set[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return set(line.partition(":")[2].split())
    return set()


def _memfd() -> Check:
    """Do what the transport does: seal a memfd, pass it over a Unix socket, map it read-only."""
    if sys.platform != "linux":
        return Check(
            "transports", "memfd", "WARN", "Linux only", "nothing to do: auto uses inline here"
        )
    try:
        _pass_sealed_memfd()
    except (OSError, TransportError) as error:
        return Check(
            "transports",
            "memfd",
            "WARN",
            f"does not work here: {error}",
            "allow memfd_create and SCM_RIGHTS (container seccomp profile), or use inline",
        )
    return Check(
        "transports", "memfd", "OK", "sealed, passed by SCM_RIGHTS, its reader cannot write to it"
    )


def _pass_sealed_memfd() -> None:
    """The transport's own ring, passed to ourselves; OSError where a step does not do its part."""
    from flashduet.transport.memfd import create_ring, map_ring

    with contextlib.ExitStack() as stack:
        ring = create_ring(PROBE_BYTES)
        stack.callback(os.close, ring.descriptor)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        stack.enter_context(ours)
        stack.enter_context(theirs)
        socket.send_fds(ours, [b"r"], [ring.descriptor])
        _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        if len(descriptors) != 1:
            raise OSError(errno.EPROTO, "the descriptor did not arrive")
        reader = map_ring(descriptors[0], PROBE_BYTES)
        ring.buffer[:4] = 42
        if reader[:4].tolist() != [42] * 4:
            raise OSError(errno.EIO, "the reader does not see what was written")
        try:
            mmap.mmap(descriptors[0], PROBE_BYTES).close()
        except PermissionError:
            return
        raise OSError(errno.EPERM, "a reader can map it writable")


def _cuda_ipc() -> Check:
    import torch

    if not torch.cuda.is_available():
        fix = "nothing to do on a CPU host: memfd is used"
        return Check("transports", "cuda_ipc", "WARN", "needs a CUDA device", fix)
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        return Check(
            "transports",
            "cuda_ipc",
            "WARN",
            "expandable segments cannot be exported",
            "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
        )
    try:
        torch.ones(1024, device="cuda").untyped_storage()._share_cuda_()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        return Check(
            "transports",
            "cuda_ipc",
            "WARN",
            f"the driver exports no memory: {first}",
            "in containers share the IPC and PID namespaces; or use memfd",
        )
    return Check("transports", "cuda_ipc", "OK", "device memory can be exported")


def _kernels() -> Iterator[Check]:
    import torch

    if importlib.util.find_spec("flash_attn") is not None:
        yield Check("kernels", "flash-attn", "OK", "installed")
    elif torch.cuda.is_available():
        fix = "pip install 'flashduet[flash-attn]'"
        yield Check("kernels", "flash-attn", "WARN", "not installed; SDPA is used", fix)
    else:
        yield Check("kernels", "flash-attn", "OK", "not installed, and of no use without a GPU")
    yield _packed_linears()
    yield _compiler()
    wanted = {"avx512_bf16", "amx_bf16"} & _cpu_flags()
    detail = ", ".join(sorted(wanted)) or "not on this processor; bfloat16 is emulated"
    yield Check("kernels", "bfloat16 instructions", "OK" if wanted else "WARN", detail)


def _compiler() -> Check:
    from target_service.compiled.package import compiler

    if found := compiler():
        detail = f"{found}; targets in 16 bits are compiled once, in the background"
        return Check("kernels", "compiled passes", "OK", detail)
    fix = "install g++ (Debian: apt-get install g++), or set CXX"
    return Check(
        "kernels", "compiled passes", "WARN", "no C++ compiler; half as fast in 16 bits", fix
    )


def _packed_linears() -> Check:
    import torch

    from flashduet.packed_linear import can_pack

    cpu = torch.device("cpu")
    types = [
        str(kind).removeprefix("torch.")
        for kind in (torch.float32, torch.bfloat16, torch.float16)
        if can_pack(kind, cpu)
    ]
    if not types:
        fix = "install a torch built with oneDNN"
        return Check("kernels", "packed linear layers", "WARN", "none; plain kernels only", fix)
    detail = f"{', '.join(types)}; weights are packed at load"
    return Check("kernels", "packed linear layers", "OK", detail)
