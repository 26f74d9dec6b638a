"""The expected times as a person reads them: in `quantgate plan`, in `quantgate doctor`, and in README, word for word.

`python -m pipeline.planning.render_time profile=rtx4090` prints README's tables.
"""

from __future__ import annotations

import sys

from pipeline.errors import run_main
from pipeline.planning.render import table
from pipeline.planning.timing import DOWNLOAD_BYTES_S, ENVIRONMENT_GB, ProfileTime

Rows = list[list[str]]

STAGES = ["stage", "expected", "of it"]
VARIANTS = ["variant", "start", "fill", "levels", "search", "`measure`", "`quality`"]


def headline(time: ProfileTime) -> str:
    """One line: "about 4 h 10 min, 9 variants"."""
    return f"about {duration(time.total_s, to_min=10)}, {len(time.variants)} variants"


def duration(seconds: float, to_min: int = 1) -> str:
    """Rounded to minutes, or to so many; never 0."""
    minutes = max(to_min, round(seconds / 60 / to_min) * to_min)
    hours, rest = divmod(minutes, 60)
    parts = [f"{hours} h"] if hours else []
    return " ".join([*parts, f"{rest} min"] if rest or not parts else parts)


def stage_rows(time: ProfileTime) -> Rows:
    """Stage, time, and what it is made of."""
    size_gb = sum(ENVIRONMENT_GB.get(name, 0.0) for name in time.environments_s)
    line = f"{DOWNLOAD_BYTES_S * 8 / 1e6:.0f} Mbit/s"
    schemes = ", ".join(f"{name} {duration(seconds)}" for name, seconds in time.quantize_s.items())
    longest = max(one.measure_s + one.load.longest_search_s - one.load.search_s for one in time.variants)
    return [
        [
            "environments",
            duration(sum(time.environments_s.values())),
            f"{size_gb:.1f} GB of wheels at {line}",
        ],
        ["`prepare`", duration(time.prepare_s), f"the model at {line}, checked and copied"],
        ["`quantize`", duration(time.quantize_s_total), schemes or "nothing"],
        [
            "`measure`",
            duration(time.measure_s),
            f"by variant, see below; up to {duration(longest)} where a search is long",
        ],
        ["`quality`", duration(time.quality_s), "by variant, see below"],
        ["all", f"about {duration(time.total_s, to_min=10)}", f"{len(time.variants)} variants"],
    ]


def variant_rows(time: ProfileTime) -> Rows:
    """By variant, with what `measure` is made of."""
    return [
        [
            one.variant,
            *(
                duration(seconds)
                for seconds in (
                    one.first_start_s,
                    one.load.fill_s,
                    one.load.levels_s,
                    one.load.search_s,
                    one.measure_s,
                    one.quality_s,
                )
            ),
        ]
        for one in time.variants
    ]


def text_lines(time: ProfileTime) -> list[str]:
    """Both tables as `quantgate plan` shows them."""
    return [
        f"Expected time: {headline(time)}. Computed from geometry, card, load and eval set; none of it measured on a card.",
        *table(STAGES, _plain(stage_rows(time))),
        "",
        *table(_plain([VARIANTS])[0], _plain(variant_rows(time))),
    ]


def _plain(rows: Rows) -> Rows:
    """Without Markdown's marks."""
    return [[cell.replace("`", "") for cell in row] for row in rows]


def markdown(time: ProfileTime) -> str:
    """Both tables as README has them."""
    return f"{_markdown(STAGES, stage_rows(time))}\n\n{_markdown(VARIANTS, variant_rows(time))}"


def _markdown(header: list[str], rows: Rows) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" if row[0] != "---" else f"|{'|'.join(row)}|" for row in lines)


def main() -> int:
    from pipeline.errors import UserInputError
    from pipeline.planning.timing import guarded_time
    from pipeline.settings import load_settings

    time, why = guarded_time(load_settings(sys.argv[1:]))
    if time is None:
        raise UserInputError(why)
    print(markdown(time))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
