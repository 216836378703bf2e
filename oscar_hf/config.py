"""Every knob, in two frozen dataclasses: how rotations are fitted, and how a cache stores what it is given."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

KeyTransform = Literal["identity", "hadamard", "eigen", "balanced", "prompt"]
ValueTransform = Literal["identity", "hadamard", "eigen"]
ScaleRule = Literal["minmax", "inner_product"]
MAX_SWEEPS = 16


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, allowed))}.")


def _within(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be a number from {low:g} to {high:g}.")


def _check_search(sweeps: object, stretch: float) -> None:
    if isinstance(sweeps, bool) or not isinstance(sweeps, int) or not 0 <= sweeps <= MAX_SWEEPS:
        raise ValueError(f"k_search={sweeps!r} must be a whole number of sweeps, 0 to {MAX_SWEEPS}.")
    _within("k_stretch", stretch, 0.0, 4.0)


@dataclass(frozen=True)
class Recipe:
    """How a layer's transforms are fitted to calibration statistics, with the quantiser that goes with them.

    Args:
        name: what `OscarConfig.recipe` and a RotationSet call it.
        k_transform: `"eigen"` (query covariance, then Hadamard and bit reversal), `"balanced"` (geometric mean of
            the inverse key covariance and the query covariance, then Hadamard), `"hadamard"`, `"identity"` or
            `"prompt"` (each cache fits its own to its sequence: `fitting`).
        v_transform: `"eigen"` (of `value_target`), `"hadamard"` or `"identity"`. Always orthogonal.
        per_head: one transform per KV head instead of one per layer.
        key_mean: take the calibration mean off every key; softmax does not see it.
        alpha: strength of the balanced transform, `A = M ** (alpha / 2) H`; 0 is a plain Hadamard.
        balance: weight of the queries in the geometric mean M; 0 follows the keys alone (whitens them), 1 the queries
            alone.
        history_weighted: queries count by the attention they pay to the history, and the key mean is that of the keys
            by the attention they receive as part of it, since errors of stored keys reach nothing else.
        ridge: added to both covariances, once scaled to mean eigenvalue 1, before they are balanced.
        value_target: second moment that V's eigenvectors come from: `"score"`, the values weighted by
            `k C_Q k'` (what the published rotations use), or `"output"`, the attention outputs (what the paper says).
        k_clip: default of `OscarConfig.k_clip`.
        v_clip: default of `OscarConfig.v_clip`.
        scale_rule: default of `OscarConfig.scale_rule`.
        k_search: default of `OscarConfig.k_search`; where it is not 0, a metric is fitted.
        k_stretch: default of `OscarConfig.k_stretch`.
        choose: hold out a tenth of the tokens, and choose alpha, clips and scale rule of each layer by the error of
            its attention outputs on them (`choice`).
    """

    name: str
    k_transform: KeyTransform = "eigen"
    v_transform: ValueTransform = "eigen"
    per_head: bool = False
    key_mean: bool = False
    alpha: float = 0.5
    balance: float = 0.5
    history_weighted: bool = False
    ridge: float = 0.1
    value_target: Literal["score", "output"] = "score"
    k_clip: float = 0.96
    v_clip: float = 0.92
    scale_rule: ScaleRule = "minmax"
    k_search: int = 0
    k_stretch: float = 1.0
    choose: bool = False

    def __post_init__(self) -> None:
        _one_of("k_transform", self.k_transform, ("identity", "hadamard", "eigen", "balanced", "prompt"))
        _one_of("v_transform", self.v_transform, ("identity", "hadamard", "eigen"))
        _one_of("value_target", self.value_target, ("score", "output"))
        _one_of("scale_rule", self.scale_rule, ("minmax", "inner_product"))
        for name in ("per_head", "key_mean", "history_weighted", "choose"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        _within("alpha", self.alpha, 0.0, 2.0)
        _within("balance", self.balance, 0.0, 1.0)
        _within("ridge", self.ridge, 0.0, 1e6)
        _within("k_clip", self.k_clip, 0.01, 1.0)
        _within("v_clip", self.v_clip, 0.01, 1.0)
        _check_search(self.k_search, self.k_stretch)

    @property
    def needs_data(self) -> bool:
        """Whether fitting needs calibration statistics at all."""
        if self.k_transform == "prompt":
            return self.v_transform == "eigen"
        fitted = self.k_transform in ("eigen", "balanced") or self.v_transform == "eigen"
        return fitted or self.key_mean or self.k_search > 0 or self.choose


MAX_WINDOW = 1 << 20
ROLLBACK = 32

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("naive", k_transform="identity", v_transform="identity", k_clip=1.0, v_clip=1.0),
        Recipe("hadamard", k_transform="hadamard", v_transform="hadamard", k_clip=1.0, v_clip=1.0),
        Recipe("oscar"),
        Recipe(
            "balanced",
            k_transform="balanced",
            v_transform="hadamard",
            per_head=True,
            key_mean=True,
            k_clip=0.94,
            scale_rule="inner_product",
        ),
        Recipe(
            "search",
            k_transform="balanced",
            v_transform="hadamard",
            per_head=True,
            key_mean=True,
            alpha=0.75,
            balance=0.25,
            history_weighted=True,
            k_clip=0.92,
            scale_rule="inner_product",
            k_search=1,
            k_stretch=1.2,
        ),
        Recipe(
            "prompt",
            k_transform="prompt",
            v_transform="hadamard",
            per_head=True,
            key_mean=True,
            k_clip=0.92,
            scale_rule="inner_product",
        ),
    )
}


def get_recipe(name: str, /, **changes: Any) -> Recipe:
    """The recipe of that name, with `changes` to its fields (for ablations).

    Raises:
        ValueError: no such recipe, or a field or value that a recipe does not have.
    """
    _one_of("recipe", name, tuple(RECIPES))
    unknown = set(changes) - {field.name for field in fields(Recipe)} - {"name"}
    if unknown:
        raise ValueError(
            f"A recipe has no setting {', '.join(map(repr, sorted(unknown)))}; "
            f"it has {', '.join(field.name for field in fields(Recipe) if field.name != 'name')}."
        )
    return replace(RECIPES[name], **changes)


def parse_setting(text: str) -> tuple[str, Any]:
    """Name and value (a number, true, false, null or text) of `"alpha=0.75"`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is no setting: write NAME=VALUE, such as alpha=0.75.")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


@dataclass(frozen=True)
class OscarConfig:
    """How a cache stores keys and values. Immutable; round-trips through `to_dict` and `from_dict`.

    Args:
        recipe: name of the recipe whose defaults fill the settings left at None; any name if none is. `"prompt"` also
            has caches fit their keys' transforms to each sequence, by the rotations given where these are calibrated.
        sink_tokens: first tokens of each row kept in the model's dtype.
        recent_tokens: newest tokens of each row kept in the model's dtype (transformers says "residual").
        k_clip: clip keys at this percentile of a row's |x|; 1 does not clip. None: the recipe's.
        v_clip: the same for values.
        scale_rule: `"minmax"`, or `"inner_product"`, which stretches the levels so that quantising does not
            shrink inner products. None: the recipe's. Keys that are searched have `k_stretch` instead.
        k_search: choose the codes of keys by the error that they make in logits, in so many sweeps of coordinate
            descent (`search.search`); 0 rounds each channel by itself. Needs rotations with a `k_metric`, and one
            group per head. Takes time when keys are stored, none when they are read. None: the recipe's.
        k_stretch: exponent of the factor that gives searched keys their inner products with queries back, which least
            errors shrink; 0 leaves it out, more than 1 favours the keys that stand out. None: the recipe's.
        group_size: channels that share one scale and min; must divide head_dim. None: head_dim.
        bits: 2, or 16 to store the rotated history in the model's dtype (for checks).
        scale_dtype: `"float16"` (saturates at 65504) or `"bfloat16"` (at 7e16, with 8 bits of precision).
        exact_chunks: tokens of one forward see each other exactly (default). False: each query sees only its own
            recent window exactly, as when decoding token by token; slower, for measuring.

    Raises:
        ValueError: names the setting, its value and what is allowed.
    """

    recipe: str = "oscar"
    sink_tokens: int = 64
    recent_tokens: int = 256
    k_clip: float = None  # type: ignore[assignment]
    v_clip: float = None  # type: ignore[assignment]
    scale_rule: ScaleRule = None  # type: ignore[assignment]
    k_search: int = None  # type: ignore[assignment]
    k_stretch: float = None  # type: ignore[assignment]
    group_size: int | None = None
    bits: Literal[2, 16] = 2
    scale_dtype: Literal["float16", "bfloat16"] = "float16"
    exact_chunks: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, str):
            raise ValueError(f"recipe={self.recipe!r} must be the name of a recipe.")
        for name in ("k_clip", "v_clip", "scale_rule"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(get_recipe(self.recipe), name))
        for name in ("k_search", "k_stretch"):  # settings of a recipe that is not known may be older than these
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(RECIPES.get(self.recipe, Recipe(self.recipe)), name))
        for name in ("sink_tokens", "recent_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_WINDOW:
                raise ValueError(f"{name}={value!r} must be a whole number of tokens, 0 or more (up to {MAX_WINDOW}).")
        _within("k_clip", self.k_clip, 0.01, 1.0)
        _within("v_clip", self.v_clip, 0.01, 1.0)
        _check_search(self.k_search, self.k_stretch)
        _one_of("scale_rule", self.scale_rule, ("minmax", "inner_product"))
        _one_of("bits", self.bits, (2, 16))
        _one_of("scale_dtype", self.scale_dtype, ("float16", "bfloat16"))
        _one_of("exact_chunks", self.exact_chunks, (True, False))
        group = self.group_size
        if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 4):
            raise ValueError(f"group_size={group!r} must be a whole number of channels, 4 or more, or None.")

    def groups(self, head_dim: int) -> int:
        """Number of quantisation groups in a head of `head_dim` channels."""
        group_size = self.group_size or head_dim
        if head_dim % 4:
            raise ValueError(f"head_dim={head_dim} is not a multiple of 4, so four codes do not fill a byte.")
        if head_dim % group_size:
            raise ValueError(
                f"group_size={group_size} does not divide head_dim={head_dim}; choose a divisor, or None for head_dim."
            )
        if self.searches and group_size != head_dim:
            raise ValueError(
                f"k_search={self.k_search} needs one group per head, but group_size={group_size} and "
                f"head_dim={head_dim}; set group_size=None, or k_search=0."
            )
        return head_dim // group_size

    def exact(self, max_cache_len: int | None = None) -> OscarConfig:
        """The same for a layer that 2 bits cannot hold: 16, or, with fixed storage, a sink that takes everything."""
        held: dict[str, Any] = {"bits": 16} if max_cache_len is None else {"sink_tokens": max_cache_len}
        return self.replace(**held, k_search=0)

    @property
    def searches(self) -> bool:
        """Whether the codes of keys are searched for, which needs rotations with a metric."""
        return self.bits == 2 and self.k_search > 0

    @property
    def fits(self) -> bool:
        """Whether each cache fits its transforms to its sequences."""
        return self.bits == 2 and self.recipe == "prompt"

    @property
    def rollback(self) -> int:
        """Tokens that can be taken back, or come in one forward, as if they had come one by one."""
        return min(ROLLBACK, self.recent_tokens)

    def bits_per_element(self, head_dim: int) -> float:
        """Bits that one element of the quantised history takes, scale and min included."""
        return float(self.bits) if self.bits == 16 else 2 + 32 * self.groups(head_dim) / head_dim

    @classmethod
    def of(cls, recipe: Recipe) -> OscarConfig:
        """The settings that go with a recipe."""
        names = ("k_clip", "v_clip", "scale_rule", "k_search", "k_stretch")
        return cls(recipe.name, **{name: getattr(recipe, name) for name in names})

    def replace(self, **changes: Any) -> OscarConfig:
        """A copy with some settings changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> OscarConfig:
        """The inverse of `to_dict`; a setting it does not know is an error, not ignored."""
        if not isinstance(settings, dict):
            raise ValueError(f"An OscarConfig is read from a dict of settings, not from {type(settings).__name__}.")
        unknown = set(settings) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(
                f"Unknown OscarConfig setting {', '.join(map(repr, sorted(unknown)))}: "
                "written by a newer oscar-hf, or misspelt?"
            )
        return cls(**settings)
