"""Which flags a version of vLLM has, and the refusal of those that it doesn't."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from pipeline.errors import UserInputError
from pipeline.files import write_text
from pipeline.serving.flags.changes import CHANGES, VARIABLES

PATH = Path(__file__).with_name("vllm.tsv")
HEADER = """\
# Every flag of vLLM's API server by release, written by `python -m pipeline.serving.flags.record` from each release's own parser
# (vllm/entrypoints/*/cli_args.py and vllm/engine/arg_utils.py of the published wheel of that version).
# Columns: flag or flag=value; what it takes (switch: no value); releases (nothing: all of them).
"""
NUMBER = re.compile(r"-\d")
SHORT = re.compile(r"-\w")


@dataclass(frozen=True)
class Row:
    """One flag (or flag=value), the kind of value it takes ('' for flag=value) and the releases that have it so."""

    flag: str
    kind: str
    versions: tuple[str, ...]


@dataclass(frozen=True)
class FlagTable:
    """All rows, and the releases that were recorded, oldest first."""

    versions: tuple[str, ...]
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, path: Path) -> FlagTable:
        """Read the table's file."""
        versions: tuple[str, ...] = ()
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# Releases: "):
                versions = tuple(line.removeprefix("# Releases: ").split())
            elif line and not line.startswith("#"):
                flag, kind, present = line.split("\t")
                rows.append(Row(flag, kind, _releases(present, versions)))
        return cls(versions, tuple(rows))

    def write(self, path: Path) -> None:
        """Write the table's file, sorted by flag."""
        lines = [f"# Releases: {' '.join(self.versions)}"]
        lines += [
            f"{row.flag}\t{row.kind}\t{_ranges(row.versions, self.versions)}"
            for row in sorted(self.rows, key=lambda row: (row.flag, row.versions))
        ]
        write_text(path, HEADER + "\n".join(lines) + "\n")

    def with_version(self, version: str, rows: Iterable[Row]) -> FlagTable:
        """The table with what one release has in place of what was known of that release."""
        found: dict[tuple[str, str], set[str]] = {}
        for row in (*self.rows, *rows):
            found.setdefault((row.flag, row.kind), set()).update(set(row.versions) - {version})
        for row in rows:
            found[row.flag, row.kind].add(version)
        versions = tuple(sorted({*self.versions, version}, key=Version))
        return FlagTable(
            versions,
            tuple(
                Row(flag, kind, tuple(sorted(present, key=Version)))
                for (flag, kind), present in found.items()
                if present
            ),
        )

    def release_of(self, version: str) -> str:
        """The recorded release that stands for `version`: the one of the same minor version. Else `UserInputError`."""
        for release in reversed(self.versions):
            if Version(release).release[:2] == Version(version).release[:2]:
                return release
        raise UserInputError(
            f"engine_version {version}: vLLM's flags are known for the releases {', '.join(self.versions)} "
            "(pipeline/serving/flags/record.py adds one)"
        )

    def flags(self, version: str) -> dict[str, str]:
        """Flag, or flag=value, to the kind of value it takes, as `version` has them."""
        release = self.release_of(version)
        return {row.flag: row.kind for row in self.rows if release in row.versions}

    def releases_with(self, flag: str) -> list[str]:
        """The recorded releases that have `flag`, oldest first."""
        return sorted(
            {version for row in self.rows if row.flag == flag for version in row.versions}, key=Version
        )


@functools.cache
def flag_table() -> FlagTable:
    """The table that comes with this package."""
    return FlagTable.read(PATH)


def canonical(argument: str) -> str:
    """A flag as the parser compares it: without its value, `_` as `-`, `--config.key` as `--config`."""
    flag = argument.split("=", 1)[0].replace("_", "-")
    return flag.split(".", 1)[0] if flag.startswith("--") else flag


def is_flag(argument: str) -> bool:
    """Whether an argument is a flag rather than a value (-1 is a value)."""
    return argument.startswith("-") and not NUMBER.match(argument)


def check_arguments(arguments: Sequence[str], version: str) -> None:
    """Refuse (`UserInputError`) a flag that `version` doesn't have, and a value where it can't be."""
    known = flag_table().flags(version)
    takes = ""  # what the last flag still accepts
    for argument in arguments:
        if not is_flag(argument):
            if takes in ("", "none"):
                raise UserInputError(f"{argument!r} is no flag and follows none that takes a value")
            takes = "none" if takes == "value" else takes
            continue
        if takes == "value":
            raise UserInputError(f"a value is missing before {argument!r}")
        flag = canonical(argument)
        if SHORT.match(flag) and not flag.startswith("--"):
            raise UserInputError(f"{argument!r}: write the flag's long form, which says what it is")
        if flag not in known:
            raise UserInputError(_refusal(flag, version, known))
        kind = known[flag]
        takes = "none" if "=" in argument or kind == "switch" else kind
    if takes == "value":
        raise UserInputError(f"{arguments[-1]!r} needs a value")
    _check_effect(arguments, version)


def check_value(flag: str, value: str, version: str) -> None:
    """Refuse (`UserInputError`) a value that `version` doesn't know for a flag whose values are recorded."""
    known = flag_table().flags(version)
    allowed = [entry.split("=", 1)[1] for entry in known if entry.startswith(f"{flag}=")]
    if value not in allowed:
        later = flag_table().releases_with(f"{flag}={value}")
        elsewhere = f"; {', '.join(later)} have it" if later else ""
        raise UserInputError(
            f"{flag} {value!r} isn't known to vLLM {version}{elsewhere}; allowed are {', '.join(sorted(allowed))}"
        )


def check_environment(variables: Mapping[str, str], version: str) -> None:
    """Refuse (`UserInputError`) a variable that once chose something and is ignored by `version`."""
    for change in VARIABLES:
        if change.name in variables and change.holds_for(version):
            raise UserInputError(
                f"the environment variable {change.name} is set, which vLLM {version} ignores "
                f"({change.what}): unset it; {change.instead}"
            )


def _check_effect(arguments: Sequence[str], version: str) -> None:
    for change in CHANGES:
        if change.without_effect and change.holds_for(version) and change.name in map(canonical, arguments):
            raise UserInputError(
                f"{change.name} has no effect in vLLM {version} ({change.what}): {change.instead}"
            )
    for position, argument in enumerate(arguments):
        if canonical(argument) == "--attention-backend":
            value = argument.split("=", 1)[1] if "=" in argument else arguments[position + 1]
            check_value("--attention-backend", value.upper(), version)


def _refusal(flag: str, version: str, known: Mapping[str, str]) -> str:
    """Why `flag` isn't one of `version`'s: what became of it, which releases have it, or what it may have meant."""
    for change in CHANGES:
        if change.name == flag and change.holds_for(version):
            return f"{flag} isn't a flag of vLLM {version} ({change.what}): {change.instead}"
    have = flag_table().releases_with(flag)
    if have:
        return f"{flag} isn't a flag of vLLM {version}, only of {', '.join(have)}"
    near = difflib.get_close_matches(flag, [name for name in known if "=" not in name], n=1)
    return f"{flag} isn't a flag of vLLM {version}" + (f"; did you mean {near[0]}?" if near else "")


def _ranges(present: Sequence[str], versions: Sequence[str]) -> str:
    """The releases as ranges over the recorded ones: '' for all, '<0.28.0', '>=0.29.0', '0.30.0 to 0.31.0'."""
    if len(present) == len(versions):
        return ""
    indexes = sorted(versions.index(version) for version in present)
    runs: list[list[int]] = []
    for index in indexes:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    said = []
    for first, last in runs:
        if first == 0:
            said.append(f"to {versions[last]}")
        elif last == len(versions) - 1:
            said.append(f"from {versions[first]}")
        else:
            said.append(f"{versions[first]} to {versions[last]}")
    return ", ".join(said)


def _releases(ranges: str, versions: Sequence[str]) -> tuple[str, ...]:
    """The inverse of `_ranges`."""
    if not ranges:
        return tuple(versions)
    found: list[str] = []
    for run in ranges.split(", "):
        words = run.split()
        first = 0 if words[0] == "to" else versions.index(words[1] if words[0] == "from" else words[0])
        last = len(versions) - 1 if words[0] == "from" else versions.index(words[-1])
        found += versions[first : last + 1]
    return tuple(found)
