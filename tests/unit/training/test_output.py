"""Of the processes that are started with one output directory, one writes there."""

from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.training import output
from spes_p2p.training.output import fresh_output, kept_output


@pytest.mark.parametrize("second", [fresh_output, kept_output])
@pytest.mark.parametrize("first", [fresh_output, kept_output])
def test_a_second_start_in_a_directory_that_is_in_use_touches_nothing(tmp_path: Path, monkeypatch, first, second):
    """Whoever resumes looks its versions over, and deletes what it does not know of."""
    monkeypatch.setattr(output, "LEAVING_SECONDS", 0.0)
    with first(tmp_path) as keep:
        keep()
        (tmp_path / "identity.key").touch()
        with pytest.raises(ConfigError, match="in use by another peer"), second(tmp_path):
            raise AssertionError("it has started")
        assert [path.name for path in tmp_path.iterdir()] == ["identity.key"]
    with second(tmp_path):
        pass
