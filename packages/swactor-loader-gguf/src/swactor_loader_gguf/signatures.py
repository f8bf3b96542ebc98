"""Which parts of an address are a signature: they say who may read it and until when, not what it is.

Whoever signs an address anew each time would otherwise seem to have another file each time. Knows the schemes
of the large stores; of any other scheme the whole query counts. Pure.
"""

from __future__ import annotations

from urllib.parse import unquote

_AMAZON = "algorithm credential date expires signedheaders signature security-token content-sha256"
_AZURE = "sv ss srt sr st se sp sip spr si sig skoid sktid skt ske sks skv saoid suoid scid ses"
_TENCENT = "sign-algorithm ak sign-time key-time header-list url-param-list signature"

SCHEMES: tuple[tuple[str, frozenset[str]], ...] = (
    # Amazon S3, "Authenticating Requests: Using Query Parameters" (version 4), and version 2 before it
    ("x-amz-credential x-amz-signature", frozenset(f"x-amz-{name}" for name in _AMAZON.split())),
    (
        "awsaccesskeyid signature",
        frozenset({"awsaccesskeyid", "signature", "expires", "x-amz-security-token"}),
    ),
    # Amazon CloudFront, "Create a signed URL", canned and custom policies
    ("key-pair-id signature", frozenset({"key-pair-id", "signature", "expires", "policy", "hash-algorithm"})),
    # Google Cloud Storage, "Signatures" (version 4), and version 2 before it
    ("x-goog-credential x-goog-signature", frozenset(f"x-goog-{name}" for name in _AMAZON.split())),
    ("googleaccessid signature", frozenset({"googleaccessid", "signature", "expires"})),
    # Azure Storage, shared access signatures of service and user delegation, and of an account
    ("sv sr sig", frozenset(_AZURE.split())),
    ("sv ss sig", frozenset(_AZURE.split())),
    # Alibaba OSS, versions 1 and 4, and Tencent COS
    ("ossaccesskeyid signature", frozenset({"ossaccesskeyid", "signature", "expires", "security-token"})),
    (
        "x-oss-credential x-oss-signature",
        frozenset(f"x-oss-{name}" for name in (*_AMAZON.split(), "signature-version", "additional-headers")),
    ),
    (
        "q-ak q-signature",
        frozenset({*(f"q-{name}" for name in _TENCENT.split()), "x-cos-security-token"}),
    ),
)
"""The parameters that a scheme cannot do without, and all of its parameters, in small letters. One alone
tells nothing: elsewhere a `sig` or a `signature` may be all that says which file is meant."""


def unsigned(url: str) -> str:
    """The address without the parameters of a signature; all else of it as it was."""
    address, mark, query = url.partition("?")
    if not mark:
        return url
    query, fragment_mark, fragment = query.partition("#")
    parts = [(unquote(part.partition("=")[0]).lower(), part) for part in query.split("&")]
    names = {name for name, _ in parts}
    dropped = {name for needed, all_of in SCHEMES if names.issuperset(needed.split()) for name in all_of}
    kept = "&".join(part for name, part in parts if name not in dropped)
    return address + (mark + kept if kept else "") + fragment_mark + fragment
