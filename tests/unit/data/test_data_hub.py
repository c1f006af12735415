"""What a stranger's manifest can name: public tables of text on a hub, and no file of the machine that reads it."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from spes_p2p.config import DataConfig
from spes_p2p.data import hub as module
from spes_p2p.data.hub import find_hub_files, load_hub
from spes_p2p.data.sources import documents
from spes_p2p.errors import DataError, OutageError

from .conftest import write_rows

SECRET = "a private note"


def texts_of(data: DataConfig) -> list[str]:
    return [document.text for document in documents(data)]


def card(hub, name: str, settings: str) -> DataConfig:
    """Write a data set's card; return the settings that stream it."""
    folder = hub.root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\n{settings}\n---\n# A data set\n")
    return DataConfig(source="hub", name=name)


@pytest.fixture
def notes(tmp_path):
    """A folder of the volunteer's with a secret in it, which is the working directory's as well."""
    folder = tmp_path / "home" / "notes"
    write_rows(folder / "private.jsonl", [SECRET] * 20)
    return folder


NAMES = [
    *("text", "json", "csv", "parquet", "arrow", "webdataset", "json:default", "imagefolder"),
    *("/etc", "/etc/passwd", "~", "~/notes", "~root/notes", "./notes/x", "../notes", "a/..", "a/b/c", "notes"),
    *("file:///etc/passwd", "hf://datasets/a/b", "http://127.0.0.1/x", "zip://a::b/c", "a/b@main", "a/b:c/d"),
    *("a\x1b[2J/b", "a/b\n", "a/b ", "-a/b", "a/.b", "a/b:../c", "a--b/c", "\u0430/b", "", "a/" + "b" * 200),
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_is_no_data_set_of_a_hub_is_refused(name, notes, monkeypatch):
    monkeypatch.chdir(notes.parent)
    for source in ("hub", "files"):
        with pytest.raises(ValidationError) as caught:
            DataConfig(source=source, name=name)
        assert "\n" not in caught.value.errors()[0]["msg"] and "\x1b" not in caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "name", ["HuggingFaceFW/fineweb-edu:sample-10BT", "Salesforce/wikitext:wikitext-103-v1", "a/b"]
)
def test_the_names_of_real_data_sets_are_taken(name):
    assert DataConfig(source="hub", name=name).name == name


@pytest.mark.parametrize(
    "split", ["../x", "train[:10%]", "train+test", "tr ain", "/etc", "", "a\x1b", "x" * 65], ids=ascii
)
def test_a_split_that_is_no_word_is_refused(split):
    with pytest.raises(ValidationError):
        DataConfig(source="hub", name="a/b", split=split)


@pytest.mark.parametrize("column", ["", " ", "\x1b[2J", "a\nb", "../x", "x" * 129, "\u202etxet"], ids=ascii)
def test_a_column_that_cannot_be_printed_is_refused(column):
    with pytest.raises(ValidationError):
        DataConfig(text_field=column)
    assert DataConfig(text_field="содержание").text_field


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "a\nb", "x" * 513], ids=["empty", "escape", "lines", "long"])
def test_a_tokenizers_name_that_cannot_be_printed_is_refused(name):
    with pytest.raises(ValidationError):
        DataConfig(tokenizer=name)


def test_a_folder_of_the_data_sets_name_is_not_read_in_its_place(hub, notes, monkeypatch):
    shadow = notes / "alice" / "texts"
    write_rows(shadow / "rows.jsonl", [SECRET])
    (shadow / "texts.py").write_text("raise SystemExit")
    write_rows(hub.root / "alice" / "texts" / "rows.jsonl", ["public"])
    monkeypatch.chdir(notes)
    assert texts_of(DataConfig(source="hub", name="alice/texts")) == ["public"]
    assert not texts_are_read_if_absent(hub)


def texts_are_read_if_absent(hub) -> bool:
    """Whether the folder stands in for a data set that the hub lacks."""
    (hub.root / "alice" / "texts" / "rows.jsonl").unlink()
    try:
        return bool(texts_of(DataConfig(source="hub", name="alice/texts")))
    except DataError:
        return False


ELSEWHERE = {
    "an absolute path": "configs: [{config_name: default, data_files: 'NOTES/*'}]",
    "a file's URL": "configs: [{config_name: default, data_files: 'file://NOTES/private.jsonl'}]",
    "a path upwards": "configs: [{config_name: default, data_files: '../../../home/notes/*'}]",
    "a path upwards further down": "configs: [{config_name: default, data_files: ['rows.jsonl', 'a/../../../b']}]",
    "a home folder": "configs: [{config_name: default, data_files: '~/notes/*'}]",
    "a web server": "configs: [{config_name: default, data_files: 'HUB/secret/rows.jsonl'}]",
    "another data set": "configs: [{config_name: default, data_files: 'hf://datasets/alice/other/rows.jsonl'}]",
    "an archive of a file": "configs: [{config_name: default, data_files: 'zip://*::file://NOTES/x.zip'}]",
    "a split elsewhere": "configs: [{config_name: default, data_files: [{split: train, path: 'NOTES/private.jsonl'}]}]",
    "a folder elsewhere": "configs: [{config_name: default, data_dir: 'NOTES'}]",
    "a folder upwards": "configs: [{config_name: default, data_dir: '../../../home/notes'}]",
    "one of two": "configs: [{config_name: default, data_files: 'NOTES/*'}, {config_name: b, data_files: x}]",
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_card_that_names_files_elsewhere_is_refused(hub, notes, case, monkeypatch):
    monkeypatch.chdir(notes)
    monkeypatch.setenv("HOME", str(notes.parent))
    settings = ELSEWHERE[case].replace("NOTES", str(notes)).replace("HUB", hub.url)
    data = card(hub, "alice/texts", settings)
    write_rows(hub.root / "alice" / "other" / "rows.jsonl", ["another's"])
    write_rows(hub.root / "alice" / "texts" / "rows.jsonl", ["public"])
    with pytest.raises(DataError, match="'alice/texts' names files elsewhere"):
        load_hub(data)
    assert not any("secret" in path or "other" in path for path in hub.asked)


@pytest.mark.parametrize(
    "settings", ["configs: 3", "configs: [3]", "configs: [{data_files: x}]", "configs: {a: b}", "license: 3"]
)
def test_a_card_that_makes_no_sense_is_refused_in_one_line_or_read(hub, settings):
    data = card(hub, "alice/texts", settings)
    write_rows(hub.root / "alice" / "texts" / "rows.jsonl", ["public"])
    try:
        assert texts_of(data) == ["public"]
    except DataError as error:
        assert "\n" not in str(error)


def test_files_outside_the_data_set_are_refused_however_they_were_matched():
    data, url = DataConfig(source="hub", name="a/b"), "hf://datasets/a/b@1"
    assert module._tables([f"{url}/x.jsonl"], data, url) == ([f"{url}/x.jsonl"], ".jsonl")
    for file in (
        "/etc/x.jsonl",
        "file:///x.jsonl",
        f"{url}2/x.jsonl",
        f"{url}/../c/x.jsonl",
        f"zip://x.jsonl::{url}/x",
    ):
        with pytest.raises(DataError, match="lies elsewhere"):
            module._tables([file], data, url)


@pytest.mark.parametrize(
    "name", ["x.tar", "x.h5", "x.pkl", "x.zip", "x.arrow", "x.py", "x.lance", "x.xml", "x.tar.gz", "x.png"]
)
def test_only_tables_of_text_are_opened(hub, name):
    data = card(hub, "alice/texts", "license: mit")
    (hub.root / "alice" / "texts" / name).write_bytes(b"\x89HDF")
    with pytest.raises(DataError, match=r"has no \.parquet"):
        load_hub(data)
    assert not any("/resolve/" in path for path in hub.asked)


def image_rows(path, value) -> None:
    """Write a parquet file whose schema says that a column holds images, which `datasets` decodes from their paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"text": ["public"], "image": pyarrow.array([value], kind)})
    features = {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
    meta = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(meta), path)


def test_no_column_but_the_texts_is_decoded(hub, notes):
    """Decoding the other column would open the file that its row names, and find no image."""
    path = str(notes / "private.jsonl")
    image_rows(hub.root / "alice" / "texts" / "a.parquet", {"bytes": None, "path": path})
    data = DataConfig(source="hub", name="alice/texts")
    assert texts_of(data) == ["public"]
    with pytest.raises(DataError, match="is no text"):
        load_hub(data.model_copy(update={"text_field": "image"}))
    with pytest.raises(DataError, match="no field 'body'"):
        load_hub(data.model_copy(update={"text_field": "body"}))


def test_a_private_data_set_of_the_volunteers_is_not_read(hub):
    write_rows(hub.root / "alice" / "texts" / "rows.jsonl", [SECRET])
    (hub.root / "alice" / "texts" / ".private").write_text("")
    with pytest.raises(DataError, match="is private"):
        load_hub(DataConfig(source="hub", name="alice/texts"))


def test_licence_size_and_files_are_known_before_any_is_read(hub):
    settings = (
        "license: odc-by\nconfigs: [{config_name: en, data_files: 'en/*'}, {config_name: de, data_files: 'de/*'}]"
    )
    card(hub, "alice/texts", settings)
    for language in ("en", "de"):
        write_rows(hub.root / "alice" / "texts" / language / "rows.jsonl.gz", [language])
        write_rows(hub.root / "alice" / "texts" / language / "b.jsonl", [language])
    found = find_hub_files(DataConfig(source="hub", name="alice/texts:de"))
    assert found.licence == "odc-by" and found.format == ".jsonl"
    assert [file.removeprefix(found.url) for file in found.files] == ["/de/b.jsonl", "/de/rows.jsonl.gz"]
    assert found.num_bytes == sum(path.stat().st_size for path in (hub.root / "alice" / "texts" / "de").iterdir())
    assert not any("/resolve/" in path for path in hub.asked)
    with pytest.raises(DataError, match="configurations en, de"):
        find_hub_files(DataConfig(source="hub", name="alice/texts"))
    with pytest.raises(DataError, match="configurations en, de"):
        find_hub_files(DataConfig(source="hub", name="alice/texts:fr"))
    with pytest.raises(DataError, match="has the splits train"):
        find_hub_files(DataConfig(source="hub", name="alice/texts:de", split="test"))


@pytest.mark.parametrize(
    "suffix, content", [(".csv", "text,n\npublic,1\n"), (".tsv", "n\ttext\n1\tpublic\n"), (".txt", "public\n")]
)
def test_other_tables_are_read_as_well(hub, suffix, content):
    folder = hub.root / "alice" / "texts"
    folder.mkdir(parents=True)
    (folder / f"rows{suffix}").write_text(content)
    assert texts_of(DataConfig(source="hub", name="alice/texts")) == ["public"]


def test_an_absent_data_set_is_named_in_one_line(hub):
    with pytest.raises(DataError, match="cannot stream data set 'alice/none'") as caught:
        load_hub(DataConfig(source="hub", name="alice/none"))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("status", [429, 503, None])
def test_a_hub_that_does_not_answer_now_may_answer_later(hub, status, monkeypatch):
    hub.status = status or 0
    if status is None:
        hub.shutdown()
        hub.server_close()
    with pytest.raises(OutageError, match="cannot stream data set 'alice/texts'") as caught:
        find_hub_files(DataConfig(source="hub", name="alice/texts"))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 75


def test_a_hub_that_is_switched_off_is_no_outage(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="cannot stream data set 'alice/texts'") as caught:
        find_hub_files(DataConfig(source="hub", name="alice/texts"))
    assert caught.value.exit_code == 2
