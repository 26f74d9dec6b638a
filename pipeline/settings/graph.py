"""What DVC sees of the profiles: the one that params.yaml names, and runs/<profile>/params.yaml, which its stages loop over.

DVC's own Hydra switch stays off: `dvc repro` never composes with it, and `dvc exp run` would overwrite a params.yaml that was
edited by hand. Nor can DVC look a list up by the name of a profile (`${a.${b}}` doesn't nest, and `vars:` takes no
interpolation, dvc/parsing/interpolate.py and context.py in 3.67.1). So each profile has a dvc.yaml of its own, all of them
links to one file, and the one to run is reached through a path: the last stage of the root's dvc.yaml depends on
runs/${profile}/.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.environments import on_device
from pipeline.errors import UserInputError
from pipeline.files import write_text
from pipeline.runs import RUNS, link
from pipeline.settings.compose import load_settings, profiles
from pipeline.settings.schema import Settings

STAGES = RUNS / "stages.yaml"


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
    """Point params.yaml at `profile` and write every profile's stages anew; returns params.yaml.

    A profile that can't be composed is named and keeps the stages that it had, unless it is the one asked for.
    """
    root = root or Path.cwd()
    _write_stages(load_settings([f"profile={profile}"], root), root)
    for other in profiles(root):
        if other == profile:
            continue
        try:
            _write_stages(load_settings([f"profile={other}"], root), root)
        except UserInputError as error:
            print(f"the stages of the profile {other} stay as they were: {error}", file=sys.stderr)
    return write_text(
        root / "params.yaml",
        f"# The profile that `dvc repro` runs, from conf/profile/; also `dvc exp run -S profile=NAME`.\nprofile: {profile}\n",
    )


def _write_stages(settings: Settings, root: Path) -> None:
    import yaml

    folder = root / RUNS / settings.profile
    folder.mkdir(parents=True, exist_ok=True)
    link(folder / "dvc.yaml", root / STAGES)
    write_text(
        folder / "params.yaml",
        "# What the stages of this profile loop over. Written by `quantgate use PROFILE` from conf/; they check that it is so.\n"
        + yaml.safe_dump(stage_parameters(settings), sort_keys=False),
    )


def check_graph(settings: Settings, root: Path | None = None) -> None:
    """`UserInputError` where a profile's params.yaml isn't what conf/ says: stages would miss, or be stale."""
    path = RUNS / settings.profile / "params.yaml"
    fix = f"run `quantgate use {settings.profile}`"
    found, wanted = _read((root or Path.cwd()) / path, fix), stage_parameters(settings)
    if found != wanted:
        wrong = next(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
        raise UserInputError(
            f"{path}: {wrong} isn't what conf/ says of the profile {settings.profile}; {fix}"
        )


def stage_parameters(settings: Settings) -> dict[str, Any]:
    """What runs/stages.yaml asks for: the chosen groups, the files that stages read, and the lists that they loop over."""
    choices = settings.choices
    evalset, policy = f"conf/evalset/{choices['evalset']}.yaml", f"conf/policy/{choices['policy']}.yaml"
    return {
        "profile": settings.profile,
        **choices,
        "evalset_folder": settings.evalset.folder or evalset,
        # A sequential run stops by the policy's margin.
        "stops_by": policy if settings.evalset.looks > 1 else evalset,
        "calibration_file": settings.calibration.file,
        "heldout_file": settings.calibration.heldout_file,
        "schemes": {
            scheme: {
                "quantizer": recipe.name,
                "lock": f"pipeline/environments/locks/{on_device(recipe.backend, settings.device.kind)}.txt",
            }
            for scheme, recipe in settings.quantizers.items()
        },
        "variants": {
            name: {"weights": variant.weights, "quality_after": _quality_after(settings, name)}
            for name, variant in settings.variants.items()
        },
    }


def _quality_after(settings: Settings, name: str) -> str:
    """What a variant's quality stage reads of the reference's. The reference itself comes after the model it serves."""
    runs = RUNS / settings.profile
    if name == settings.reference:
        return f"{runs}/prepare.json"
    kind = "json" if settings.evalset.looks > 1 else "logprobs.parquet"
    return f"{runs}/quality/{settings.reference}.{kind}"


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
