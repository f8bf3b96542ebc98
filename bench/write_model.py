"""A model of a real one's shape with random weights: speed and memory ask for a size, not for sense.

    python bench/write_model.py 1b|3b|8b FILE [--seed N]

The shapes are those of Llama 3.2 1B and 3B and Llama 3.1 8B, with a vocabulary of 32,000 nameless tokens, all
matrices Q4_1. A block's values lie around zero, so that activations neither vanish nor overflow: a run
computes what a real model's run computes. Ids are given with `--prompt-ids`; there is no tokenizer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

VOCABULARY = 32_000
GROUP = 32  # values of a Q4_1 block
BLOCK = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", GROUP // 2)])
"""Q4_1: value = scale * nibble + minimum; gguf-py, quants.py."""
MIDDLE = 7.5  # of the sixteen values of a nibble


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides how long a token takes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int


SHAPES = {
    "1b": Shape(16, 2048, 32, 8, 64, 8192),
    "3b": Shape(28, 3072, 24, 8, 128, 8192),
    "8b": Shape(32, 4096, 32, 8, 128, 14336),
}


def write(shape: Shape, path: Path, seed: int) -> None:
    """Writes the file, one tensor at a time in memory."""
    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")

    def matrix(name: str, rows: int, columns: int) -> None:
        """(rows, columns), as torch has them."""
        blocks = np.zeros((rows, columns // GROUP), BLOCK)
        blocks["scale"] = random.uniform(0.5, 1.5, blocks.shape) / (MIDDLE * np.sqrt(columns))
        blocks["minimum"] = -MIDDLE * blocks["scale"]
        blocks["nibbles"] = random.integers(0, 256, (*blocks.shape, GROUP // 2), np.uint8)
        writer.add_tensor(name, blocks.view(np.uint8).reshape(rows, -1), raw_dtype=GGMLQuantizationType.Q4_1)

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))

    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    matrix("token_embd.weight", VOCABULARY, shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight")
        matrix(f"{block}.attn_q.weight", queries, shape.hidden)
        matrix(f"{block}.attn_k.weight", keys, shape.hidden)
        matrix(f"{block}.attn_v.weight", keys, shape.hidden)
        matrix(f"{block}.attn_output.weight", shape.hidden, queries)
        ones(f"{block}.ffn_norm.weight")
        matrix(f"{block}.ffn_gate.weight", shape.feed_forward, shape.hidden)
        matrix(f"{block}.ffn_up.weight", shape.feed_forward, shape.hidden)
        matrix(f"{block}.ffn_down.weight", shape.hidden, shape.feed_forward)
    ones("output_norm.weight")
    matrix("output.weight", VOCABULARY, shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write(SHAPES[options.shape], options.file, options.seed)
    print(f"{options.file}: {options.file.stat().st_size / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
