"""What stands below a study's table: what its marks mean, and which runs are not in it, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from spes_p2p import __version__
from spes_p2p.study.store import Missing
from spes_p2p.study.summary import TOKENS_TOLERANCE, Results, Row

MissingRuns = Mapping[tuple[str, int], Missing]
"""By variant and seed."""
UNEQUAL_MARK = "†"
UNEQUAL_NOTE = (
    f"{UNEQUAL_MARK} Not at equal tokens, so this gap also tells how much was trained: some peer trained more or less "
    f"than the lone one, or all together than the centralised one, by more than {TOKENS_TOLERANCE:.0%}."
)


def notes(results: Results, missing: MissingRuns, rows: Sequence[Row]) -> list[str]:
    """Return what must be said below the table, a line each; in a study that is done by this version, nothing."""
    lines = [UNEQUAL_NOTE] if any(row.unequal for row in rows) else []
    lines += missing_lines(missing)
    others: dict[str, list[tuple[str, int]]] = {}
    for key, result in results.items():
        if result.software != __version__:
            others.setdefault(result.software, []).append(key)
    lines += [f"made by spes_p2p {name} (this is {__version__}): {_runs(keys)}" for name, keys in others.items()]
    return lines


def missing_lines(missing: MissingRuns) -> list[str]:
    """Return "outdated: ours seeds 0, 1: run.train.lr was 0.1, is 0.2", a line for each kind and reason."""
    return [": ".join(filter(None, cells)) for cells in missing_cells(missing)]


def missing_cells(missing: MissingRuns) -> list[tuple[str, str, str]]:
    """Return what became of runs that are not in the table, which they are, and why."""
    alike: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for key, run in missing.items():
        alike.setdefault((run.kind, " ".join(run.reason.split())), []).append(key)
    return [(kind, _runs(keys), reason) for (kind, reason), keys in alike.items()]


def _runs(keys: Iterable[tuple[str, int]]) -> str:
    seeds: dict[str, list[int]] = {}
    for variant, seed in keys:
        seeds.setdefault(variant, []).append(seed)
    return "; ".join(f"{variant} {of_seeds(found)}" for variant, found in seeds.items())


def of_seeds(seeds: Sequence[int]) -> str:
    """Return "seed 1", or "seeds 0, 1"."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
