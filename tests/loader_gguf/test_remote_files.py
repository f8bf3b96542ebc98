"""A stage's own tensors from a web server: no other bytes, shared by all, on a disk that may fail."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from remote_support import assert_fetched, failed, opened, wait_until
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf import remote, sparse
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.sparse import SparseFile

# against nginx


def test_a_middle_stage_of_four_fetches_its_own_tensors_and_little_more(large, tmp_path, nginx, cache):
    (tmp_path / "served" / "m.gguf").write_bytes(large)
    loader = GgufLoader()
    model = loader.open(loader.resolve(f"{nginx.url}/m.gguf"))
    heard = []
    own = sum(ref.nbytes for ref in model.manifest(4, 8).tensors)
    assert model.to_fetch(4, 8) == own == 4 << 20
    model.fetch(4, 8, progress=lambda done, total: heard.append((done, total)))
    assert assert_fetched(model, large, 4, 8) == own
    assert model.to_fetch(4, 8) == 0
    model.close()
    nginx.stop()
    sent = sum(request.body for request in nginx.sent())
    assert sent < own * 1.02 + model.files.header_bytes
    print(f"{sent} bytes sent, {own} of tensors, header {model.files.header_bytes}")
    assert heard[-1] == (own, own)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    # what is not wanted takes no room
    path = model.manifest(4, 8).tensors[0].path
    assert os.stat(path).st_size == len(large)
    assert os.stat(path).st_blocks * 512 < own + (1 << 20)


def test_a_large_stage_stays_under_two_hundredths_with_its_header(raw, tmp_path, nginx, cache):
    content = raw.large_model(7, layers=48, tokens=500)
    (tmp_path / "served" / "m.gguf").write_bytes(content)
    model = opened(f"{nginx.url}/m.gguf")
    model.fetch(12, 24)
    own = assert_fetched(model, content, 12, 24)
    model.close()
    nginx.stop()
    sent = sum(request.body for request in nginx.sent())
    print(f"{sent} bytes sent, {own} of tensors: {sent / own:.4f}")
    assert sent < 1.02 * own


def test_later_runs_and_other_stages_share_what_is_here(large, tmp_path, nginx, cache):
    (tmp_path / "served" / "m.gguf").write_bytes(large)
    for start, end in ((0, 8), (0, 8), (8, 16), (4, 12)):
        model = opened(f"{nginx.url}/m.gguf")
        model.fetch(start, end)
        assert_fetched(model, large, start, end)
        model.close()
    nginx.stop()
    bodies = [request for request in nginx.sent() if request.body > 1]
    assert sum(request.body for request in bodies) <= len(large) + 1
    assert len(list((cache / "remote").iterdir())) == 1


FETCHER = """
import json, sys
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf import remote
remote._PIECE = 1 << 20
loader = GgufLoader()
model = loader.open(loader.resolve(sys.argv[1]))
model.fetch(int(sys.argv[2]), int(sys.argv[3]))
print(json.dumps([[ref.path, ref.offset, ref.nbytes] for ref in model.manifest(int(sys.argv[2]), int(sys.argv[3])).tensors]))
"""  # noqa: E501


def fetcher(url: str, start: int, end: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", FETCHER, url, str(start), str(end)], stdout=subprocess.PIPE, text=True
    )


def test_processes_that_fetch_at_once_neither_corrupt_nor_fetch_twice(large, tmp_path, nginx, cache):
    (tmp_path / "served" / "m.gguf").write_bytes(large)
    ranges = [(0, 10), (4, 16), (0, 16), (6, 9)]
    processes = [fetcher(f"{nginx.url}/m.gguf", start, end) for start, end in ranges]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    for output in outputs:
        for path, offset, nbytes in json.loads(output):
            assert Path(path).read_bytes()[offset : offset + nbytes] == large[offset : offset + nbytes]
    nginx.stop()
    bytes_sent = sum(request.body for request in nginx.sent() if request.body > 1)
    assert bytes_sent <= len(large)


def test_a_killed_fetch_goes_on_where_it_was(large, misbehaving, cache, monkeypatch):
    misbehaving.behaviour.content = large
    url = f"{misbehaving.url}/m.gguf"
    opened(url).close()  # the header is here
    hold = threading.Event()
    code = FETCHER.replace("remote._PIECE = 1 << 20", "remote._COMMIT = 1 << 20")
    misbehaving.behaviour.hold = hold
    process = subprocess.Popen([sys.executable, "-c", code, url, "0", "16"], stdout=subprocess.DEVNULL)
    # The first byte and the whole stage are asked for; the second answer stops half way.
    waits = misbehaving.behaviour.held
    while True:
        assert waits.wait(30)
        waits.clear()
        if "-0" in misbehaving.requests[-1][1]["Range"]:
            misbehaving.behaviour.hold = None
            hold.set()
            hold = threading.Event()
            misbehaving.behaviour.hold = hold
            continue
        break
    journal = next((cache / "remote").glob("*/journal"))
    half = len(large) // 2
    wait_until(lambda: journal.stat().st_size > 24 * ((half >> 20) - 1))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    misbehaving.behaviour.hold = None
    hold.set()
    before = len(misbehaving.requests)
    model = opened(url)
    model.fetch(0, 16)
    assert_fetched(model, large, 0, 16)
    model.close()
    asked = [request[1]["Range"] for request in misbehaving.requests[before:]]
    starts = [int(text.removeprefix("bytes=").split("-")[0]) for text in asked if text != "bytes=0-0"]
    print(asked)
    assert min(starts) > half - (2 << 20)


# the disk


def test_a_full_disk_is_said_before_anything_is_fetched(large, misbehaving, cache, monkeypatch):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    monkeypatch.setattr(SparseFile, "free_bytes", lambda self: 1 << 20)
    before = misbehaving.sent
    with pytest.raises(ModelError, match=r"needs (4[0-9]|5[0-9]) MiB .* has 1 MiB free") as caught:
        model.fetch(0, 16)
    assert caught.value.cause is ModelFailure.DISK_FULL
    assert "SWACTOR_CACHE_DIR" in caught.value.hint
    assert misbehaving.sent == before
    model.close()


def test_a_disk_that_fills_up_meanwhile(large, misbehaving, cache, monkeypatch):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    written, real = 0, os.pwrite

    def pwrite(descriptor, data, offset):
        nonlocal written
        written += len(data)
        if written > 3 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(sparse.os, "pwrite", pwrite)
    with pytest.raises(ModelError, match="No space left on device") as caught:
        model.fetch(0, 16)
    assert caught.value.cause is ModelFailure.DISK_FULL
    monkeypatch.undo()
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(cache))
    before = misbehaving.sent
    model.fetch(0, 16)  # with room again it goes on
    assert_fetched(model, large, 0, 16)
    assert misbehaving.sent - before < len(large) - (2 << 20)
    model.close()


def test_a_cache_that_cannot_be_made(small, monkeypatch):
    monkeypatch.setenv("SWACTOR_CACHE_DIR", "/dev/null/cache")
    failed(small[0], ModelFailure.CACHE_UNUSABLE)


def test_a_cache_that_another_user_has_filled_is_read(large, misbehaving, cache, monkeypatch):
    misbehaving.behaviour.content = large
    url = f"{misbehaving.url}/m.gguf"
    model = opened(url)
    model.fetch(0, 4)
    model.close()
    real = os.open

    def read_only(path, flags, mode=0o777):
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, mode)

    monkeypatch.setattr(sparse.os, "open", read_only)
    with pytest.raises(ModelError, match=os.strerror(errno.EROFS)) as caught:
        opened(f"{url}2")  # of which nothing is here
    assert caught.value.cause is ModelFailure.CACHE_UNUSABLE
    model = opened(url)
    model.fetch(0, 4)
    assert_fetched(model, large, 0, 4)
    with pytest.raises(ModelError, match="may not be written") as caught:
        model.fetch(0, 5)
    assert caught.value.cause is ModelFailure.CACHE_UNUSABLE
    model.close()


def test_a_file_that_is_deleted_while_it_is_fetched(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    Path(model.manifest(0, 1).tensors[0].path).unlink()
    with pytest.raises(ModelError, match="somebody has removed it") as caught:
        model.fetch(0, 4)
    assert caught.value.cause is ModelFailure.CACHE_UNUSABLE
    model.close()


def test_a_limit_of_the_system_s_on_file_sizes_is_a_full_disk(large, misbehaving, cache):
    """A true refusal by the kernel, in a process of its own."""
    misbehaving.behaviour.content = large
    code = (
        "import resource, sys\n"
        "from swactor_core.errors import ModelError\n"
        "from swactor_loader_gguf.loader import GgufLoader\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    GgufLoader().open(sys.argv[1])\n"
        "except ModelError as error:\n"
        "    print(error.cause, error.message, error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"{misbehaving.url}/m.gguf"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "ModelDiskFull" in done.stdout
    assert "File too large" in done.stdout


def test_a_torn_record_costs_a_fetch_and_no_wrong_byte(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    model.fetch(0, 8)
    model.close()
    journal = next((cache / "remote").glob("*/journal"))
    raw = journal.read_bytes()
    damaged = bytearray(raw)
    damaged[24] ^= 1
    journal.write_bytes(bytes(damaged[:-7]))
    model = opened(f"{misbehaving.url}/m.gguf")
    model.fetch(0, 16)
    assert_fetched(model, large, 0, 16)
    model.close()
    assert journal.stat().st_size % 24 == 0


def test_a_data_file_of_another_size_is_begun_anew(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    model.fetch(0, 16)
    path = Path(model.manifest(0, 16).tensors[0].path)
    model.close()
    path.unlink()
    model = opened(f"{misbehaving.url}/m.gguf")
    assert model.to_fetch(0, 16) > len(large) - (1 << 20)
    model.fetch(0, 16)
    assert_fetched(model, large, 0, 16)
    model.close()


def test_a_claim_is_let_go_with_its_process_and_excludes_threads(tmp_path):
    first, second = SparseFile(tmp_path, "m.gguf", 100), SparseFile(tmp_path, "m.gguf", 100)
    claim = first.claim(10, 20)
    assert claim is not None
    assert second.claim(19, 30) is None
    assert first.claim(0, 11) is None
    with second.claim(20, 30):
        pass
    claim.release()
    with second.claim(0, 100):
        assert first.claim(99, 100) is None
    first.close()
    second.close()


def test_waiting_for_another_process_has_a_bound(large, misbehaving, cache, monkeypatch):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    path = Path(model.manifest(0, 1).tensors[0].path)
    other = SparseFile(path.parent, path.name, len(large))
    monkeypatch.setattr(remote, "_STUCK_S", 0.3)
    with (
        other.claim(0, len(large)),
        pytest.raises(ModelError, match="another process holds parts"),
    ):
        model.fetch(0, 16)
    other.close()
    model.fetch(0, 16)
    model.close()


def test_a_checksum_that_the_source_names_is_compared_once_all_is_here(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    good = hashlib.sha256(large).hexdigest()
    misbehaving.behaviour.headers = {"X-Linked-Etag": f'"{good}"', "X-Linked-Size": str(len(large))}
    model = opened(f"{misbehaving.url}/m.gguf")
    model.fetch(0, 16)
    assert good in model.manifest(0, 1).tensors[0].path
    model.close()
    bad = good[:-1] + ("0" if good[-1] != "0" else "1")
    misbehaving.behaviour.headers["X-Linked-Etag"] = f'"{bad}"'
    for _ in range(2):
        model = opened(f"{misbehaving.url}/m.gguf")
        model.fetch(0, 4)  # a part of it cannot be compared
        with pytest.raises(ModelError, match=f"{good}, its source says {bad}") as caught:
            model.fetch(0, 16)
        assert caught.value.cause is ModelFailure.CHECKSUM_MISMATCH
        model.close()
