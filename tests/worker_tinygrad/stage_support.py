"""Helpers of these tests: manifests built with the gguf package's reader, a pipeline in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from swactor_core.plan import SamplingPolicy, TokenOutputPolicy
from swactor_core.specs import DTypeFamily, ObjectKind, ObjectSpec
from swactor_core.spi.loader import StageManifest, TensorRef
from swactor_core.spi.worker import StageConfig, StepInput

DATA = Path(__file__).parent.parent / "data" / "tiny"


def read_model(path: Path) -> tuple[dict[str, Any], list[TensorRef]]:
    reader = GGUFReader(str(path))
    metadata: dict[str, Any] = {}
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")):
            continue
        value = field.contents()
        metadata[name] = tuple(value) if isinstance(value, list) else value
    refs = [
        TensorRef(
            name=tensor.name,
            ggml_type=int(tensor.tensor_type),
            type_name=tensor.tensor_type.name,
            dims=tuple(int(size) for size in tensor.shape),
            path=str(path),
            offset=int(tensor.data_offset),
            nbytes=int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    ]
    return metadata, refs


def manifest_of(path: Path, start: int = 0, end: int | None = None, *, token_count: int = 0) -> StageManifest:
    metadata, refs = read_model(path)
    architecture = str(metadata["general.architecture"])
    layers = int(metadata[f"{architecture}.block_count"])
    end = layers if end is None else end
    by_name = {ref.name: ref for ref in refs}
    tied = "output.weight" not in by_name
    wanted = [
        ref for ref in refs if ref.name.startswith("blk.") and start <= int(ref.name.split(".")[1]) < end
    ]
    for ref in refs:
        if ref.name == "token_embd.weight":
            needed = start == 0 or (end == layers and tied)
        else:
            needed = end == layers or not ref.name.startswith("output")
        if needed and not ref.name.startswith("blk."):
            wanted.append(ref)
    return StageManifest(
        architecture=architecture,
        metadata=metadata,
        num_layers=layers,
        layer_start=start,
        layer_end_exclusive=end,
        hidden_dim=int(metadata[f"{architecture}.embedding_length"]),
        vocab_size=by_name["token_embd.weight"].dims[1],
        token_count=token_count,
        tied_head=tied,
        tensors=tuple(wanted),
    )


def config_of(
    manifest: StageManifest,
    *,
    max_context: int = 64,
    chunk: int = 8,
    sampling: SamplingPolicy | None = None,
    policy: TokenOutputPolicy = TokenOutputPolicy.TOKEN_IDS,
    weights_in_memory: bool = False,
) -> StageConfig:
    hidden, vocab = manifest.hidden_dim, manifest.vocab_size
    tokens = ObjectSpec(ObjectKind.TOKENS, max_context * 4, DTypeFamily.UNSIGNED, 4, 1)
    rows = ObjectSpec(ObjectKind.ACTIVATION, max_context * hidden * 4, DTypeFamily.FLOAT, 4, hidden)
    logits = ObjectSpec(ObjectKind.LOGITS, vocab * 4, DTypeFamily.FLOAT, 4, vocab)
    produced = tokens if policy is TokenOutputPolicy.TOKEN_IDS else logits
    return StageConfig(
        manifest=manifest,
        max_context=max_context,
        prefill_chunk=chunk,
        input_spec=tokens if manifest.first else rows,
        output_spec=produced if manifest.last else rows,
        sampling=sampling or SamplingPolicy(),
        token_output_policy=policy,
        weights_in_memory=weights_in_memory,
    )


def ranges(layers: int, stages: int) -> list[tuple[int, int]]:
    cuts = [round(layers * index / stages) for index in range(stages + 1)]
    return list(pairwise(cuts))


class Pipeline:
    """Stages of one model in this process; objects are handed over as bytes, as the rings would."""

    def __init__(
        self,
        backend: Any,
        path: Path,
        stages: int,
        *,
        manifests: Sequence[StageManifest] = (),
        **options: Any,
    ) -> None:
        """`manifests` take the place of those that the file at `path` gives."""
        self.backend = backend
        layers = manifest_of(path).num_layers
        manifests = manifests or [manifest_of(path, *part) for part in ranges(layers, stages)]
        self.configs = [config_of(manifest, **options) for manifest in manifests]
        self.roles = [
            backend.configure(config, progress=lambda _: None, should_abort=lambda: False)
            for config in self.configs
        ]
        self.sequence = 0

    def step(self, ids: Sequence[int], position: int) -> bytes:
        payload = np.asarray(ids, "<u4").tobytes()
        bridge = self.backend.bridge
        for config, role in zip(self.configs, self.roles, strict=True):
            given = bridge.alloc_device(config.input_spec, len(payload))
            assert bridge.copy_event_complete(bridge.host_to_device(memoryview(payload), given, 0))
            made, extent = role.execute(
                StepInput(given, len(payload), self.sequence, position), lambda: False
            )
            out = bytearray(extent)
            assert bridge.copy_event_complete(bridge.device_to_host(made, 0, memoryview(out)))
            bridge.free_device(given)
            payload = bytes(out)
        self.sequence += 1
        return payload

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        made = [int.from_bytes(self.step(prompt, 0), "little")]
        while len(made) < count:
            made.append(int.from_bytes(self.step(made[-1:], len(prompt) + len(made) - 1), "little"))
        return made

    def close(self) -> None:
        for role in self.roles:
            role.close()


def reference(model: str | Path) -> dict[str, Any]:
    """What llama.cpp made of a model of the tests' data, by name or path."""
    path = model if isinstance(model, Path) else DATA / f"{model}.gguf"
    made: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return made
