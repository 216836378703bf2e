import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oscar_hf.config import OscarConfig, get_recipe
from oscar_hf.matrices import (
    balanced_transform,
    bit_reversal,
    compose_rotation,
    error_metric,
    geometric_mean,
    hadamard,
    matrix_power,
)
from oscar_hf.rotation import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME, LayerRotation, RotationSet

ARCHITECTURE = {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0}


def covariance(size: int, *leading: int, decades: float = 2.0) -> Tensor:
    """Random symmetric positive definite matrices, eigenvalues over some decades."""
    vectors = torch.linalg.qr(torch.randn(*leading, size, size, dtype=torch.float64)).Q
    values = torch.logspace(-decades / 2, decades / 2, size, dtype=torch.float64)
    return (vectors * values) @ vectors.mT


def orthogonal(size: int, *leading: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*leading, size, size, dtype=torch.float64)).Q.float()


def shared_layer(size: int = 16) -> LayerRotation:
    return LayerRotation(orthogonal(size), orthogonal(size))


def balanced_layer(size: int = 16, heads: int = 2) -> LayerRotation:
    transform = balanced_transform(covariance(size, heads), covariance(size, heads), 0.5, 0.1)
    inverse = torch.linalg.inv(transform).mT.contiguous()
    return LayerRotation(transform.float(), orthogonal(size), inverse.float(), torch.randn(heads, size))


def searching_layer(size: int = 16, heads: int = 2) -> LayerRotation:
    layer = balanced_layer(size, heads)
    metric = error_metric(layer.q_rotation, covariance(size, heads)).float()  # type: ignore[arg-type]
    return replace(layer, k_metric=metric)


def rotation_set() -> RotationSet:
    return RotationSet(
        {1: balanced_layer(), 3: shared_layer()},
        OscarConfig("balanced", group_size=8),
        dict(ARCHITECTURE),
        {"model": "tiny", "tokens": 512, "recipe": {"alpha": 0.5}, "revision": None},
    )


def changed(layer: LayerRotation, name: str, change: Callable[[Tensor], Tensor]) -> LayerRotation:
    return replace(layer, **{name: change(getattr(layer, name))})


def assert_close(ours: Tensor, theirs: Tensor | np.ndarray, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=0, atol=tolerance)


# Hadamard and bit reversal


@pytest.mark.parametrize("size", [1, 2, 4, 64, 128, 256])
def test_hadamard_is_scipys_normalised(size: int) -> None:
    assert_close(hadamard(size), scipy.linalg.hadamard(size) / size**0.5)
    assert hadamard(size)[0].tolist() == pytest.approx([size**-0.5] * size, abs=1e-15)


@pytest.mark.parametrize(("size", "block"), [(80, 16), (96, 32), (192, 64), (7, 1)])
def test_hadamard_of_other_sizes_is_block_diagonal(size: int, block: int) -> None:
    blocks = [scipy.linalg.hadamard(block) / block**0.5] * (size // block)
    assert_close(hadamard(size), scipy.linalg.block_diag(*blocks))


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
def test_hadamard_is_orthogonal(size: int) -> None:
    assert_close(hadamard(size) @ hadamard(size).T, np.eye(size))


def test_bit_reversal_goldens() -> None:
    beta = bit_reversal(128)
    assert [beta[i].item() for i in (0, 1, 2, 3, 127)] == [0, 64, 32, 96, 127]
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert bit_reversal(1).tolist() == [0]


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256])
def test_bit_reversal_is_a_permutation(size: int) -> None:
    assert bit_reversal(size).sort().values.tolist() == list(range(size))


@pytest.mark.parametrize("size", [64, 256])
def test_bit_reversal_of_a_power_of_two_undoes_itself(size: int) -> None:
    beta = bit_reversal(size)
    assert beta[beta].tolist() == list(range(size))


@pytest.mark.parametrize(("size", "blocks"), [(80, 5), (96, 3), (192, 3)])
def test_neighbouring_columns_come_from_different_hadamard_blocks(size: int, blocks: int) -> None:
    rotation = compose_rotation(torch.arange(1.0, size + 1).diag())
    # Hadamard block b mixes eigenvectors b, b + blocks, ...
    block_of_column = (rotation.abs() > 1e-6).int().argmax(0) % blocks
    for neighbours in block_of_column.split(blocks):
        assert neighbours.unique().numel() == blocks


# Eigenbasis


def test_compose_rotation_is_the_published_u_h_p() -> None:
    size = 128
    moment = torch.arange(1.0, size + 1, dtype=torch.float64).diag()
    beta = [int(f"{i:07b}"[::-1], 2) for i in range(size)]
    permutation = [size - 1 - b for b in beta]
    assert [permutation[j] for j in (0, 1, 64)] == [127, 63, 126]
    eigenvectors = torch.linalg.eigh(moment).eigenvectors
    assert_close(eigenvectors.abs(), np.eye(size))
    signs = eigenvectors.diagonal().numpy()[:, None]
    assert_close(compose_rotation(moment), signs * scipy.linalg.hadamard(size)[:, permutation] / size**0.5)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_composed_rotation_equalises_the_diagonal(size: int) -> None:
    moment = covariance(size)
    rotation = compose_rotation(moment)
    assert_close(rotation.T @ rotation, np.eye(size))
    rotated = rotation.T @ moment @ rotation
    assert_close(rotated.diagonal(), np.full(size, moment.trace().item() / size), 1e-10)


@pytest.mark.parametrize("size", [80, 96, 192])
def test_composed_rotation_of_other_sizes_spreads_each_eigenvalue_band_over_all_blocks(size: int) -> None:
    moment = covariance(size)
    rotation = compose_rotation(moment)
    assert_close(rotation.T @ rotation, np.eye(size))
    diagonal = (rotation.T @ moment @ rotation).diagonal()
    eigenvalues = np.linalg.eigvalsh(moment.numpy())
    blocks = size // (size & -size)
    means = sorted(eigenvalues[first::blocks].mean() for first in range(blocks))
    assert sorted(diagonal.tolist()) == pytest.approx(np.repeat(means, size // blocks).tolist(), rel=1e-9)


def test_compose_rotation_takes_batches_and_single_precision() -> None:
    moments = covariance(32, 3)
    rotations = compose_rotation(moments)
    for moment, rotation in zip(moments, rotations, strict=True):
        assert_close(rotation, compose_rotation(moment))
    assert compose_rotation(moments.float()).dtype == torch.float64


# Geometric mean and balanced transform


@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.0, 0.25])
def test_matrix_power_is_scipys(exponent: float) -> None:
    matrix = covariance(24)
    expected = scipy.linalg.fractional_matrix_power(matrix.numpy(), exponent)
    assert_close(matrix_power(matrix, exponent), expected, 1e-9)


def test_geometric_mean_by_scipys_square_root() -> None:
    a, b = covariance(24), covariance(24)
    root = scipy.linalg.sqrtm(a.numpy())
    inverse = np.linalg.inv(root)
    expected = root @ scipy.linalg.sqrtm(inverse @ b.numpy() @ inverse) @ root
    torch.testing.assert_close(geometric_mean(a, b), torch.as_tensor(expected.real), rtol=1e-9, atol=1e-9)


def test_geometric_mean_by_its_defining_properties() -> None:
    a, b = covariance(24, 3), covariance(24, 3)
    mean = geometric_mean(a, b)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(mean @ torch.linalg.inv(a) @ mean, b, **close)
    torch.testing.assert_close(mean, geometric_mean(b, a), **close)
    torch.testing.assert_close(mean, mean.mT, **close)
    assert (torch.linalg.eigvalsh(mean) > 0).all()
    torch.testing.assert_close(geometric_mean(a, a), a, **close)
    torch.testing.assert_close(mean.det().log(), (a.det().log() + b.det().log()) / 2, **close)


@pytest.mark.parametrize("size", [32, 96])
def test_balanced_transform_without_strength_is_hadamard(size: int) -> None:
    assert_close(balanced_transform(covariance(size), covariance(size), 0.0, 0.1), hadamard(size), 1e-10)


def test_balanced_transform_at_full_strength_balances_keys_and_queries() -> None:
    keys, queries = covariance(32, 2), covariance(32, 2)
    transform = balanced_transform(keys, queries, 1.0, 0.0)
    mean = transform @ transform.mT
    scaled = [torch.stack([moment / moment.trace() * 32 for moment in pair]) for pair in (keys, queries)]
    assert_close(mean @ scaled[0] @ mean, scaled[1], 1e-8)
    assert_close(mean, geometric_mean(torch.linalg.inv(scaled[0]), scaled[1]), 1e-8)


def test_balanced_transform_scales_covariances_before_the_ridge() -> None:
    keys, queries = covariance(16), covariance(16)
    transform = balanced_transform(keys, queries, 0.5, 0.1)
    torch.testing.assert_close(balanced_transform(1e6 * keys, 1e-6 * queries, 0.5, 0.1), transform)
    eye = torch.eye(16, dtype=torch.float64)
    ridged = [moment / moment.trace() * 16 + 0.1 * eye for moment in (keys, queries)]
    mean = geometric_mean(torch.linalg.inv(ridged[0]), ridged[1])
    torch.testing.assert_close(transform @ transform.T, matrix_power(mean, 0.5), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_balanced_transform_lowers_the_logit_error(seed: int, alpha: float) -> None:
    torch.manual_seed(seed)
    keys, queries = covariance(32, decades=3), covariance(32, decades=3)

    def error(transform: Tensor) -> float:
        inverse = torch.linalg.inv(transform)
        return ((transform.T @ keys @ transform).trace() * (inverse @ queries @ inverse.T).trace()).item()

    balanced = error(balanced_transform(keys, queries, alpha, 0.0))
    assert balanced < 0.8 * error(hadamard(32))
    assert balanced < 0.8 * error(torch.eye(32, dtype=torch.float64))
    assert balanced >= error(balanced_transform(keys, queries, 1.0, 0.0)) * (1 - 1e-9)


def test_balanced_transform_of_degenerate_covariances_is_finite() -> None:
    rank_one = torch.ones(16, 16, dtype=torch.float64)
    for keys, queries in ((rank_one, covariance(16)), (covariance(16), rank_one)):
        transform = balanced_transform(keys, queries, 1.0, 0.1)
        assert transform.isfinite().all()
        assert torch.linalg.cond(transform) < 100


def test_balanced_transform_of_zero_covariances_is_hadamard() -> None:
    zero = torch.zeros(16, 16, dtype=torch.float64)
    assert_close(balanced_transform(zero, zero, 1.0, 0.1), hadamard(16))


# RotationSet: what is accepted


@pytest.mark.parametrize(
    "layer",
    [
        shared_layer(),
        balanced_layer(),
        LayerRotation(orthogonal(16, 2), orthogonal(16, 2)),
        LayerRotation(orthogonal(16, 2), orthogonal(16), k_mean=torch.randn(2, 16)),
    ],
    ids=["shared", "balanced", "per head", "mean"],
)
def test_sound_layers_pass(layer: LayerRotation) -> None:
    layer.validate(0)
    layer.validate(0, 2)
    rotations = RotationSet({1: layer, 3: layer}, architecture=dict(ARCHITECTURE))
    rotations.validate()
    rotations.check_fits({1, 3}, ARCHITECTURE)


UNSOUND: dict[str, tuple[Callable[[], LayerRotation], str]] = {
    "NaN": (
        lambda: changed(shared_layer(), "k_rotation", lambda t: t.index_fill(0, torch.tensor(3), np.nan)),
        "k_rot",
    ),
    "inf": (
        lambda: changed(shared_layer(), "v_rotation", lambda t: t.index_fill(0, torch.tensor(3), np.inf)),
        "v_rot",
    ),
    "NaN mean": (lambda: changed(balanced_layer(), "k_mean", lambda t: t * np.nan), "k_mean.*NaN"),
    "integers": (lambda: replace(shared_layer(), v_rotation=torch.eye(16).long()), "v_rotation.*floating"),
    "k not orthogonal": (
        lambda: changed(shared_layer(), "k_rotation", lambda t: 1.01 * t),
        "k_rotation is not orthogonal",
    ),
    "v not orthogonal": (
        lambda: changed(balanced_layer(), "v_rotation", lambda t: t + 0.01),
        "v_rotation is not orthogonal",
    ),
    "v singular": (
        lambda: changed(shared_layer(), "v_rotation", torch.zeros_like),
        "v_rotation is not orthogonal",
    ),
    "q no inverse": (
        lambda: changed(balanced_layer(), "q_rotation", lambda t: t.mT),
        "inverse transpose of q_rotation",
    ),
    "q missing": (lambda: replace(balanced_layer(), q_rotation=None), "k_rotation is not orthogonal"),
    "ill-conditioned": (
        lambda: replace(
            shared_layer(),
            k_rotation=torch.logspace(-2.5, 2.5, 16).diag(),
            q_rotation=torch.logspace(2.5, -2.5, 16).diag(),
        ),
        "condition number 1e.05, allowed 10000",
    ),
    "v of another size": (
        lambda: replace(shared_layer(), v_rotation=orthogonal(8)),
        r"v_rotation.*\[8, 8\].*\[16, 16\]",
    ),
    "not square": (
        lambda: changed(shared_layer(), "k_rotation", lambda t: t[:8]),
        r"k_rotation has shape \[8, 16\]",
    ),
    "a vector": (
        lambda: changed(shared_layer(), "k_rotation", lambda t: t[0]),
        r"k_rotation has shape \[16\]",
    ),
    "too many dimensions": (
        lambda: changed(shared_layer(), "v_rotation", lambda t: t[None, None]),
        r"\[1, 1, 16, 16\]",
    ),
    "heads disagree": (
        lambda: replace(balanced_layer(), v_rotation=orthogonal(16, 3)),
        r"KV heads, \[2, 3\]",
    ),
    "mean of one head": (lambda: changed(balanced_layer(), "k_mean", lambda t: t[:1]), r"KV heads, \[1, 2\]"),
    "metric of one head": (lambda: changed(searching_layer(), "k_metric", lambda t: t[:1]), r"KV heads, \[1, 2\]"),
    "metric of another size": (
        lambda: changed(searching_layer(), "k_metric", lambda t: t[:, :8, :8]),
        r"k_metric has shape \[2, 8, 8\]",
    ),
    "NaN in the metric": (
        lambda: changed(searching_layer(), "k_metric", lambda t: t * float("nan")),
        "k_metric holds NaN",
    ),
    "skew metric": (
        lambda: changed(searching_layer(), "k_metric", lambda t: t + t.triu(1)),
        "k_metric is not symmetric",
    ),
    "metric that is none": (
        lambda: changed(
            searching_layer(), "k_metric", lambda t: t - t.diagonal(dim1=-2, dim2=-1).mean() * torch.eye(16)
        ),
        "k_metric is not positive definite",
    ),
    "mean of another size": (
        lambda: changed(balanced_layer(), "k_mean", lambda t: t[:, :8]),
        r"k_mean has shape \[2, 8\]",
    ),
}
SHAPELESS: dict[str, Callable[[], LayerRotation]] = {
    "scalar": lambda: changed(shared_layer(), "k_rotation", lambda t: t[0, 0]),
    "scalar mean": lambda: changed(balanced_layer(), "k_mean", lambda t: t[0, 0]),
    "empty": lambda: LayerRotation(torch.zeros(0, 0), torch.zeros(0, 0)),
    "no heads": lambda: LayerRotation(torch.zeros(0, 16, 16), torch.eye(16)),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_layer_is_refused_with_layer_and_tensor(case: str, tmp_path: Path) -> None:
    make, message = UNSOUND[case]
    layer = make()
    with pytest.raises(ValueError, match=f"Layer 7: .*{message}"):
        layer.validate(7)
    rotations = RotationSet({2: shared_layer(), 7: layer})
    with pytest.raises(ValueError, match="Layer 7: "):
        rotations.validate()
    with pytest.raises(ValueError, match="Layer 7: "):
        rotations.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", SHAPELESS)
def test_layer_without_shape_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match="Layer 7: "):
        SHAPELESS[case]().validate(7)


def test_set_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="without layers"):
        RotationSet({}).validate()


@pytest.mark.parametrize(
    ("layers", "architecture", "message"),
    [
        ({1, 2, 3}, {}, r"lack .*\[2\]"),
        ({1}, {}, r"have layers \[3\]"),
        ({1, 3}, {"head_dim": 32}, "head_dim is 16 in the rotations and 32 in the model"),
        ({1, 3}, {"model_type": "qwen3"}, "model_type is 'llama' in the rotations and 'qwen3' in the model"),
        ({1, 3}, {"rope_theta": 5e5}, "rope_theta is 10000.0 in the rotations and 500000.0 in the model"),
        ({1, 3}, {"head_dim": 32, "model_type": "qwen3"}, "model_type.*; head_dim"),
    ],
)
def test_set_of_another_model_is_refused(layers: set[int], architecture: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotation_set().check_fits(layers, {**ARCHITECTURE, **architecture})


@pytest.mark.parametrize(
    ("architecture", "message"),
    [({"head_dim": 32}, "Layer 1: .*head_dim 16.* 32"), ({"num_key_value_heads": 4}, "Layer 1: ")],
)
def test_set_of_unknown_origin_must_still_have_the_models_shapes(architecture: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotationSet(rotation_set().layers).check_fits({1, 3}, {**ARCHITECTURE, **architecture})


def test_facts_that_one_side_does_not_know_are_no_difference() -> None:
    rotations = rotation_set()
    rotations.check_fits({1, 3}, {"model_type": "llama"})
    rotations.check_fits({1, 3}, {**ARCHITECTURE, "hidden_size": 64})


def test_without_data() -> None:
    rotations = RotationSet.without_data({2, 0}, 96, "hadamard", model="tiny")
    assert list(rotations.layers) == [0, 2]
    assert torch.equal(rotations.layers[0].k_rotation, hadamard(96).float())
    assert rotations.provenance == {"recipe": "hadamard", "model": "tiny"}
    assert rotations.config == OscarConfig("hadamard")
    rotations.check_fits({0, 2}, {"head_dim": 96, "num_key_value_heads": 5})
    naive = RotationSet.without_data({0}, 8, "naive").layers[0]
    assert torch.equal(naive.k_rotation, torch.eye(8))
    mixed = RotationSet.without_data({0}, 8, get_recipe("naive", v_transform="hadamard")).layers[0]
    assert torch.equal(mixed.v_rotation, hadamard(8).float())


@pytest.mark.parametrize("recipe", ["oscar", "balanced", get_recipe("hadamard", key_mean=True)])
def test_without_data_refuses_what_needs_data(recipe: object) -> None:
    with pytest.raises(ValueError, match="calibrate"):
        RotationSet.without_data({0}, 16, recipe)  # type: ignore[arg-type]


# RotationSet: digest, files


def test_digest_is_stable_and_sensitive() -> None:
    layer, other = balanced_layer(), shared_layer()
    rotations = RotationSet({1: layer, 3: other})
    digest = rotations.digest()
    assert len(digest) == 64
    assert RotationSet({3: replace(other), 1: replace(layer)}, OscarConfig("naive")).digest() == digest
    different = [
        RotationSet({1: layer}),
        RotationSet({1: other, 3: layer}),
        RotationSet({1: layer, 4: other}),
        RotationSet({1: replace(layer, k_mean=None), 3: other}),
        RotationSet({1: layer, 3: replace(other, q_rotation=other.k_rotation)}),
        *(
            RotationSet({1: changed(layer, name, lambda t: torch.nextafter(t, t + 1)), 3: other})
            for name in layer.tensors()
        ),
    ]
    assert len({digest, *(rotations.digest() for rotations in different)}) == len(different) + 1


def test_digest_does_not_depend_on_memory_layout() -> None:
    matrix = orthogonal(16)
    strided = matrix.T.contiguous().T
    assert not strided.is_contiguous()
    assert (
        RotationSet({0: LayerRotation(strided, matrix)}).digest()
        == RotationSet({0: LayerRotation(matrix, matrix)}).digest()
    )


def test_error_metric_is_the_mean_squared_error_of_logits() -> None:
    queries, transform = torch.randn(500, 16, dtype=torch.float64), covariance(16)
    error = torch.randn(16, dtype=torch.float64)
    metric = error_metric(torch.linalg.inv(transform).mT, queries.mT @ queries / 500)
    rest = (metric - 0.1 * torch.eye(16)) / 0.9
    logits = (queries @ torch.linalg.inv(transform).mT @ error).square().mean()
    whole = (queries @ torch.linalg.inv(transform).mT).square().sum(1).mean()
    torch.testing.assert_close(error @ rest @ error, logits * 16 / whole)
    torch.testing.assert_close(metric.trace(), torch.tensor(16.0, dtype=torch.float64))
    assert_close(error_metric(transform, torch.zeros(2, 16, 16)), torch.eye(16).double().expand(2, -1, -1))


def test_a_search_needs_a_metric_in_each_layer_of_two_bits(tmp_path: Path) -> None:
    rotations = RotationSet({1: searching_layer(), 3: searching_layer()}, OscarConfig("search"))
    rotations.save_pretrained(tmp_path)
    loaded = RotationSet.from_pretrained(tmp_path)
    for index, layer in rotations.layers.items():
        assert torch.equal(loaded.layers[index].k_metric, layer.k_metric)  # type: ignore[arg-type]
    assert loaded.config == rotations.config and loaded.digest() == rotations.digest()
    rotations.layers[3] = replace(rotations.layers[3], k_metric=None)
    assert rotations.digest() != loaded.digest()
    with pytest.raises(ValueError, match=r"k_search=1 needs a k_metric .* none in layers \[3\].*recipe 'search'"):
        rotations.save_pretrained(tmp_path)
    rotations.check_settings(OscarConfig("search", k_search=0))
    rotations.layers[3] = replace(rotations.layers[3], bits=16)
    rotations.validate()


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    rotations = rotation_set()
    rotations.save_pretrained(tmp_path / "new" / "set")
    assert {file.name for file in (tmp_path / "new" / "set").iterdir()} == {WEIGHTS_NAME, CONFIG_NAME}
    loaded = RotationSet.from_pretrained(str(tmp_path / "new" / "set"))
    assert list(loaded.layers) == [1, 3]
    for index, layer in rotations.layers.items():
        assert loaded.layers[index].tensors().keys() == layer.tensors().keys()
        for name, tensor in layer.tensors().items():
            assert torch.equal(loaded.layers[index].tensors()[name], tensor)
    assert loaded.config == rotations.config
    assert loaded.architecture == rotations.architecture
    assert loaded.provenance == rotations.provenance
    assert loaded.digest() == rotations.digest()
    loaded.check_fits({1, 3}, ARCHITECTURE)


def test_set_that_shares_tensors_between_layers_is_saved(tmp_path: Path) -> None:
    rotations = RotationSet.without_data({0, 1}, 16)
    rotations.save_pretrained(tmp_path)
    assert RotationSet.from_pretrained(tmp_path).digest() == rotations.digest()


def test_many_layers_come_back_in_order(tmp_path: Path) -> None:
    RotationSet.without_data(set(range(12)), 4).save_pretrained(tmp_path)
    assert list(RotationSet.from_pretrained(tmp_path).layers) == list(range(12))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rotation_set().save_pretrained(tmp_path)
    return tmp_path


def test_failing_save_leaves_the_old_set(saved: Path) -> None:
    before = RotationSet.from_pretrained(saved).digest()
    rotations = rotation_set()
    rotations.provenance["corpus"] = saved
    with pytest.raises(TypeError):
        rotations.save_pretrained(saved)
    assert RotationSet.from_pretrained(saved).digest() == before


def load_error(directory: Path, *, naming: str = "") -> str:
    """The message with which loading a damaged set fails, checked for the path."""
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        RotationSet.from_pretrained(directory)
    assert type(error.value) in (ValueError, FileNotFoundError)
    assert str(directory / naming) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", [WEIGHTS_NAME, CONFIG_NAME])
def test_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        RotationSet.from_pretrained(saved)
    load_error(saved, naming=name)


def test_missing_folder(tmp_path: Path) -> None:
    assert "is not there" in load_error(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 0.3, 0.9, -1])
def test_truncated_weights(saved: Path, kept: float) -> None:
    content = (saved / WEIGHTS_NAME).read_bytes()
    size = kept if isinstance(kept, int) else int(len(content) * kept)
    (saved / WEIGHTS_NAME).write_bytes(content[:size])
    assert "damaged or cut short" in load_error(saved, naming=WEIGHTS_NAME)


@pytest.mark.parametrize("content", [b"x" * 500, b"\xff" * 8 + b"{}", b"PK\x03\x04" + bytes(200)])
def test_weights_that_are_something_else(saved: Path, content: bytes) -> None:
    (saved / WEIGHTS_NAME).write_bytes(content)
    load_error(saved, naming=WEIGHTS_NAME)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"rotations", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a":' * 100_000, "is not JSON"),
        (b"[]", "version None"),
        (b"null", "version None"),
        (b"{}", "version None"),
        (b'{"version": 2}', "version 2"),
        (b'{"version": "1"}', "version '1'"),
        (b'{"version": 1}', "'config' is missing"),
        (
            b'{"version": 1, "config": {}, "architecture": [], "provenance": {}}',
            "'architecture' is missing or no object",
        ),
        (
            b'{"version": 1, "config": {}, "architecture": {}, "provenance": "x"}',
            "'provenance' is missing or no object",
        ),
        (b" " * MAX_CONFIG_BYTES + b"{}", f"{MAX_CONFIG_BYTES + 2} bytes, allowed {MAX_CONFIG_BYTES}"),
    ],
)
def test_malformed_json(saved: Path, content: bytes, message: str) -> None:
    (saved / CONFIG_NAME).write_bytes(content)
    assert message in load_error(saved, naming=CONFIG_NAME)


def test_json_with_a_number_too_long_for_python(saved: Path) -> None:
    (saved / CONFIG_NAME).write_bytes(b'{"version": ' + b"1" * 10_000 + b"}")
    load_error(saved, naming=CONFIG_NAME)


@pytest.mark.parametrize(
    "settings",
    [{"k_clip": 7}, {"k_clips": 0.9}, {"recipe": "best"}, {"sink_tokens": -1}, {"bits": {}}, {"recipe": []}],
)
def test_json_with_bad_settings(saved: Path, settings: dict) -> None:
    content = json.loads((saved / CONFIG_NAME).read_text())
    (saved / CONFIG_NAME).write_text(json.dumps({**content, "config": settings}))
    message = load_error(saved, naming=CONFIG_NAME)
    assert next(iter(settings)) in message


@pytest.mark.parametrize(
    "name",
    [
        "weight",
        "layers",
        "layers.0",
        "layers.-1.k_rotation",
        "layers.x.k_rotation",
        "layers.0.o_rotation",
        "model.0.k_mean",
    ],
)
def test_unexpected_tensor(saved: Path, name: str) -> None:
    save_file(
        {"layers.1.k_rotation": torch.eye(16), "layers.1.v_rotation": torch.eye(16), name: torch.eye(2)},
        saved / WEIGHTS_NAME,
    )
    assert repr(name) in load_error(saved, naming=WEIGHTS_NAME)


@pytest.mark.parametrize("name", ["layers.1.k_rotation.weight", "layers.01.k_rotation"])
def test_tensor_whose_name_is_almost_right(saved: Path, name: str) -> None:
    save_file(
        {"layers.1.k_rotation": torch.eye(16), "layers.1.v_rotation": torch.eye(16), name: torch.eye(16)},
        saved / WEIGHTS_NAME,
    )
    assert repr(name) in load_error(saved, naming=WEIGHTS_NAME)


@pytest.mark.parametrize("missing", ["k_rotation", "v_rotation"])
def test_missing_tensor(saved: Path, missing: str) -> None:
    names = {"k_rotation", "v_rotation", "q_rotation"} - {missing}
    save_file({f"layers.5.{name}": torch.eye(16) for name in names}, saved / WEIGHTS_NAME)
    assert "layer 5 lacks" in load_error(saved, naming=WEIGHTS_NAME)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_tensors(saved: Path, dtype: torch.dtype) -> None:
    save_file({f"layers.1.{name}_rotation": torch.eye(16).to(dtype) for name in "kv"}, saved / WEIGHTS_NAME)
    load_error(saved, naming=WEIGHTS_NAME)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"layers.1.k_rotation": torch.full((16, 16), torch.nan), "layers.1.v_rotation": torch.eye(16)},
        {"layers.1.k_rotation": torch.ones(16, 16), "layers.1.v_rotation": torch.eye(16)},
        {"layers.1.k_rotation": torch.eye(8), "layers.1.v_rotation": torch.eye(16)},
    ],
    ids=["none", "NaN", "singular", "sizes"],
)
def test_weights_that_are_no_rotations(saved: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, saved / WEIGHTS_NAME)
    load_error(saved, naming=WEIGHTS_NAME)


# Published rotations


@pytest.mark.parametrize(
    ("folder", "names", "layers", "size"),
    [
        (
            "qwen3-4b-thinking-2507",
            ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"),
            range(36),
            128,
        ),
        ("qwen3-8b-longbench", ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"), range(36), 128),
        ("qwen3.5-4b", ("k_rotation.pt", "v_rotation.pt"), range(3, 32, 4), 256),
    ],
)
def test_published_rotations_are_sound(
    shared_data: Path, folder: str, names: tuple[str, str], layers: range, size: int
) -> None:
    folder = shared_data / "upstream_rotations" / folder
    files = [torch.load(folder / name, weights_only=True)["layers"] for name in names]
    keys, values = ({index: entry["rotation"] for index, entry in layers.items()} for layers in files)
    rotations = RotationSet({index: LayerRotation(keys[index], values[index]) for index in keys})
    assert sorted(rotations.layers) == sorted(values) == list(layers)
    rotations.check_fits(set(layers), {"head_dim": size})


def test_a_set_saved_twice_has_equal_bytes(tmp_path: Path) -> None:
    rotations = RotationSet.without_data({0, 1, 2}, 16)
    saved = []
    for name in "abcdefgh":
        rotations.save_pretrained(tmp_path / name)
        saved.append([(tmp_path / name / file).read_bytes() for file in (WEIGHTS_NAME, CONFIG_NAME)])
    assert all(files == saved[0] for files in saved)


def test_files_with_more_metadata_still_load(tmp_path: Path) -> None:
    rotations = RotationSet.without_data({0, 1}, 16)
    rotations.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    save_file(tensors, tmp_path / WEIGHTS_NAME, metadata={"format": "pt", "oscar_version": "1"})
    assert RotationSet.from_pretrained(tmp_path).digest() == rotations.digest()
