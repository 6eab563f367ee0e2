"""A cache of target features on disk: safetensors shards, memory-mapped, appended to as conversations arrive.

A folder holds ``manifest.json`` and ``shard-00000.safetensors`` and so on, each with its samples one after the other:

    offsets [n + 1] int64, index [n] int64, line [n] int64
    ids [T] int32, loss_mask [T] uint8, best [T] int32, lse [T] float32
    taps [T, m * d] and last [T, d], bfloat16 (or what the manifest says)

The manifest is replaced as a whole after each shard, so that a reader or a crash sees complete shards alone.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import ConfigError, DataError
from dspark.training.features import Features
from dspark.training.samples import Sample

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind
    fcntl = None  # type: ignore[assignment]

FORMAT, VERSION = "dspark-target-cache", 1
BYTES_APART_FROM_STATES = 4 + 1 + 4 + 4
"""Bytes a token of ids, loss mask, best and lse."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a cache holds; two caches mix only if these agree.

    Attributes:
        target: name of the target.
        taps: decoder layers, in DeepSpec's numbering.
        hidden_size: d_t.
        vocab_size: V.
        max_length: samples were cut to so many tokens.
        dtype: of the states.
    """

    target: str
    taps: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_length: int
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one value of a state."""
        return torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()

    @property
    def bytes_per_token(self) -> int:
        """(taps + 1) x width x bytes of the states, and what else a token needs."""
        return (len(self.taps) + 1) * self.hidden_size * self.itemsize + BYTES_APART_FROM_STATES


@dataclass(slots=True)
class Manifest:
    """What is in a cache so far.

    Attributes:
        spec: see there.
        shards: file name, samples and tokens of each.
        read: source file -> bytes of it that are done.
        skipped: reason -> conversations left out.
    """

    spec: CacheSpec
    shards: list[dict[str, Any]] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples in all shards."""
        return sum(int(s["samples"]) for s in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(int(s["tokens"]) for s in self.shards)

    def write(self, folder: Path) -> None:
        """Replace the manifest of ``folder``."""
        value = {"format": FORMAT, "version": VERSION, **asdict(self)}
        temporary = folder / ".manifest.json"
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / "manifest.json")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache.

    Raises:
        ConfigError: there is none, or it is of another format.
    """
    path = folder / "manifest.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT or raw["version"] != VERSION:
            raise ConfigError(f"{path}: expected format {FORMAT!r} version {VERSION}, got {raw['format']!r}")
        spec = CacheSpec(**{**raw["spec"], "taps": tuple(raw["spec"]["taps"])})
        return Manifest(spec, raw["shards"], raw["read"], raw["skipped"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(f"{path}: not a target cache: {type(err).__name__}: {err}") from err


class CacheWriter:
    """Appends shards to a cache.

    Args:
        folder: made where it is not there.
        spec: what it is to hold; an existing cache has to agree.

    Raises:
        ConfigError: naming what differs.
    """

    def __init__(self, folder: Path, spec: CacheSpec) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.manifest = read_manifest(folder) if (folder / "manifest.json").exists() else Manifest(spec)
        old = asdict(self.manifest.spec)
        differs = [f"{k}: {old[k]} there, {v} asked" for k, v in asdict(spec).items() if old[k] != v]
        if differs:
            raise ConfigError(f"{folder} holds a cache of something else: " + "; ".join(differs))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes from filling the cache meanwhile (where the file system has locks).

        Raises:
            DataError: another process is filling it, or has filled it since this one looked.
        """
        with (self.folder / ".lock").open("w") as lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as err:
                    raise DataError(f"{self.folder} is being filled by another process") from err
            if (self.folder / "manifest.json").exists() and read_manifest(self.folder).read != self.manifest.read:
                raise DataError(f"{self.folder} was filled by another process; begin again")
            yield

    def add(self, samples: Sequence[Sample], features: Sequence[Features], read: Mapping[str, int]) -> None:
        """Write one shard, and what of the sources is done once it is there."""
        from safetensors.torch import save_file

        dtype = getattr(torch, self.manifest.spec.dtype)

        def states(name: str) -> Tensor:
            return torch.cat([getattr(f, name).to(device="cpu", dtype=dtype) for f in features])

        if samples:
            name = f"shard-{len(self.manifest.shards):05d}.safetensors"
            ids = torch.from_numpy(np.concatenate([s.ids for s in samples]))
            tensors = {
                "offsets": torch.from_numpy(np.cumsum([0, *map(len, samples)])),
                "index": torch.tensor([s.index for s in samples]),
                "line": torch.tensor([s.line for s in samples]),
                "ids": ids.int(),
                "loss_mask": torch.from_numpy(np.concatenate([s.loss_mask for s in samples])).to(torch.uint8),
                "best": torch.cat([f.best.cpu().int() for f in features]),
                "lse": torch.cat([f.lse.cpu().float() for f in features]),
                "taps": states("taps"),
                "last": states("last"),
            }
            temporary = self.folder / f".{name}"
            save_file(tensors, temporary, metadata={"format": "pt"})
            os.replace(temporary, self.folder / name)
            self.manifest.shards.append({"file": name, "samples": len(samples), "tokens": len(ids)})
        self.manifest.read |= dict(read)
        self.manifest.write(self.folder)

    def count_skipped(self, counts: Mapping[str, int]) -> None:
        """Note conversations that were left out, by reason."""
        if counts:
            for reason, n in counts.items():
                self.manifest.skipped[reason] = self.manifest.skipped.get(reason, 0) + n
            self.manifest.write(self.folder)


class CacheReader:
    """Samples of a cache by number, memory-mapped.

    Args:
        folder: the cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._open = 0
        self._samples: list[Sample] = []
        self._places: list[tuple[str, int, int]] = []
        self.refresh()

    def refresh(self) -> int:
        """Open shards that were added; returns the number of samples."""
        from safetensors import safe_open

        self.manifest = read_manifest(self.folder)
        for shard in self.manifest.shards[self._open :]:
            with safe_open(self.folder / shard["file"], framework="pt") as file:
                offsets, index, line = (file.get_tensor(k).tolist() for k in ("offsets", "index", "line"))
                ids = file.get_tensor("ids").numpy().astype(np.int64)
                mask = file.get_tensor("loss_mask").numpy().astype(bool)
            for i, (a, b) in enumerate(itertools.pairwise(offsets)):
                self._samples.append(Sample(ids[a:b], mask[a:b], index[i], line[i]))
                self._places.append((shard["file"], a, b))
            self._open += 1
        return len(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, number: int) -> Sample:
        """Ids and mask of a sample; no states are read."""
        return self._samples[number]

    def features(self, number: int) -> Features:
        """States of a sample. The shard is mapped for as long as they are copied out of it."""
        from safetensors import safe_open

        name, a, b = self._places[number]
        with safe_open(self.folder / name, framework="pt") as file:
            return Features(*(file.get_slice(part)[a:b] for part in ("taps", "last", "lse", "best")))
