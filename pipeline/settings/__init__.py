"""The one schema: Hydra composes `conf/`, pydantic validates, every field says its unit and its reason."""

from pipeline.settings.compose import load_parameters, load_settings, write_parameters
from pipeline.settings.schema import (
    DeviceSettings,
    EvalsetSettings,
    LoadSettings,
    ModelSettings,
    ServerSettings,
    Settings,
    VariantSettings,
)

__all__ = [
    "DeviceSettings",
    "EvalsetSettings",
    "LoadSettings",
    "ModelSettings",
    "ServerSettings",
    "Settings",
    "VariantSettings",
    "load_parameters",
    "load_settings",
    "write_parameters",
]
