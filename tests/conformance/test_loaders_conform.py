"""The loaders of this repository keep the loader contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from swactor_core.spi.loader import Loader
from swactor_testing.conformance import LoaderCapabilities, LoaderContract
from swactor_testing.conformance.fetching import Distant
from swactor_testing.synthetic import SyntheticLoader
from web_servers import Misbehaving

TINY = Path(__file__).parents[1] / "data" / "tiny"
WITH_VOCABULARY = TINY.parent / "conformance" / "vocabulary.gguf"
HIDDEN, LAYERS = 8, 3


class TestSynthetic(LoaderContract):
    capabilities = LoaderCapabilities(provider="synthetic", models=("demo", "other"), reads_files=False)

    @pytest.fixture
    def plugin(self) -> Loader:
        return SyntheticLoader()


class TestGguf(LoaderContract):
    capabilities = LoaderCapabilities(
        provider="gguf",
        models=(
            str(WITH_VOCABULARY),
            *(str(TINY / f"llama-{name}.gguf") for name in ("tied", "gqa", "ropefreqs")),
        ),
        fetches=True,
        pre_tokenizers=("gpt-2", "llama-bpe"),
        suppressed={str(WITH_VOCABULARY): frozenset({256})},
    )

    @pytest.fixture
    def plugin(self) -> Loader:
        from swactor_loader_gguf.loader import GgufLoader

        return GgufLoader()

    @pytest.fixture
    def distant(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distant]:
        monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "cache"))
        path = tmp_path / "large.gguf"
        write_large_model(path)
        server = Misbehaving(path.read_bytes())

        def remove() -> None:
            server.behaviour.status = 404

        yield Distant(f"{server.url}/large.gguf", str(path), remove)
        server.stop()


def write_large_model(path: Path) -> None:
    """Layers of noise that are larger than what a header's reader reads ahead."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(2)
    noise = np.random.default_rng(3)
    rows = {"token_embd.weight": 1 << 15, "output_norm.weight": 1, "output.weight": 1 << 15}
    for name, count in (rows | {f"blk.{layer}.ffn_up.weight": 1 << 14 for layer in range(LAYERS)}).items():
        shape = (HIDDEN,) if count == 1 else (count, HIDDEN)
        writer.add_tensor(name, noise.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model_with_vocabulary(path: Path) -> None:
    """A model of three layers of different size, with every byte as a token, a few merges, control tokens
    and a chat template."""
    from swactor_loader_gguf.stream import byte_alphabet

    alphabet = [letter for letter, _ in sorted(byte_alphabet().items(), key=lambda pair: pair[1])]
    merges = ["h e", "l l", "he ll", "Ġ w", "Ã ¼", "3 4"]  # the last one where digits are not cut by threes
    controls = ["<s>", "<|im_end|>"]
    tokens = [*alphabet, *controls, *(merge.replace(" ", "") for merge in merges)]
    types = [TokenType.CONTROL if token in controls else TokenType.NORMAL for token in tokens]
    writer = GGUFWriter(path, "llama")
    writer.add_name("vocabulary")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(True)
    writer.add_array("tokenizer.ggml.suppress_tokens", [tokens.index("<s>")])
    writer.add_chat_template(
        "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
    )

    def tensor(name: str, *shape: int) -> None:
        count = int(np.prod(shape))
        writer.add_tensor(name, np.arange(count, dtype=np.float32).reshape(shape))

    tensor("token_embd.weight", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        tensor(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        tensor(f"blk.{layer}.ffn_up.weight", 16 + 8 * layer, HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    tensor("output.weight", len(tokens), HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_stored_model_with_a_vocabulary_is_the_one_written_here(tmp_path: Path) -> None:
    write_model_with_vocabulary(tmp_path / "written.gguf")
    assert (tmp_path / "written.gguf").read_bytes() == WITH_VOCABULARY.read_bytes()
