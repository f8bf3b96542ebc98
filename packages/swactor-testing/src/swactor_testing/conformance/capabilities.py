"""What a plug-in under test says of itself: facts that a contract cannot find out, and its bounds.

Pure data, a record per kind. Times in seconds, sizes in bytes. A capability switches no guarantee off: it
says which of two truths a test expects, or how long the kit waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from swactor_core.spi.loader import StageManifest
from swactor_core.spi.provider import Kind
from swactor_core.spi.storage import StoredKind
from swactor_core.values import frozen

NOTHING: Mapping[str, Any] = {}


@frozen
class ArenaCapabilities:
    """`provider` is the name it is registered under; `crosses_processes` as in its provider's capabilities:
    its memory is then reached by an inherited descriptor from a process of its own."""

    provider: str
    crosses_processes: bool = True


@frozen
class TransportCapabilities:
    """`settings` go into every context. `patience`: nothing that must happen takes longer. `loss_within`:
    how soon a peer whose process was killed is told as lost. `silence_within`: how soon one that does not
    answer any more is, as where its machine or the network to it has gone; asked where peers are other
    processes. `send_bound`: bytes of an edge that were
    accepted and are not acknowledged, at most. `control_bound`: bytes of frames a sender can be ahead of a
    peer that reads none. `edges` and `large_payload`: how much the kit moves at once."""

    provider: str
    crosses_processes: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    patience: float = 10.0
    loss_within: float = 5.0
    silence_within: float = 10.0
    send_bound: int = 1 << 20
    control_bound: int = 16 << 20
    edges: int = 48
    large_payload: int = 4 << 20


@frozen
class MembershipCapabilities:
    """`settings` go into every context. `converges_within`: participants that can reach each other are alive
    in every view. `dead_within`: one that ended without a word is dead in every view of the others.
    `survives`: how long a participant may be stopped without being declared dead. `sealed`: datagrams of
    another `gossip_key` are not heard."""

    provider: str
    crosses_processes: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    converges_within: float = 10.0
    dead_within: float = 10.0
    survives: float = 1.0
    sealed: bool = True


@frozen
class WorkerCapabilities:
    """What the backend is run with: `manifest(layer_start, layer_end_exclusive)` of one small model, `prompt`
    token ids of it, `settings` of the backend, and `max_context` rows.

    `in_process` as in its provider's capabilities: several live in one process, on its event loop.
    `deterministic`: the same prompt gives the same ids. `split_invariant`: however layers are divided over
    stages. `expected`: the ids that greedy sampling makes of `prompt`, where they are known. `copy_polls` is
    how often the kit asks for the completion of one copy, a millisecond apart. `wrong_settings` are values
    that the provider's `check_settings` refuses, by name."""

    provider: str
    manifest: Callable[[int, int], StageManifest]
    num_layers: int
    prompt: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_context: int = 64
    in_process: bool = False
    deterministic: bool = True
    split_invariant: bool = True
    expected: tuple[int, ...] = ()
    copy_polls: int = 2000
    wrong_settings: Mapping[str, Any] = field(default_factory=dict)


@frozen
class LoaderCapabilities:
    """`models` are names that `resolve` knows without a network, small ones; two at least, of different
    content. `reads_files`: what `open` is given is a file, so that missing and damaged ones must be refused.
    `lossless`: text comes back from its ids byte for byte; otherwise but for white space and normal form.
    `fetches`: some names are of models elsewhere; the heir's fixture `distant` gives one. `pre_tokenizers`:
    names that `tokenizer(pre=)` takes for every model with a vocabulary, at least one of which makes other
    ids of some text than the file's. `suppressed`: what a model's tokenizer says, by name, where it is
    known."""

    provider: str
    models: tuple[str, ...]
    reads_files: bool = True
    lossless: bool = True
    fetches: bool = False
    pre_tokenizers: tuple[str, ...] = ()
    suppressed: Mapping[str, frozenset[int]] = field(default_factory=dict)


@frozen
class StorageCapabilities:
    """`kind` and `provider` are of what is registered with a `storage()`; `kinds` are those of what it
    keeps."""

    kind: Kind
    provider: str
    kinds: tuple[StoredKind, ...]
