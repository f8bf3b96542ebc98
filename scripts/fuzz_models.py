"""Holds the worker against llama.cpp with random tiny models: either the same logits, or a refusal by name.

    uv pip install llama-cpp-python     # the reference; no part of the project, built by its own installation
    scripts/fuzz_models.py [--seeds 0:200] [--architecture NAME ...] [--kernels native|graph]

Each seed draws an architecture and what its files vary: heads and their widths, odd sizes, rope and its
scalings, windows, caps, biases, experts, fused and tied tensors, stored types, and now and then a key or a
tensor that asks for something else. A refusal is never wrong here; other logits where llama.cpp has some, and
splits that differ by a bit, are. Quantised models are compared with llama.cpp's run of their dequantised
twins, because it rounds activations for quantised weights. Exits with 1 when a seed failed; a seed is the
same model on every machine.
"""

# ruff: noqa: T201 -- a tool that prints its findings

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "worker_tinygrad"))

from stage_support import Pipeline, ranges
from swactor_core.errors import SwactorError
from swactor_core.plan import TokenOutputPolicy
from swactor_loader_gguf.model import GgufModel
from swactor_worker_tinygrad import create
from swactor_worker_tinygrad.families import FAMILIES, Family

CONTEXT = 256
TOLERANCE = 1e-3  # of the greatest logit
QKV = ("attn_q", "attn_k", "attn_v")
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# what nothing here implements for most families, or what llama.cpp does not read for them
STRANGERS: dict[str, Any] = {
    "attention.scale": 0.5,
    "attention.clamp_kqv": 0.5,
    "attention.temperature_scale": 0.1,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "attention.sliding_window": 8,
    "logit_scale": 0.5,
    "residual_scale": 0.5,
    "embedding_scale": 2.0,
    "nextn_predict_layers": 1,
    "rope.scaling.yarn_beta_fast": 8.0,
    "expert_weights_scale": 2.0,
}
STRANGE_TENSORS = ("blk.0.attn_sinks.weight", "blk.0.attn_q.scale", "rope_freqs.weight", "output.bias")


@dataclass(slots=True)
class Drawn:
    """A model of one seed: keys without their prefix, tensors as they are stored."""

    family: Family
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[np.ndarray, str]] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    chunk: int = 16

    def write(self, path: Path, *, dequantised: bool) -> None:
        writer = GGUFWriter(str(path), self.family.architecture)
        writer.add_tokenizer_model("no_vocab")
        adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        for name, value in self.keys.items():
            full = f"{self.family.architecture}.{name}"
            adders.get(type(value), writer.add_string if isinstance(value, str) else writer.add_array)(
                full, value
            )
        for name, (values, kind) in self.tensors.items():
            number = GGMLQuantizationType[kind]
            if kind == "F32":
                writer.add_tensor(name, values)
            elif dequantised:
                writer.add_tensor(name, dequantize(quantize(values, number), number).astype(np.float32))
            elif kind == "F16":
                writer.add_tensor(name, values.astype(np.float16))
            else:
                writer.add_tensor(name, quantize(values, number), raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


class Draw:
    """Makes the model of one seed."""

    def __init__(self, seed: int, architectures: list[str]) -> None:
        self.random = np.random.default_rng(seed)
        self.family = FAMILIES[architectures[seed % len(architectures)]]
        self.made = Drawn(self.family)
        self.scale = float(self.random.uniform(0.15, 0.5))
        self.types = [self.one_of("F32", *TYPES) for _ in range(4)] if self.chance(0.5) else ["F32"]

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def vector(self, name: str, width: int, *, around: float = 1.0, spread: float = 0.1) -> None:
        values = around + self.random.standard_normal(width) * spread
        self.made.tensors[name] = values.astype(np.float32), "F32"

    def matrix(self, name: str, *shape: int, spread: float = 0.0) -> None:
        spread = spread or self.scale * (32 / shape[-1]) ** 0.5
        kind = self.types[len(self.made.tensors) % len(self.types)]
        if shape[-1] % 32 and kind.startswith("Q"):
            kind = "BF16"
        self.made.tensors[name] = (self.random.standard_normal(shape) * spread).astype(np.float32), kind

    def model(self) -> Drawn:
        family, keys, one_of, chance = self.family, self.made.keys, self.one_of, self.chance
        kv_heads = one_of(1, 1, 2, 3, 4)
        heads = kv_heads * one_of(1, 2, 3, 4)
        width, wide = one_of(4, 6, 8, 10, 16, 20, 32), one_of(12, 17, 31, 40, 64)
        narrow = family.architecture in ("qwen2", "phi3") or chance(0.5)
        hidden = heads * width if narrow else one_of(16, 24, 32, 36, 64)
        layers, vocab = one_of(1, 2, 3, 5), one_of(7, 31, 64, 100, 257)
        keys |= {
            "block_count": layers,
            "vocab_size": vocab,
            "context_length": one_of(CONTEXT, 4096),
            "embedding_length": hidden,
            "feed_forward_length": wide,
            "attention.head_count": heads,
            "attention.head_count_kv": kv_heads,
            "attention.key_length": width,
            "attention.value_length": width,
            "attention.layer_norm_rms_epsilon": one_of(1e-5, 1e-6, 1e-3),
            "rope.freq_base": one_of(1e3, 1e4, 1e6),
        }
        self._rope(width)
        self._attention(layers)
        if family.experts:
            experts = one_of(1, 2, 4, 9)
            used = int(self.random.integers(1, experts + 1))
            keys |= {"expert_count": experts, "expert_used_count": used, "expert_feed_forward_length": wide}
        self.matrix("token_embd.weight", vocab, hidden, spread=one_of(0.03, 0.15, 1.0))
        self.vector("output_norm.weight", hidden)
        if not family.tied and chance(0.5):
            self.matrix("output.weight", vocab, hidden)
        biases = [name for name in sorted(family.biases) if name not in QKV and chance(0.3)]
        biases += QKV if chance(0.5) else ()
        fused = chance(0.9 if family.gate_in_up else 0.2)
        for layer in range(layers):
            self._block(f"blk.{layer}.", heads, kv_heads, width, biases=biases, fused=fused)
        if chance(0.1):
            name = one_of(*STRANGERS)
            keys.setdefault(name, STRANGERS[name])
        if chance(0.05):
            self.vector(one_of(*STRANGE_TENSORS), one_of(1, width // 2, heads, vocab))
        count = one_of(1, 2, 7, 8, 16, 17, 40, 100, 200)
        self.made.prompt = [int(token) for token in self.random.integers(0, vocab, count)]
        self.made.chunk = one_of(1, 5, 8, 16, 64)
        return self.made

    def _rope(self, width: int) -> None:
        family, keys, one_of, chance = self.family, self.made.keys, self.one_of, self.chance
        dims = width
        if family.partial_rope and chance(0.3):
            dims = max(2, width // 4 * 2)
            keys["rope.dimension_count"] = dims
        kind = one_of("", "", "none", "linear", "yarn")
        if kind:
            keys |= {"rope.scaling.type": kind, "rope.scaling.factor": one_of(2.0, 4.0, 16.0)}
            keys["rope.scaling.original_context_length"] = one_of(16, 64, 2048)
        if chance(0.2):
            keys["rope.scaling.attn_factor"] = one_of(0.9, 1.2)
        if family.rope_factors and chance(0.4):
            self.vector("rope_freqs.weight", dims // 2, around=4.0)
        if family.rope_factor_pair and chance(0.5):
            self.vector("rope_factors_short.weight", dims // 2, around=1.5)
            self.vector("rope_factors_long.weight", dims // 2, around=4.0)
            keys["rope.scaling.original_context_length"] = one_of(64, 2048)

    def _attention(self, layers: int) -> None:
        family, keys, one_of, chance = self.family, self.made.keys, self.one_of, self.chance
        if family.window_period:
            keys["attention.sliding_window"] = one_of(1, 3, 8, 33)
            pattern = one_of(None, 2, 3, [bool(self.random.integers(2)) for _ in range(layers - 1)] + [True])
            keys |= {} if pattern is None else {"attention.sliding_window_pattern": pattern}
            keys |= {"rope.freq_base_swa": 500.0} if chance(0.3) else {}
            keys |= {"final_logit_softcapping": one_of(3.0, 30.0)} if chance(0.4) else {}
        if family.default_score_cap is not None and chance(0.4):
            keys["attn_logit_softcapping"] = one_of(2.0, 50.0)
        if family.attention_temperature and chance(0.5):
            keys["attention.temperature_scale"] = one_of(0.1, 0.3)

    def _block(
        self, block: str, heads: int, kv_heads: int, width: int, *, biases: list[str], fused: bool
    ) -> None:
        keys, family = self.made.keys, self.family
        hidden, wide = keys["embedding_length"], keys["feed_forward_length"]
        queries, shared = heads * width, kv_heads * width

        def linear(name: str, out: int, into: int, *, bias: bool) -> None:
            self.matrix(f"{block}{name}.weight", out, into)
            if bias:
                self.vector(f"{block}{name}.bias", out, around=0.0, spread=0.3)

        norms = ["attn_norm", "ffn_norm"]
        norms += ["post_attention_norm", "post_ffw_norm"] if family.post_norms else []
        for name in norms:
            self.vector(f"{block}{name}.weight", hidden)
        if family.head_norms:
            self.vector(f"{block}attn_q_norm.weight", width)
            self.vector(f"{block}attn_k_norm.weight", width)
        if fused:
            linear("attn_qkv", queries + 2 * shared, hidden, bias="attn_q" in biases)
        else:
            for name, out in zip(QKV, (queries, shared, shared), strict=True):
                linear(name, out, hidden, bias=name in biases)
        linear("attn_output", hidden, queries, bias="attn_output" in biases)
        if experts := keys.get("expert_count"):
            self.matrix(f"{block}ffn_gate_inp.weight", experts, hidden, spread=0.5)
            self.matrix(f"{block}ffn_gate_exps.weight", experts, wide, hidden)
            self.matrix(f"{block}ffn_up_exps.weight", experts, wide, hidden)
            self.matrix(f"{block}ffn_down_exps.weight", experts, hidden, wide)
            return
        if not family.gate_in_up:
            linear("ffn_gate", wide, hidden, bias="ffn_gate" in biases)
        linear("ffn_up", wide * (1 + family.gate_in_up), hidden, bias="ffn_up" in biases)
        linear("ffn_down", hidden, wide, bias="ffn_down" in biases)


def reference(path: Path, prompt: list[int]) -> np.ndarray | None:
    """llama.cpp's logits behind the prompt; None when it does not take the model. In a process of its own,
    because it ends its process when it finds a model impossible late."""
    command = [sys.executable, __file__, "--reference", str(path), json.dumps(prompt)]
    made = subprocess.run(command, capture_output=True, timeout=120, check=False)
    if b"ModuleNotFoundError" in made.stderr:
        raise SystemExit(f"the reference is missing: {made.stderr.decode().splitlines()[-1]}")
    return np.frombuffer(made.stdout, "<f4") if made.returncode == 0 else None


def print_reference(path: str, prompt: list[int]) -> int:
    import ctypes

    import llama_cpp

    @llama_cpp.llama_log_callback
    def silent(*_: object) -> None: ...

    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    wanted = llama_cpp.llama_model_default_params()
    wanted.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), wanted)
    if not model:
        return 1
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = CONTEXT
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
    settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.swa_full = True
    context = llama_cpp.llama_init_from_model(model, settings)
    ids = (ctypes.c_int32 * len(prompt))(*prompt)
    if not context or llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(prompt))):
        return 1
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    row = llama_cpp.llama_get_logits_ith(context, -1)
    sys.stdout.buffer.write(np.ctypeslib.as_array(row, (vocab,)).astype("<f4").tobytes())
    return 0


def verdict(backend: Any, drawn: Drawn, folder: Path) -> tuple[str, str]:
    """(what came of it in one word, the details); `differs` and `splits` are faults."""
    path, twin = folder / "model.gguf", folder / "twin.gguf"
    drawn.write(path, dequantised=False)
    drawn.write(twin, dequantised=True)
    options: dict[str, Any] = {
        "max_context": CONTEXT,
        "chunk": drawn.chunk,
        "policy": TokenOutputPolicy.LOGITS,
    }
    rows = []
    try:
        model = GgufModel(str(path))
        layers = model.facts.num_layers
        for stages in range(1, min(3, layers) + 1):
            manifests = [model.manifest(*part) for part in ranges(layers, stages)]
            pipeline = Pipeline(backend, path, stages, manifests=manifests, **options)
            rows.append(np.frombuffer(pipeline.step(drawn.prompt, 0), "<f4"))
            pipeline.close()
        model.close()
    except SwactorError as error:
        return "refused", error.message
    if any(row.tobytes() != rows[0].tobytes() for row in rows):
        return "splits", "give other bits than the whole model"
    expected = reference(twin, drawn.prompt)
    if expected is None:
        return "unknown", "llama.cpp does not take this model"
    share = float(np.abs(rows[0] - expected).max() / np.abs(expected).max())
    return ("same" if share < TOLERANCE else "differs"), f"by {share:.1e} of the greatest logit"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", default="0:200", help="FIRST:END")
    parser.add_argument("--architecture", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--kernels", default="native", choices=["native", "graph"])
    parser.add_argument("--reference", nargs=2, metavar=("MODEL", "PROMPT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.reference:
        return print_reference(given.reference[0], json.loads(given.reference[1]))
    first, _, end = given.seeds.partition(":")
    counts: Counter[tuple[str, str]] = Counter()
    backend = create({"device": "CPU", "kernels": given.kernels})
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(first), int(end)):
            drawn = Draw(seed, given.architecture).model()
            word, details = verdict(backend, drawn, Path(folder))
            counts[drawn.family.architecture, word] += 1
            if word in ("differs", "splits"):
                print(f"seed {seed}: {drawn.family.architecture} {word} {details}: {drawn.keys}", flush=True)
    backend.close()
    for (architecture, word), count in sorted(counts.items()):
        print(f"{architecture:10} {word:8} {count}")
    return int(any(word in ("differs", "splits") for _, word in counts))


if __name__ == "__main__":
    sys.exit(main())
