"""parts.py: models in several files, whole, incomplete and mixed, from a folder and over the web."""

from __future__ import annotations

import struct

import pytest
from swactor_core.errors import ModelError
from swactor_core.faults import ModelFailure
from swactor_loader_gguf.loader import GgufLoader

NAME = "m-{:05}-of-{:05}.gguf"


def written(folder, parts, *, count=None):
    paths = [folder / NAME.format(number + 1, count or len(parts)) for number in range(len(parts))]
    for path, content in zip(paths, parts, strict=True):
        path.write_bytes(content)
    return paths


def opened(name):
    loader = GgufLoader()
    return loader.open(loader.resolve(str(name)))


def refused(name):
    with pytest.raises(ModelError) as caught:
        opened(name).close()
    assert caught.value.cause is ModelFailure.PARTS_INVALID
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("metadata_only", [False, True])
@pytest.mark.parametrize("given", range(4))
def test_any_part_opens_the_whole_model(raw, tmp_path, given, metadata_only):
    paths = written(tmp_path, raw.split_model(metadata_only=metadata_only))
    model = opened(paths[given])
    assert model.facts.num_layers == 4
    assert model.facts.file_bytes == sum(path.stat().st_size for path in paths)
    refs = model.manifest(0, 4).tensors
    assert len(refs) == 6
    for ref in refs:
        with open(ref.path, "rb") as file:
            file.seek(ref.offset)
            assert file.read(32).rstrip(b".").decode() == ref.name
    reference = opened(paths[0])
    assert model.digest() == reference.digest()
    assert model.to_fetch(0, 4) == 0
    model.fetch(0, 4)
    model.close()
    reference.close()


def test_a_stage_names_only_the_parts_that_hold_its_tensors(raw, tmp_path):
    paths = written(tmp_path, raw.split_model(count=6))
    model = opened(paths[3])
    held = {ref.name: ref.path for ref in model.manifest(1, 2).tensors}
    assert list(held) == ["blk.1.attn_q.weight"]
    assert held["blk.1.attn_q.weight"] == str(paths[2])
    for path in set(paths) - {paths[2]}:
        path.unlink()  # a middle stage's worker never opens them
    from swactor_worker_tinygrad.weights import WeightFiles

    files = WeightFiles("CPU")
    refs = model.manifest(1, 2).tensors
    files.open(refs)
    assert bytes(files.stored(refs[0])).startswith(b"blk.1.attn_q.weight")
    files.close()
    model.close()


def test_tensors_of_several_parts_are_mapped_without_a_copy(raw, tmp_path):
    from swactor_worker_tinygrad.weights import WeightFiles

    model = opened(written(tmp_path, raw.split_model())[0])
    refs = model.manifest(0, 4).tensors
    assert len({ref.path for ref in refs}) == 4
    files = WeightFiles("CPU")
    files.open(refs)
    for ref in refs:
        stored = files.stored(ref)
        assert bytes(stored).startswith(ref.name.encode())
        assert stored.base is not None
        assert not stored.flags.owndata
    del stored
    files.close()
    model.close()


@pytest.mark.parametrize("lost", range(4))
def test_a_missing_part_is_named(raw, tmp_path, lost):
    paths = written(tmp_path, raw.split_model())
    paths[lost].unlink()
    assert f"part {lost + 1} of" in refused(paths[(lost + 1) % 4])
    assert paths[lost].name in refused(paths[(lost + 2) % 4])


def test_parts_of_another_count(raw, tmp_path):
    written(tmp_path, raw.split_model(count=3))
    paths = written(tmp_path, raw.split_model(count=3), count=4)
    assert "is part 1 of 3 by its keys, and another by its name" in refused(paths[0])


def test_a_part_under_another_number(raw, tmp_path):
    parts = raw.split_model()
    paths = written(tmp_path, [parts[0], parts[2], parts[1], parts[3]])
    message = refused(paths[0])
    assert f"{paths[1]} says that it is part 3 of 4, not 2 of 4" in message


def test_a_part_under_no_part_s_name(raw, tmp_path):
    path = tmp_path / "renamed.gguf"
    path.write_bytes(raw.split_model()[0])
    assert "its name does not end like -00001-of-00004.gguf" in refused(path)


def test_parts_of_two_models(raw, tmp_path):
    parts, other = raw.split_model(), raw.split_model(total=7)
    paths = written(tmp_path, [*parts[:3], other[3]])
    message = refused(paths[0])
    assert f"{paths[3]} is of a model of 7 tensors" in message


def test_a_tensor_in_two_parts(raw, tmp_path):
    parts = raw.split_model()
    twin = parts[1].replace(b"blk.0.attn_q.weight", b"blk.2.attn_q.weight")
    paths = written(tmp_path, [parts[0], twin, *parts[2:]])
    assert "has the tensor 'blk.2.attn_q.weight', which" in refused(paths[0])


def test_a_count_that_the_parts_do_not_hold(raw, tmp_path):
    paths = written(tmp_path, raw.split_model(total=9))
    assert "hold 6 tensors together, not 9" in refused(paths[0])


def test_a_part_without_the_keys_of_one(raw, tmp_path):
    parts = raw.split_model()
    paths = written(tmp_path, [*parts[:3], raw.small_model()])
    with pytest.raises(ModelError, match=r"00004-of-00004.gguf: 'split.no' is missing"):
        opened(paths[0])


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_keys_of_another_type_are_refused(raw, tmp_path, key):
    parts = raw.split_model()
    kind = struct.pack("<I", 5 if key == "split.tensors.count" else 2)
    at = parts[0].index(key.encode()) + len(key)
    assert parts[0][at : at + 4] == kind
    width = {5: 6, 2: 7}[kind[0]]  # a float for the integer of four bytes, a bool for that of two
    broken = parts[0][:at] + struct.pack("<I", width) + parts[0][at + 4 :]
    paths = written(tmp_path, [broken, *parts[1:]])
    with pytest.raises(ModelError) as caught:
        opened(paths[0])
    assert caught.value.cause is ModelFailure.MALFORMED


def test_parts_over_the_web(raw, tmp_path, nginx, cache):
    parts = raw.split_model(metadata_only=True)
    paths = written(tmp_path / "served", parts)
    model = opened(f"{nginx.url}/{paths[2].name}")
    local = opened(paths[0])
    assert model.digest() == local.digest()
    assert model.facts.num_layers == 4
    refs = model.manifest(1, 2).tensors
    model.fetch(1, 2)
    for ref in refs:
        with open(ref.path, "rb") as file:
            file.seek(ref.offset)
            assert file.read(32).rstrip(b".").decode() == ref.name
    model.close()
    local.close()


def test_a_part_missing_on_the_web(raw, tmp_path, nginx, cache):
    paths = written(tmp_path / "served", raw.split_model())
    paths[3].unlink()
    assert f"part 4 of {nginx.url}/{paths[0].name} is missing" in refused(f"{nginx.url}/{paths[0].name}")
