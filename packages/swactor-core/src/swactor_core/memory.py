"""What one stage holds in its device's memory: weights, KV cache, and scratch for the rows of its steps.

Pure arithmetic on model facts. Knows what a transformer block computes with, not how a worker lays it out: a
worker may round up, and its process has a size of its own.
"""

from __future__ import annotations

from swactor_core.specs import align_up
from swactor_core.spi.loader import ModelFacts
from swactor_core.values import frozen

F32_BYTES = 4


@frozen
class StageMemory:
    """Bytes. `weights` as stored, `kv` of all positions of the run, `scratch` of what steps need; `copies` of
    weights, `process` and whether weights stay `in_file` as the worker says them."""

    weights: int
    kv: int
    scratch: int
    copies: int = 0
    process: int = 0
    in_file: bool = False

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch + self.copies + self.process

    @property
    def kept(self) -> int:
        """What the kernel cannot drop when memory is short."""
        return self.total - self.weights * self.in_file


def spare_rows(max_seq_len: int, prefill_chunk: int) -> int:
    """Rows of the cache beyond `max_seq_len`: steps write whole chunks, and the last may begin at the end."""
    chunk = min(prefill_chunk, max_seq_len)
    return align_up(max_seq_len, chunk) + chunk - max_seq_len


def scratch_bytes(facts: ModelFacts, *, max_seq_len: int, prefill_chunk: int, last: bool) -> int:
    """Activations of one chunk inside one block, the rope table, and the last stage's logits.

    Rows are `prefill_chunk`: residual in and out, query and attended, key and value, gate and up.
    """
    rows = min(prefill_chunk, max_seq_len)
    hidden = facts.hidden_dim
    heads = _largest(facts, "attention.head_count", 1)
    query = heads * _largest(facts, "attention.key_length", max(hidden // heads, 1))
    key_and_value = max(facts.kv_bytes_per_token, default=0) // F32_BYTES
    feed_forward = _largest(facts, "feed_forward_length", 4 * hidden)
    block = rows * (2 * hidden + 2 * query + key_and_value + 2 * feed_forward)
    places = max_seq_len + spare_rows(max_seq_len, prefill_chunk)
    rope = places * query // heads
    return F32_BYTES * (block + rope + (facts.vocab_size if last else 0))


def object_bytes(facts: ModelFacts, *, rows: int, first: bool, last: bool) -> int:
    """The prompt's objects, each of which lies on the device whole: `rows` of activations in and out, where
    the stage takes them from or gives them to another."""
    return F32_BYTES * rows * facts.hidden_dim * ((not first) + (not last))


def _largest(facts: ModelFacts, key: str, default: int) -> int:
    """The largest value of a key that files give once or a layer each."""
    value = facts.metadata.get(f"{facts.architecture}.{key}", default)
    values = value if isinstance(value, tuple) else (value,)
    return max((each for each in values if isinstance(each, int) and each > 0), default=default)
