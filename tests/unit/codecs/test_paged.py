"""Vectors in files: the same values as in memory, of which little is in memory at a time."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spes_p2p.codecs import paged
from spes_p2p.codecs.paged import PagedVector, save_tensors

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere vectors lie in memory")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(paged, "PIECE_NUMEL", 1024)


@on_linux
@pytest.mark.usefixtures("small_pieces")
def test_what_is_written_piece_by_piece_is_there_and_a_part_of_it(tmp_path, seed):
    torch.manual_seed(seed)
    vector, flat_N = PagedVector.scratch(5000, tmp_path), torch.randn(5000)
    for here, piece in vector.pieces():
        piece.copy_(flat_N[here])
    assert vector.numel == 5000 and vector.nbytes == 20_000 and not list(tmp_path.iterdir())
    assert torch.equal(vector.whole(), flat_N)
    assert torch.equal(vector.part(1000, 4000).part(5, 3000).whole(), flat_N[1005:4000])
    assert torch.equal(torch.cat([piece for _, piece in vector.part(7, 4001).pieces()]), flat_N[7:4001])


@on_linux
def test_of_a_large_vector_one_piece_is_in_memory(tmp_path):
    numel = 8 * paged.PIECE_NUMEL
    vector = PagedVector.scratch(numel, tmp_path)
    most = 0
    for _, piece in vector.pieces():
        piece.fill_(1.0)
        most = max(most, mapped_bytes())
    assert 0 < most < 2 * 4 * paged.PIECE_NUMEL
    whole = vector.whole()
    assert float(whole.sum()) == numel and mapped_bytes() >= 4 * numel
    del whole
    assert mapped_bytes() == 0


def mapped_bytes() -> int:
    """Return the memory of this process that shows files without a name."""
    resident, is_nameless = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_nameless = line.endswith("(deleted)") and "/tmp" in line
        elif is_nameless and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident


def test_without_a_folder_and_of_few_elements_it_lies_in_memory(tmp_path):
    for vector in (PagedVector.scratch(10, tmp_path), PagedVector.scratch(2 * paged.PIECE_NUMEL, None)):
        assert vector.open().memory is None
    assert PagedVector.of(torch.empty(0)).whole().numel() == 0 and not list(PagedVector.of(torch.empty(0)).pieces())


@pytest.mark.usefixtures("small_pieces")
def test_tensors_are_saved_as_safetensors_has_them(tmp_path, seed):
    torch.manual_seed(seed)
    tensors = {
        "residual/shared": PagedVector.scratch(3000, tmp_path),
        "step": torch.tensor(7.0),
        "codes": torch.randint(256, (3, 5), dtype=torch.uint8),
        "narrow": torch.randn(4, 3).bfloat16().t(),
        "none": torch.empty(0, dtype=torch.int64),
    }
    tensors["residual/shared"].whole().normal_()  # type: ignore[union-attr]
    save_tensors(tensors, tmp_path / "saved")
    found = load_file(tmp_path / "saved")
    assert set(found) == set(tensors)
    for name, each in tensors.items():
        expected = each.whole() if isinstance(each, PagedVector) else each
        assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), name
