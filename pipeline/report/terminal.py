"""The verdict as plain text for the terminal: figures in columns, then one sentence per variant."""

from __future__ import annotations

import re
import textwrap
import unicodedata

from pipeline.report.bundle import ResultBundle
from pipeline.report.reading import (
    control_summary,
    fitting_sequences,
    headline,
    is_emulated,
    required_sequences,
    why,
)
from pipeline.report.times import last_run, phase_text, stage_rows
from pipeline.report.wording import (
    NOT_MEASURED,
    count,
    mebibytes,
    number,
    percent,
    points,
    points_interval,
    speed,
)
from pipeline.results import Plan, QualityDelta, VariantVerdict, Verdict

WIDTH = 110


def verdict_table(verdict: Verdict, plan: Plan | None = None) -> str:
    """The table, at most 110 columns wide for names of ordinary length; ASCII but for what the names hold.

    With the plan it also says when the device's memory is only emulated.
    """
    needed = required_sequences(verdict)
    head = ["variant", "verdict", "fit / needed", "ran at once", "accuracy change (pt)", "output tok/s"]
    rows = [
        [
            _plain(name),
            result.decision,
            _against(fitting_sequences(result.capacity), needed),
            count(result.capacity.observed_peak_running if result.capacity else None),
            _change(verdict, name, result),
            _speed(result),
        ]
        for name, result in verdict.variants.items()
    ]
    lines = [*_columned(head, rows), ""]
    widths = [max(_columns(name) for name in ["variant", *map(_plain, verdict.variants)])]
    lines += [*_quality_lines(verdict), ""]
    indent = " " * (widths[0] + 2)
    for name, result in verdict.variants.items():
        lines += textwrap.wrap(
            f"{_plain(name):<{widths[0]}}  {_plain(why(result))}", WIDTH, subsequent_indent=indent
        )
    for name, result in verdict.variants.items():
        lines += _rescue_lines(name, result)
    if any(is_emulated(result) for result in verdict.variants.values()):
        lines += ["", "* speed of an emulated kernel"]
    if plan is not None and plan.device_emulated:
        budget = mebibytes(plan.device_memory_bytes)
        lines += ["", f"{_plain(plan.device)} is an emulated memory budget of {budget}, not a card"]
    lines += ["", *textwrap.wrap(_plain(control_summary(verdict)), WIDTH)]
    title = f"{_plain(headline(verdict))} (profile {_plain(verdict.profile)}, reference {_plain(verdict.reference)})"
    return "\n".join([title, "", *lines]).replace("\u2212", "-").replace("\u00a0", " ") + "\n"


def time_table(bundle: ResultBundle) -> str:
    """Where the time went, a line per stage; empty where no stage left its time."""
    rows = stage_rows(bundle)
    if not rows:
        return ""
    whole, title = last_run(bundle), "Where the time went"
    if whole is not None:
        title += f": {_clock(whole.seconds)}, {_clock(whole.in_stages_s)} of it in stages"
    width = max(_columns(_plain(row.stage)) for row in rows)
    lines = [title, ""]
    for row in rows:
        head = f"{_plain(row.stage):<{width}}  {row.seconds:>6,.0f} s{' k' if row.kept else '  '}  "
        lines += textwrap.wrap(f"{head}{phase_text(row)}", WIDTH, subsequent_indent=" " * len(head))
    if any(row.kept for row in rows):
        lines += ["", "k: DVC kept the results; the time is that of the run that made them"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest if not hours else 0, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"


def _rescue_lines(name: str, result: VariantVerdict) -> list[str]:
    """What to try after a variant that lost quality, one rung after another."""
    if not result.rescue:
        return []
    lines = ["", f"{_plain(name)} lost quality; next worth trying:"]
    for place, rung in enumerate(result.rescue, 1):
        fit = "" if rung.sequences is None else f", {rung.sequences} fit"
        short = "" if rung.enough is None or rung.enough else " (too few)"
        if rung.variant is not None:
            here = f"{rung.variant}: {rung.decision}"
        else:
            here = rung.command or "not by quantgate"
        text = f"{place}. {rung.change} at {rung.max_model_len}{fit}{short}: {here}"
        lines += textwrap.wrap(
            _plain(text),
            WIDTH,
            initial_indent="  ",
            subsequent_indent="     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _columned(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(_columns(row[index]) for row in [head, *rows]) for index in range(len(head))]
    return [
        _line(head, widths),
        "  ".join("-" * width for width in widths),
        *(_line(row, widths) for row in rows),
    ]


def _quality_lines(verdict: Verdict) -> list[str]:
    """Accuracy, flips beside the A/A floor, the items that an open case needs, and the divergence."""
    head = ["variant", "items", "accuracy", "flips, A/A", "items needed", "KL (nats)", "same token"]
    rows = [
        [_plain(name), *_quality_row(result.quality, name == verdict.reference), *_divergence_row(result)]
        for name, result in verdict.variants.items()
        if result.quality is not None
    ]
    if not any(result.divergence for result in verdict.variants.values()):
        head, rows = head[:-2], [row[:-2] for row in rows]
    return _columned(head, rows) if rows else ["quality was not measured"]


def _divergence_row(result: VariantVerdict) -> list[str]:
    found = result.divergence
    if found is None:
        return ["", ""]
    return [f"{number(found.kl.value, 4)} +- {number(found.kl.se, 4)}", percent(found.same_top1.value)]


def _quality_row(delta: QualityDelta, is_reference: bool) -> list[str]:
    if is_reference:
        return [count(delta.n), percent(delta.accuracy), "reference", ""]
    noise = " (noise)" if delta.within_noise and delta.flips else ""
    needed = "" if delta.items_to_decide is None else count(delta.items_to_decide)
    return [
        count(delta.n),
        percent(delta.accuracy),
        f"{count(delta.flips)}, {count(delta.noise_floor_flips)}{noise}",
        needed or "decided",
    ]


def _against(value: int | None, needed: int | None) -> str:
    return f"{count(value)} / {needed}" if value is not None and needed is not None else count(value)


def _change(verdict: Verdict, name: str, result: VariantVerdict) -> str:
    if name == verdict.reference:
        return "reference"
    delta = result.quality
    if delta is None or delta.delta is None:
        return NOT_MEASURED
    return f"{points(delta.delta)} {points_interval(delta.delta_ci)}"


def _speed(result: VariantVerdict) -> str:
    found = result.throughput
    if found is None or found.peak_output_tok_s is None:
        return NOT_MEASURED
    ratio = "" if found.ratio_to_reference is None else f" (x{number(found.ratio_to_reference)})"
    return f"{speed(found.peak_output_tok_s)}{ratio}{'*' if is_emulated(result) else ' '}"


def _line(row: list[str], widths: list[int]) -> str:
    cells = []
    for index, (text, width) in enumerate(zip(row, widths, strict=True)):
        space = " " * (width - _columns(text))
        cells.append(text + space if index < 2 else space + text)
    return "  ".join(cells).rstrip()


def _plain(text: str) -> str:
    """One line without control characters, so that a name can't move the cursor or colour the terminal."""
    line = re.sub(r"\s+", " ", text)
    return "".join(sign for sign in line if unicodedata.category(sign)[0] != "C")


def _columns(text: str) -> int:
    """Terminal columns of a text; East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)
