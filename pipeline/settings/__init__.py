"""The one schema: Hydra composes `conf/`, pydantic validates, every field says its unit and its reason."""

from pipeline.settings.compose import load_settings
from pipeline.settings.graph import check_graph, chosen_profile, use
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
    "check_graph",
    "chosen_profile",
    "load_settings",
    "use",
]
