"""What a check says, and what all of them come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import EnvironmentUnfitError, QuantgateError, UserInputError

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do when it isn't ok; `exit_code` is what a failure is worth."""

    name: str
    status: Status
    found: str
    fix: str = ""
    exit_code: int = 0


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, fix: str) -> Check:
    return Check(name, "warn", found, fix)


def unfit(name: str, found: str, fix: str) -> Check:
    """The machine can't do it."""
    return Check(name, "fail", found, fix, EnvironmentUnfitError.exit_code)


def wrong(name: str, found: str, fix: str) -> Check:
    """The user's input is wrong."""
    return Check(name, "fail", found, fix, UserInputError.exit_code)


def guarded(name: str, body: Callable[[], Check | Iterable[Check]]) -> list[Check]:
    """What `body` finds; whatever it raises is one more failed check, so that neither earlier nor later ones are lost."""
    found: list[Check] = []
    try:
        result = body()
        for check in [result] if isinstance(result, Check) else result:
            found.append(check)
    except QuantgateError as error:
        found.append(Check(name, "fail", str(error), "", error.exit_code))
    except Exception as error:
        said = f"the check itself broke ({type(error).__name__}: {error})"
        found.append(Check(name, "fail", said, "please report it", QuantgateError.exit_code))
    return found


def verdict(profile: str, checks: Sequence[Check]) -> QuantgateError | None:
    """The error to end with, or None when the profile can run. An unfit machine outweighs wrong input: nothing helps there."""
    failed = [check for check in checks if check.status == "fail"]
    if not failed:
        return None
    unfit_ones = [check for check in failed if check.exit_code == EnvironmentUnfitError.exit_code]
    # Of several wrong inputs the one that says what to do: others often only stumble over it.
    first = (unfit_ones or [check for check in failed if check.fix] or failed)[0]
    others = [check.name for check in failed if check is not first]
    text = f"the profile {profile} can't run here: {first.found}" + (f"; {first.fix}" if first.fix else "")
    if others:
        text += f" (failed too: {', '.join(others)})"
    kinds = {kind.exit_code: kind for kind in (QuantgateError, UserInputError, EnvironmentUnfitError)}
    return kinds.get(first.exit_code, EnvironmentUnfitError)(text)
