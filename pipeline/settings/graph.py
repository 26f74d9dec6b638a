"""What DVC sees of the profiles: the one that params.yaml names, and the lists in graph/params.yaml that its stages loop over.

DVC's own Hydra switch stays off: `dvc repro` never composes with it, and `dvc exp run` would overwrite a params.yaml that was
edited by hand. Nor can DVC look a list up by the name of a profile (`${a.${b}}` doesn't nest, and `vars:` takes no
interpolation, dvc/parsing/interpolate.py and context.py in 3.67.1). So the graph holds the stages of all profiles, and the one
to run is reached through a path: dvc.yaml's last stage depends on runs/${profile}/.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.environments import on_device
from pipeline.errors import UserInputError
from pipeline.files import write_text
from pipeline.settings.compose import load_settings, profiles
from pipeline.settings.schema import Settings

GRAPH = Path("graph/params.yaml")
Graph = dict[str, dict[str, dict[str, str]]]
"""profiles, schemes and variants: name of a stage's instance -> what its template asks for."""


def chosen_profile(root: Path | None = None) -> str:
    """The profile that params.yaml names."""
    root = root or Path.cwd()
    path = root / "params.yaml"
    parameters = _read(path, "`quantgate use demo` writes it")
    name = parameters.get("profile")
    if not isinstance(name, str) or name not in profiles(root):
        found = "missing" if name is None else repr(name)
        raise UserInputError(f"{path}: profile is {found}; allowed are {', '.join(profiles(root))}")
    others = [key for key in parameters if key != "profile"]
    if others:
        raise UserInputError(
            f"{path}: unknown key {others[0]}; it names the profile and nothing else, the rest is in conf/"
        )
    return name


def use(profile: str, root: Path | None = None) -> Path:
    """Point params.yaml at `profile` and write the graph's lists anew; returns params.yaml.

    A profile that can't be composed is left out of the graph and named, unless it is the one asked for.
    """
    import yaml

    root = root or Path.cwd()
    whole = graph_of(load_settings([f"profile={profile}"], root))
    for other in profiles(root):
        if other == profile:
            continue
        try:
            _join(whole, graph_of(load_settings([f"profile={other}"], root)))
        except UserInputError as error:
            print(f"the profile {other} is left out of the graph: {error}", file=sys.stderr)
    ordered = {part: dict(sorted(entries.items(), key=_by_profile)) for part, entries in whole.items()}
    write_text(
        root / GRAPH,
        "# What the stages of graph/dvc.yaml loop over, for every profile. Written by `quantgate use PROFILE` from conf/; the\n"
        "# stages check that the two agree.\n" + yaml.safe_dump(ordered, sort_keys=False),
    )
    return write_text(
        root / "params.yaml",
        f"# The profile that `dvc repro` runs, from conf/profile/; also `dvc exp run -S profile=NAME`.\nprofile: {profile}\n",
    )


def check_graph(settings: Settings, root: Path | None = None) -> None:
    """`UserInputError` where graph/params.yaml isn't what conf/ says of this profile: stages would miss, or be stale."""
    found = _read((root or Path.cwd()) / GRAPH, f"`quantgate use {settings.profile}` writes it")
    for part, entries in graph_of(settings).items():
        listed = {
            key: entry
            for key, entry in (found.get(part) or {}).items()
            if entry.get("profile", key) == settings.profile
        }
        if listed != entries:
            wrong = next(key for key in {**entries, **listed} if listed.get(key) != entries.get(key))
            raise UserInputError(
                f"{GRAPH}: {part}.{wrong} isn't what conf/ says of the profile {settings.profile}; "
                f"run `quantgate use {settings.profile}`"
            )


def graph_of(settings: Settings) -> Graph:
    """One profile's part of the graph's lists. Instances of a stage are named PROFILE.ITEM."""
    profile, choices = settings.profile, settings.choices
    evalset = f"conf/evalset/{choices['evalset']}.yaml"
    policy = f"conf/policy/{choices['policy']}.yaml"
    texts = settings.calibration
    return {
        "profiles": {profile: dict(choices)},
        "schemes": {
            f"{profile}.{scheme}": {
                "profile": profile,
                "scheme": scheme,
                "quantizer": recipe.name,
                "lock": f"pipeline/environments/locks/{on_device(recipe.backend, settings.device.kind)}.txt",
                "calibration": choices["calibration"],
                "calibration_file": texts.file,
                "heldout_file": texts.heldout_file,
            }
            for scheme, recipe in settings.quantizers.items()
        },
        "variants": {
            f"{profile}.{name}": {
                "profile": profile,
                "variant": name,
                "weights": variant.weights,
                **{group: choices[group] for group in ("server", "load", "slo", "evalset")},
                "quality_after": _quality_after(settings, name),
                "evalset_folder": settings.evalset.folder or evalset,
                "calibration_file": texts.file,
                # A sequential run stops by the policy's margin.
                "stops_by": policy if settings.evalset.looks > 1 else evalset,
            }
            for name, variant in settings.variants.items()
        },
    }


def _quality_after(settings: Settings, name: str) -> str:
    """What a variant's quality stage reads of the reference's. The reference itself comes after the model it serves."""
    runs = f"runs/{settings.profile}"
    if name == settings.reference:
        return f"{runs}/prepare.json"
    kind = "json" if settings.evalset.looks > 1 else "logprobs.parquet"
    return f"{runs}/quality/{settings.reference}.{kind}"


def _join(whole: Graph, more: Graph) -> None:
    for part, entries in more.items():
        for key in entries:
            if key in whole[part]:
                raise UserInputError(f"{part}.{key} would be two stages of one name; rename the profile")
        whole[part] |= entries


def _by_profile(entry: tuple[str, dict[str, str]]) -> str:
    return entry[1].get("profile", entry[0])


def _read(path: Path, fix: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserInputError(f"{path}: no such file; {fix}") from None
    except yaml.YAMLError as error:
        raise UserInputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserInputError(f"{path}: must be a mapping of keys; {fix}")
    return content
