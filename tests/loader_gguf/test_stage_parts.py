"""A stage of a split model opens the first part and those that hold its tensors, and trusts no other file."""

from __future__ import annotations

import base64
import json
import random
import re
import threading
import zlib
from dataclasses import replace

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf import outline as outlines
from swactor_loader_gguf.loader import GgufLoader
from swactor_loader_gguf.outline import Outline, PartOutline
from swactor_loader_gguf.parts import part_name
from swactor_loader_gguf.sources import open_files
from web_servers import Misbehaving

NAME = "m-{:05}-of-{:05}.gguf"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Of `split_model(count=6)`: a tensor a part, in this order.
HELD = ["token_embd", "blk.0", "blk.1", "blk.2", "blk.3", "output_norm"]
STAGES = [((0, 1), {0, 1}), ((1, 2), {0, 2}), ((2, 4), {0, 3, 4, 5}), ((1, 3), {0, 2, 3})]


def written(folder, parts):
    paths = [folder / NAME.format(number + 1, len(parts)) for number in range(len(parts))]
    for path, content in zip(paths, parts, strict=True):
        path.write_bytes(content)
    return paths


def planned(name):
    """(digest, outline) that a plan tells, of all parts."""
    model = GgufLoader().open(str(name))
    model.fetch(0, 4)
    told = model.digest(), model.outline()
    model.close()
    return told


def staged(name, outline):
    loader = GgufLoader()
    return loader.open(loader.resolve(str(name)), outline=outline)


def assert_right(model, layers):
    manifest = model.manifest(*layers)
    model.fetch(*layers)
    assert manifest.tensors
    for ref in manifest.tensors:
        with open(ref.path, "rb") as file:
            file.seek(ref.offset)
            assert file.read(32).rstrip(b".").decode() == ref.name


def refused(call, cause=ModelFailure.DIFFERENT_FILE):
    with pytest.raises(ModelError) as caught:
        call()
    print(caught.value.line)
    assert caught.value.cause is cause
    assert caught.value.hint
    return caught.value.message


# files


@pytest.mark.parametrize("metadata_only", [False, True])
def test_a_model_with_its_outline_says_what_the_whole_one_says(raw, tmp_path, metadata_only):
    paths = written(tmp_path, raw.split_model(metadata_only=metadata_only))
    whole = GgufLoader().open(str(paths[0]))
    stage = staged(paths[2], whole.outline())
    assert stage.digest() == whole.digest()
    assert stage.outline() == whole.outline()
    assert stage.facts == whole.facts
    for layers in ((0, 4), (0, 1), (1, 3), (3, 4)):
        assert stage.manifest(*layers) == whole.manifest(*layers)
    whole.close()
    stage.close()


@pytest.mark.parametrize(("layers", "needed"), STAGES)
@pytest.mark.parametrize("how", ["absent", "unreadable", "corrupt", "another"])
def test_parts_that_a_stage_does_not_need_may_be_anything(raw, tmp_path, layers, needed, how):
    paths = written(tmp_path, raw.split_model(count=6))
    digest, outline = planned(paths[0])
    for number in set(range(6)) - needed:
        paths[number].unlink()
        if how == "unreadable":
            paths[number].mkdir()
        elif how == "corrupt":
            paths[number].write_bytes(b"no model at all")
        elif how == "another":
            paths[number].write_bytes(raw.small_model())
    for given in needed if how == "absent" else range(6):
        if paths[given].is_dir():
            continue
        model = staged(paths[given], outline)
        assert model.digest() == digest
        assert_right(model, layers)
        model.close()


def test_the_name_that_was_given_may_be_of_a_part_that_is_not_there(raw, tmp_path):
    paths = written(tmp_path, raw.split_model(count=6))
    digest, outline = planned(paths[4])
    paths[4].unlink()
    model = staged(paths[4], outline)
    assert model.digest() == digest
    assert_right(model, (1, 2))
    model.close()
    message = refused(lambda: staged(paths[4], ""), ModelFailure.PARTS_INVALID)
    assert f"part 5 of {paths[0]} is missing: {paths[4].name}" in message


@pytest.mark.parametrize("number", [0, 2])
def test_a_part_that_a_stage_needs_and_that_differs_is_named(raw, tmp_path, number):
    parts = raw.split_model(count=6)
    paths = written(tmp_path, parts)
    _, outline = planned(paths[0])
    paths[number].write_bytes(parts[number] + b"?")

    def stage():
        model = staged(paths[5], outline)
        try:
            model.manifest(1, 2)
        finally:
            model.close()

    message = refused(stage)
    assert f"part {number + 1} of 6, {paths[number]}, is another file" in message
    if number:
        model = staged(paths[5], outline)
        assert_right(model, (0, 1))
        model.close()


def test_a_part_that_a_stage_needs_and_that_is_missing_is_named(raw, tmp_path):
    paths = written(tmp_path, raw.split_model(count=6))
    _, outline = planned(paths[0])
    paths[2].unlink()
    model = staged(paths[5], outline)
    message = refused(lambda: model.manifest(1, 2), ModelFailure.PARTS_INVALID)
    assert f"part 3 of {paths[5]} is missing: {paths[2].name}" in message
    assert_right(model, (0, 1))
    model.close()


def test_the_outline_of_another_model_is_refused(raw, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    paths = written(first, raw.split_model(count=6))
    others = written(second, raw.split_model(count=3))
    _, outline = planned(paths[0])
    assert "part 1 of 6" in refused(lambda: staged(others[0], outline))
    plain = tmp_path / "plain.gguf"
    plain.write_bytes(raw.small_model())
    assert "not named like a part" in refused(lambda: staged(plain, outline), ModelFailure.PARTS_INVALID)


# the web


class Parts(Misbehaving):
    """A part under each name; those of `refused` are answered with 403."""

    def __init__(self, contents):
        super().__init__()
        self.contents, self.refused = contents, set()
        self.behaviour.before = self.choose

    def choose(self, request):
        number = int(re.search(r"-(\d{5})-of-", request.path)[1]) - 1
        content = self.contents[number]
        status = 403 if number in self.refused else 200
        return replace(self.behaviour, content=content, etag=f'"{hash(content)}"', status=status)

    def asked(self):
        return {int(re.search(r"-(\d{5})-of-", path)[1]) - 1 for path, _ in self.requests}


@pytest.fixture
def web(raw, cache):
    server = Parts(raw.split_model(count=6))
    yield server
    server.stop()


@pytest.mark.parametrize(("layers", "needed"), STAGES)
def test_a_stage_asks_only_for_its_parts(web, monkeypatch, tmp_path, layers, needed):
    url = f"{web.url}/{NAME.format(5, 6)}?signature=s1gned"
    digest, outline = planned(url)
    assert web.asked() == set(range(6))
    web.requests.clear()
    web.refused = set(range(6)) - needed
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "another machine's"))
    model = staged(url, outline)
    assert model.digest() == digest
    assert_right(model, layers)
    model.close()
    assert web.asked() == needed
    assert all(path.endswith("?signature=s1gned") for path, _ in web.requests)
    assert len(list((tmp_path / "another machine's" / "remote").iterdir())) == len(needed)


def test_parts_on_the_web_are_opened_side_by_side(web):
    """No part's server answers before all others have been asked."""
    met, first, answer = threading.Barrier(5), [], web.behaviour.before

    def together(request):
        if request.path not in first:
            first.append(request.path)
            if len(first) > 1:
                met.wait(60)
        return answer(request)

    web.behaviour.before = together
    planned(f"{web.url}/{NAME.format(3, 6)}")
    assert not met.broken


def test_progress_of_parts_is_told_by_one_thread_at_a_time(web):
    """Whoever listens has bars and flags, and no lock."""
    pair, met, waited = threading.Barrier(2), [], []

    def progress(done, total):
        if threading.current_thread() is threading.main_thread() or len(waited) > 3:
            return
        waited.append(threading.current_thread())
        try:
            pair.wait(0.1)
            met.append((done, total))
        except threading.BrokenBarrierError:
            pair.reset()

    open_files(f"{web.url}/{NAME.format(3, 6)}", progress).close()
    assert len(set(waited)) > 1
    assert not met


def test_weights_that_changed_on_the_web_are_refused_by_name(web, monkeypatch, tmp_path):
    """The header is the same: only the server's tag tells."""
    url = f"{web.url}/{NAME.format(1, 6)}"
    _, outline = planned(url)
    web.contents[2] = web.contents[2][:-1] + b"?"
    web.contents[4] = web.contents[4][:-1] + b"?"
    monkeypatch.setenv("SWACTOR_CACHE_DIR", str(tmp_path / "another machine's"))
    model = staged(url, outline)
    assert_right(model, (0, 1))
    message = refused(lambda: model.manifest(1, 2))
    assert f"part 3 of 6, {web.url}/{NAME.format(3, 6)}, is another file" in message
    model.close()


def test_a_split_model_of_the_hub(raw, web, monkeypatch):
    """The commit stays behind every part's name."""
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    web.behaviour.headers = {"X-Repo-Commit": COMMIT}
    loader = GgufLoader()
    name = loader.resolve(f"hf:owner/repo/{NAME.format(2, 6)}")
    assert name == f"hf:owner/repo/{NAME.format(2, 6)}@{COMMIT}"
    digest, outline = planned(name)
    assert web.asked() == set(range(6))
    assert {path.split("/")[4] for path, _ in web.requests} == {"main", COMMIT}
    model = staged(name, outline)
    assert model.digest() == digest
    assert_right(model, (1, 2))
    model.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("https://h.test/a/m-00002-of-00003.gguf", "https://h.test/a/m-00001-of-00003.gguf"),
        ("https://h.test/m-00002-of-00003.gguf?x=/n-00003-of-00003.gguf", None),
        (f"hf:o/r/m-00002-of-00003.gguf@{COMMIT}", f"hf:o/r/m-00001-of-00003.gguf@{COMMIT}"),
        ("https://h.test/m.gguf?x=/n-00003-of-00003.gguf", ""),
        ("https://h.test/m.gguf", ""),
    ],
)
def test_names_of_parts(name, expected):
    if expected is None:
        expected = name.replace("m-00002", "m-00001")
    assert (part_name(name, 0, address=True) or "") == expected
    assert part_name("/a@b?c/m-00002-of-00003.gguf", 2) == "/a@b?c/m-00003-of-00003.gguf"
    assert part_name("/a/m-00002-of-00003.gguf@x", 2) is None


# the outline


def test_one_local_file_has_nothing_to_tell(raw, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw.small_model())
    model = GgufLoader().open(str(path))
    assert model.outline() == ""
    model.close()


def test_an_outline_that_no_message_holds_is_none(raw, tmp_path, monkeypatch):
    paths = written(tmp_path, raw.split_model(count=6))
    digest, _ = planned(paths[0])
    monkeypatch.setattr(outlines, "LONGEST", 100)
    assert planned(paths[0]) == (digest, "")
    model = staged(paths[0], "")  # which opens every part, as before
    assert model.digest() == digest
    model.close()


def packed(rows):
    return base64.b64encode(zlib.compress(json.dumps(rows).encode())).decode()


PART = ["a" * 64, "", 10, 5, []]
ROW = ["t", 0, [8, 8], 32, 256, 256]


@pytest.mark.parametrize(
    "text",
    [
        "!",
        "AAAA",
        packed([]),
        packed({}),
        packed([1]),
        packed([PART[:4]]),
        packed([["a" * 63, *PART[1:]]]),
        packed([[*PART[:1], 1, *PART[2:]]]),
        packed([[*PART[:2], -1, *PART[3:]]]),
        packed([[*PART[:2], True, *PART[3:]]]),
        packed([PART, [*PART[:4], [ROW[:5]]]]),
        packed([PART, [*PART[:4], [[1, *ROW[1:]]]]]),
        packed([PART, [*PART[:4], [["t", 0, [8, "8"], *ROW[3:]]]]]),
        packed([PART, [*PART[:4], [[*ROW[:3], 1 << 63, *ROW[4:]]]]]),
        packed([PART] * 4097),
        packed([PART])[:-8],
        "A" * ((1 << 20) + 4),
        base64.b64encode(zlib.compress(b"[" * 100_000)).decode(),
    ],
)
def test_what_is_no_outline_is_refused(text):
    message = refused(lambda: Outline.unpacked(text), ModelFailure.PLAN_DIFFERS)
    assert "cannot be read" in message
    assert len(message) < 300


def test_a_damaged_outline_is_never_another_one(raw, tmp_path):
    paths = written(tmp_path, raw.split_model(count=6))
    _, good = planned(paths[0])
    assert Outline.unpacked(good).packed() == good
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        at = chance.randrange(len(good))
        changed = good[:at] + chance.choice("ABCxyz019+/=") + good[at + 1 :]
        try:
            made = Outline.unpacked(changed)
        except ModelError:
            assert changed != good
        else:
            assert made.packed() == good  # the last letter has bits that mean nothing


def test_the_digest_is_of_all_parts_and_tags_are_told_beside_it():
    parts = [PartOutline(str(number) * 64, "", 10, 5, ()) for number in range(3)]
    whole = Outline(parts)
    assert whole.digest() != Outline(parts[:2]).digest()
    assert whole.digest() != Outline(parts[::-1]).digest()
    assert Outline(parts[:1]).digest() == parts[0].digest
    tagged = Outline([*parts[:2], PartOutline("2" * 64, '"tag"', 10, 5, ())])
    assert tagged.digest() == whole.digest()
    assert Outline.unpacked(tagged.packed()).parts[2].tag == '"tag"'
