"""The page and the Markdown: everything is in, nothing reaches outside, nothing is invented, nothing breaks out."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from pipeline.report import ResultBundle, render
from pipeline.report.markdown import render_markdown
from pipeline.report.sections.quality import worst_loss
from pipeline.report.wording import NOT_MEASURED
from pipeline.results import Gate, KernelChoice, KernelTimes
from tests.support.sample_results import SHAPES, SLICES, sample_results

VOID = {"meta", "path", "use", "rect", "br"}


class Page(HTMLParser):
    """Collects what the assertions need and notices tags that don't close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key.split(":")[-1] in ("href", "src", "srcset", "action", "data", "poster"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.fixture(scope="module")
def bundle() -> ResultBundle:
    return sample_results()


@pytest.fixture(scope="module")
def rendered(bundle: ResultBundle) -> tuple[str, str]:
    return render(bundle)


def renamed(old: str, new: str) -> ResultBundle:
    """The sample with one variant under another name, everywhere."""
    source = sample_results()
    plan = source.plan.model_copy(
        update={
            "device": new,
            "rows": [
                row.model_copy(update={"variant": new}) if row.variant == old else row
                for row in source.plan.rows
            ],
        }
    )

    def swap(values: dict[str, Any]) -> dict[str, Any]:
        return {new if name == old else name: value for name, value in values.items()}

    variants = swap(dict(source.verdict.variants))
    gate = Gate(name=new, decision="NO-GO", value=1.0, limit=2.0, unit=new, why=new)
    variants[new] = variants[new].model_copy(update={"gates": [gate, *variants[new].gates]})
    return ResultBundle(
        verdict=source.verdict.model_copy(update={"variants": variants}),
        plan=plan,
        measurements=swap(dict(source.measurements)),
        qualities=swap(dict(source.qualities)),
        quantizations={new: source.quantizations["awq"].model_copy(update={"backend": new})},
        environment=source.environment.model_copy(update={"cpu_model": new}),
        timelines=swap(dict(source.timelines)),
        facts={"policy": {new: new}, "variants": {new: new}},
    )


def test_every_variant_gate_and_reason_is_on_both(bundle: ResultBundle, rendered: tuple[str, str]) -> None:
    page, markdown = Page(rendered[0]).text, rendered[1]
    for name, result in bundle.verdict.variants.items():
        assert name in page and name in markdown
        assert result.decision in page and result.decision in markdown
        for gate in result.gates:
            reason = gate.why[1:]  # the first letter may be made upper-case
            assert gate.name in page and gate.name in markdown
            assert reason in page and reason in markdown
    for label in SLICES:
        assert label in page and label in markdown


def test_the_page_is_well_formed_and_its_ids_are_unique(rendered: tuple[str, str]) -> None:
    page = Page(rendered[0])
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))


def test_the_page_loads_nothing(rendered: tuple[str, str]) -> None:
    html = rendered[0]
    page = Page(html)
    assert page.links and all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)


def test_the_same_results_give_the_same_bytes(rendered: tuple[str, str]) -> None:
    assert render(sample_results()) == rendered


def test_the_page_stays_small(rendered: tuple[str, str]) -> None:
    assert len(rendered[0].encode()) < 1_000_000


def test_every_plot_is_drawn_and_described(rendered: tuple[str, str]) -> None:
    labels = re.findall(r'<svg role="img" aria-label="([^"]+)"', rendered[0])
    # ladder; load curves, two plots of probes, ITL, timelines; forest; layer errors; stages
    assert len(labels) == 1 + (3 + 2 + 1 + len(SHAPES)) + 1 + 1 + 1
    assert len(set(labels)) == len(labels)


def test_no_placeholder_colour_is_left(rendered: tuple[str, str]) -> None:
    assert not re.search(r"#0[ab]0[ab]0", rendered[0])
    used = set(re.findall(r"var\((--[\w-]+)\)", rendered[0]))
    defined = set(re.findall(r"(--[\w-]+):", rendered[0]))
    assert used <= defined


def test_emulation_is_said_before_the_first_table(rendered: tuple[str, str]) -> None:
    for text in rendered:
        start = re.split(r"<table|\n\|", text, maxsplit=1)[0]
        assert "Emulated memory budget" in start and "Emulated kernels" in start


@pytest.mark.usefixtures("without_plots")
def test_a_real_device_with_stock_kernels_carries_no_caveat(bundle: ResultBundle) -> None:
    variants = {
        name: result.model_copy(update={"provenance": result.provenance.model_copy(update={"emulated": []})})
        for name, result in bundle.verdict.variants.items()
        if result.provenance
    }
    real = ResultBundle(
        verdict=bundle.verdict.model_copy(update={"variants": variants}),
        plan=bundle.plan.model_copy(update={"device_emulated": False}),
        measurements=bundle.measurements,
        qualities=bundle.qualities,
        quantizations=bundle.quantizations,
        environment=bundle.environment,
        timelines=bundle.timelines,
        facts=bundle.facts,
    )
    html, markdown = render(real)
    assert "Emulated memory budget." not in html and "Emulated kernels." not in html
    assert 'class="tag">emulated' not in html and "(emulated kernel)" not in markdown


@pytest.mark.usefixtures("without_plots")
def test_whose_kernel_ran_is_said_with_its_reason(bundle: ResultBundle) -> None:
    figures = [KernelTimes(tokens=8, stock_us=600.0, plugin_us=400.0, bf16_us=500.0)]
    chosen = {
        "int4": KernelChoice(taken="plugin", why="comparison", compared=figures),
        "fp8_kv": KernelChoice(taken="stock", why="setting"),
    }
    assert bundle.verdict.variants["awq"].provenance is not None
    changed = {"emulated": ["int4_awq_linear"], "kernels": chosen}
    result = bundle.verdict.variants["awq"]
    awq = result.model_copy(
        update={"provenance": bundle.verdict.variants["awq"].provenance.model_copy(update=changed)}
    )
    verdict = bundle.verdict.model_copy(update={"variants": {**bundle.verdict.variants, "awq": awq}})
    for text in render(replace(bundle, verdict=verdict)):
        assert "int4 product: plugin, by comparison" in text and "400 against 600 at 8" in text
        assert "FP8 KV attention: stock, the device" in text
        assert "which was the faster in a comparison on this machine" in text


def test_the_control_stands_beside_every_delta(rendered: tuple[str, str]) -> None:
    table = rendered[1].split("### Verdict by variant")[1].split("###")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(SHAPES)
    assert all("A/A" in row for row in rows if not row.startswith("| bf16<br>"))


def test_missing_results_are_said_and_never_zero() -> None:
    html, markdown = render(sample_results(frozenset({"awq", "bf16-again"})))
    for section, cells in (("### Load levels", 12), ("### Accuracy change against the reference", 9)):
        table = markdown.split(section)[1].split("###")[0]
        row = next(line for line in table.splitlines() if line.startswith("| awq |"))
        assert row.count(NOT_MEASURED) == cells
        assert not re.search(r"\d", row)
    assert "noise floor is unknown" in html


def test_everything_missing_still_renders() -> None:
    html, markdown = render(sample_results(frozenset(SHAPES)))
    assert "No variant is GO" in html and NOT_MEASURED in markdown
    assert Page(html).open == []


def test_a_gate_that_does_not_count_is_marked(rendered: tuple[str, str]) -> None:
    assert rendered[1].count("(not gated)") == 2 * len(SHAPES)  # in the matrix and in detail


def test_hostile_names_stay_text() -> None:
    hostile = "<script>alert(1)</script> a&b\"'<i> a|b`c`*d* $x_1$ $ ]]> --><svg>"
    html, markdown = render(renamed("awq", hostile))
    page = Page(html)
    assert hostile in page.text
    assert not page.tags & {"script", "i"}
    assert page.open == []
    assert "<script" not in markdown and "<svg" not in markdown
    for block in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1  # a bar in a name opened no column


def test_flipped_items_are_listed_losses_first_with_both_answers_and_scores() -> None:
    """The sample's awq loses 14 items and gains 9; the A/A control has none, so it has no table."""
    markdown = render_markdown(sample_results())
    table = markdown.split("### Items that awq answers differently")[1].split("###")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 23
    changes = ["lost" if ", lost" in row else "gained" for row in rows]
    assert changes == ["lost"] * 14 + ["gained"] * 9
    assert "right, 4.50 nats" in rows[0] and "wrong, \u22124.50 nats" in rows[0]
    assert "the answer is" in rows[0] and "“choice " in rows[0]
    assert "Items that bf16-again" not in markdown


def test_many_flips_are_cut_and_it_says_so() -> None:
    markdown = render_markdown(sample_results())
    assert "Items that awq-fp8kv answers differently ###" not in markdown
    results = sample_results()
    own = results.qualities["awq"]
    assert own is not None
    wrong = own.model_copy(update={"samples": [s.model_copy(update={"correct": False}) for s in own.samples]})
    markdown = render_markdown(replace(results, qualities={**results.qualities, "awq": wrong}))
    assert re.search(r"Items that awq answers differently \(the first 40 of 1\d\d\)", markdown)


def test_slices_are_ranked_by_their_worst_loss() -> None:
    bundle = sample_results()
    markdown = render_markdown(bundle)
    table = markdown.split("### Change by slice, the worst loss first")[1].split("###")[0]
    shown = [
        line.split("|")[1].split("<br>")[0].strip() for line in table.splitlines() if line.startswith("| ")
    ][2:]
    deltas = [result.quality for result in bundle.verdict.variants.values()]
    losses = {label: worst_loss(deltas, label) for label in SLICES}
    assert shown == sorted(losses, key=lambda label: (losses[label], label))


def test_a_flip_rate_within_the_floor_is_said_to_be_noise() -> None:
    bundle = sample_results()
    awq = bundle.verdict.variants["awq"]
    assert awq.quality is not None
    noisy = awq.model_copy(update={"quality": awq.quality.model_copy(update={"within_noise": True})})
    verdict = bundle.verdict.model_copy(update={"variants": {**bundle.verdict.variants, "awq": noisy}})
    markdown = render_markdown(replace(bundle, verdict=verdict))
    assert "flips 23, A/A 0: noise" in markdown and "23 (noise)" in markdown
    plain = render_markdown(bundle)
    assert "noise\n" not in plain and "(noise)" not in plain


def test_divergence_stands_beside_the_deltas_with_its_errors() -> None:
    markdown = render_markdown(sample_results())
    table = markdown.split("### Divergence from the reference")[1].split("###")[0]
    row = next(
        line for line in table.splitlines() if line.startswith("| awq<br>") or line.startswith("| awq |")
    )
    assert "1.2300<br>± 0.0023" in row and "0.11500<br>± 0.00460" in row and "92.33 %" in row
    assert "6.1 % of the reference's mass" in markdown and "a lower bound" in markdown
    summary = next(line for line in markdown.splitlines() if line.startswith("| awq<br>AWQ"))
    assert "KL 0.1150, same token 92.3 %" in summary and "526 items needed" in summary
    without = sample_results()
    variants = {k: v.model_copy(update={"divergence": None}) for k, v in without.verdict.variants.items()}
    bare = replace(without, verdict=without.verdict.model_copy(update={"variants": variants}))
    shown = render_markdown(bare)
    assert "Divergence from" not in shown and "KL" not in shown


def test_further_tasks_and_how_prompts_were_put_are_shown() -> None:
    markdown = render_markdown(sample_results(frozenset({"awq"})))
    table = markdown.split("### Further task team_demo_short")[1].split("###")[0]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    assert rows["awq"].count(NOT_MEASURED) == 4
    assert "50.0" in rows["bf16-fp8kv"] and "40" in rows["bf16-fp8kv"]
    put = markdown.split("### How the prompts were put")[1].split("###")[0]
    assert put.count("not applied") == 8 and "| bf16 | team_demo_short | not applied | 0 | 0 | 1 | 1 |" in put
