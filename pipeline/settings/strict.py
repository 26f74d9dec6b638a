"""The base of all settings, and the type of their names."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="becomes part of file names")
]


class Strict(BaseModel):
    """Base of all settings: unknown keys are errors, values don't change once checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)
