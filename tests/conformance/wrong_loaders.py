"""The loader of small files with one thing broken at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from file_loader import HEAD, LAYERS, FileModel, FileTokenizer, content
from file_loader import WrongLoader as Wrong
from swactor_core.errors import ModelError
from swactor_core.spi.loader import ModelFacts, StageManifest, TensorRef
from swactor_testing.synthetic import BEGIN, END, VOCABULARY
from wrong_kit import Around, caught_by

FACTS = "test_facts_are_whole_and_agree_with_each_other"
LAYER_BYTES = "test_layer_bytes_are_those_of_the_layers_tensors"
STAGES = "test_stages_cover_the_model_each_with_its_own_tensors[1]"
BACK = "test_text_comes_back_from_its_ids[2]"
WHOLE = "test_a_stream_never_splits_a_character[5]"
HALF = "test_half_a_character_at_the_end_is_told"
DAMAGED = "test_a_damaged_file_is_a_model_error[0]"


class TestUnbroken(Wrong):
    pass


# --- facts and stages ---


@caught_by("test_what_another_node_is_told_is_the_same_model", r"stage.outline\(\) ==")
class TestTellsEachNodeSomethingElse(Wrong):
    class model(FileModel):
        def outline(self) -> str:
            return str(id(self))


@caught_by("test_what_another_node_is_told_is_the_same_model", "characters in a message")
class TestTellsTooMuch(Wrong):
    class model(FileModel):
        def outline(self) -> str:
            return "." * ((1 << 20) + 1)


@caught_by(LAYER_BYTES, "layer 1 has 320 bytes, the facts say")
class TestLiesAboutLayerBytes(Wrong):
    class model(FileModel):
        @property
        def facts(self) -> ModelFacts:
            honest = super().facts
            return replace(honest, layer_bytes=(honest.layer_bytes[0],) * LAYERS)


@caught_by(FACTS, "assert 4 == 3")
class TestForgetsALayer(Wrong):
    class model(FileModel):
        @property
        def facts(self) -> ModelFacts:
            return replace(super().facts, kv_bytes_per_token=(1,) * (LAYERS - 1))


@caught_by(FACTS, "bytes of tensors in a file of less")
class TestCountsUnpackedBytes(Wrong):
    class model(FileModel):
        @property
        def facts(self) -> ModelFacts:
            honest = super().facts
            return replace(honest, layer_bytes=tuple(64 * size for size in honest.layer_bytes))


@caught_by(FACTS, "a header of 0 bytes")
class TestForgetsItsHeader(Wrong):
    class model(FileModel):
        @property
        def facts(self) -> ModelFacts:
            return replace(super().facts, header_bytes=0)


@caught_by(FACTS, "a header of [0-9]+ bytes beside")
class TestItsHeaderIsTheFile(Wrong):
    class model(FileModel):
        @property
        def facts(self) -> ModelFacts:
            honest = super().facts
            return replace(honest, header_bytes=honest.file_bytes)


@caught_by("test_a_name_resolves_to_the_same_place_twice", "depends on where a process runs")
class TestResolvesFromWhereItIs(Wrong):
    relative = True


@caught_by("test_a_digest_is_of_the_content", "different models have the same digest")
class TestDigestIsOfTheShape(Wrong):
    class model(FileModel):
        def digest(self) -> str:
            return blake2b(b"file", digest_size=32).hexdigest()


@caught_by("test_a_digest_is_of_the_content", r"again.digest\(\) ==")
class TestDigestIsOfTheMoment(Wrong):
    class model(FileModel):
        def digest(self) -> str:
            return blake2b(str(id(self)).encode(), digest_size=32).hexdigest()


@caught_by("test_metadata_is_small_and_of_scalars", "is the tokenizer's")
class TestSendsItsVocabularyAround(Wrong):
    class model(FileModel):
        @property
        def facts(self) -> ModelFacts:
            return replace(super().facts, metadata={"tokenizer.tokens": (1, 2, 3)})


@caught_by(STAGES, "blocks of others, or too few")
class TestGivesEveryStageEverything(Wrong):
    class model(FileModel):
        def wanted(self, start: int, end: int) -> set[str]:
            return set(self.sizes)


@caught_by(STAGES, "blocks of others, or too few")
class TestDropsTheLastLayerOfAStage(Wrong):
    class model(FileModel):
        def wanted(self, start: int, end: int) -> set[str]:
            return super().wanted(start, end) - {f"blk.{end - 1}.attn.weight"}


@caught_by(STAGES, "the tensors outside its blocks")
class TestForgetsTheHead(Wrong):
    class model(FileModel):
        def wanted(self, start: int, end: int) -> set[str]:
            return super().wanted(start, end) - {"output.weight"}


@caught_by("test_tensors_lie_in_their_file_and_apart", "two tensors share bytes")
class TestOffsetsAreRelative(Wrong):
    class model(FileModel):
        def tensors(self) -> list[TensorRef]:
            return [replace(tensor, offset=tensor.offset % 900) for tensor in super().tensors()]


@caught_by("test_layers_outside_the_model_are_refused", "DID NOT RAISE|IndexError")
class TestCutsRanges(Wrong):
    class model(FileModel):
        def manifest(self, start: int, end: int) -> StageManifest:
            start = min(max(0, start), LAYERS - 1)
            return super().manifest(start, min(max(start + 1, end), LAYERS))


@caught_by("test_a_model_closes_twice", "ValueError")
class TestClosesOnce(Wrong):
    class model(FileModel):
        closed = False

        def close(self) -> None:
            if self.closed:
                raise ValueError("closed already")
            self.closed = True

    @pytest.fixture
    def models(self, plugin: Any) -> Any:
        return [plugin.open(plugin.resolve(name)) for name in self.capabilities.models]


# --- what is no model ---


@caught_by("test_a_missing_model_names_itself_and_the_remedy", "FileNotFoundError|DID NOT RAISE")
class TestAMissingFileIsTheSystemsError(Wrong):
    missing_is_fine = True

    class model(FileModel):
        def __init__(self, path: str) -> None:
            Path(path).stat()
            super().__init__(path)


@caught_by(DAMAGED, "JSONDecodeError|UnicodeDecodeError|KeyError")
class TestADamagedFileIsTheParsersError(Wrong):
    class model(FileModel):
        def __init__(self, path: str) -> None:
            self.path, self.head = path, json.loads(Path(path).read_bytes()[32:HEAD])
            self.sizes = self.head["sizes"]


@caught_by(DAMAGED, "was taken for a model")
class TestTakesHalfAFile(Wrong):
    class model(FileModel):
        def __init__(self, path: str) -> None:
            data = Path(path).read_bytes()
            if len(data) >= HEAD:
                Path(path).write_bytes(data.ljust(HEAD + 100_000, b"\0")[: len(content("first"))])
            super().__init__(path)


@caught_by(DAMAGED, "does not name the file")
class TestARefusalNamesNothing(Wrong):
    class model(FileModel):
        def __init__(self, path: str) -> None:
            try:
                super().__init__(path)
            except ModelError:
                raise ModelError("bad model") from None


# --- text ---


class Stream(Around):
    pass


@caught_by(WHOLE, "a character was split")
class TestSplitsCharacters(Wrong):
    class tokenizer(FileTokenizer):
        def stream(self) -> Any:
            class Bytewise(Stream):
                def push(self, token_id: int) -> str:
                    byte = self._inner._byte_of.get(token_id)
                    return "" if byte is None else bytes((byte,)).decode("utf-8", "replace")

            return Bytewise(self._inner.stream())


@caught_by(WHOLE, "is not the beginning of")
class TestGuessesCharactersAhead(Wrong):
    class tokenizer(FileTokenizer):
        def stream(self) -> Any:
            class Eager(Stream):
                def push(self, token_id: int) -> str:
                    return self._inner.push(token_id) or "?"

            return Eager(self._inner.stream())


@caught_by(HALF, "vanished at the end")
class TestForgetsTheRest(Wrong):
    class tokenizer(FileTokenizer):
        def stream(self) -> Any:
            class Forgetful(Stream):
                def finish(self) -> str:
                    return ""

            return Forgetful(self._inner.stream())


@caught_by(BACK, "Gre, nave")
class TestLosesAccents(Wrong):
    class tokenizer(FileTokenizer):
        def encode(self, text: str, *, special: bool = False) -> list[int]:
            return self._inner.encode(text.encode("ascii", "ignore").decode())


@caught_by(BACK, "outside 0..")
class TestIdsLeaveTheVocabulary(Wrong):
    class tokenizer(FileTokenizer):
        def encode(self, text: str, *, special: bool = False) -> list[int]:
            return [*self._inner.encode(text), VOCABULARY + 7]


@caught_by("test_no_text_has_no_id", r"assert \[256\] == \[\]")
class TestAddsABeginningEverywhere(Wrong):
    class tokenizer(FileTokenizer):
        def encode(self, text: str, *, special: bool = False) -> list[int]:
            return [BEGIN, *self._inner.encode(text)]


@caught_by("test_user_text_never_becomes_a_control_token", "ends the generation")
class TestUserTextEndsATurn(Wrong):
    class tokenizer(FileTokenizer):
        def encode(self, text: str, *, special: bool = False) -> list[int]:
            before, _, after = text.partition("<|im_end|>")
            if before == text:
                return self._inner.encode(text)
            return [*self._inner.encode(before), END, *self._inner.encode(after)]


@caught_by("test_streams_are_separate[0]", "seed 0")
class TestHasOneStream(Wrong):
    class tokenizer(FileTokenizer):
        def stream(self) -> Any:
            if "only" not in self.__dict__:
                self.only = self._inner.stream()
            return self.only


@caught_by("test_any_ids_stream_without_an_error", "KeyError")
class TestControlTokensRaise(Wrong):
    class tokenizer(FileTokenizer):
        def stream(self) -> Any:
            class Strict(Stream):
                def push(self, token_id: int) -> str:
                    self._inner._byte_of[token_id]
                    return self._inner.push(token_id)

            return Strict(self._inner.stream())


@caught_by("test_a_prompt_is_its_text_and_at_most_a_beginning", r":\] == plain")
class TestAPromptHasAnEnd(Wrong):
    class tokenizer(FileTokenizer):
        def prompt_ids(self, text: str) -> list[int]:
            return [*self._inner.prompt_ids(text), END]


@caught_by("test_a_chat_template_is_there_or_refused", "DID NOT RAISE")
class TestInventsATemplate(Wrong):
    class tokenizer(FileTokenizer):
        def chat_ids(self, messages: Any) -> list[int]:
            return self._inner.encode(messages[0]["content"])
