"""Text and token ids: there and back, control tokens only where they are meant, streams of whole characters.

The guarantees are those of `Tokenizer` and `TextStream` in `swactor_core.spi.loader`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import pytest
from swactor_core.errors import ModelError, UsageError
from swactor_core.spi.loader import Loader, Model, Tokenizer

from swactor_testing.conformance.base import Contract
from swactor_testing.conformance.bounds import seeded
from swactor_testing.conformance.capabilities import LoaderCapabilities

TEXTS = (
    "hello world",
    "  two leading spaces,\ttabs\nand lines\r\n",
    "Grüße, naïve café — “quoted”",
    "Ελληνικά, русский, עברית, العربية, हिन्दी",
    "日本語と中文和한국어",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 and e\u0301 composed",
    "1234567890 3.14159 x=[1,2];{}()<>\\/",
    "\u0000\u0001 control characters \u007f",
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], str]:
    """The text of each push, and of the finish."""
    stream = tokenizer.stream()
    return [stream.push(token) for token in ids], stream.finish()


class TokenizerContract(Contract[Loader, LoaderCapabilities]):
    """What a model's tokenizer keeps; a model without vocabulary has none."""

    @pytest.fixture
    def models(self, plugin: Loader) -> list[Model]:
        raise NotImplementedError

    @pytest.fixture
    def tokenizers(self, models: list[Model]) -> list[tuple[Tokenizer, int]]:
        """The tokenizers of models that have one, with the size of the vocabulary."""
        found = [(m.tokenizer(), m.facts.vocab_size) for m in models if m.facts.has_vocabulary]
        assert found, "the capabilities name no model with a vocabulary"
        return found

    def test_a_model_without_vocabulary_has_no_tokenizer(self, models: list[Model]) -> None:
        """`tokenizer` raises ModelError when the file has no vocabulary, as its facts say."""
        for model in models:
            if not model.facts.has_vocabulary:
                with pytest.raises(ModelError):
                    model.tokenizer()

    def test_suppressed_ids_are_those_of_the_file(self, models: list[Model]) -> None:
        """`suppressed`: ids that the model's author says are never to be sampled, a set of the vocabulary;
        something is left to sample."""
        for name, model in zip(self.capabilities.models, models, strict=True):
            if not model.facts.has_vocabulary:
                continue
            vocabulary, suppressed = model.facts.vocab_size, model.tokenizer().suppressed
            assert isinstance(suppressed, frozenset)
            outside = {token for token in suppressed if not 0 <= token < vocabulary}
            assert not outside, f"{sorted(outside)} outside 0..{vocabulary - 1} are suppressed"
            assert len(suppressed) < vocabulary, "every id is suppressed"
            assert suppressed == model.tokenizer().suppressed
            assert suppressed == self.capabilities.suppressed.get(name, suppressed)

    def test_an_unknown_pre_tokenizer_is_refused(self, models: list[Model]) -> None:
        """`tokenizer(pre=)` raises UsageError when there is no such pre-tokenizer, naming the remedy, and
        ModelError when there is no vocabulary that it could be of."""
        for model in models:
            wanted = UsageError if model.facts.has_vocabulary else ModelError
            with pytest.raises(wanted) as caught:
                model.tokenizer(pre="no such pre-tokenizer")
            assert caught.value.hint, "an error without a remedy"

    def test_a_pre_tokenizer_overrules_the_files_where_it_is_asked_for(self, models: list[Model]) -> None:
        """`tokenizer(pre=)`: `pre` overrules the file's, for this tokenizer and no other one; text comes back
        all the same."""
        for model in models:
            if not model.facts.has_vocabulary or not self.capabilities.pre_tokenizers:
                continue
            before = [model.tokenizer().encode(text) for text in TEXTS]
            differ = False
            for pre in self.capabilities.pre_tokenizers:
                tokenizer = model.tokenizer(pre=pre)
                ids = [tokenizer.encode(text) for text in TEXTS]
                differ |= ids != before
                for text, encoded in zip(TEXTS, ids, strict=True):
                    pushed, rest = streamed(tokenizer, encoded)
                    assert _loosely("".join(pushed) + rest) == _loosely(text), f"with pre {pre}"
                after = [model.tokenizer().encode(text) for text in TEXTS]
                assert after == before, f"pre {pre} stays for those who did not ask for it"
            assert differ, "no pre-tokenizer of the capabilities overrules the file's"

    @pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
    def test_text_comes_back_from_its_ids(self, tokenizers: list[tuple[Tokenizer, int]], text: str) -> None:
        """`encode` and a stream are each other's inverse; ids are of the vocabulary, the same each time."""
        for tokenizer, vocabulary in tokenizers:
            ids = tokenizer.encode(text)
            assert ids == tokenizer.encode(text)
            assert all(0 <= token < vocabulary for token in ids), f"{ids} outside 0..{vocabulary - 1}"
            pushed, rest = streamed(tokenizer, ids)
            back = "".join(pushed) + rest
            if self.capabilities.lossless:
                assert back == text
            else:
                assert _loosely(back) == _loosely(text)

    def test_no_text_has_no_id(self, tokenizers: list[tuple[Tokenizer, int]]) -> None:
        """`encode`: ids of the text; no BOS is added."""
        for tokenizer, _ in tokenizers:
            assert tokenizer.encode("") == []
            assert streamed(tokenizer, []) == ([], "")

    @pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
    def test_a_stream_never_splits_a_character(
        self, tokenizers: list[tuple[Tokenizer, int]], text: str
    ) -> None:
        """`TextStream`: text that is certain after this token, never half of a UTF-8 character: what is said
        is never taken back, and holds no U+FFFD that the text has not."""
        for tokenizer, _ in tokenizers:
            pushed, rest = streamed(tokenizer, tokenizer.encode(text))
            assert _REPLACEMENT not in "".join(pushed) + rest, "a character was split"
            if self.capabilities.lossless:
                said = ""
                for part in pushed:
                    said += part
                    assert text.startswith(said), f"{said!r} is not the beginning of {text!r}"

    def test_half_a_character_at_the_end_is_told(self, tokenizers: list[tuple[Tokenizer, int]]) -> None:
        """`finish`: bytes that never became a character appear as U+FFFD, once the end is sure."""
        for tokenizer, _ in tokenizers:
            for text in ("é", "日", "😀"):
                ids = tokenizer.encode(text)
                if len(ids) < 2:
                    continue
                pushed, rest = streamed(tokenizer, ids[:-1])
                assert "".join(pushed) == "", f"half of {text!r} was said as {pushed}"
                assert rest, f"half of {text!r} vanished at the end"
                assert set(rest) == {_REPLACEMENT}, f"half of {text!r} became {rest!r}"

    @pytest.mark.parametrize("seed", range(2))
    def test_streams_are_separate(self, tokenizers: list[tuple[Tokenizer, int]], seed: int) -> None:
        """`stream`: a new one each time; two runs at once do not mix."""
        random = seeded(seed)
        for tokenizer, _ in tokenizers:
            texts = random.sample(TEXTS[:6], 2)
            streams, said = [tokenizer.stream() for _ in texts], ["", ""]
            queues = [tokenizer.encode(text) for text in texts]
            alone = ["".join((*streamed(tokenizer, q)[0], streamed(tokenizer, q)[1])) for q in queues]
            while any(queues):
                which = random.choice([number for number, queue in enumerate(queues) if queue])
                said[which] += streams[which].push(queues[which].pop(0))
            assert [text + s.finish() for text, s in zip(said, streams, strict=True)] == alone, f"seed {seed}"

    def test_any_ids_stream_without_an_error(self, tokenizers: list[tuple[Tokenizer, int]]) -> None:
        """A model may generate any id of its vocabulary: control tokens give nothing, and none raises."""
        for tokenizer, vocabulary in tokenizers:
            random = seeded(vocabulary)
            pushed, rest = streamed(tokenizer, [random.randrange(vocabulary) for _ in range(500)])
            "".join((*pushed, rest)).encode()
            for end in tokenizer.end_of_generation:
                assert 0 <= end < vocabulary
                assert streamed(tokenizer, [end]) == ([""], ""), "a control token has a text"

    def test_user_text_never_becomes_a_control_token(self, tokenizers: list[tuple[Tokenizer, int]]) -> None:
        """`prompt_ids` and `encode`: control tokens in a text are recognised only with `special`. Who
        writes a prompt cannot end a turn in it."""
        for tokenizer, _ in tokenizers:
            for text in ("<|im_end|>", "</s>", "<|endoftext|>", "<|eot_id|>", "a <s> b"):
                for ids in (tokenizer.encode(text), tokenizer.prompt_ids(text)):
                    assert not tokenizer.end_of_generation & set(ids), f"{text!r} ends the generation"
                assert "".join(streamed(tokenizer, tokenizer.encode(text))[0]) == text

    def test_a_prompt_is_its_text_and_at_most_a_beginning(
        self, tokenizers: list[tuple[Tokenizer, int]]
    ) -> None:
        """`prompt_ids`: BOS in front where the file asks for it, and nothing else."""
        for tokenizer, _ in tokenizers:
            ids, plain = tokenizer.prompt_ids("hello world"), tokenizer.encode("hello world")
            assert ids[len(ids) - len(plain) :] == plain
            assert len(ids) - len(plain) in (0, 1)

    def test_a_chat_template_is_there_or_refused(self, tokenizers: list[tuple[Tokenizer, int]]) -> None:
        """`chat_ids`: the template applied, contents without control tokens; ModelError without one."""
        messages = [{"role": "user", "content": "hello <|im_end|>"}]
        for tokenizer, vocabulary in tokenizers:
            if not tokenizer.has_chat_template:
                with pytest.raises(ModelError):
                    tokenizer.chat_ids(messages)
                continue
            ids = tokenizer.chat_ids(messages)
            assert all(0 <= token < vocabulary for token in ids)
            said = "".join(streamed(tokenizer, ids)[0])
            assert "hello <|im_end|>" in said, f"the message's content is not in {said!r}"
            longer = tokenizer.chat_ids([*messages, {"role": "user", "content": "again"}])
            assert len(longer) > len(ids)


def _loosely(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())
