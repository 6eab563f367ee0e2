"""Compile the kernels for an architecture without having it, and say what they take of it.

What is compiled is what the launchers launch (:mod:`dspark.ops.triton.describe`), specialised as Triton does it on a
device. The tests, ``dspark bench kernels`` and the report that is kept with the sources all read this list.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark.errors import DSparkError
from dspark.ops.triton.launch import Launch, interpreted

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What kernels are compiled for: A100, H100 and H200, B200, MI300."""
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory that one program may take."""


@dataclass(frozen=True, slots=True)
class Build:
    """One compilation: a launch, and what names it in reports, without the architecture."""

    launch: Launch
    label: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel takes: registers a thread, bytes of a thread's stack, which is where registers spill to,
    and bytes of shared memory a program."""

    registers: int
    spills: int
    shared: int
    binary_bytes: int = field(default=0, compare=False)


def target_of(architecture: str) -> Any:
    """Triton's name of an architecture.

    Raises:
        DSparkError: one that kernels are not compiled for.
    """
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture[3:]), 32)
    if architecture.startswith("gfx9"):
        return GPUTarget("hip", architecture, 64)
    raise DSparkError(f"no kernels for {architecture!r} (known: {', '.join(ARCHITECTURES)})")


def compile_for(build: Build, architecture: str) -> Any:
    """The compiled kernel; ``asm`` holds its cubin or hsaco."""
    import triton
    from triton.compiler import ASTSource

    options, *special = specialised(build.launch, architecture)
    source = ASTSource(build.launch.kernel, *special)
    return triton.compile(source, target=target_of(architecture), options=options.__dict__)


def specialised(launch: Launch, architecture: str) -> tuple[Any, dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """What Triton compiles when a kernel is launched so on a device: options, types, constants, and attributes such as
    a multiple of 16."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(target_of(architecture))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, options = bind(**launch.arguments, **launch.options)
    found: tuple[Any, dict[str, str], dict[Any, Any], dict[Any, Any]]
    found = kernel._pack_args(backend, options, bound, special, options)
    return found


def usage(compiled: Any) -> Usage:
    """Registers, spills and shared memory of what :func:`compile_for` made.

    Raises:
        DSparkError: the compiler's listing does not say.
    """
    shared = int(compiled.metadata.shared)
    if "hsaco" in compiled.asm:
        listing = compiled.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s*(\d+)", listing)
        scratch = _number(r"\.private_segment_fixed_size:\s*(\d+)", listing)
        return Usage(registers, scratch, shared, len(compiled.asm["hsaco"]))
    binary = compiled.asm["cubin"]
    listing = _resources(binary)
    return Usage(_number(r"REG:(\d+)", listing), _number(r"STACK:(\d+)", listing), shared, len(binary))


def _resources(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DSparkError(f"cuobjdump can't read a compiled kernel: {done.stderr.strip()}")
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise DSparkError(f"the compiler's listing of a kernel has no {pattern!r}")
    return int(found.group(1))


def builds(architecture: str, dtypes: Sequence[torch.dtype] | None = None) -> Iterator[Build]:
    """Every kernel that an engine launches on an architecture; with ``dtypes``, of models in one of these alone."""
    from dspark.ops.triton.describe import PAIRS, label_of, launches

    pairs = PAIRS if dtypes is None else [(dtype, dtype) for dtype in dtypes]
    for launch in launches(architecture, pairs):
        yield Build(launch, label_of(launch))


def report(
    architectures: tuple[str, ...] = ARCHITECTURES, dtypes: Sequence[torch.dtype] | None = None
) -> dict[str, Any]:
    """Usage of every kernel on every architecture, and the compiler that it holds for.

    Raises:
        DSparkError: Triton interprets in this process, or a compiler's listing does not say.
    """
    from importlib.metadata import version

    if interpreted():
        raise DSparkError("TRITON_INTERPRET is set, which excludes compiling: unset it")
    kernels = {a: {b.label: asdict(usage(compile_for(b, a))) for b in builds(a, dtypes)} for a in architectures}
    for entries in kernels.values():
        for entry in entries.values():
            del entry["binary_bytes"]
    return {"triton": version("triton"), "kernels": kernels}


def differences(committed: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What a report says otherwise than the committed one, in words; registers may differ with the compiler."""
    same_compiler = committed["triton"] == found["triton"]
    faults = []
    for architecture, entries in found["kernels"].items():
        known = committed["kernels"].get(architecture, {})
        for label in sorted(set(known) ^ set(entries)):
            faults.append(f"{architecture} {label}: only in {'the committed report' if label in known else 'this one'}")
        for label in sorted(set(known) & set(entries)):
            names = ("registers", "spills", "shared") if same_compiler else ("spills",)
            for name in names:
                if known[label][name] != entries[label][name]:
                    faults.append(
                        f"{architecture} {label}: {name} {entries[label][name]}, committed {known[label][name]}"
                    )
    return faults
