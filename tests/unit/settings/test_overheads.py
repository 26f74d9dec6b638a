"""What conf/overheads/ may say: a table, a model's constants, or both; and what is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline.capacity.overheads import CONSTANTS
from pipeline.errors import UserInputError
from pipeline.settings import load_settings
from pipeline.settings.overheads import OverheadSettings

ROOT = Path(__file__).parents[3]
TERM = {
    "name": "activation", "engine_versions": ">=0.20", "gib": 0.4, "low_gib": 0.3, "high_gib": 0.5, "source": "here",
    "runs": 2, "driver": "a step of 2,048 tokens", "model_gib": 0.3,
}  # fmt: skip


def shipped(name: str = "rtx4090") -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "conf" / "overheads" / f"{name}.yaml").read_text())
    return content


@pytest.mark.parametrize("name", ["rtx4090", "h100"])
def test_a_cards_file_has_every_constant_with_its_source(name: str) -> None:
    model = OverheadSettings.model_validate(shipped(name)).model
    assert model is not None
    found = model.for_version("0.32.0")
    assert set(found) == set(CONSTANTS)
    assert all(one.source and one.low < one.high and one.runs == 0 for one in found.values())


def test_measured_terms_stand_beside_the_model_one_per_driver() -> None:
    other = TERM | {"driver": "a step of 8,192 tokens"}
    both = OverheadSettings.model_validate(shipped() | {"terms": [TERM, other]})
    assert len(both.for_version("0.32.0")) == 2
    twice = OverheadSettings.model_validate(shipped() | {"terms": [TERM, TERM]})
    with pytest.raises(ValueError, match=r"terms given twice for engine version 0\.32\.0: activation"):
        twice.for_version("0.32.0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"name": "x", "device": "x"}, "neither terms nor model"),
        (
            {"name": "x", "device": "x", "terms": [TERM]},
            "a term has a driver, but there is no model to scale it",
        ),
        (shipped() | {"terms": [TERM | {"model_gib": None}]}, "driver and model_gib need each other"),
        (shipped() | {"terms": [TERM | {"low_gib": 0.45}]}, "must rise"),
        (shipped() | {"terms": [TERM | {"engine_versions": "new"}]}, "no version specifier"),
    ],
)
def test_what_cant_be_meant_is_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OverheadSettings.model_validate(content)


def test_a_constant_that_isnt_there_or_falls_is_named() -> None:
    content = shipped()
    [first, *rest] = content["model"]["constants"]
    short = content | {"model": content["model"] | {"constants": rest}}
    with pytest.raises(
        ValueError, match=rf"incomplete or given twice for engine version 0\.32\.0: {first['name']}"
    ):
        OverheadSettings.model_validate(short).for_version("0.32.0")
    falling = content | {"model": content["model"] | {"constants": [first | {"high": 0.0}, *rest]}}
    with pytest.raises(ValidationError, match=f"{first['name']}: low 0.0, value .* and high 0.0 must rise"):
        OverheadSettings.model_validate(falling)


def test_a_model_is_of_cards_only() -> None:
    with pytest.raises(
        UserInputError, match="have a model, which is of cards; the device 'cpu-demo' is a cpu"
    ):
        load_settings(["profile=demo", "overheads=rtx4090"], ROOT)


def test_an_h100_can_be_planned() -> None:
    found = load_settings(["profile=rtx4090", "device=h100", "overheads=h100"], ROOT)
    assert (found.device.compute_capability, found.overheads.device) == ("9.0", "h100")
