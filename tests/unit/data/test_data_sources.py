"""Documents and their split."""

import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.config import DataConfig
from spes_p2p.data.readers import PIECE_CHARACTERS
from spes_p2p.data.sources import corpus_identity, documents, in_held_out_part, is_held_out, split_documents
from spes_p2p.errors import ConfigError, DataError

from .conftest import EDITS, SAME, sentences, write_rows

FILES = DataConfig(source="files")


def read(*paths: Path, data: DataConfig = FILES) -> list[tuple[str, str]]:
    return [tuple(document) for document in documents(data, paths)]


@pytest.fixture(scope="module")
def embedded():
    return list(documents(DataConfig()))


def test_embedded_corpus_is_the_standard_library_and_its_reference(embedded):
    texts = dict(embedded)
    assert "json/decoder.py" in texts and "topics/for" in texts
    assert "class JSONDecoder" in texts["json/decoder.py"] and 5e6 < sum(map(len, texts.values())) < 20e6
    assert len(texts) == len(embedded)
    assert not [name for name in texts if {"test", "tests", "site-packages"} & set(name.split("/")[:-1])]


def test_embedded_corpus_holds_no_path_of_this_machine(embedded):
    assert not [name for name, text in embedded if name.startswith(("_sysconfigdata", "config-"))]
    places = {value for name in ("abs_srcdir", "LIBDIR") if len(value := str(sysconfig.get_config_var(name))) > 8}
    assert places and not [name for name, text in embedded if any(place in text for place in places)]


def test_embedded_held_out_part_is_about_its_share(embedded):
    share = sum(in_held_out_part(document, DataConfig(held_out_fraction=0.2)) for document in embedded) / len(embedded)
    assert 0.1 < share < 0.3
    assert sum(len(document.text) for document in embedded if in_held_out_part(document, DataConfig())) > 50_000


def test_split_is_the_same_in_another_process():
    names = [f"{index}.py" for index in range(50)]
    code = (
        "from spes_p2p.data.sources import is_held_out\n"
        f"print([(is_held_out(n, None, 0.3), is_held_out('', n, 0.3)) for n in {names!r}])"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    here = [(is_held_out(name, None, 0.3), is_held_out("", name, 0.3)) for name in names]
    assert other.stdout.strip() == repr(here)
    assert len(set(here)) == 4, "name and text hash independently"


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_holds_out_everything_a_smaller_one_does(text, one, other):
    small, large = sorted((one, other))
    assert is_held_out("", text, large) or not is_held_out("", text, small)


def test_the_same_text_is_held_out_whatever_its_file_is_called(tmp_path, seed):
    texts = sentences(random.Random(seed), 60)
    here = write_rows(tmp_path / "a" / "mine.jsonl", texts)
    there = write_rows(tmp_path / "b" / "theirs.jsonl", texts[::-1])
    data = DataConfig(source="files", held_out_fraction=0.3)
    split = [{text for _, text in split_documents(data, [path], held_out=True)} for path in (here, there)]
    assert split[0] == split[1] and 0 < len(split[0]) < 60


def test_text_jsonl_parquet_and_folders_give_their_documents_in_order(tmp_path):
    (tmp_path / "z.txt").write_text("plain ä", encoding="utf-8")
    (tmp_path / "readme.md").write_text("# Title")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    write_rows(tmp_path / "sub" / "rows.jsonl", ["one", " ", "two"])
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["three", None, "four"], "n": [1, 2, 3]}), tmp_path / "c.parquet"
    )
    expected = [
        ("c.parquet#0", "three"),
        ("c.parquet#2", "four"),
        ("readme.md", "# Title"),
        ("sub/rows.jsonl#0", "one"),
        ("sub/rows.jsonl#2", "two"),
        ("z.txt", "plain ä"),
    ]
    assert read(tmp_path) == expected
    assert read(tmp_path / "z.txt", tmp_path / "sub" / "rows.jsonl") == [
        expected[5],
        ("rows.jsonl#0", "one"),
        ("rows.jsonl#2", "two"),
    ]


def test_another_text_field_is_read(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ["one"], field="content")
    assert read(path, data=DataConfig(source="files", text_field="content")) == [("rows.jsonl#0", "one")]


def test_a_large_text_file_becomes_pieces_that_join_to_the_whole(tmp_path, seed):
    generator = random.Random(seed)
    whole = "".join("x" * generator.randint(0, 400) + "\n" for _ in range(400)) + "y" * (3 * PIECE_CHARACTERS)
    path = tmp_path / "large.txt"
    path.write_text(whole)
    pieces = read(path)
    assert "".join(text for _, text in pieces) == whole
    assert [name for name, _ in pieces[:2]] == ["large.txt#0", "large.txt#1"]
    assert max(len(text) for _, text in pieces) <= 2 * PIECE_CHARACTERS
    assert all(text.endswith("\n") for _, text in pieces if "y" not in text)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert read(path) == [("rows.jsonl#0", "a?b")]


BAD_FILES = [
    ("a.txt", b"", "holds no text"),
    ("a.txt", b"caf\xe9", "not UTF-8"),
    ("a.jsonl", b"", "holds no text"),
    ("a.jsonl", b'{"text": "x"}\n{"text"\n', "line 2 is not JSON"),
    ("a.jsonl", b"[" * 100_000, "is not JSON"),
    (
        "a.jsonl",
        b'{"content": "x", "id": 1}\n',
        "no field 'text' (it has: content, id); rename one, or set data.text_field",
    ),
    ("a.jsonl", b'["x"]\n', "no field 'text'"),
    ("a.jsonl", b'{"text": 3}\n', "holds int, not text"),
    ("a.parquet", b"no parquet", "cannot read"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=lambda value: str(value)[:20])
def test_a_bad_file_is_named_with_the_remedy(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(path) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


def test_parquet_without_the_field_names_its_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"no field .text. .*body"):
        read(tmp_path / "c.parquet")


def test_parquet_with_numbers_for_text_is_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match="holds int, not text"):
        read(tmp_path / "c.parquet")


def test_missing_paths_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"trains on files.*--text"):
        read()
    with pytest.raises(ConfigError, match=r"absent.txt does not exist"):
        read(tmp_path / "absent.txt")
    with pytest.raises(ConfigError, match="--text"):
        corpus_identity(FILES, [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no files"):
        read(tmp_path / "empty")


def test_identity_changes_with_the_corpus_and_its_settings(corpus):
    data = DataConfig(source="files")
    before = corpus_identity(data, [corpus])
    assert corpus_identity(data, [corpus]) == before
    assert corpus_identity(data.model_copy(update={"held_out_fraction": 0.1}), [corpus]) != before
    assert corpus_identity(data.model_copy(update={"sequence_length": 7}), [corpus]) == before
    with corpus.open("a") as stream:
        stream.write('{"text": "more"}\n')
    assert corpus_identity(data, [corpus]) != before


@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_identity_is_of_the_content_whatever_the_times(corpus, tmp_path, kind):
    def identity(path: Path) -> str:
        data, paths = (FILES, [path]) if kind == "text" else (DataConfig(source="files", paths=[path]), [])
        return corpus_identity(data, paths, tmp_path / "cache")

    before = identity(corpus)
    for change in SAME.values():
        change(corpus)
        assert identity(corpus) == before
    found = {before}
    for edit in EDITS.values():
        edit(corpus, corpus.read_bytes().replace(b"Document", b"Dokument", 1))
        found.add(identity(corpus))
    assert len(found) == 1 + len(EDITS)
    corpus.parent.rename(tmp_path / "elsewhere")
    assert identity(tmp_path / "elsewhere" / corpus.name) in found


def test_a_file_that_has_not_changed_is_read_once(corpus, tmp_path, monkeypatch):
    before = corpus_identity(FILES, [corpus], tmp_path / "cache")
    monkeypatch.setattr("spes_p2p.fs.digest_of_file", lambda _: pytest.fail("read again"))
    assert corpus_identity(FILES, [corpus], tmp_path / "cache") == before


@pytest.fixture
def hub_data(hub, corpus):
    """The corpus as a data set of a hub."""
    folder = hub.root / "alice" / "texts"
    folder.mkdir(parents=True)
    (folder / corpus.name).write_bytes(corpus.read_bytes())
    return DataConfig(source="hub", name="alice/texts")


def test_hub_documents_come_from_a_data_set(corpus, hub_data):
    names, texts = zip(*documents(hub_data), strict=True)
    assert names == tuple(str(index) for index in range(120))
    assert list(texts) == [text for _, text in read(corpus)]


@pytest.mark.parametrize("change", [{"name": "nobody/nothing"}, {"name": "nobody/nothing:part"}])
def test_an_unreachable_data_set_is_named_with_the_remedy(hub_data, change):
    with pytest.raises(DataError, match=r"cannot stream data set .*check name, split and network"):
        next(documents(hub_data.model_copy(update=change)))


def test_hub_rows_without_the_field_are_refused(hub_data):
    with pytest.raises(DataError, match="no field 'content'"):
        next(documents(hub_data.model_copy(update={"text_field": "content"})))
