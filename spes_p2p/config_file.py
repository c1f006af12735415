"""Settings in files: YAML or TOML, read so that nothing in them is ignored in silence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

from spes_p2p.errors import ConfigError


class _KeyTwice(yaml.YAMLError):
    """A mapping sets one key twice; YAML itself would let the last one win in silence."""


class _UniqueKeys(yaml.SafeLoader):
    """Reads as `yaml.safe_load` does, but refuses a key that is set twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line, known = key.start_mark.line + 1, lines.get((key.tag, key.value))
            if known is not None:
                where = f"on line {known} and again on line {line}" if known != line else f"twice on line {line}"
                raise _KeyTwice(f"sets {key.value!r} {where}; keep one")
            lines[key.tag, key.value] = line
        return node


def read_settings(path: Path, name: str) -> dict[Any, Any]:
    """Return the settings in a YAML file, or a TOML file if its name says so.

    Args:
        path: The file.
        name: What the user calls it, for messages.

    Raises:
        ConfigError: it cannot be read or parsed, sets a key twice, or holds something else than settings.
    """
    kind = "TOML" if path.suffix.lower() == ".toml" else "YAML"
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if kind == "TOML" else _UniqueKeys(text).get_single_data() or {}
    except _KeyTwice as error:
        raise ConfigError(f"{name} {path} {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {name} {path}: {error.strerror}; name an existing {kind} file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a date that does not exist
        raise ConfigError(f"{name} {path} is not valid {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name} {path} holds {type(content).__name__}, not settings; see configs/ for examples")
    return content
