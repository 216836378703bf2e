"""Every scenario on every family: it works, or is refused with a reason."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conformance.page import PAGE
from conformance.scenarios import SCENARIOS, make_case
from tiny import FAMILIES, REFUSED, tiny_model

from oscar_hf import OscarQuantizedCache, calibrate, patch_model

LINEAR, SLIDING = ("qwen3_next", "qwen3_5_text"), ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss")
CROPS = [name for name in SCENARIOS if name.startswith("crop") and name != "crop to nothing"]
REFUSALS: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(LINEAR, "one state for all tokens") for name in CROPS},
    "prompt lookup": dict.fromkeys(LINEAR, "not supported with stateful models"),
    "assisted": dict.fromkeys(LINEAR, "not supported with stateful models"),
    "prompt lookup in fixed storage": {
        **dict.fromkeys(LINEAR, "not supported with stateful models"),
        **dict.fromkeys(SLIDING, "without max_cache_len"),
    },
}
REFUSALS["crop past a sliding window"] |= dict.fromkeys(SLIDING, "not enough without the newest 4")


@pytest.fixture
def tell(record_property: Callable[[str, str], None]) -> Callable[..., None]:
    """Notes facts for docs/compatibility.md in the file that --junitxml names."""

    def note(**facts: str) -> None:
        for name, value in facts.items():
            record_property(name, value)

    note(transformers=transformers.__version__)
    return note


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_scenario(family: str, scenario: str, tmp_path: Path, tell: Callable[..., None]) -> None:
    function, words = SCENARIOS[scenario], REFUSALS.get(scenario, {}).get(family)
    given = [tmp_path] if "folder" in inspect.signature(function).parameters else []
    tell(family=family, scenario=scenario, about=inspect.getdoc(function) or "")
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
    tell(family=label, scenario="refused by name", about="", refused=str(refusal.value))


def test_the_page_is_of_this_suite() -> None:
    page = PAGE.read_text(encoding="utf-8")
    scenarios = [(name, inspect.getdoc(function)) for name, function in SCENARIOS.items()]
    assert page.split("## Scenarios\n\n")[1].splitlines() == [
        f"{number}. **{name}**: {about}" for number, (name, about) in enumerate(scenarios, 1)
    ]
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", page, re.M)
    assert [family for family, _ in rows if family != "family"] == [*sorted(FAMILIES), *sorted(REFUSED)]
    marks = {family: cells.split(" | ") for family, cells in rows if family in FAMILIES}
    for family, cells in marks.items():
        for name, mark in zip(SCENARIOS, cells, strict=True):
            assert (mark == "✓") == (family not in REFUSALS.get(name, {})), (family, name)
