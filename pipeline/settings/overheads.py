"""What a device spends beside weights and KV pool: figures in a table, or the constants of a model of them."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from pipeline.settings.strict import Name, Strict


class Versioned(Strict):
    """A figure that holds for some versions of the engine, with its source."""

    name: str
    engine_versions: str = Field(description="PEP 440 specifier of the engine versions it holds for")
    source: str = Field(min_length=1, description="where the figures are from")
    runs: int = Field(
        default=0, ge=0, description="own measured runs behind the figures; 0: published ones only"
    )

    @model_validator(mode="after")
    def _specifier(self) -> Versioned:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            SpecifierSet(self.engine_versions)
        except InvalidSpecifier:
            raise ValueError(
                f"{self.name}: engine_versions {self.engine_versions!r} is no version specifier, e.g. '>=0.20'"
            ) from None
        return self

    def holds_for(self, version: str) -> bool:
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(self.engine_versions).contains(version, prereleases=True)


class OverheadTerm(Versioned):
    """One memory term beside weights and KV, with the band it is believed to lie in."""

    name: Literal["buffers", "activation", "non_torch", "cuda_graphs", "emulated"] = Field(
        description="buffers: what loading adds to the checkpoint's bytes; the others as the engine's log names them"
    )
    gib: float = Field(ge=0, description="expected, GiB")
    low_gib: float = Field(ge=0)
    high_gib: float = Field(ge=0)
    driver: str | None = Field(
        default=None,
        description="what the model computes the term from in the runs that measured it: with the same driver the figures stand in "
        "its place, elsewhere its own are scaled by gib / model_gib. null: they hold anywhere",
    )
    model_gib: float | None = Field(
        default=None, gt=0, description="what the model says of that driver, GiB; needed beside it"
    )

    @model_validator(mode="after")
    def _ordered(self) -> OverheadTerm:
        if not self.low_gib <= self.gib <= self.high_gib:
            raise ValueError(
                f"{self.name}: low_gib {self.low_gib}, gib {self.gib} and high_gib {self.high_gib} must rise"
            )
        if (self.driver is None) != (self.model_gib is None):
            raise ValueError(f"{self.name}: driver and model_gib need each other")
        return self


class OverheadConstant(Versioned):
    """What a card's term has beside the sizes that are computed (pipeline/capacity/overheads.py), in the unit its name ends in."""

    name: Literal[
        "buffers_gib", "workspace_gib", "non_torch_gib", "parallel_gib", "graph_layer_mib", "graph_expert_layer_mib", "context_gib",
        "parallel_context_gib",
    ]  # fmt: skip
    value: float = Field(ge=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> OverheadConstant:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"{self.name}: low {self.low}, value {self.value} and high {self.high} must rise"
            )
        return self


class OverheadModel(Strict):
    """The constants of a card with which its terms are computed from what drives them."""

    multiprocessors: int = Field(ge=1, description="SMs of the card: rows of a sampling kernel's buffer")
    constants: tuple[OverheadConstant, ...]

    def for_version(self, version: str) -> dict[str, OverheadConstant]:
        """Name -> the constant that holds for an engine version; ValueError where one isn't there, or twice."""
        found = [constant for constant in self.constants if constant.holds_for(version)]
        names = [constant.name for constant in found]
        wanted = get_args(OverheadConstant.model_fields["name"].annotation)
        missing = [name for name in wanted if name not in names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if missing or twice:
            what = "no term for" if len(missing) == len(wanted) else "incomplete or given twice for"
            raise ValueError(f"{what} engine version {version}: {', '.join(missing or twice)}")
        return {constant.name: constant for constant in found}


class OverheadSettings(Strict):
    """A + O of one device: a table of terms by engine version, or a model of them, or both: what was measured beside the model."""

    name: Name
    device: Name = Field(description="the device that they are of")
    terms: tuple[OverheadTerm, ...] = ()
    model: OverheadModel | None = Field(
        default=None, description="null: the terms of the table are all there are"
    )

    @model_validator(mode="after")
    def _something(self) -> OverheadSettings:
        if not self.terms and self.model is None:
            raise ValueError("neither terms nor model: nothing says what the device spends")
        if self.model is None and any(term.driver for term in self.terms):
            raise ValueError("a term has a driver, but there is no model to scale it")
        return self

    def for_version(self, version: str) -> tuple[OverheadTerm, ...]:
        """The table's terms that hold for an engine version; one given twice for it, or nothing at all, is a ValueError."""
        found = tuple(term for term in self.terms if term.holds_for(version))
        keys = [(term.name, term.driver) for term in found]
        twice = sorted({name for name, driver in keys if keys.count((name, driver)) > 1})
        if twice:
            raise ValueError(f"terms given twice for engine version {version}: {', '.join(twice)}")
        if self.model is not None:
            self.model.for_version(version)
        elif not found:
            raise ValueError(f"no term for engine version {version}")
        return found
