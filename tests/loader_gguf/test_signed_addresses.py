"""Which addresses are one address of the cache: a fresh signature makes no other, everything else does."""

from __future__ import annotations

import pytest
from swactor_loader_gguf.known import Identity, Known, keep, recall
from swactor_loader_gguf.signatures import unsigned


def test_what_is_kept_of_one_address_is_no_other_s(cache):
    url = "https://host.test/download?id=5"
    keep(url, Known("https://host.test/download", Identity(7, '"a"')))
    assert recall(url) is not None
    for other in ("https://host.test/download?id=6", "https://host.test/download"):
        assert recall(other) is None


S3 = "X-Amz-Algorithm=A&X-Amz-Credential=AK%2F1&X-Amz-Date={0}&X-Amz-Expires=60&X-Amz-SignedHeaders=h"
SIGNED = {
    "s3": S3 + "&X-Amz-Signature={0}&versionId=7",
    "s3, version 2": "versionId=7&AWSAccessKeyId=AK&Expires={0}&Signature={0}%3D",
    "cloudfront": "Policy={0}&Signature={0}&Key-Pair-Id=K&versionId=7",
    "gcs": "versionId=7&X-Goog-Algorithm=a&X-Goog-Credential=c&X-Goog-Date={0}&x-goog-signature={0}",
    "azure": "sv=2024&st={0}&se={0}&sr=b&sp=r&versionId=7&sig={0}",
    "azure, account": "sv=2024&ss=b&srt=o&st={0}&se={0}&sp=r&versionId=7&sig={0}",
    "oss": "OSSAccessKeyId=AK&Expires={0}&Signature={0}&versionId=7",
    "cos": "q-sign-algorithm=sha1&q-ak=AK&q-sign-time={0}&q-signature={0}&versionId=7",
}


@pytest.mark.parametrize("scheme", SIGNED)
def test_a_fresh_signature_is_no_other_address(cache, scheme):
    said = Known("https://host.test/m.gguf", Identity(7, '"a"'))
    address = "https://host.test/m.gguf?" + SIGNED[scheme]
    keep(address.format("20260101"), said)
    assert recall(address.format("20270202")) == said
    assert recall(address.format("1").replace("versionId=7", "versionId=8")) is None
    assert recall("https://host.test/m.gguf?versionId=7") == said
    assert recall("https://host.test/m.gguf") is None
    keep(address.format("20270202"), said)
    (note,) = (cache / "addresses").iterdir()
    assert "2026" not in note.read_text()


@pytest.mark.parametrize(
    "query",
    [
        "?signature=1",
        "?expires=1&policy=2",
        "?sv=1&st=2&se=3",
        "?X-Amz-Date=1",
        "?X-Amz-Signature",
        "?sig=names-the-file",
        "?st=small&sp=q4&sig=1",
        "?key-pair-id=1&policy=large",
        "?q-signature=1&q-ak",
        "?",
    ],
)
def test_a_query_that_is_no_signature_of_a_known_scheme_counts(query):
    url = f"https://host.test/m.gguf{query}"
    assert unsigned(url) == ("https://host.test/m.gguf" if query in ("?q-signature=1&q-ak", "?") else url)
    assert unsigned(f"{url}#part").endswith("#part")
