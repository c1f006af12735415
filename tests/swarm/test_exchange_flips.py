"""Of downloads in each of which one bit was flipped none is loaded, and each names its sender."""

import pytest
from bit_flips import flip_downloads

pytestmark = [pytest.mark.timeout(120), pytest.mark.full]


def test_no_bit_flipped_on_the_way_is_loaded_whatever_it_is_in(tmp_path, seed):
    flips = flip_downloads(tmp_path, 60, seed)
    print(flips)
    assert not flips.loaded.total() and not flips.unnamed.total()
    assert flips.refused.total() == 60 and len(flips.refused) == 2
