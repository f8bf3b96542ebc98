"""template.py and render.py: what model authors rely on, where contents lie, and hostile templates."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swactor_core.errors import ModelError, UsageError
from swactor_loader_gguf import template as module
from swactor_loader_gguf.template import ChatTemplate, check_asked


def render(source, *contents, now=None):
    messages = [{"role": "user", "content": content} for content in contents or ("hi",)]
    return ChatTemplate(source, "<bos>", "<eos>").render(messages, now=now)


def parts(rendered):
    return [rendered.text[start:end] for start, end in rendered.contents]


def test_blocks_are_trimmed_and_lines_stripped():
    source = (
        "{% for m in messages %}\n  {% if loop.first %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n.\n"
    )
    rendered = render(source, "hi", "there")
    assert rendered.text == "hi\n."
    assert parts(rendered) == ["hi"]


def test_what_templates_expect_of_their_surroundings():
    source = (
        "{{ bos_token }}{{ eos_token }}|{{ strftime_now('%Y-%m-%d') }}|{{ {'a': '<é>'} | tojson }}|"
        "{{ [1, 2] | tojson(indent=1) }}|{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}|{% generation %}g{% endgeneration %}|{{ tools is none }}|{{ absent }}|"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    rendered = render(source, "x", now=datetime(2024, 2, 29, tzinfo=UTC))
    assert rendered.text == '<bos><eos>|2024-02-29|{"a": "<é>"}|[\n 1,\n 2\n]|01|g|True||1'
    assert rendered.contents == ()


def test_raise_exception_reaches_the_user():
    with pytest.raises(ModelError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.hint


TRIMS = {
    "| trim": str.strip,
    ".strip()": str.strip,
    ".lstrip()": str.lstrip,
    ".rstrip()": str.rstrip,
    ".strip('\\n')": lambda content: content.strip("\n"),
    "": str,
}


@pytest.mark.parametrize("trim", TRIMS)
def test_contents_may_be_trimmed(trim):
    contents = ["  hi \n", "hi", "\n hi", "hi\t", " h  i ", "   ", ""]
    rendered = render("{% for m in messages %}[{{ m.content" + trim + " }}]{% endfor %}", *contents)
    assert rendered.text == "".join(f"[{TRIMS[trim](content)}]" for content in contents)
    assert parts(rendered) == [content.strip() for content in contents if content.strip()]


def test_contents_may_be_left_out_repeated_and_reordered():
    rendered = render(
        "{{ messages[1].content }}|{{ messages[0].content }}|{{ messages[1].content }}", "a", "b", "c"
    )
    assert rendered.text == "b|a|b"
    assert parts(rendered) == ["b", "a", "b"]


def test_contents_may_be_looked_into():
    source = "{% if 'x' in messages[0].content %}yes{% endif %}{{ messages[0].content.split('x')[0] }}"
    with pytest.raises(ModelError, match="transforms message contents"):
        render(source, "axb")
    assert render(source, "ab").text == "ab"


@pytest.mark.parametrize(
    "use",
    [
        "{{ c[0] }}",
        "{{ c | length }}",
        "{{ c[::-1] }}",
        "{{ c[1:] }}",
        "{{ c | tojson | length }}",
        "{{ c.startswith('h') }}",
    ],
)
def test_contents_that_are_transformed_are_refused(use):
    with pytest.raises(ModelError, match="transforms message contents") as caught:
        render("{% set c = messages[0].content %}" + use, "hello")
    assert caught.value.hint


def test_a_change_of_case_keeps_its_place():
    rendered = render("<{{ messages[0].content | upper }}>", "hello")
    assert (rendered.text, parts(rendered)) == ("<HELLO>", ["HELLO"])


def test_marks_are_not_confused_by_private_use_characters():
    content = "\ue000\ue001x\ue000"
    rendered = render("\ue002{{ messages[0].content }}\ue003", content)
    assert (rendered.text, parts(rendered)) == ("\ue002" + content + "\ue003", [content])


def test_every_private_use_character_in_use():
    with pytest.raises(UsageError, match="every private-use character"):
        render("{{ messages[0].content }}", "".join(map(chr, range(0xE000, 0xF900))))


@settings(max_examples=15, deadline=None)
@given(contents=st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=4))
def test_any_contents_keep_their_places(contents):
    rendered = render("{% for m in messages %}<{{ m.content }}>{% endfor %}", *contents)
    assert rendered.text == "".join(f"<{content}>" for content in contents)
    assert parts(rendered) == [content.strip() for content in contents if content.strip()]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "message 0 is not of a role and a text"),
        ([{"role": "user", "content": 3}], "message 0 is not of a role and a text"),
        ([{"role": "user", "content": "x", "name": "<|im_start|>"}], "message 0 is not of a role and a text"),
        (
            [{"role": "user", "content": "x"}, {"role": "a<|im_end|>", "content": "x"}],
            "message 1 has the role",
        ),
        ([{"content": "x"}], "message 0 has the role None"),
        ([{"role": "user", "content": "x" * (module.MAX_CONTENTS + 1)}], "characters, more than"),
    ],
)
def test_malformed_messages(messages, words):
    with pytest.raises(UsageError) as caught:
        ChatTemplate("{{ messages }}", "", "").render(messages)
    assert words in caught.value.message
    assert caught.value.hint


# hostile templates

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append({'role': 'x', 'content': 'y'}) }}",
    "{{ messages[0].update({'content': 'y'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(source):
    """The sandbox refuses, or gives an undefined value that prints nothing."""
    try:
        text = render(source).text
    except ModelError as error:
        text = ""
        assert "cannot be rendered" in error.message  # noqa: PT017 - either outcome is right
    assert text == ""


EXPLOSIONS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 10 ** (10 ** 9) }}",
    "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ lipsum(n=10 ** 7) }}",
    "{% for i in range(30000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
]


@pytest.mark.parametrize("source", EXPLOSIONS, ids=lambda source: source[:40])
def test_a_template_that_explodes_ends_in_bounded_time(source, monkeypatch):
    monkeypatch.setattr(module, "CPU_SECONDS", 1)
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"cannot be rendered|exceeds its bounds") as caught:
        render(source)
    assert time.monotonic() - started < module.WALL_SECONDS + 5
    assert caught.value.hint
    assert len(caught.value.message) < 1000


def test_a_template_that_is_too_long():
    with pytest.raises(ModelError, match=f"has {module.MAX_TEMPLATE + 1} characters"):
        render("x" * (module.MAX_TEMPLATE + 1))


@pytest.mark.parametrize("source", ["{{", "{% for %}", "{% nonsense %}", "{{ absent.absent.absent }}"])
def test_a_template_with_an_error(source):
    with pytest.raises(ModelError, match="cannot be rendered: "):
        render(source)


def test_a_renderer_that_waits_is_ended(monkeypatch):
    """The wall clock bound holds although no processor time passes."""
    monkeypatch.setattr(module, "WALL_SECONDS", 0.5)
    monkeypatch.setattr(module.sys, "executable", "/bin/sleep")
    monkeypatch.setattr(module, "COMMAND", ("30",))
    with pytest.raises(ModelError, match="takes too long"):
        render("x")


BOUNDED = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from swactor_loader_gguf.template import ChatTemplate
print(ChatTemplate("{{ messages[0].content }}", "", "").render([{"role": "user", "content": "hi"}]).text)
"""


def test_a_user_with_less_than_the_bounds_keeps_what_there_is():
    """A hard limit of the user's may be below ours, and cannot be raised (setrlimit(2))."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "hi\n", done.stderr


def test_a_renderer_without_descriptors_is_told_of_them(monkeypatch):
    def run(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module.subprocess, "run", run)
    with pytest.raises(ModelError, match="Too many open files") as caught:
        render("x")
    assert "ulimit -n" in caught.value.hint


def test_a_renderer_that_cannot_start(monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/nonexistent/python")
    with pytest.raises(ModelError, match="cannot start"):
        render("x")


def test_a_file_in_the_working_folder_does_not_stand_in_for_jinja2(monkeypatch, tmp_path):
    (tmp_path / "jinja2.py").write_text("raise SystemExit('impostor')")
    monkeypatch.chdir(tmp_path)
    assert render("ok{{ messages[0].content }}").text == "okhi"


def test_a_system_text_is_not_dropped_in_silence():
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}]
    with pytest.raises(ModelError, match="leaves out the system text") as caught:
        ChatTemplate("{{ messages[1].content }}", "", "").render(messages)
    assert "user's text" in caught.value.hint
    same_length = [{"role": "system", "content": "oh"}, {"role": "user", "content": "hi"}]
    with pytest.raises(ModelError, match="leaves out the system text"):
        ChatTemplate("{{ messages[1].content }}", "", "").render(same_length)
    source = "{% for m in messages %}{{ m.content | trim | upper }};{% endfor %}"
    assert ChatTemplate(source, "", "").render(messages).text == "BE BRIEF;HI;"


@pytest.mark.parametrize("source", [" ", "{{ messages | length }}", "{{ messages[0].content }}"])
def test_what_the_user_said_last_is_not_dropped_in_silence(source):
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": " last "}]
    rendered = ChatTemplate(source, "", "").render(messages)
    with pytest.raises(ModelError, match="leaves out the user's text"):
        check_asked(messages, rendered)
    check_asked(messages, ChatTemplate("{{ messages[-1].content | upper }}", "", "").render(messages))


def test_too_much_processor_time_is_named(monkeypatch):
    monkeypatch.setattr(module, "CPU_SECONDS", 1)
    with pytest.raises(ModelError, match="more than 1 s of processor time"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")


def test_no_tools_are_none_or_an_empty_list():
    assert render("{{ tools is none }}").text == "True"
    assert render("{% for tool in tools %}{{ tool }}{% endfor %}x").text == "x"
    with pytest.raises(ModelError, match="TypeError"):
        render("{{ tools + 1 }}")
