"""The chat templates of real models (scripts/fetch_vocab_vectors) against a plain jinja2 environment with the
settings that their authors write them for (the Hugging Face chat template guide)."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import jinja2
import pytest
from jinja2.ext import Extension
from swactor_core.errors import ModelError
from swactor_loader_gguf import render
from swactor_loader_gguf.template import ChatTemplate

NOW = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)
CHATS = {
    "user": [("user", 'Hello <there> & "you" é 🎉\n two')],
    "system": [("system", "Be brief."), ("user", "Hi")],
    "turns": [("user", "One"), ("assistant", "Two"), ("user", " Three ")],
    "all": [
        ("system", "S y"),
        ("user", "A a"),
        ("assistant", "B b"),
        ("user", "C c"),
        ("assistant", "D d"),
        ("user", "E e"),
    ],
}
# What these say of a plain chat, in the reference as well.
REFUSED = {
    ("google-gemma-2-2b-it", "system"): "System role not supported",
    ("google-gemma-2-2b-it", "all"): "System role not supported",
    **{("fireworks-ai-llama-3-firefunction-v2", chat): "'functions' is undefined" for chat in CHATS},
}
NO_TOOLS_IS_A_LIST = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
}


class Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def reference(name, source, messages):
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    environment.globals.update(raise_exception=raise_exception, strftime_now=NOW.strftime)
    none = [] if name in NO_TOOLS_IS_A_LIST else None
    return environment.from_string(source).render(
        messages=messages,
        tools=none,
        documents=none,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )


def messages_of(chat):
    return [{"role": role, "content": content} for role, content in CHATS[chat]]


@pytest.fixture(scope="session")
def sources(vectors_folder):
    files = sorted(vectors_folder.glob("templates/*.jinja"))
    return {file.stem: file.read_bytes().decode("utf-8") for file in files}


def each(sources):
    """Every template with every chat that it takes."""
    for name, source in sources.items():
        for chat in CHATS:
            if (name, chat) not in REFUSED:
                yield name, source, chat


def test_there_are_templates(sources):
    assert len(sources) == 70
    assert {name for name, _ in REFUSED} | NO_TOOLS_IS_A_LIST <= set(sources)


def test_every_template_writes_what_plain_jinja2_writes(sources):
    """In this process, with the same sandbox."""
    for name, source, chat in each(sources):
        request = {
            "template": source,
            "variants": [messages_of(chat)],
            "bos_token": "<s>",
            "eos_token": "</s>",
            "now": NOW.isoformat(),
            "max_output": 1 << 20,
        }
        assert render.render(request) == [reference(name, source, messages_of(chat))], (name, chat)


@pytest.mark.parametrize("part", range(7))
def test_every_templates_contents_are_found_in_what_its_process_writes(sources, part):
    for name, source in list(sources.items())[part::7]:
        chat = next((chat for chat in ("all", "turns") if (name, chat) not in REFUSED), None)
        if chat is None:
            continue
        rendered = ChatTemplate(source, "<s>", "</s>").render(messages_of(chat), now=NOW)
        assert rendered.text == reference(name, source, messages_of(chat)), name
        parts = [rendered.text[start:end] for start, end in rendered.contents]
        for _, content in CHATS[chat]:
            assert content.strip() in parts, name


@pytest.mark.parametrize(("name", "chat"), [case for case in REFUSED if case[1] in ("system", "user")])
def test_what_a_template_refuses_is_told(sources, name, chat):
    with pytest.raises(jinja2.exceptions.TemplateError, match=REFUSED[name, chat]):
        reference(name, sources[name], messages_of(chat))
    with pytest.raises(ModelError, match=REFUSED[name, chat]) as caught:
        ChatTemplate(sources[name], "<s>", "</s>").render(messages_of(chat), now=NOW)
    assert caught.value.hint
