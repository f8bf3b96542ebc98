"""What people meet first: pages in place of files, servers that ask for patience, settings of no use."""

from __future__ import annotations

import logging
import os
import ssl
import time

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf import web as module
from swactor_loader_gguf.index import GgufIndex
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.model import GgufModel
from swactor_loader_gguf.sources import resolve
from swactor_loader_gguf.web import Patience, WebFile

TOKEN = "hf_geheim"


def refused(url: str, **options) -> ModelError:
    patience = Patience(connect=2.0, idle=1.0, tries=2, first_pause=0.01, longest_asked=1.5)

    def probe() -> None:
        web = WebFile(url, patience=patience, **options)
        try:
            web.probe()
        finally:
            web.close()

    with pytest.raises(ModelError) as caught:
        probe()
    print(caught.value.message, "|", caught.value.hint)
    assert caught.value.hint
    return caught.value


def test_a_web_page_is_called_one(misbehaving):
    misbehaving.behaviour.content, misbehaving.behaviour.ranges = b"<!DOCTYPE html>log in", False
    misbehaving.behaviour.headers = {"Content-Type": "text/html; charset=utf-8"}
    error = refused(f"{misbehaving.url}/owner/repo/blob/main/m.gguf")
    assert "is a web page (text/html), not a model" in error.message
    assert "download link" in error.hint


@pytest.mark.parametrize("ranges", [True, False], ids=["416", "200"])
def test_a_file_without_a_byte_is_called_empty(misbehaving, ranges):
    misbehaving.behaviour.ranges = ranges
    if not ranges:  # what nginx says to a request for a range of nothing
        misbehaving.behaviour.before = lambda request: (
            misbehaving.RequestHandlerClass.answer(request, 200, {}),
            setattr(request, "close_connection", True),
        )
    error = refused(f"{misbehaving.url}/m.gguf")
    assert error.message.endswith("/m.gguf is empty")
    assert error.cause is ModelFailure.MALFORMED


def test_who_asks_for_an_hour_is_not_waited_for(misbehaving):
    misbehaving.behaviour.status, misbehaving.behaviour.headers = 429, {"Retry-After": "3600"}
    begun = time.monotonic()
    error = refused(f"{misbehaving.url}/m.gguf")
    assert "asks to come back in 3600 s: status 429" in error.message
    assert time.monotonic() - begun < 5.0
    assert len(misbehaving.requests) == 1


def test_a_long_wait_is_said(misbehaving, caplog, monkeypatch):
    monkeypatch.setattr("swactor_loader_gguf.web._QUIET_PAUSE_S", 0.5)
    misbehaving.behaviour.content = b"content"
    misbehaving.behaviour.answers, misbehaving.behaviour.headers = [503], {"Retry-After": "1"}
    with caplog.at_level(logging.WARNING):
        web = WebFile(f"{misbehaving.url}/m.gguf?signature=secret")
        web.probe()
        web.close()
    [record] = caplog.records
    assert record.getMessage() == f"{misbehaving.url}/m.gguf: status 503; the next try is in 1 s"


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("", "redirects without saying where to"),
        (
            "http://example.test/x.gguf",
            "redirects to http://example.test/x.gguf: models are not fetched over",
        ),
        ("http://[::1", "redirects to what is no address"),
    ],
)
def test_redirects_that_lead_nowhere_name_the_address_that_was_given(misbehaving, location, words):
    misbehaving.behaviour.location = location
    assert refused(f"{misbehaving.url}/given.gguf").message.startswith(
        f"{misbehaving.url}/given.gguf {words}"
    )


@pytest.mark.parametrize("token", [f"{TOKEN}\nx", f"{TOKEN} x", f"{TOKEN}ö", f"{TOKEN}\0"])
def test_a_token_that_no_header_takes_is_refused_and_not_shown(misbehaving, token):
    error = refused(f"{misbehaving.url}/m.gguf", token=token)
    assert "characters that no token has" in error.message
    assert TOKEN not in error.message + error.hint
    assert misbehaving.requests == []


@pytest.mark.parametrize("what", ["nowhere", "a folder", "no certificate"])
def test_certificates_that_cannot_be_used_are_named(tmp_path, monkeypatch, what):
    path = tmp_path / "certificates"
    if what == "a folder":
        path.mkdir()
    elif what == "no certificate":
        path.write_text("nothing of the kind")
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    error = refused("https://127.0.0.1:1/m.gguf")
    assert f"SSL_CERT_FILE {str(path)!r} cannot be read" in error.message
    assert "PEM" in error.hint


@pytest.mark.parametrize("proxy", ["ftp://127.0.0.1:1", "socks4://127.0.0.1:1", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch, proxy):
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    error = refused("https://127.0.0.1:1/m.gguf")
    assert "HTTPS_PROXY" in error.message
    assert "http://host:port" in error.hint


@pytest.mark.parametrize("name", ["s3://bucket", "s3://bucket/", "gs://Big_Bucket/m.gguf", "s3://b/x?y"])
def test_a_name_of_no_stored_object(name):
    with pytest.raises(ModelError, match="does not name an object of a bucket") as caught:
        resolve(name)
    assert caught.value.hint == f"write {name[:2]}://bucket/folder/file.gguf"


def test_an_endpoint_that_is_no_address(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "garbage")
    with pytest.raises(ModelError, match="HF_ENDPOINT is 'garbage'"):
        resolve("hf:owner/repo/m.gguf")


def test_a_hub_s_name_without_its_prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="there is no model") as caught:
        resolve("owner/repo/m.gguf")
    assert caught.value.hint.endswith("write hf:owner/repo/m.gguf")
    with pytest.raises(ModelError) as caught:
        resolve("owner/m.gguf")
    assert "hf:" not in caught.value.hint


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b'{"error": "no"}', "server's message"),
        (b"PK\x03\x04" + bytes(40), "PyTorch"),
        (b"\x1f\x8b\x08" + bytes(40), "gzip"),
        (b"tjgg" + bytes(40), "before GGUF"),
        (bytes(40), "in part"),
        (b"\x10\0\0\0\0\0\0\0" + b'{"x":{}}', "safetensors"),
        (b"what is this", "give a GGUF file"),
    ],
)
def test_files_that_are_often_taken_for_a_model(tmp_path, content, hint):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="magic is") as caught:
        GgufIndex(str(path))
    assert hint in caught.value.hint


@pytest.mark.parametrize("kind", ["adapter", "imatrix", "mmproj"])
def test_what_lies_beside_models_is_called_what_it_is(raw, tmp_path, kind):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.file([raw.text("general.type", kind)]))
    model = GgufModel(str(path))
    with pytest.raises(ModelError, match=f"general.type is '{kind}', not 'model'") as caught:
        model.facts  # noqa: B018 - the facts are what cannot be had
    assert "give the model itself" in caught.value.hint
    model.close()


def test_a_tensor_of_an_unknown_type_is_named_with_the_address(raw, misbehaving, cache):
    misbehaving.behaviour.content = raw.small_model(
        names=[("token_embd.weight", (8, 4), 0), ("blk.0.attn_q.weight", (8, 8), 99),
               ("blk.1.attn_q.weight", (8, 8), 0), ("output_norm.weight", (8,), 0)]
    )  # fmt: skip
    model = GgufLoader().open(f"{misbehaving.url}/m.gguf")
    with pytest.raises(ModelError, match=f"{misbehaving.url}/m.gguf: tensor 'blk.0.attn_q.weight' has type"):
        model.manifest(0, 2)
    model.close()


def test_a_model_s_name_gives_no_orders_to_a_terminal(raw, tmp_path):
    path = tmp_path / "m.gguf"
    for name, shown in (("\x1b]0;x\x07 a\r\nb \x9b1m", "]0;x a b 1m"), ("x" * 1000, "x" * 200)):
        path.write_bytes(raw.small_model(keys={"name": raw.text("general.name", name)}))
        model = GgufModel(str(path))
        assert model.facts.model_id == shown
        model.close()


def test_certificates_are_read_once_and_again_when_their_file_is_another(tmp_path, monkeypatch):
    """A node lives for months, and certificates are renewed meanwhile."""
    path, made = tmp_path / "certificates", []
    path.touch()

    def create_ssl_context():
        made.append(ssl.create_default_context())
        return made[-1]

    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    monkeypatch.setattr(module.httpx2, "create_ssl_context", create_ssl_context)
    for written_at, contexts in ((1, 1), (1, 1), (2, 2)):
        os.utime(path, ns=(written_at, written_at))
        module._client().close()
        assert len(made) == contexts
