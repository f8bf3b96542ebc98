"""web.py, sparse.py and remote.py: only the asked bytes, once a machine, against nginx and a bad server."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf import remote, sparse
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.model import GgufModel
from swactor_loader_gguf.parts import ModelFiles
from swactor_loader_gguf.remote import RemoteFile
from swactor_loader_gguf.sparse import SparseFile
from swactor_loader_gguf.web import Patience, WebFile

HASTY = Patience(connect=2.0, idle=0.4, tries=3, progress_bytes=1 << 12, first_pause=0.01)


@pytest.fixture
def large(raw):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return raw.large_model(seed)


def hasty(url: str, wanted: str = "") -> RemoteFile:
    return RemoteFile(WebFile(url, patience=HASTY))


def opened(url: str) -> GgufModel:
    return GgufModel(url, ModelFiles(url, hasty))


def assert_fetched(model: GgufModel, content: bytes, start: int, end: int) -> int:
    """The stage's tensors are in the cache as they are in the file; returns their bytes."""
    total = 0
    for ref in model.manifest(start, end).tensors:
        with open(ref.path, "rb") as file:
            file.seek(ref.offset)
            assert file.read(ref.nbytes) == content[ref.offset : ref.offset + ref.nbytes], ref.name
        total += ref.nbytes
    return total


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


def wait_until(true, seconds=30.0):
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if true():
            return
        pause.wait(0.02)
    pytest.fail(f"waited {seconds} s")


# bad servers


def failed(url: str, cause: ModelFailure, *, start: int = 0, end: int = 2) -> ModelError:
    def fetch() -> None:
        model = opened(url)
        try:
            model.fetch(start, end)
        finally:
            model.close()

    with pytest.raises(ModelError) as caught:
        fetch()
    print(caught.value.message, "|", caught.value.hint)
    assert caught.value.cause is cause
    assert caught.value.hint
    return caught.value


@pytest.fixture
def small(raw, misbehaving, cache):
    """A small model behind the bad server; (its address, its bytes, the server's behaviour)."""
    content = raw.small_model()
    misbehaving.behaviour.content = content
    return f"{misbehaving.url}/m.gguf", content, misbehaving.behaviour


def whole(url, content):
    model = opened(url)
    model.fetch(0, 2)
    assert_fetched(model, content, 0, 2)
    model.close()


def test_a_good_answer(small):
    whole(*small[:2])


def test_no_ranges(small):
    url, _, behaviour = small
    behaviour.ranges = False
    error = failed(url, ModelFailure.RANGES_UNSUPPORTED)
    assert "does not give byte ranges" in error.message
    assert "download the file and give its path" in error.hint


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (401, ModelFailure.ACCESS_DENIED),
        (403, ModelFailure.ACCESS_DENIED),
        (404, ModelFailure.NOT_FOUND),
        (410, ModelFailure.NOT_FOUND),
        (418, ModelFailure.SOURCE_UNREACHABLE),
        (204, ModelFailure.SOURCE_UNREACHABLE),
    ],
)
def test_refusals_are_not_tried_again(small, misbehaving, status, cause):
    url, _, behaviour = small
    behaviour.status = status
    assert str(status) in failed(url, cause).message
    assert len(misbehaving.requests) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_servers_that_are_busy_are_asked_again(small, misbehaving, status):
    url, content, behaviour = small
    behaviour.answers = [status, 200, status, status]
    whole(url, content)
    behaviour.status = status
    assert "3 tries" in failed(url + "2", ModelFailure.SOURCE_UNREACHABLE).message


def test_retry_after_is_kept(small, misbehaving, monkeypatch):
    url, content, behaviour = small
    behaviour.answers, behaviour.headers = [503], {"Retry-After": "1"}
    behaviour.before = lambda request: None
    import time

    begun = time.monotonic()
    whole(url, content)
    assert time.monotonic() - begun >= 1.0


def test_bodies_cut_short_go_on_from_there(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    misbehaving.behaviour.cut_after = 700_000
    model = opened(f"{misbehaving.url}/m.gguf")
    model.fetch(3, 5)
    assert_fetched(model, large, 3, 5)
    model.close()
    assert misbehaving.sent < len(large)


def test_bodies_always_cut_at_once(small):
    url, _, behaviour = small
    behaviour.cut_after = 0
    assert "tries" in failed(url, ModelFailure.SOURCE_UNREACHABLE).message


def test_answers_shorter_than_asked_are_taken(small):
    url, content, behaviour = small
    behaviour.most = 100
    whole(url, content)


def test_a_length_that_is_not_the_range_s(small):
    url, _, behaviour = small
    behaviour.longer = 5
    failed(url, ModelFailure.SOURCE_UNREACHABLE)


@pytest.mark.parametrize(
    "lie",
    [
        lambda start, end: (start + 1, end, 1 << 20),
        lambda start, end: (start, end, 1 << 20),
        lambda start, end: (start, end - 1, 1 << 50),
        lambda start, end: (start, end - 1, 0),
    ],
    ids=["shifted", "longer", "huge", "nothing"],
)
def test_ranges_that_were_not_asked_for(small, lie):
    url, _, behaviour = small
    behaviour.lie = lie
    failed(url, ModelFailure.RANGES_UNSUPPORTED)


def test_encoded_answers(small):
    url, _, behaviour = small
    behaviour.headers = {"Content-Encoding": "gzip"}
    assert "encoded" in failed(url, ModelFailure.RANGES_UNSUPPORTED).message


def test_a_tag_that_changes_between_requests(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    misbehaving.behaviour.etag = '"two"'
    with pytest.raises(ModelError, match="has changed") as caught:
        model.fetch(0, 16)
    assert caught.value.cause is ModelFailure.CONTENT_CHANGED
    model.close()
    whole_again = opened(f"{misbehaving.url}/m.gguf")  # the new content, in a place of its own
    whole_again.fetch(0, 2)
    whole_again.close()
    assert len(list((misbehaving_cache := cache / "remote").iterdir())) == 2, misbehaving_cache


def test_a_size_that_changes_between_requests(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    misbehaving.behaviour.content = large[:-5]
    with pytest.raises(ModelError, match=f"had {len(large)} bytes and has {len(large) - 5}"):
        model.fetch(0, 16)
    misbehaving.behaviour.content = large[:100]
    with pytest.raises(ModelError, match="shorter than before") as caught:
        model.fetch(0, 16)
    assert caught.value.cause is ModelFailure.CONTENT_CHANGED
    model.close()


def test_servers_without_any_tag(small, raw, cache):
    url, content, behaviour = small
    behaviour.etag = None
    whole(url, content)
    other = raw.small_model(keys={"llama.context_length": raw.u32("llama.context_length", 65)})
    assert len(other) == len(content)
    behaviour.content = other
    model = opened(url)
    assert model.facts.context_length == 65
    model.close()


def test_a_byte_at_a_time_is_given_up(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    misbehaving.behaviour.drip = True
    with pytest.raises(ModelError, match=r"3 tries: \d+ bytes in") as caught:
        model.fetch(0, 16)
    assert caught.value.cause is ModelFailure.SOURCE_UNREACHABLE
    model.close()


def test_a_server_that_says_nothing_is_given_up(small, misbehaving):
    url, _, behaviour = small
    behaviour.before = lambda request: misbehaving.stopped.wait(5)
    assert "ReadTimeout" in failed(url, ModelFailure.SOURCE_UNREACHABLE).message


def test_nobody_listens():
    url = "http://127.0.0.1:1/m.gguf"
    assert "ConnectError" in failed(url, ModelFailure.SOURCE_UNREACHABLE).message


def test_redirects_that_go_round(small, misbehaving):
    url, _, behaviour = small
    behaviour.location = "/again.gguf"
    assert "redirects more than 5 times" in failed(url, ModelFailure.SOURCE_UNREACHABLE).message
    assert len(misbehaving.requests) == 6


@pytest.mark.parametrize(
    "location", ["http://example.test/m.gguf", "ftp://127.0.0.1/m.gguf", "file:///etc/passwd", ""]
)
def test_redirects_to_where_models_are_not_fetched_from(small, location):
    url, _, behaviour = small
    behaviour.location = location
    with pytest.raises(ModelError):
        opened(url)


def test_what_progress_raises_ends_the_fetch(large, misbehaving, cache):
    class Stop(Exception):
        pass

    def stop(done, total):
        if done:
            raise Stop

    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    with pytest.raises(Stop):
        model.fetch(0, 16, progress=stop)
    model.fetch(0, 16)
    assert_fetched(model, large, 0, 16)
    model.close()


def test_waiting_for_a_busy_server_ends_when_progress_says_so(large, misbehaving, cache):
    class Stop(Exception):
        pass

    calls = []

    def stop(done, total):
        calls.append(done)
        if len(calls) > 3:
            raise Stop

    misbehaving.behaviour.content = large
    url = f"{misbehaving.url}/m.gguf"
    model = GgufModel("m", ModelFiles(url, lambda url, _: RemoteFile(WebFile(url))))
    misbehaving.behaviour.status = 503
    misbehaving.behaviour.headers = {"Retry-After": "20"}
    with pytest.raises(Stop):
        model.fetch(0, 16, progress=stop)
    model.close()


def test_a_header_that_does_not_come_ends_when_progress_says_so(small):
    class Stop(Exception):
        pass

    calls = []

    def stop(done, total):
        calls.append(done)
        if len(calls) > 2:
            raise Stop

    url, _, behaviour = small
    behaviour.status = 503
    with pytest.raises(Stop):
        GgufLoader().open(url, stop)
    behaviour.status = 200
    calls.clear()
    behaviour.before = lambda request: setattr(behaviour, "status", 503 if len(calls) > 1 else 200)
    with pytest.raises(Stop):
        GgufLoader().open(url, stop)


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
