"""Web servers that refuse, stall, lie and cut off: a typed fault or a fetch that goes on."""

from __future__ import annotations

import contextlib

import pytest
from remote_support import assert_fetched, failed, opened, whole
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.model import GgufModel
from swactor_loader_gguf.parts import ModelFiles
from swactor_loader_gguf.remote import RemoteFile
from swactor_loader_gguf.web import WebFile


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


def test_an_answer_that_goes_on_behind_its_range_is_left(small):
    url, _, behaviour = small
    behaviour.endless = True
    assert "more bytes than were asked for" in failed(url, ModelFailure.SOURCE_UNREACHABLE).message


def test_bytes_behind_a_range_are_not_written(large, misbehaving, cache):
    misbehaving.behaviour.content = large
    model = opened(f"{misbehaving.url}/m.gguf")
    misbehaving.behaviour.endless = True
    with contextlib.suppress(ModelError):  # as it happens to be cut into blocks
        model.fetch(3, 5)
    assert {path.stat().st_size for path in cache.rglob("m.gguf")} == {len(large)}
    misbehaving.behaviour.endless = False
    model.fetch(3, 5)
    assert_fetched(model, large, 3, 5)
    model.close()


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
