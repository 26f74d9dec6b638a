"""From `conf/` to validated settings. Hydra composes in process; what DVC sees of a profile is in graph.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import UserInputError
from pipeline.settings.schema import Settings

GROUPS = ("model", "device", "overheads", "server", "load", "evalset", "slo", "policy", "calibration")


def load_settings(overrides: Sequence[str] = (), root: Path | None = None) -> Settings:
    """Compose `conf/config.yaml` with Hydra overrides and validate it.

    Args:
        overrides: Hydra's override grammar, e.g. `["profile=demo"]` or `["device=rtx4090"]`.
        root: the clone; by default the working folder.

    Raises:
        UserInputError: naming the conf file, the key, the value and what is allowed.
    """
    root = (root or Path.cwd()).resolve()
    composed, choices = _compose(root, list(overrides))
    for key, kind in (("variant_names", list), ("quantizer_names", dict)):
        if not isinstance(composed.get(key), kind):
            wanted = "a list of variants" if kind is list else "a mapping of weights schemes to quantizers"
            raise UserInputError(
                f"conf/profile/{choices.get('profile', '?')}.yaml: {key} must be {wanted}, found {composed.get(key)!r}"
            )
    composed["variants"] = {name: _variant(root, name) for name in composed.pop("variant_names")}
    composed["quantizers"] = {
        scheme: _compose_group(root, "quantizer", name)
        for scheme, name in composed.pop("quantizer_names").items()
    }
    composed["choices"] = {group: choices[group] for group in GROUPS}
    try:
        return Settings.model_validate(composed)
    except ValidationError as error:
        raise UserInputError(_explain(error, choices)) from None


def choices_of(profile: str, root: Path | None = None) -> dict[str, str]:
    """Conf group -> option that a profile selects, read from the defaults lists alone: composing takes 0.1 s a profile."""
    import yaml

    conf = (root or Path.cwd()) / "conf"
    chosen: dict[str, str] = {}
    for path in (conf / "config.yaml", conf / "profile" / f"{profile}.yaml"):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise UserInputError(f"{path}: not valid YAML ({_one_line(error)})") from None
        if not isinstance(content, dict):
            raise UserInputError(f"{path}: must be a mapping of keys")
        for entry in content.get("defaults", []):
            if isinstance(entry, dict):
                chosen |= {str(key).removeprefix("override /"): str(value) for key, value in entry.items()}
    return {group: chosen[group] for group in GROUPS if group in chosen}


def profiles(root: Path | None = None) -> list[str]:
    """Names of the profiles in `conf/profile/`."""
    return sorted(path.stem for path in ((root or Path.cwd()) / "conf" / "profile").glob("*.yaml"))


def _compose(root: Path, overrides: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    conf = root / "conf"
    if not (conf / "config.yaml").is_file():
        raise UserInputError(f"{conf}/config.yaml: no such file; run from the top of the clone")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            config = compose("config", overrides=overrides, return_hydra_config=True)
            choices = dict(config.hydra.runtime.choices)
            with open_dict(config):
                del config["hydra"]  # its own interpolations only resolve inside a job
            content = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise UserInputError(f"conf/: {_one_line(error)}") from None
    except Exception as error:  # yaml's scanner errors come through bare
        raise UserInputError(f"conf/: {type(error).__name__}: {_one_line(error)}") from None
    assert isinstance(content, dict)
    for group in ("variant", "quantizer"):
        content.pop(group, None)
    return {str(key): value for key, value in content.items()}, choices


def _compose_group(root: Path, group: str, name: str) -> dict[str, Any]:
    """One option of a group on its own. Hydra composes it where it has a defaults list; without one it would take 50 ms for a copy."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    available = sorted(path.stem for path in (root / "conf" / group).glob("*.yaml"))
    if name not in available:
        raise UserInputError(f"conf/{group}/{name}.yaml: no such {group}; there are {', '.join(available)}")
    GlobalHydra.instance().clear()
    try:
        loaded = OmegaConf.load(root / "conf" / group / f"{name}.yaml")
        if "defaults" in loaded:
            with initialize_config_dir(str(root / "conf"), version_base="1.3"):
                loaded = compose(f"{group}/{name}")
        content = OmegaConf.to_container(loaded, resolve=True)
    except Exception as error:
        raise UserInputError(f"conf/{group}/{name}.yaml: {_one_line(error)}") from None
    assert isinstance(content, dict)
    inner = content.get(group, content)
    if not isinstance(inner, dict):
        raise UserInputError(f"conf/{group}/{name}.yaml: must be a mapping of keys")
    return {"name": name, **inner}


def _variant(root: Path, name: str) -> dict[str, Any]:
    return _compose_group(root, "variant", name)


def _explain(error: ValidationError, choices: dict[str, str]) -> str:
    """The first fault as `file: key is value: what is allowed`."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    group = (
        {"variants": "variant", "quantizers": "quantizer"}.get(location[0], location[0]) if location else ""
    )
    if group in ("variant", "quantizer") and len(location) > 1:
        file, key = f"conf/{group}/{location[1]}.yaml", ".".join(location[2:])
    elif group in choices:
        file, key = f"conf/{group}/{choices[group]}.yaml", ".".join(location[1:])
    else:
        file, key = f"conf/profile/{choices.get('profile', '?')}.yaml", ".".join(location)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key"
    value = f" is {first['input']!r}" if key and first["type"] not in ("missing", "extra_forbidden") else ""
    return f"{file}: {key or '(whole file)'}{value}: {message}"


def _one_line(error: Exception) -> str:
    """Without Hydra's list of the folders that it searched: they are this project's, by absolute path."""
    return " ".join(str(error).split("Config search path:")[0].split())
