"""`quantgate plan | calibrate | doctor | use | show | ui`: what a person types beside `dvc repro`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from pipeline.errors import UserInputError, run_main
from pipeline.runs import RUNS, point_at
from pipeline.settings import chosen_profile, load_settings, use
from pipeline.settings.compose import choices_of, profiles

OVERRIDES = "Hydra overrides, e.g. profile=rtx4090, device=rtx4090, server.max_model_len=4096"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="quantgate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan", help="what fits: the capacity table and the ordered levers, by arithmetic"
    )
    plan.add_argument("overrides", nargs="*", help=OVERRIDES)
    form = plan.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    form.add_argument("--csv", action="store_true", help="one line per variant instead of tables")
    plan.add_argument(
        "--plot", metavar="FILE", type=Path, help="also draw sequences against context: FILE.html or FILE.png"
    )
    plan.add_argument(
        "--workload",
        metavar="LENGTHS",
        help="expected concurrency for lengths that vary: mean=2000,p95=6000 (tokens per sequence), or a JSONL file "
        "whose lines have tokens, or prompt_tokens and output_tokens",
    )
    plan.add_argument(
        "--model-folder",
        metavar="DIR",
        type=Path,
        help="take the geometry from this folder's config.json, and count its safetensors where it has them",
    )
    calibrate = commands.add_parser(
        "calibrate", help="fit the memory overheads from measured runs, as a new option in conf/overheads/"
    )
    calibrate.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="measure/*.json of runs, and what `make gpu-test` wrote (default: all of the profile)",
    )
    calibrate.add_argument("--profile", help="the profile they were measured with (default: params.yaml's)")
    doctor = commands.add_parser("doctor", help="can this machine run a profile, and is the input in order?")
    doctor.add_argument("overrides", nargs="*", help=OVERRIDES)
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    use = commands.add_parser("use", help="point params.yaml at a profile, after conf/profile/ has changed")
    use.add_argument("profile", help="a name from conf/profile/")
    commands.add_parser("show", help="the verdict table of the last run, and where the report is")
    ui = commands.add_parser("ui", help="MLflow on 127.0.0.1")
    ui.add_argument("--port", type=int, default=5000)
    arguments = parser.parse_args()
    action = {
        "plan": _plan,
        "calibrate": _calibrate,
        "doctor": _doctor,
        "use": _use,
        "show": _show,
        "ui": _ui,
    }[arguments.command]
    return run_main(lambda: action(arguments))


def _overrides(given: list[str]) -> list[str]:
    """The overrides with a profile: the one named, else the one whose device or model is asked for, else params.yaml's."""
    for word in given:
        if "=" not in word:
            raise UserInputError(f"{word!r} isn't an override; write key=value ({OVERRIDES})")
    keys = dict(word.split("=", 1) for word in given)
    if "profile" in keys:
        return given
    for group in ("device", "model"):
        for name in profiles():
            if group in keys and choices_of(name).get(group) == keys[group]:
                return [f"profile={name}", *given]
    return [f"profile={chosen_profile()}", *given]


def _plan(arguments: argparse.Namespace) -> None:
    from pipeline.planning import as_csv, plan_of, plan_rows, render_plan
    from pipeline.planning.inputs import read_lengths, with_model_folder
    from pipeline.planning.render_time import text_lines
    from pipeline.planning.timing import guarded_time

    settings = load_settings(_overrides(arguments.overrides))
    counted: dict[str, int] = {}
    if arguments.model_folder is not None:
        settings, counted = with_model_folder(settings, arguments.model_folder)
    lengths = read_lengths(arguments.workload, settings.server.max_model_len) if arguments.workload else None
    time, why_not = guarded_time(settings)
    plan = plan_of(settings, lengths, counted) | {
        "time": None if time is None else time.as_json(),
        "time_note": why_not,
    }
    if arguments.plot is not None:
        from pipeline.planning.plot import write_plot

        path = write_plot(plan_rows(settings, counted), plan, arguments.plot)
        print(f"plot: {path}", file=sys.stderr)
    if arguments.csv:
        print(as_csv(plan), end="")
    else:
        shown = text_lines(time) if time is not None else [f"Expected time: {why_not}."]
        whole = "\n\n".join([render_plan(plan), "\n".join(shown)])
        print(json.dumps(plan, indent=2, ensure_ascii=False) if arguments.json else whole)


def _calibrate(arguments: argparse.Namespace) -> None:
    from pipeline.planning.calibrate import calibrate

    profile = arguments.profile or chosen_profile()
    settings = load_settings([f"profile={profile}"])
    files = arguments.files or [
        *sorted(
            path
            for path in (RUNS / profile / "measure").glob("*.json")
            if not path.name.endswith(".engine.json")
        ),
        *sorted((RUNS / "gpu-test" / profile).glob("*.json")),
    ]
    path, text = calibrate(settings, files)
    print(
        f"{text}\n{path} now holds them; `overheads={path.stem}` uses them, in a profile or with `quantgate plan`"
    )


def _doctor(arguments: argparse.Namespace) -> None:
    from pipeline.doctor import examine, verdict
    from pipeline.environments.needed import environments_of
    from pipeline.stages.environment import describe_machine

    settings = load_settings(_overrides(arguments.overrides))
    checks = examine(settings, describe_machine(environments_of(settings)))
    error = verdict(settings.profile, checks)
    if arguments.json:
        found = {
            "profile": settings.profile,
            "can_run": error is None,
            "checks": [dataclasses.asdict(c) for c in checks],
        }
        print(json.dumps(found, indent=2))
    else:
        for check in checks:
            fix = f" -> {check.fix}" if check.fix and check.status != "ok" else ""
            print(f"{check.status:4}  {check.name}: {check.found}{fix}")
    if error:
        raise error


def _use(arguments: argparse.Namespace) -> None:
    chosen = use(arguments.profile)
    print(f"{chosen.name} now names the profile {arguments.profile}; `dvc repro` runs it")


def _show(arguments: argparse.Namespace) -> None:
    from pipeline.files import read_json
    from pipeline.report.bundle import load_bundle
    from pipeline.report.terminal import time_table, verdict_table

    profile = chosen_profile()
    point_at(profile)
    if not Path("results/verdict.json").is_file():
        raise UserInputError(f"{profile} has no verdict here yet: `dvc repro` makes it")
    found = load_bundle("results", {})
    print(verdict_table(found.verdict, found.plan))
    print(time_table(found))
    page = read_json("results/tracking.json")["comparison_page"]
    print(f"\nreport:  {Path('results/report.html').resolve()}")
    print(f"MLflow:  `make ui`, then http://127.0.0.1:5000{page}")


def _ui(arguments: argparse.Namespace) -> None:
    from pipeline.tracking import TRACKING_URI, server_command

    command = server_command(TRACKING_URI, arguments.port)
    print(f"MLflow: http://127.0.0.1:{arguments.port} (Ctrl-C ends it)", flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
