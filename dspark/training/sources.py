"""Where a trainer gets conversations and the target's view of them: from a cache, or by running the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from dspark.errors import CapacityError
from dspark.training.cache import CacheReader, CacheWriter
from dspark.training.features import Features, TargetReader
from dspark.training.samples import Sample, SampleReader, Skipped

SHARD_TOKENS = 32_768
"""Tokens of a shard: about a quarter of a gibibyte for a small target."""


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def sample(self, number: int) -> Sample:
        """Ids and mask."""
        ...

    def features(self, numbers: Sequence[int]) -> list[Features]:
        """The target's view of them."""
        ...


class CachedSource:
    """Samples of a target cache."""

    def __init__(self, reader: CacheReader) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def sample(self, number: int) -> Sample:
        return self.reader.sample(number)

    def features(self, numbers: Sequence[int]) -> list[Features]:
        return [self.reader.features(n) for n in numbers]


class OnlineSource:
    """Samples in memory, whose features the target makes each time. Nothing is stored."""

    def __init__(self, samples: Sequence[Sample], reader: TargetReader) -> None:
        self.samples, self.reader = samples, reader

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, number: int) -> Sample:
        return self.samples[number]

    def features(self, numbers: Sequence[int]) -> list[Features]:
        return self.reader.read([self.samples[n] for n in numbers])


class CacheFiller:
    """What is still to go from JSONL files into a cache.

    Args:
        writer: the cache.
        files: where the conversations are.
        samples: reads them.

    Attributes:
        tokens: how many the target will run over.
        skipped: conversations that are left out.
    """

    def __init__(self, writer: CacheWriter, files: Sequence[Path], samples: SampleReader) -> None:
        self._writer, self.skipped = writer, Skipped()
        done = writer.manifest.read
        self._todo = {f: list(samples.read(f, self.skipped, done.get(str(f), 0))) for f in files}
        self.tokens = sum(len(s) for found in self._todo.values() for s, _ in found if s is not None)

    def estimate(self) -> str:
        """Tokens x layers x width x bytes, and the whole size of the cache with what it holds."""
        spec, held = self._writer.manifest.spec, self._writer.manifest.tokens
        return (
            f"target cache: {self.tokens:,} new tokens x ({len(spec.taps)} + 1) layers x {spec.hidden_size} wide x "
            f"{spec.itemsize} bytes = {_gib(self.tokens * spec.bytes_per_token)}"
            + (f", beside {_gib(held * spec.bytes_per_token)} that are there" if held else "")
        )

    def check_budget(self, gib: float | None) -> None:
        """Refuse a cache beyond a budget of so many gibibytes, before the target runs.

        Raises:
            CapacityError: with both sizes, and how to get below.
        """
        spec, held = self._writer.manifest.spec, self._writer.manifest.tokens
        need = (self.tokens + held) * spec.bytes_per_token
        if gib is not None and need > gib * 2**30:
            fits = max(int(gib * 2**30 / spec.bytes_per_token), 0)
            raise CapacityError(
                f"{self.estimate()}; data.cache_budget_gib allows {gib:g} GiB, {fits:,} tokens in all. Give less data, "
                "tap fewer layers (drafter.taps), raise the budget, or leave out data.cache: the target then runs "
                "online"
            )

    def fill(self, reader: TargetReader, progress: Callable[[int, int], None] | None = None) -> None:
        """Run the target, and append shard after shard.

        Args:
            progress: called with tokens done and tokens to do after each shard.
        """
        if not any(self._todo.values()):
            return
        with self._writer.alone():
            self._fill(reader, progress)

    def _fill(self, reader: TargetReader, progress: Callable[[int, int], None] | None) -> None:
        done = 0
        for file, found in self._todo.items():
            shard: list[Sample] = []
            for i, (sample, end) in enumerate(found):
                if sample is not None:
                    shard.append(sample)
                size = sum(map(len, shard))
                if size >= SHARD_TOKENS or i == len(found) - 1:
                    self._writer.add(shard, reader.read(shard), {str(file): end})
                    done, shard = done + size, []
                    if progress is not None:
                        progress(done, self.tokens)
        self._writer.count_skipped(self.skipped.counts)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
