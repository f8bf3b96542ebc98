"""Names that stand for addresses: the hub's, with its token, and object stores'; proxies and secrets."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_core.plan import GgufSource
from swactor_loader_gguf import sources
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.sources import resolve
from swactor_loader_gguf.web import check_address, shown
from web_servers import Misbehaving, sha256

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_oneTokenThatNobodyElseSees"


@pytest.fixture
def hub(misbehaving, raw, monkeypatch, cache):
    """A hub that redirects to a store on another port; (hub, store, content)."""
    content = raw.small_model()
    store = Misbehaving(content)
    store.behaviour.etag = '"the-store-s-own"'
    misbehaving.behaviour.location = f"{store.url}/signed.gguf?signature=s1gned"
    misbehaving.behaviour.headers = {
        "X-Repo-Commit": COMMIT,
        "X-Linked-Etag": f'"{sha256(content)}"',
        "X-Linked-Size": str(len(content)),
    }
    monkeypatch.setenv("HF_ENDPOINT", misbehaving.url + "/")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield misbehaving, store, content
    store.stop()


def fetched(name: str) -> str:
    loader = GgufLoader()
    resolved = loader.resolve(name)
    model = loader.open(resolved)
    model.fetch(0, 2)
    path = model.manifest(0, 2).tensors[0].path
    model.close()
    return path


def test_a_hub_s_file_is_pinned_to_its_commit_and_kept_by_its_digest(hub):
    server, store, content = hub
    name = resolve("hf:owner/repo/folder/m q4.gguf")
    assert name == f"hf:owner/repo/folder/m q4.gguf@{COMMIT}"
    assert server.requests[-1][0] == "/owner/repo/resolve/main/folder/m%20q4.gguf"
    path = fetched(name)
    assert server.requests[-1][0] == f"/owner/repo/resolve/{COMMIT}/folder/m%20q4.gguf"
    assert f"/{sha256(content)}/" in path
    assert resolve(name) == name
    assert store.requests


def test_a_revision_is_asked_for(hub):
    server, *_ = hub
    assert resolve("hf:owner/repo/m.gguf@refs/pr/1") == f"hf:owner/repo/m.gguf@{COMMIT}"
    assert server.requests[-1][0] == "/owner/repo/resolve/refs%2Fpr%2F1/m.gguf"


def test_the_token_goes_to_the_hub_and_nowhere_else(hub, monkeypatch):
    server, store, _ = hub
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetched("hf:owner/repo/m.gguf")
    assert {headers.get("Authorization") for _, headers in server.requests} == {f"Bearer {TOKEN}"}
    assert store.requests
    assert all("Authorization" not in headers for _, headers in store.requests)
    # another address than a hub's name does not get it, not even on the hub's host
    before = len(server.requests)
    fetched(f"{server.url}/m.gguf")
    assert all("Authorization" not in headers for _, headers in server.requests[before:])


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_gated_model_says_what_helps(hub, monkeypatch, token):
    server, *_ = hub
    server.behaviour.status = 401
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError) as caught:
        resolve("hf:owner/repo/m.gguf")
    assert caught.value.cause is ModelFailure.ACCESS_DENIED
    assert ("accept the model's licence" if token else "set HF_TOKEN") in caught.value.hint
    assert TOKEN not in caught.value.message + caught.value.hint


def test_a_signature_that_runs_out_is_asked_for_again(hub):
    server, store, _ = hub
    loader = GgufLoader()
    model = loader.open(loader.resolve("hf:owner/repo/m.gguf"))
    # the whole small file came with its header: make the fetch ask again
    model.files._remotes[model.index.path]._sparse.forget()
    asked = len(server.requests)
    store.behaviour.answers = [403]
    model.fetch(0, 2)
    assert len(server.requests) == asked + 1
    assert model.to_fetch(0, 2) == 0
    model.close()


def test_a_hub_that_means_another_content_now(hub):
    server, store, content = hub
    loader = GgufLoader()
    model = loader.open(loader.resolve("hf:owner/repo/m.gguf"))
    model.files._remotes[model.index.path]._sparse.forget()
    server.behaviour.headers["X-Linked-Etag"] = f'"{sha256(content + b"x")}"'
    store.behaviour.answers = [403]
    with pytest.raises(ModelError, match="has changed") as caught:
        model.fetch(0, 2)
    assert caught.value.cause is ModelFailure.CONTENT_CHANGED
    model.close()


def test_no_secret_reaches_messages_or_logs(hub, monkeypatch, caplog):
    server, store, _ = hub
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    fetched("hf:owner/repo/m.gguf")
    store.behaviour.status = 403
    with pytest.raises(ModelError) as caught:
        fetched(f"{server.url}/other.gguf?signature=given")
    said = caught.value.message + caught.value.hint + caplog.text
    for secret in (TOKEN, "s1gned", "given"):
        assert secret not in said


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("s3://models/a b/m.gguf", "https://models.s3.amazonaws.com/a%20b/m.gguf"),
        ("s3://my.models/m.gguf", "https://s3.amazonaws.com/my.models/m.gguf"),
        ("gs://models/m.gguf", "https://storage.googleapis.com/models/m.gguf"),
        ("hf:o/r/m.gguf", "https://huggingface.co/o/r/resolve/main/m.gguf"),
        ("https://host.test/m.gguf?x=1", "https://host.test/m.gguf?x=1"),
    ],
)
def test_names_that_stand_for_addresses(name, url, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert sources._address(name) == url


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host.test/m.gguf", "over http from 'host.test'"),
        ("http://10.0.0.1/m.gguf", "over http"),
        ("ftp://host.test/m.gguf", "over ftp"),
        ("https:///m.gguf", "names no host"),
        ("https://user:pass@host.test/m.gguf", "carries a password"),
        ("https://host.test:99999/m.gguf", "is not an address"),
        ("https://[::1/m.gguf", "is not an address"),
    ],
)
def test_addresses_that_are_refused(url, words):
    with pytest.raises(ModelError) as caught:
        check_address(url)
    assert words in caught.value.message
    assert "pass@" not in caught.value.message
    assert caught.value.hint


def test_http_is_for_loopback_and_for_hosts_that_are_listed(monkeypatch):
    for host in ("127.0.0.1:80", "127.9.9.9", "[::1]:8080", "localhost"):
        check_address(f"http://{host}/m.gguf")
    monkeypatch.setenv("SWACTOR_HTTP_HOSTS", "store, 10.0.0.1")
    check_address("http://store/m.gguf")
    check_address("http://10.0.0.1:9000/m.gguf")
    with pytest.raises(ModelError):
        check_address("http://10.0.0.2/m.gguf")


def test_what_people_see_of_an_address():
    url = "https://user:word@host.test/m.gguf?X-Amz-Signature=abc#part"
    assert shown(url) == GgufSource(url).shown == "https://host.test/m.gguf"
    assert "abc" not in repr(GgufSource(url))
    assert GgufSource("/a?b/m.gguf").shown == "/a?b/m.gguf"


def test_a_proxy_that_the_environment_names_is_asked(raw, cache, monkeypatch):
    """The proxy gets the whole address; its answer is the file's."""
    content, seen = raw.small_model(), []

    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, *_):
            """Says nothing."""

        def do_GET(self):
            seen.append(self.path)
            start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = content[start : end + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", '"x"')
            self.end_headers()
            self.wfile.write(part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("SWACTOR_HTTP_HOSTS", "models.test")
        fetched("http://models.test/m.gguf")
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
    assert set(seen) == {"http://models.test/m.gguf"}
