"""Free memory is the system's, or what a container's limit leaves of it."""

from pathlib import Path

import psutil
import pytest

from spes_p2p.planner.size import free_memory_bytes

MIB = 2**20


def write_group(folder: Path, names: tuple[str, str], limit: int | str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(f"{content}\n")


def version_2(folder: Path, limit: int | str, used: int, inactive: int = 0) -> None:
    write_group(folder, ("memory.max", "memory.current"), limit, used, f"anon 1\ninactive_file {inactive}")


def version_1(folder: Path, limit: int, used: int, inactive: int = 0) -> None:
    stat = f"cache 1\ntotal_inactive_file {inactive}"
    write_group(folder, ("memory.limit_in_bytes", "memory.usage_in_bytes"), limit, used, stat)


def free(tmp_path: Path, lines: str) -> int:
    (tmp_path / "cgroup").write_text(lines)
    return free_memory_bytes(tmp_path / "cgroup", tmp_path / "mount")


def test_free_memory_is_less_than_all_memory():
    assert 0 < free_memory_bytes() < psutil.virtual_memory().total


def test_a_containers_limit_counts_less_what_is_used_and_cannot_be_given_back(tmp_path):
    version_2(tmp_path / "mount" / "pod", 20 * MIB, 9 * MIB, inactive=4 * MIB)
    assert free(tmp_path, "0::/pod\n") == 15 * MIB


def test_the_tightest_limit_above_a_process_counts(tmp_path):
    version_2(tmp_path / "mount" / "pod", 12 * MIB, 9 * MIB)
    version_2(tmp_path / "mount" / "pod" / "container", 20 * MIB, 9 * MIB)
    version_2(tmp_path / "mount" / "pod" / "container" / "job", "max", 9 * MIB)
    assert free(tmp_path, "0::/pod/container/job\n") == 3 * MIB


def test_within_a_container_its_own_root_holds_the_limit(tmp_path):
    version_2(tmp_path / "mount", 20 * MIB, 5 * MIB)
    assert free(tmp_path, "0::/a-name/of-the-host\n") == 15 * MIB
    assert free(tmp_path, "0::/../../other\n") == 15 * MIB


def test_version_1_of_control_groups_counts_too(tmp_path):
    version_1(tmp_path / "mount" / "memory" / "pod", 20 * MIB, 9 * MIB, inactive=MIB)
    assert free(tmp_path, "9:name=systemd:/\n4:memory:/pod\n0::/\n") == 12 * MIB


def test_a_container_that_uses_more_than_its_limit_has_nothing_free(tmp_path):
    version_2(tmp_path / "mount", 5 * MIB, 6 * MIB)
    assert free(tmp_path, "0::/\n") == 0


@pytest.mark.parametrize("lines", ["", "0::/pod\n", "nonsense\n", "4:memory:/pod\n0::/pod\n"])
def test_without_a_limit_the_system_has_the_word(tmp_path, lines):
    version_2(tmp_path / "mount" / "pod", "max", 9 * MIB)
    version_1(tmp_path / "mount" / "memory" / "pod", 2**63 - 4096, 9 * MIB)
    assert free(tmp_path, lines) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize("damage", ["memory.max", "memory.current", "memory.stat"])
def test_a_group_that_cannot_be_read_sets_no_limit(tmp_path, damage):
    version_2(tmp_path / "mount" / "pod", MIB, 0)
    (tmp_path / "mount" / "pod" / damage).write_text("?")
    assert free(tmp_path, "0::/pod\n") > 16 * MIB


def test_no_linux_no_groups(tmp_path):
    assert free_memory_bytes(tmp_path / "none", tmp_path) > 16 * MIB
