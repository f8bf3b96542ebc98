"""Options of text and sampling: what each refuses, how answers end, what becomes of the options."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swactor_cli.answer import Answer
from swactor_cli.prompts import prompt_ids_of
from swactor_cli.sampling_options import fitted, sampling_policy
from swactor_core.errors import UsageError
from swactor_core.plan import BAN, SamplingPolicy

TINY = Path(__file__).parent.parent / "data" / "tiny"
MODEL = TINY / "llama-tied.gguf"
MOCKS = (
    "--transport", "memory", "--membership", "static", "--worker", "echo", "--loader", "synthetic",
    "--arena", "heap",
)  # fmt: skip
IDS = ("--prompt-ids", "1")

REFUSED = {
    "no seed": ([*IDS, "--seed", "-1"], ["--seed"]),
    "a seed of 65 bits": ([*IDS, "--seed", str(1 << 64)], ["--seed"]),
    "no top-p": ([*IDS, "--temperature", "1", "--top-p", "0"], ["--top-p is 0", "more than 0"]),
    "top-p no number": ([*IDS, "--temperature", "1", "--top-p", "nan"], ["--top-p"]),
    "min-p": ([*IDS, "--min-p", "1.5"], ["--min-p"]),
    "top-k": ([*IDS, "--top-k", "-1"], ["--top-k"]),
    "a hot nothing": ([*IDS, "--temperature", "nan"], ["--temperature"]),
    "a heat without end": ([*IDS, "--temperature", "inf"], ["--temperature is inf"]),
    "repeat": ([*IDS, "--repeat-penalty", "0"], ["--repeat-penalty is 0", "1 is off"]),
    "repeat infinite": ([*IDS, "--repeat-penalty", "inf"], ["--repeat-penalty is inf"]),
    "frequency": ([*IDS, "--frequency-penalty", "nan"], ["--frequency-penalty is nan"]),
    "presence": ([*IDS, "--presence-penalty", "x"], ["--presence-penalty"]),
    "last n": ([*IDS, "--repeat-last-n", "-2"], ["--repeat-last-n"]),
    "bias without value": ([*IDS, "--logit-bias", "5"], ["--logit-bias '5'", "42=-1.5"]),
    "bias of a word": ([*IDS, "--logit-bias", "five=1"], ["'five=1'"]),
    "bias no number": ([*IDS, "--logit-bias", "5=nan"], ["'5=nan'"]),
    "bias too sure": ([*IDS, "--logit-bias", "5=inf"], ["'5=inf'"]),
    "bias twice": ([*IDS, "--logit-bias", "5=1", "--logit-bias", "5=2"], ["the token 5 twice"]),
    "bias outside": ([*IDS, "--logit-bias", "160=1"], ["160 is outside the vocabulary of 160"]),
    "bias of a token in 5000 digits": ([*IDS, "--logit-bias", "9" * 5000 + "=1"], ["'99999"]),
    "bias too large": ([*IDS, "--logit-bias", "5=1e300"], ["'5=1e300'", "at most 1e+09"]),
    "penalty too large": ([*IDS, "--presence-penalty", "-1e10"], ["--presence-penalty is -1e+10"]),
    "heat too large": ([*IDS, "--temperature", "1e300"], ["--temperature is 1e+300"]),
    "an id of 5000 digits": (["--prompt-ids", "9" * 5000], ["'99999", "not a token id"]),
    "an id in other digits": (["--prompt-ids", "1,\N{ARABIC-INDIC DIGIT THREE}"], ["not a token id"]),
    "an id left out": (["--prompt-ids", "1,,2"], ["'' is not a token id", "1,2,3"]),
    "no ids": (["--prompt-ids", " , "], ["--prompt-ids is empty"]),
    "stop without vocabulary": ([*IDS, "--stop", "x"], ["--stop", "no vocabulary"]),
    "pre without vocabulary": ([*IDS, "--pre", "gpt-2"], ["--pre", "no vocabulary"]),
    "system and ids": ([*IDS, "--system", "x"], ["--system and --prompt-ids exclude each other"]),
    "a prompt longer than the context": (
        ["--prompt-ids", ",".join(["1"] * 600)],
        ["the prompt has 600 tokens", "a context of 512"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_run_refuses_nonsense(call: Any, case: str) -> None:
    options, words = REFUSED[case]
    said = call("run", MODEL, *options)
    assert (said.code, said.out) == (2, ""), said
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err, (word, said.err)


REFUSED_ON_MOCKS = {
    "an empty stop": (["--stop", ""], "a stop text is empty"),
    "no template": (["--system", "x"], "no chat template"),
    "system and raw": (["--system", "x", "--raw"], "--system and --raw exclude each other"),
    "pre": (["--pre", "gpt-2"], "no pre-tokenizer"),
    "a stop that is no UTF-8": (["--stop", "a\udcff"], "--stop is not valid UTF-8 behind 1 characters"),
    "a prompt that is no UTF-8": (["--prompt", "\udcff"], "--prompt is not valid UTF-8"),
}


CHAT = SimpleNamespace(has_chat_template=True, chat_ids=lambda messages: [1, len(messages)])


@pytest.mark.parametrize("text", ["", " ", "\n\t\u3000"])
def test_a_message_of_white_space_is_empty(text: str) -> None:
    facts: Any = SimpleNamespace(vocab_size=9)
    tokenizer: Any = CHAT
    with pytest.raises(UsageError, match="--prompt is empty"):
        prompt_ids_of(text, None, raw=False, facts=facts, tokenizer=tokenizer)
    ids = prompt_ids_of("x", None, raw=False, facts=facts, tokenizer=tokenizer, system="y")
    assert ids == (1, 2)


@pytest.mark.parametrize("case", REFUSED_ON_MOCKS)
def test_what_a_vocabulary_does_not_allow(call: Any, case: str) -> None:
    options, words = REFUSED_ON_MOCKS[case]
    said = call("run", "demo", *MOCKS, "--prompt", "hello", *options)
    assert (said.code, said.out) == (2, "")
    assert words in said.err


@pytest.mark.parametrize(("options", "noted"), [((), True), (("--raw",), False), (("--quiet",), False)])
def test_a_model_without_chat_template_is_said(call: Any, options: tuple[str, ...], noted: bool) -> None:
    said = call("run", "demo", *MOCKS, "--prompt", "hello", "--max-tokens", "1", *options)
    assert said.code == 0
    assert ("no chat template: the prompt goes to it as it is" in said.err) is noted


def answered(call: Any, *options: Any) -> dict[str, Any]:
    said = call("run", "demo", *MOCKS, "--prompt", "hello", "--json", *options)
    assert said.code == 0, said
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert "".join(line["text"] for line in lines[:-1]) in (lines[-1]["text"], lines[-1]["text"][:-1])
    return lines[-1]


def test_an_answer_ends_with_its_length(call: Any) -> None:
    result = answered(call, "--max-tokens", "7")
    assert (result["finish_reason"], len(result["token_ids"])) == ("length", 7)


def test_an_answer_ends_with_the_context(call: Any) -> None:
    said = call(
        "run", "demo", *MOCKS, "--prompt-ids", ",".join(["1"] * 2040), "--json", "--max-tokens", "50"
    )  # fmt: skip
    result = json.loads(said.out.splitlines()[-1])
    assert (result["finish_reason"], len(result["token_ids"])) == ("context", 9)
    assert "room for 9 of the 50 tokens" in said.err


@pytest.mark.parametrize("sample_on", ["last-stage", "orchestrator"])
def test_an_answer_ends_before_a_stop_text(call: Any, sample_on: str) -> None:
    whole = answered(call, "--max-tokens", "40")["text"]
    at = next(
        i
        for i in range(4, len(whole) - 3)
        if whole[i : i + 2].isascii() and whole.find(whole[i : i + 2]) == i
    )
    stop = whole[at : at + 2]
    result = answered(
        call, "--max-tokens", "40", "--stop", "not in there", "--stop", stop, "--sample-on", sample_on
    )
    assert result["finish_reason"] == "stop"
    assert result["text"] == whole[:at]
    assert len(result["token_ids"]) < 40


def test_without_a_stop_text_in_it_the_answer_is_whole(call: Any) -> None:
    whole = answered(call, "--max-tokens", "12")
    result = answered(call, "--max-tokens", "12", "--stop", "not in there")
    assert (result["text"], result["finish_reason"]) == (whole["text"], "length")


def test_options_become_the_policy() -> None:
    policy = sampling_policy(
        temperature=0.7,
        seed=None,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repeat_penalty=1.1,
        frequency_penalty=-0.2,
        presence_penalty=0.3,
        repeat_last_n=-1,
        logit_bias=("9=-inf", "3=1.5"),
    )
    assert policy.logit_bias == ((3, 1.5), (9, BAN))
    assert (policy.temperature, policy.top_k, policy.top_p, policy.min_p) == (0.7, 4, 0.9, 0.1)
    assert (policy.repeat_penalty, policy.frequency_penalty, policy.presence_penalty) == (1.1, -0.2, 0.3)
    assert policy.repeat_last_n == -1
    assert 0 <= policy.seed < 1 << 32


def test_what_a_model_suppresses_is_banned_unless_the_operator_says_otherwise() -> None:
    policy = SamplingPolicy(logit_bias=((3, 1.5), (7, 0.0)))
    assert fitted(policy, 10, frozenset({7, 2, 99})).logit_bias == ((2, BAN), (3, 1.5), (7, 0.0))
    assert fitted(policy, 10, frozenset()) == policy


class Letters:
    """A text stream of one letter an id; 0 is nothing yet."""

    def push(self, token_id: int) -> str:
        return chr(token_id) if token_id else ""

    def finish(self) -> str:
        return "�"


def test_text_that_was_held_back_comes_out_at_the_end() -> None:
    answer = Answer(Letters(), ("abc",))
    assert [answer.push(ord(letter)) for letter in "xab"] == ["x", "", ""]
    assert (answer.finish(), answer.stopped) == ("ab�", False)
    answer = Answer(Letters(), ("abc",))
    assert "".join(answer.push(ord(letter)) for letter in "xabc") == "x"
    assert (answer.finish(), answer.stopped) == ("", True)


def test_ids_are_the_text_of_a_model_without_vocabulary() -> None:
    answer = Answer(None)
    assert "".join(map(answer.push, (4, 5))) + answer.finish() == "4 5"


def test_a_stop_text_needs_characters() -> None:
    with pytest.raises(UsageError, match="empty"):
        Answer(None, ("",))
