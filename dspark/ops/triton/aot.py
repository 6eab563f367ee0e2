"""Compile the kernels for an architecture without having it, and say what they take of it.

Every kernel is described once, as :class:`Build`: its arguments' types, what is constant, its launch options. The
tests, ``dspark bench kernels`` and the report that is kept with the sources all read this list.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.errors import DSparkError
from dspark.ops.triton.launch import SIZE_CLASSES, choose_tile

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What kernels are compiled for: A100, H100 and H200, B200, MI300."""
_ROUND = ("base_row", "latent_row", "w2_row", "width", "logits_row")
"""Sizes that are multiples of 16 in the models that kernels are made for; Triton compiles for that apart."""
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory that one program may take."""


@dataclass(frozen=True, slots=True)
class Build:
    """One compilation.

    Attributes:
        kernel: the jitted function.
        types: argument -> ``*fp32``, ``i32``, ..
        constants: arguments that are compiled in; None for a pointer that is absent.
        options: ``num_warps``, ``num_stages``.
        label: names it in reports, without the architecture.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    label: str
    round_ints: tuple[str, ...] = ()


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

    names = build.kernel.arg_names
    unknown = (set(build.types) | set(build.constants)) ^ set(names)
    if unknown:
        raise DSparkError(f"{build.label}: arguments described and arguments taken differ: {sorted(unknown)}")
    signature = {n: "constexpr" if n in build.constants else build.types[n] for n in names}
    round_ints = (*_ROUND, *build.round_ints)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or (n in round_ints and signature[n] == "i32")
    }
    source = ASTSource(build.kernel, signature=signature, constexprs=dict(build.constants), attrs=aligned)
    return triton.compile(source, target=target_of(architecture), options=dict(build.options))


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


_POINTERS = {"bf16": "*bf16", "f32": "*fp32"}


def builds(architecture: str) -> Iterator[Build]:
    """Every kernel, with every tuned tile of an architecture."""
    from dspark.ops.triton.describe import describe, describe_rest

    for dtype, pointer in _POINTERS.items():
        seen = set()
        for op in ("bias_sample", "reject_sample"):
            for size in SIZE_CLASSES:
                rank = int(size.partition("-")[2])
                tile = choose_tile(op, architecture, size).for_words(4 if dtype == "f32" else 2)
                if (op, tile, rank) not in seen:
                    seen.add((op, tile, rank))
                    yield from describe(op, tile, rank=rank, pointer=pointer, label=f"{size}-{dtype}")
        yield from describe_rest(pointer, dtype)


def report(architectures: tuple[str, ...] = ARCHITECTURES) -> dict[str, Any]:
    """Usage of every kernel on every architecture, and the compiler that it holds for."""
    from importlib.metadata import version

    kernels = {a: {b.label: asdict(usage(compile_for(b, a))) for b in builds(a)} for a in architectures}
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
