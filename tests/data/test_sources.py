"""Sources: the same documents in the same order, a key that follows the content, and clear mistakes."""

import bz2
import errno
import gzip
import json
import lzma
import os
import re
import sys
from pathlib import Path

import pytest

from axon.data import Folder, HuggingFace, JsonLines, Parquet, Source, Stdlib, Synthetic, parse_source
from axon.errors import UserError


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_the_standard_library_is_tens_of_megabytes_in_a_fixed_order():
    texts = list(Stdlib().texts())
    assert sum(len(text) for text in texts) > 8e6  # some systems leave the library's own tests out
    assert texts == list(Stdlib().texts())
    assert not any("site-packages" in str(path) for path in Stdlib()._files())


def test_a_folder_yields_its_files_by_name_whatever_order_they_were_made_in(tmp_path, texts):
    written = texts(12)
    for index in sorted(range(12), key=lambda index: written[index]):
        (tmp_path / f"{index:02}.txt").write_bytes(written[index].encode())
    (tmp_path / "other.md").write_text("not this one")
    assert list(Folder(str(tmp_path)).texts()) == written


def test_a_single_file_is_one_document(tmp_path, texts):
    (tmp_path / "all.md").write_bytes(texts(1)[0].encode())
    assert [text.encode() for text in Folder(str(tmp_path / "all.md")).texts()] == [(tmp_path / "all.md").read_bytes()]


def test_a_file_source_has_a_new_key_when_a_file_changes(folder):
    path = folder("words", 3)
    source = Folder(str(path))
    before = source.key()
    assert source.key() == before
    os.utime(path / "0001.txt", ns=(1, 1))
    touched = source.key()
    (path / "0002.txt").unlink()
    assert len({before, touched, source.key()}) == 3


def test_jsonl_reads_the_field_and_skips_blank_lines(tmp_path, texts):
    written = texts(20)
    path = jsonl(tmp_path / "a.jsonl", [{"body": text, "n": 1} for text in written])
    with open(path, "a") as file:
        file.write("\n\n")
    assert list(JsonLines(path, field="body").texts()) == written


def test_a_folder_of_jsonl_is_read_file_after_file(tmp_path, texts):
    written = texts(6)
    jsonl(tmp_path / "b.jsonl", [{"text": text} for text in written[3:]])
    jsonl(tmp_path / "a.jsonl", [{"text": text} for text in written[:3]])
    assert list(JsonLines(str(tmp_path)).texts()) == written


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"txt": "x"}', "Did you mean 'txt'"),
        ('{"text": 3}', "holds int"),
        ("{nonsense", "not valid JSON"),
        ("[1, 2]", "found list"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_line_of_jsonl_is_named_by_file_and_line(tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        list(JsonLines(str(path)).texts())
    assert f"{path}:2" in str(caught.value)
    assert said in str(caught.value)


def test_parquet_reads_its_column(tmp_path, texts):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    written = texts(50)
    parquet.write_table(pyarrow.table({"body": written, "n": range(50)}), tmp_path / "a.parquet", row_group_size=7)
    assert list(Parquet(str(tmp_path / "a.parquet"), field="body").texts()) == written
    assert list(Parquet(str(tmp_path), field="body").texts()) == written


def test_parquet_says_what_is_wrong_with_a_file(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("not this")
    for source, said in [
        (Parquet(str(tmp_path / "a.parquet"), field="bdy"), "Did you mean 'body'"),
        (Parquet(str(tmp_path / "a.parquet"), field="n"), "holds int"),
        (Parquet(str(tmp_path / "b.parquet")), "cannot be read as Parquet"),
    ]:
        with pytest.raises(UserError, match=said):
            list(source.texts())


def test_a_parquet_file_with_a_damaged_page_is_named(tmp_path, texts):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": texts(200)}), path, write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=f"^{path} cannot be read as Parquet"):
        list(Parquet(str(path)).texts())


def test_a_hugging_face_dataset_is_streamed(tmp_path, texts):
    pytest.importorskip("datasets")
    written = texts(30)
    jsonl(tmp_path / "train.jsonl", [{"body": text} for text in written])
    assert list(HuggingFace(str(tmp_path), field="body").texts()) == written
    assert list(HuggingFace(str(tmp_path), field="body", documents=4).texts()) == written[:4]


def test_a_hugging_face_dataset_that_cannot_be_opened_says_why(tmp_path):
    pytest.importorskip("datasets")
    jsonl(tmp_path / "train.jsonl", [{"body": "x"}])
    for source, said in [
        (HuggingFace(str(tmp_path), split="tran"), "Bad split: tran"),
        (HuggingFace(str(tmp_path), config="none"), "'none' not found"),
        (HuggingFace(str(tmp_path / "absent")), "cannot be read"),
        (HuggingFace("x" * 300), "cannot be read"),
        (HuggingFace(str(tmp_path)), "no field 'text'.*'?body"),
    ]:
        with pytest.raises(UserError, match=said):
            list(source.texts())


@pytest.mark.parametrize(("make", "package"), [(Parquet, "pyarrow"), (HuggingFace, "datasets")])
def test_a_missing_optional_package_is_named_with_its_extra(tmp_path, monkeypatch, make, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UserError) as caught:
        list(make(str(tmp_path / "a.parquet")).texts())
    assert "run scripts/setup data" in str(caught.value)
    assert package in str(caught.value)


def test_synthetic_documents_follow_from_their_fields():
    source = Synthetic(vocab=900, documents=5, length=64, seed=3)
    texts = list(source.texts())
    assert texts == list(source.texts())
    assert [len(text.split()) for text in texts] == [64] * 5
    assert len(set(texts)) == 5
    assert texts != list(Synthetic(vocab=900, documents=5, length=64, seed=4).texts())


def test_synthetic_words_are_all_different():
    words = {word for text in Synthetic(vocab=800, documents=60, length=400).texts() for word in text.split()}
    assert len(words) == 800


def test_a_missing_path_suggests_its_neighbour(tmp_path):
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(UserError, match=r"Did you mean 'corpus\.jsonl'"):
        JsonLines(str(tmp_path / "corpis.jsonl")).key()


def test_a_folder_with_no_match_says_its_pattern(tmp_path):
    with pytest.raises(UserError, match=r"matches '\*\.md'"):
        Folder(str(tmp_path), "*.md").key()


@pytest.mark.parametrize("pattern", ["", "/etc/*.txt"])
def test_a_pattern_that_is_none_is_refused(tmp_path, pattern):
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=f"pattern '{re.escape(pattern)}'"):
        Folder(str(tmp_path), pattern).key()


@pytest.mark.parametrize("make", [Folder, JsonLines, Parquet])
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_is_none_is_refused_by_its_field(make, path):
    with pytest.raises(UserError, match=rf"{make.__name__}\.path is "):
        make(path)


def refusing(monkeypatch, name, refused):
    """Has the system refuse the file or folder `refused`, as it does for anyone but root."""
    real = getattr(os, name)

    def call(path, *more, **options):
        if str(path) == str(refused):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *more, **options)

    monkeypatch.setattr(os, name, call)


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_left_out(folder, monkeypatch):
    path = folder("words", 3)
    (path / "closed").mkdir()
    refusing(monkeypatch, "scandir", path / "closed")
    with pytest.raises(UserError, match=rf"{path}/closed cannot be read: Permission denied"):
        Folder(str(path)).key()
    assert Folder(str(path), "*.txt").key()  # nothing below it is asked for
    refusing(monkeypatch, "scandir", path)
    with pytest.raises(UserError, match=rf"{path} cannot be read: Permission denied"):
        Folder(str(path), "*.txt").key()


@pytest.mark.parametrize(("make", "name"), [(Folder, "a.txt"), (JsonLines, "a.jsonl"), (Parquet, "a.parquet")])
def test_a_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch, make, name):
    if make is Parquet:
        pytest.importorskip("pyarrow")
    (tmp_path / name).mkdir()  # opened as a file, it is refused to root too
    monkeypatch.setattr(Path, "is_file", lambda self: True)
    with pytest.raises(UserError, match=rf"{tmp_path / name} cannot be read"):
        list(make(str(tmp_path / name)).texts())


@pytest.mark.parametrize("make", [Folder, JsonLines, Parquet])
def test_a_circle_of_links_and_a_name_too_long_are_errors_that_say_so(tmp_path, make):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, said in [(tmp_path / "loop", "Too many levels"), (tmp_path / ("x" * 300), "File name too long")]:
        with pytest.raises(UserError, match=f"{path} cannot be read: {said}"):
            make(str(path)).key()


@pytest.mark.parametrize(
    "name", ["a.jsonl", "b.JSONL", "c.ndjson", "d.json", "e.Jsonl.GZ", "f.jsonl.bz2", "g.json.xz", "h.jsonl"]
)
def test_lines_of_json_are_read_whatever_their_suffixes_case_and_compression(tmp_path, texts, name):
    written, path = texts(20), tmp_path / name
    lines = "".join(json.dumps({"text": text}) + "\n" for text in written).encode()
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    pack = gzip.compress if name == "h.jsonl" else packed.get(path.suffix.lower(), bytes)  # one by its content alone
    path.write_bytes(pack(lines))
    assert list(parse_source(str(path)).texts()) == written


def test_compressed_text_is_read_as_what_it_holds(tmp_path, texts):
    written = texts(4)
    for index, pack in enumerate((bytes, gzip.compress, bz2.compress, lzma.compress)):
        suffix = ["TXT", "txt.gz", "Txt.bz2", "txt.XZ"][index]
        (tmp_path / f"{index}.{suffix}").write_bytes(pack(written[index].encode()))
    assert list(Folder(str(tmp_path)).texts()) == written
    assert [next(Folder(str(one)).texts()) for one in sorted(tmp_path.iterdir())] == written
    (tmp_path / "1.txt").write_text(written[1])  # as `gzip --keep` leaves them
    assert len(Folder(str(tmp_path)).files()) == 4


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.jsonl.gz"])
@pytest.mark.parametrize("harm", [lambda raw: raw[: len(raw) // 2], lambda raw: raw[:40] + b"x" + raw[41:]])
def test_damaged_compressed_files_are_named(tmp_path, name, harm):
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[Path(name).suffix]
    lines = "".join(json.dumps({"text": str(number)}) + "\n" for number in range(1000))
    (tmp_path / name).write_bytes(harm(pack(lines.encode())))
    with pytest.raises(UserError, match=rf"{tmp_path / name}( cannot be read|:\d+: not valid)"):
        list(parse_source(str(tmp_path / name)).texts())


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"PAR1 and more", "a Parquet file"),
        (b"PK\x03\x04 and more", "a zip archive"),
        (b"%PDF-1.7", "a PDF"),
        (b"\0" * 257 + b"ustar", "a tar archive"),
        (gzip.compress(b"\0" * 257 + b"ustar"), "a tar archive"),
        (b"\x28\xb5\x2f\xfd" + b"?" * 30, "zst"),
    ],
    ids=["parquet", "zip", "pdf", "tar", "tar.gz", "zst"],
)
def test_what_is_no_text_is_refused_by_what_it_is(tmp_path, begin, said):
    (tmp_path / "a.txt").write_bytes(begin)
    with pytest.raises(UserError, match=f"{tmp_path}/a.txt .*{said}"):
        list(Folder(str(tmp_path / "a.txt")).texts())


def test_the_files_that_a_folder_skips_are_named(tmp_path):
    for name in ("a.txt", "b.md", "c.JSON", ".hidden"):
        (tmp_path / name).write_text("x")
    assert Folder(str(tmp_path)).notices() == [f"{tmp_path} is read but for b.md, c.JSON"]
    assert Folder(str(tmp_path), "*").notices() == []
    assert Folder(str(tmp_path / "a.txt")).notices() == []
    for number in range(30):
        (tmp_path / f"{number}.py").write_text("x")
    assert f"{tmp_path} is read but for 32 files (30 .py, " in Folder(str(tmp_path)).notices()[0]
    with pytest.raises(UserError, match=r"There are 34 files .*30 \.py"):
        JsonLines(str(tmp_path)).key()


def test_a_source_is_named_in_one_word(tmp_path):
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "a.parquet").touch()
    assert parse_source("stdlib") == Stdlib()
    assert parse_source("hf:owner/name") == HuggingFace("owner/name")
    assert parse_source(str(tmp_path)) == Folder(str(tmp_path))
    assert parse_source(str(tmp_path / "a.jsonl")) == JsonLines(str(tmp_path / "a.jsonl"))
    assert parse_source(str(tmp_path / "a.parquet")) == Parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match="no source 'stdlb'"):
        parse_source("stdlb")
    with pytest.raises(UserError, match="source is ''"):
        parse_source("")
    with pytest.raises(UserError, match=r"HuggingFace\.name is ''; expected the name of a dataset"):
        parse_source("hf:")


def test_every_source_has_what_a_source_needs():
    for source in (Stdlib(), Folder("x"), JsonLines("x"), Parquet("x"), HuggingFace("x"), Synthetic()):
        assert isinstance(source, Source)
