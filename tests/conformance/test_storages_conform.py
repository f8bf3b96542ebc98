"""What the plug-ins of this repository keep on the disk: they keep the storage contract."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from swactor_core.spi.provider import Kind
from swactor_core.spi.storage import StoredKind
from swactor_testing.conformance import Kept, StorageCapabilities, StorageContract


class TestFetches(StorageContract):
    """What fetches of the GGUF loader leave behind when they are killed."""

    capabilities = StorageCapabilities(Kind.LOADER, "gguf", (StoredKind.TEMPORARY,))

    @pytest.fixture
    def kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
        cache, numbers = tmp_path / "cache", itertools.count()
        monkeypatch.setenv("SWACTOR_CACHE_DIR", str(cache))

        def make() -> Path:
            folder = cache / "tmp" / f"key{next(numbers)}.half"
            folder.mkdir(parents=True)
            (folder / "wheel").write_bytes(bytes(10_000))
            return folder

        @contextmanager
        def use(path: Path) -> Iterator[None]:
            lock = cache / "locks" / path.name.rpartition(".")[0]
            lock.parent.mkdir(exist_ok=True)
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield

        return Kept(tmp_path, make, use)


class TestKernels(StorageContract):
    """Kernels that the tinygrad worker has compiled and keeps."""

    capabilities = StorageCapabilities(Kind.WORKER, "tinygrad", (StoredKind.KERNELS, StoredKind.TEMPORARY))

    @pytest.fixture
    def kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
        numbers = itertools.count()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("SWACTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        monkeypatch.setattr("tempfile.tempdir", None)
        (tmp_path / "tmp").mkdir()

        def make() -> Path:
            folder = tmp_path / "cache" / "swactor" / "tinygrad-1.0" / f"processor{next(numbers)}"
            folder.mkdir(parents=True)
            (folder / "kernels.db").write_bytes(bytes(10_000))
            return folder

        @contextmanager
        def use(path: Path) -> Iterator[None]:
            with (path / "kernels.db").open("rb"):
                yield

        return Kept(tmp_path, make, use)


class TestPassingKernels(TestKernels):
    """Those of a machine that cannot keep them, left by processes that were killed."""

    @pytest.fixture
    def kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
        numbers = itertools.count()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("SWACTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        (tmp_path / "tmp").mkdir()

        def make() -> Path:
            folder = tmp_path / "tmp" / f"swactor-tinygrad-{next(numbers)}"
            folder.mkdir(mode=0o700)
            (folder / "kernels.db").write_bytes(bytes(10_000))
            return folder

        @contextmanager
        def use(path: Path) -> Iterator[None]:
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)

        return Kept(tmp_path, make, use)
