"""Every scenario on every family: it works, or is refused with a reason."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conformance.page import PAGE, read, render
from conformance.scenarios import SCENARIOS, make_case
from tiny import FAMILIES, REFUSED, tiny_model
from transformers.cache_utils import Cache

from oscar_hf import OscarQuantizedCache, calibrate, patch_model

LINEAR, SLIDING = ("qwen3_next", "qwen3_5_text"), ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss")
CROPS = [name for name in SCENARIOS if name.startswith("crop") and name != "crop to nothing"]
# transformers 5.25 brought states to go back to when candidates are refused
STATELESS = () if hasattr(Cache, "get_recurrent_states_to_keep") else LINEAR
REFUSALS: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(LINEAR, "one state for all tokens") for name in CROPS},
    "prompt lookup": dict.fromkeys(STATELESS, "not supported with stateful models"),
    "assisted": dict.fromkeys(STATELESS, "not supported with stateful models"),
    "prompt lookup in fixed storage": {
        **dict.fromkeys(STATELESS, "not supported with stateful models"),
        **dict.fromkeys(SLIDING, "without max_cache_len"),
    },
}
# Every run of the tests covers some scenarios of every family, and all of one family of each kind; the rest is slow.
QUICK = ("patch and unpatch", "chunks and steps", "left padding", "greedy")
WHOLE = ("llama", "gemma3_text", "gpt_oss", "qwen3_next")
REFUSALS["crop past a sliding window"] |= dict.fromkeys(SLIDING, "not enough without the newest 4")


@pytest.fixture
def tell(record_property: Callable[[str, str], None]) -> Callable[..., None]:
    """Notes facts for docs/compatibility.md in the file that --junitxml names."""

    def note(**facts: str) -> None:
        for name, value in facts.items():
            record_property(name, value)

    note(transformers=transformers.__version__)
    return note


def cells() -> Iterator[Any]:
    """Every family and scenario, those of a long run marked."""
    for family in FAMILIES:
        for scenario in SCENARIOS:
            quick = scenario in QUICK or (family in WHOLE and (family == "llama" or scenario != "compiled steps"))
            yield pytest.param(family, scenario, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("family", "scenario"), list(cells()))
def test_scenario(family: str, scenario: str, tmp_path: Path, tell: Callable[..., None]) -> None:
    function, words = SCENARIOS[scenario], REFUSALS.get(scenario, {}).get(family)
    given = [tmp_path] if "folder" in inspect.signature(function).parameters else []
    number = str(list(SCENARIOS).index(scenario) + 1)  # processes that share the tests write them in any order
    tell(family=family, scenario=scenario, number=number, about=inspect.getdoc(function) or "")
    if words is None:
        return function(make_case(family), *given)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=words) as refusal:
        function(make_case(family), *given)
    tell(refused=str(refusal.value))


@pytest.mark.parametrize("label", REFUSED)
def test_refused_by_name(label: str, tell: Callable[..., None]) -> None:
    family, changes = REFUSED[label]
    model = tiny_model(family, **changes)
    rotations = make_case("llama").rotations
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes, settings = set(vars(model)), model.config.to_dict()
    attempts = (
        lambda: patch_model(model, rotations),
        lambda: OscarQuantizedCache(model, rotations),
        lambda: calibrate(model, [torch.arange(3, 60)], progress=False),
    )
    for attempt in attempts:
        with pytest.raises(ValueError, match=f"^{family} .*; use DynamicCache") as refusal:
            attempt()
    assert set(vars(model)) == attributes and model.config.to_dict() == settings
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    tell(family=label, scenario="refused by name", number="0", about="", refused=str(refusal.value))


def test_the_page_is_of_this_suite() -> None:
    if not PAGE.is_file():
        pytest.skip("docs/compatibility.md is not there: make compatibility")
    page = PAGE.read_text(encoding="utf-8")
    scenarios = [(name, inspect.getdoc(function)) for name, function in SCENARIOS.items()]
    assert page.split("## Scenarios\n\n")[1].splitlines() == [
        f"{number}. **{name}**: {about}" for number, (name, about) in enumerate(scenarios, 1)
    ]
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", page, re.M)
    assert [family for family, _ in rows if family != "family"] == [*sorted(FAMILIES), *sorted(REFUSED)]
    version = 0 if STATELESS else -1  # "older / newest" where they differ
    marks = {family: cells.split(" | ") for family, cells in rows if family in FAMILIES}
    for family, cells in marks.items():
        for name, mark in zip(SCENARIOS, cells, strict=True):
            assert (mark.split(" / ")[version] == "✓") == (family not in REFUSALS.get(name, {})), (family, name)


def result(file: Path, version: str, outcomes: dict[tuple[str, str], str | None]) -> Path:
    """What pytest --junitxml leaves; an outcome of None is a failure."""
    cases = []
    for (family, scenario), outcome in outcomes.items():
        facts = {"family": family, "scenario": scenario, "number": "1", "about": "What.", "transformers": version}
        facts |= {"refused": outcome} if outcome else {}
        entries = "".join(f'<property name="{name}" value="{value}"/>' for name, value in facts.items())
        failure = "<failure/>" if outcome is None else ""
        cases.append(f"<testcase><properties>{entries}</properties>{failure}</testcase>")
    file.write_text(f"<testsuites>{''.join(cases)}</testsuites>", encoding="utf-8")
    return file


def test_a_page_from_results(tmp_path: Path) -> None:
    old = {
        ("llama", "crop"): "",
        ("gemma2", "crop"): "Not Gemma2ForCausalLM.",
        ("t5", "refused by name"): "t5 is odd.",
    }
    new = {**old, ("gemma2", "crop"): ""}
    files = [result(tmp_path / f"{version}.xml", version, cells) for version, cells in (("5.1", old), ("5.2", new))]
    page = render(*read(files))
    for line in (
        "| llama | ✓ |",
        "| gemma2 | a / ✓ |",
        "a. Not this one.",
        "| t5 | t5 is odd. |",
        "1. **crop**: What.",
    ):
        assert line in page.splitlines()
    failed = result(tmp_path / "failed.xml", "5.2", {("llama", "crop"): None})
    with pytest.raises(ValueError, match="llama / crop on 5.2"):
        read([*files, failed])
    with pytest.raises(ValueError, match="not of the same suite"):
        render(*read([files[0], result(tmp_path / "part.xml", "5.2", {("llama", "crop"): ""})]))
