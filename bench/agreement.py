"""How far other numerics are from exact ones: the same token and how much of the distribution, on a text.

    python bench/agreement.py [MODEL] [--text FILE] [--positions N] [--kinds native:packed:fast]
        [--logits NAME=FILE] [--write-ids FILE]

Each kind computes the logits of the text's first `--positions` tokens, and so does the reference, which is
`native:mapped:exact`: f32 activations on dequantised weights. "top-1" is at how many positions both give the
same token the greatest logit, KL the mean over positions of the Kullback-Leibler divergence of the kind's
distribution from the reference's, in nats; "perplexity" is that of the text itself. `--logits` adds what
another program made of the same ids (`--write-ids` writes them, uint32): f32 logits, one row a position.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from kinds import settings_of
from numpy.typing import NDArray
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec
from swactor_core.spi.loader import StageManifest
from swactor_core.spi.worker import StageConfig, StepInput
from swactor_loader_gguf.loader import GgufLoader
from swactor_worker_tinygrad import create

REFERENCE = "native:mapped:exact"
TEXT = Path(__file__).parent.parent / "docs" / "architecture.md"


def computed(manifest: StageManifest, ids: Sequence[int], kind: str) -> Iterator[NDArray[np.float32]]:
    """The logits behind each of `ids`, one token a step: a chunk would give only those of its last."""
    tokens = ObjectSpec(ObjectKind.TOKENS, len(ids) * 4, DTypeFamily.UNSIGNED, 4, 1)
    vocab = manifest.vocab_size
    config = StageConfig(
        manifest=manifest,
        max_context=len(ids),
        prefill_chunk=1,
        input_spec=tokens,
        output_spec=ObjectSpec(ObjectKind.LOGITS, vocab * 4, DTypeFamily.FLOAT, 4, vocab),
        sampling=SamplingPolicy(),
        token_output_policy=TokenOutputPolicy.LOGITS,
    )
    backend = create(dict(settings_of(kind)))
    try:
        role = backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
        if role.facts["numerics"] != settings_of(kind)["numerics"]:
            raise SystemExit(f"{kind}: the worker says that its numerics are {role.facts}")
        given = backend.bridge.alloc_device(tokens, 4)
        for position, token in enumerate(ids):
            payload = np.asarray([token], "<u4").tobytes()
            backend.bridge.host_to_device(memoryview(payload), given, 0)
            made, extent = role.execute(StepInput(given, 4, position, position), lambda: False)
            raw = bytearray(extent)
            backend.bridge.device_to_host(made, 0, memoryview(raw))
            yield np.frombuffer(raw, "<f4")
        backend.bridge.free_device(given)
        role.close()
    finally:
        backend.close()


def stored_logits(path: Path, positions: int, vocab: int) -> NDArray[np.float32]:
    """(positions, vocab) f32 of a file. Raises SystemExit when it is not there or of another size."""
    size, wanted = path.stat().st_size if path.is_file() else 0, positions * vocab * 4
    if size != wanted:
        raise SystemExit(
            f"{str(path)!r} holds {size} bytes, {positions} rows of {vocab} logits have {wanted}"
        )
    return np.memmap(path, "<f4", mode="r", shape=(positions, vocab))


def log_shares(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The logarithms of the distribution that logits stand for."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


class Tally:
    """What one kind makes of the text, beside the reference."""

    def __init__(self) -> None:
        self.same = 0
        self.divergences: list[float] = []
        self.surprises: list[float] = []

    def add(self, exact: NDArray[np.float64], other: NDArray[np.float64], following: int | None) -> None:
        self.same += int(exact.argmax() == other.argmax())
        self.divergences.append(float((np.exp(exact) * (exact - other)).sum()))
        if following is not None:
            self.surprises.append(-float(other[following]))

    def line(self, name: str) -> str:
        count = len(self.divergences)
        share = f"{self.same:6d} of {count} {self.same / count:7.3f}"
        divergence = f"{np.mean(self.divergences):10.6f} {np.max(self.divergences):10.6f}"
        return f"{name:20} {share} {divergence} {np.exp(np.mean(self.surprises)):11.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--positions", type=int, default=1000)
    parser.add_argument("--kinds", default="native:packed:fast", help="separated by commas")
    parser.add_argument("--logits", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--write-ids", type=Path)
    options = parser.parse_args()
    loader = GgufLoader()
    path = options.model if Path(options.model).exists() else loader.resolve(options.model)
    model = loader.open(str(path))
    manifest = model.manifest(0, model.facts.num_layers)
    ids = model.tokenizer().encode(options.text.read_text())[: options.positions]
    model.close()
    if len(ids) < options.positions:
        raise SystemExit(f"{options.text} has only {len(ids)} tokens: give --positions or another --text")
    if options.write_ids is not None:
        options.write_ids.write_bytes(np.asarray(ids, "<u4").tobytes())
    sources: dict[str, Iterator[NDArray[np.float32]]] = {}
    for kind in options.kinds.split(","):
        sources[kind] = computed(manifest, ids, kind)
    for given in options.logits:
        name, _, file = given.partition("=")
        sources[name] = iter(stored_logits(Path(file), len(ids), manifest.vocab_size))
    own, tallies = Tally(), {name: Tally() for name in sources}
    for position, exact in enumerate(computed(manifest, ids, REFERENCE)):
        following = ids[position + 1] if position + 1 < len(ids) else None
        reference = log_shares(exact)
        own.add(reference, reference, following)
        for name, rows_of_source in sources.items():
            tallies[name].add(reference, log_shares(next(rows_of_source)), following)
    print(f"{Path(path).name}, {len(ids)} positions of {options.text.name}")
    room = len(f"      of {len(ids)}   1.000")
    print(f"{'':20} {'top-1':<{room}} {'mean KL':>10} {'most':>10} {'perplexity':>11}")
    for name, tally in ((REFERENCE, own), *tallies.items()):
        print(tally.line(name))


if __name__ == "__main__":
    main()
