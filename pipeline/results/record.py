"""What all result records are: refused by name when cut, edited or of another version, instead of half understood."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import UserInputError
from pipeline.files import read_json, write_json

Decision = Literal["GO", "NO-GO", "INCONCLUSIVE"]


class Record(BaseModel):
    """Base of all result records: unknown keys are errors, values don't change once written."""

    model_config = ConfigDict(extra="forbid", frozen=True)


AnyRecord = TypeVar("AnyRecord", bound=Record)


def save(path: str | Path, record: Record) -> Path:
    """Write one record as JSON, atomically."""
    return write_json(path, record.model_dump(mode="json"))


def load(path: str | Path, kind: type[AnyRecord]) -> AnyRecord:
    """Read one record; `UserInputError` names the file and the first offending key."""
    try:
        return kind.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top level)"
        raise UserInputError(
            f"{path}: {key}: {first['msg']}; it wasn't written by this version, run `dvc repro --force` for its stage"
        ) from None
