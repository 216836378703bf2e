import json
from dataclasses import FrozenInstanceError, fields

import pytest

from oscar_hf.config import RECIPES, OscarConfig, get_recipe

BAD_SETTINGS = [
    ("recipe", "best"),
    ("recipe", None),
    ("sink_tokens", -1),
    ("sink_tokens", 1.5),
    ("sink_tokens", True),
    ("sink_tokens", None),
    ("recent_tokens", -256),
    ("recent_tokens", "256"),
    ("k_clip", 0.0),
    ("k_clip", 1.01),
    ("k_clip", -0.5),
    ("k_clip", float("nan")),
    ("k_clip", True),
    ("v_clip", float("inf")),
    ("v_clip", "0.92"),
    ("scale_rule", "lloyd"),
    ("k_search", -1),
    ("k_search", 17),
    ("k_search", 1.5),
    ("k_search", True),
    ("k_stretch", -0.1),
    ("k_stretch", "1.2"),
    ("k_stretch", float("nan")),
    ("group_size", 0),
    ("group_size", -64),
    ("group_size", 3),
    ("group_size", 64.0),
    ("group_size", True),
    ("bits", 4),
    ("bits", "2"),
    ("bits", None),
    ("scale_dtype", "float32"),
    ("scale_dtype", None),
    ("exact_chunks", "no"),
    ("exact_chunks", None),
]
BAD_RECIPE_SETTINGS = [
    ("k_transform", "svd"),
    ("v_transform", "balanced"),
    ("value_target", "values"),
    ("scale_rule", None),
    ("alpha", -0.1),
    ("alpha", 2.5),
    ("alpha", float("nan")),
    ("balance", -0.1),
    ("balance", 1.1),
    ("history_weighted", 1),
    ("k_search", None),
    ("k_stretch", None),
    ("ridge", -1.0),
    ("ridge", True),
    ("k_clip", 0.0),
    ("k_clip", None),
    ("v_clip", 1.5),
]


def test_defaults() -> None:
    config = OscarConfig()
    assert (config.recipe, config.sink_tokens, config.recent_tokens) == ("oscar", 64, 256)
    assert (config.k_clip, config.v_clip, config.scale_rule) == (0.96, 0.92, "minmax")
    assert (config.bits, config.group_size, config.scale_dtype, config.exact_chunks) == (
        2,
        None,
        "float16",
        True,
    )


@pytest.mark.parametrize(
    ("recipe", "filled"),
    [
        ("naive", (1.0, 1.0, "minmax")),
        ("hadamard", (1.0, 1.0, "minmax")),
        ("oscar", (0.96, 0.92, "minmax")),
        ("balanced", (0.94, 0.92, "inner_product")),
        ("search", (0.92, 0.92, "inner_product")),
    ],
)
def test_recipe_fills_only_what_is_left_at_none(recipe: str, filled: tuple) -> None:
    config = OscarConfig(recipe)
    assert (config.k_clip, config.v_clip, config.scale_rule) == filled
    assert OscarConfig(recipe, k_clip=0.5).k_clip == 0.5
    assert OscarConfig(recipe, k_clip=0.5).v_clip == filled[1]


@pytest.mark.parametrize(
    "config",
    [
        OscarConfig(),
        OscarConfig("balanced", group_size=32),
        OscarConfig(
            "naive",
            sink_tokens=0,
            recent_tokens=0,
            k_clip=0.5,
            v_clip=1,
            scale_rule="inner_product",
            group_size=16,
            bits=16,
            scale_dtype="bfloat16",
            exact_chunks=False,
        ),
    ],
)
def test_json_round_trip(config: OscarConfig) -> None:
    settings = json.loads(json.dumps(config.to_dict()))
    assert set(settings) == {field.name for field in fields(OscarConfig)}
    assert OscarConfig.from_dict(settings) == config


def test_settings_from_before_the_search_do_not_search() -> None:
    for config in (OscarConfig("balanced"), OscarConfig("mine", k_clip=0.9, v_clip=0.9, scale_rule="minmax")):
        older = {name: value for name, value in config.to_dict().items() if name not in ("k_search", "k_stretch")}
        assert OscarConfig.from_dict(older) == config
        assert (config.k_search, config.searches) == (0, False)


def test_a_search_takes_one_group_a_head() -> None:
    config = OscarConfig("search")
    assert (config.k_search, config.k_stretch, config.searches) == (1, 1.2, True)
    assert config.groups(64) == config.replace(group_size=64).groups(64) == 1
    with pytest.raises(ValueError, match="k_search=1 needs one group per head, but group_size=32 and head_dim=64"):
        config.replace(group_size=32).groups(64)
    assert config.replace(group_size=32, k_search=0).groups(64) == 2
    assert not config.exact().searches and not config.exact(100).searches


def test_frozen_and_hashable() -> None:
    config = OscarConfig()
    with pytest.raises(FrozenInstanceError):
        config.bits = 16  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        RECIPES["oscar"].alpha = 1.0  # type: ignore[misc]
    assert len({config, OscarConfig(), OscarConfig(bits=16)}) == 2


def test_replace_makes_a_checked_copy() -> None:
    config = OscarConfig("balanced")
    assert config.replace(sink_tokens=4) == OscarConfig("balanced", sink_tokens=4)
    assert config.sink_tokens == 64
    with pytest.raises(ValueError, match="sink_tokens=-4"):
        config.replace(sink_tokens=-4)


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS)
def test_bad_value_is_named_with_its_setting(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        OscarConfig.from_dict({name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("settings", [{"sink_token": 4}, {**OscarConfig().to_dict(), "sink_token": 4}])
def test_unknown_setting_is_named(settings: dict) -> None:
    with pytest.raises(ValueError, match="'sink_token'"):
        OscarConfig.from_dict(settings)


@pytest.mark.parametrize("settings", [None, [], "oscar", OscarConfig()])
def test_settings_must_be_a_dict(settings: object) -> None:
    with pytest.raises(ValueError, match=type(settings).__name__):
        OscarConfig.from_dict(settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head_dim", "group_size", "groups", "bits"),
    [
        (128, None, 1, 2.25),
        (64, None, 1, 2.5),
        (64, 64, 1, 2.5),
        (64, 32, 2, 3.0),
        (128, 32, 4, 3.0),
        (80, 20, 4, 3.6),
        (256, None, 1, 2.125),
    ],
)
def test_groups_and_bits_per_element(head_dim: int, group_size: int | None, groups: int, bits: float) -> None:
    config = OscarConfig(group_size=group_size)
    assert config.groups(head_dim) == groups
    assert config.bits_per_element(head_dim) == pytest.approx(bits, abs=1e-12)
    assert config.replace(bits=16).bits_per_element(head_dim) == 16


@pytest.mark.parametrize(
    ("head_dim", "group_size", "message"),
    [
        (64, 48, "group_size=48 .*head_dim=64"),
        (64, 128, "group_size=128 .*head_dim=64"),
        (66, None, "head_dim=66"),
    ],
)
def test_groups_that_do_not_fit_the_head(head_dim: int, group_size: int | None, message: str) -> None:
    for ask in (
        OscarConfig(group_size=group_size).groups,
        OscarConfig(group_size=group_size).bits_per_element,
    ):
        with pytest.raises(ValueError, match=message):
            ask(head_dim)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_go_by_their_names(name: str) -> None:
    assert get_recipe(name).name == name
    assert get_recipe(name).needs_data == (name in ("oscar", "balanced", "search"))


def test_get_recipe_changes_only_what_is_asked_for() -> None:
    changed = get_recipe("balanced", alpha=0.75, per_head=False)
    expected = {**vars(RECIPES["balanced"]), "alpha": 0.75, "per_head": False}
    assert vars(changed) == expected
    assert RECIPES["balanced"].alpha == 0.5


@pytest.mark.parametrize(
    ("changes", "needs_data"),
    [
        ({}, False),
        ({"key_mean": True}, True),
        ({"v_transform": "eigen"}, True),
        ({"k_transform": "balanced"}, True),
    ],
)
def test_needs_data_follows_the_transforms(changes: dict, needs_data: bool) -> None:
    assert get_recipe("hadamard", **changes).needs_data is needs_data


@pytest.mark.parametrize(("name", "value"), BAD_RECIPE_SETTINGS)
def test_bad_recipe_value_is_named_with_its_setting(name: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        get_recipe("balanced", **{name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("setting", ["per_head", "key_mean"])
def test_recipe_switches_are_booleans(setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting}='no'"):
        get_recipe("balanced", **{setting: "no"})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("best", {}, "recipe='best' .*'balanced'"),
        ("oscar", {"clip": 1.0}, "'clip'.*k_clip"),
    ],
)
def test_unknown_recipe_or_setting_is_named_with_the_known(name: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_recipe(name, **changes)
