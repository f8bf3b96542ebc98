"""`run` and `plan` with a model that lies on a web server: the real command, tokens of the reference."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from local_command import Command, Run
from web_servers import Misbehaving, Nginx

Start = Callable[..., Run]
SECRET = "a5ecret51gnature"


@pytest.fixture
def reference_run(reference: Callable[[str], dict[str, Any]]) -> tuple[str, list[int]]:
    """(prompt ids, the greedy ids that follow) of the tiny model."""
    known = reference("tiny/llama-gqa")
    return ",".join(map(str, known["prompt"])), known["greedy"]


def test_a_run_from_an_address_on_two_nodes(
    run: Start,
    tmp_path: Path,
    nginx: Nginx,
    tiny_model: Callable[[str], str],
    reference_run: tuple[str, list[int]],
) -> None:
    prompt, expected = reference_run
    shutil.copy(tiny_model("llama-gqa"), tmp_path / "served" / "m.gguf")
    environment = {"SWACTOR_CACHE_DIR": str(tmp_path / "cache"), "SWACTOR_LOG": "DEBUG"}
    for _ in range(2):
        started = run(
            f"{nginx.url}/m.gguf?signature={SECRET}",
            "--prompt-ids", prompt, "--max-tokens", str(len(expected)), "--nodes", "2", "--ignore-eos",
            environment=environment,
        )  # fmt: skip
        assert started.finish(0)["token_ids"] == expected
        for text in (started.out, started.err, started.events_path.read_text()):
            assert SECRET not in text
    nginx.stop()
    sent = sum(request.body for request in nginx.sent() if request.body > 1)
    assert sent <= os.stat(tiny_model("llama-gqa")).st_size, "nothing comes twice, over both runs"


def certificate(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) that 127.0.0.1 shows, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "server.pem", folder / "server.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


def test_certificates_are_those_that_ssl_cert_file_names(
    run: Start,
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    reference_run: tuple[str, list[int]],
) -> None:
    prompt, expected = reference_run
    root, folder = tmp_path / "served", tmp_path / "nginx"
    root.mkdir()
    folder.mkdir()
    shutil.copy(tiny_model("llama-gqa"), root / "m.gguf")
    pem, key = certificate(folder)
    server = Nginx(root, folder, extra=f"ssl_certificate {pem}; ssl_certificate_key {key};", listen="ssl")
    try:
        arguments = [
            f"{server.url}/m.gguf",
            "--prompt-ids", prompt, "--max-tokens", str(len(expected)), "--nodes", "2", "--ignore-eos",
        ]  # fmt: skip
        environment = {"SWACTOR_CACHE_DIR": str(tmp_path / "cache")}
        refused = run(*arguments, environment={**environment, "SSL_CERT_FILE": None, "SSL_CERT_DIR": None})
        assert refused.wait() == 2, refused.said()
        assert "is not trusted" in refused.err
        assert "SSL_CERT_FILE" in refused.err
        trusted = {**environment, "SSL_CERT_FILE": str(pem)}
        assert run(*arguments, environment=trusted).finish(0)["token_ids"] == expected
    finally:
        server.stop()


@pytest.fixture
def misbehaving() -> Any:
    server = Misbehaving()
    yield server
    server.stop()


def test_a_server_that_fails_the_nodes_is_a_typed_fault(
    echo: Start,
    run: Start,
    tmp_path: Path,
    misbehaving: Misbehaving,
    tiny_model: Callable[[str], str],
) -> None:
    """The header can be read, what stages ask for is refused."""
    misbehaving.behaviour.content = Path(tiny_model("llama-gqa")).read_bytes()

    def refuse(request: Any) -> None:
        start = int(request.headers["Range"].removeprefix("bytes=").split("-")[0])
        misbehaving.behaviour.status = 403 if start >= 1 << 16 else 200

    misbehaving.behaviour.before = refuse
    started = run(
        f"{misbehaving.url}/m.gguf?signature={SECRET}", "--worker", "echo", "--prompt-ids", "5,6,7",
        environment={"SWACTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    result = started.finish(1)
    assert (result["fault"]["reason"], result["fault"]["cause"]) == ("WeightLoadFailed", "ModelAccessDenied")
    assert "status 403" in started.error_line()
    assert SECRET not in started.err + started.out + started.events_path.read_text()


def test_a_run_that_is_stopped_while_it_fetches_leaves_nothing(
    run: Start, tmp_path: Path, misbehaving: Misbehaving, tiny_model: Callable[[str], str]
) -> None:
    misbehaving.behaviour.content = Path(tiny_model("llama-gqa")).read_bytes()

    def drip(request: Any) -> None:
        start = int(request.headers["Range"].removeprefix("bytes=").split("-")[0])
        misbehaving.behaviour.drip = start >= 1 << 16

    misbehaving.behaviour.before = drip
    started = run(
        f"{misbehaving.url}/m.gguf", "--worker", "echo", "--prompt-ids", "5,6,7",
        environment={"SWACTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    started.wait_event("weights_download_started")
    started.process.send_signal(signal.SIGINT)
    started.finish(130, within=20)


def test_plan_says_what_each_node_will_fetch(
    command: Callable[..., Command], tmp_path: Path, nginx: Nginx, tiny_model: Callable[[str], str]
) -> None:
    shutil.copy(tiny_model("llama-gqa"), tmp_path / "served" / "m.gguf")
    started = command(
        "plan", f"{nginx.url}/m.gguf", "--nodes", "2", "--json",
        environment={"SWACTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert started.wait() == 0, started.err
    (record,) = started.records()
    header = record["model"]["header_bytes"]
    assert [stage["fetch_bytes"] for stage in record["stages"]] == [
        stage["weight_bytes"] + header for stage in record["stages"]
    ]
    nginx.stop()
    assert sum(request.body for request in nginx.sent()) <= header + (64 << 10)
