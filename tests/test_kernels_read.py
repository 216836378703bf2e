"""Attention kernels against their torch twins: in Triton's interpreter, and on a GPU with `make test-gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_hf.kernels import reference
from oscar_hf.quantization import Quantized, quantize, unpack

triton = pytest.importorskip("triton", reason="Triton is not installed")
from oscar_hf.kernels.attend import LOG2E, attend_split  # noqa: E402
from oscar_hf.kernels.merge import merge  # noqa: E402

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    value = 255 if dtype == torch.uint8 else float("nan")
    return torch.full(shape, value, dtype=dtype, device=device)


def stored_state(
    lengths: list[int],
    queries: int,
    heads: int,
    size: int,
    *,
    sink: int,
    recent: int,
    group_size: int | None = None,
    floors: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    scale_dtype: torch.dtype = torch.float16,
    capacity: int | None = None,
    device: str = "cpu",
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Buffers that hold `length + queries` random tokens a row, NaN wherever nothing may be read; lengths, floors."""
    batch, longest = len(lengths), max(lengths) + queries
    ring, groups = recent + max(1, min(32, recent)), size // (group_size or size)
    capacity = capacity or longest + 3
    buffers = {}
    for name in ("k", "v"):
        states = torch.randn(batch, heads, longest, size, device=device).to(dtype) + 0.5
        packed = quantize(states, group_size=group_size, scale_dtype=scale_dtype)
        sinks = poisoned(batch, heads, sink, size, dtype=dtype, device=device)
        window = poisoned(batch, heads, ring, size, dtype=dtype, device=device)
        # one spare head: strides are not those of contiguous buffers
        codes = poisoned(batch, heads + 1, capacity, size // 4, dtype=torch.uint8, device=device)[:, 1:]
        affine = poisoned(batch, heads + 1, capacity, groups, 2, dtype=scale_dtype, device=device)[:, 1:]
        for row, length in enumerate(lengths):
            total, floor = length + queries, floors[row] if floors else 0
            first = min(sink, total)
            sinks[row, :, :first] = states[row, :, :first]
            held = torch.arange(max(sink, total - ring), max(sink, total), device=device)
            window[row, :, held % ring] = states[row, :, held]
            flushed = max(floor, total - sink - recent, 0)
            codes[row, :, :flushed] = packed.codes[row, :, sink : sink + flushed]
            affine[row, :, :flushed] = packed.affine[row, :, sink : sink + flushed]
        buffers |= {f"{name}_codes": codes, f"{name}_affine": affine, f"{name}_sink": sinks, f"{name}_recent": window}
    counts = (torch.tensor(values, dtype=torch.int32, device=device) for values in (lengths, floors or [0] * batch))
    return buffers, *counts


def ordered(buffers: dict[str, Tensor]) -> list[Tensor]:
    names = ("k_codes", "k_affine", "v_codes", "v_affine", "k_sink", "v_sink", "k_recent", "v_recent")
    return [buffers[name] for name in names]


def kernel_step(
    query: Tensor, buffers: dict[str, Tensor], lengths: Tensor, floors: Tensor, *, splits: int, windows: int,
    queries: int, recent: int, softcap: float | None = None, sink_logits: Tensor | None = None,
    offset: Tensor | None = None, v_rotation: Tensor | None = None, dtype: torch.dtype = torch.float32, **extra: Any,
) -> Tensor:  # fmt: skip
    """attend_split and merge: [B, queries, H_q, D]; checks that merge counts."""
    batch, heads, rows, size = query.shape
    partial, stats = attend_split(
        query, *ordered(buffers), lengths, floors, queries=queries, splits=splits, window_splits=windows,
        recent_tokens=recent, softcap=softcap, offset=offset, **extra,
    )  # fmt: skip
    output = torch.full(
        (batch, queries, rows // queries * heads, size), float("nan"), dtype=dtype, device=query.device
    )
    before = lengths.clone()
    merge(partial, stats, output, queries=queries, sink_logits=sink_logits, v_rotation=v_rotation, lengths=before)
    assert torch.equal(before, lengths + queries)
    return output


def relative_error(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


CASES: dict[str, dict[str, Any]] = {
    "one token": {"lengths": [0], "group": 2, "size": 64},
    "sink only": {"lengths": [2, 1], "group": 3, "size": 64},
    "ragged": {"lengths": [200, 3, 63], "group": 2, "size": 64, "queries": 3},
    "floors": {"lengths": [150, 130], "floors": [140, 0], "group": 2, "size": 64, "queries": 2},
    "more splits than tokens": {"lengths": [70, 2], "group": 2, "size": 64, "splits": (9, 3)},
    "no sink": {"lengths": [127], "group": 1, "size": 64, "sink": 0},
    "eight queries": {"lengths": [129], "group": 4, "size": 64, "queries": 8, "recent": 9},
    "head_dim 80": {"lengths": [130], "group": 5, "size": 80},
    "head_dim 96": {"lengths": [130], "group": 6, "size": 96},
    "head_dim 128": {"lengths": [257], "group": 8, "size": 128},
    "head_dim 192": {"lengths": [130], "group": 7, "size": 192},
    "head_dim 256": {"lengths": [130], "group": 12, "size": 256},
    "sixteen heads": {"lengths": [130], "group": 16, "size": 64, "queries": 5},
    "groups": {"lengths": [130], "group": 4, "size": 64, "group_size": 16},
    "bfloat16": {"lengths": [130, 90], "group": 4, "size": 64, "dtype": torch.bfloat16},
    "float16": {"lengths": [130, 90], "group": 4, "size": 64, "dtype": torch.float16},
    "bfloat16 scales": {"lengths": [130], "group": 4, "size": 64, "scale_dtype": torch.bfloat16},
    "softcap": {"lengths": [130], "group": 4, "size": 64, "softcap": 5.0},
    "sink logits": {"lengths": [130], "group": 4, "size": 64, "sinks": True, "queries": 2},
    "both": {"lengths": [130], "group": 4, "size": 64, "softcap": 5.0, "sinks": True, "dtype": torch.float16},
    "value rotation": {"lengths": [130], "group": 4, "size": 64, "rotate": True},
    "value rotation of 80": {"lengths": [70], "group": 2, "size": 80, "rotate": True},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_equals_its_twin(case: dict[str, Any], device: str) -> None:
    splits, windows = case.get("splits", (2, 1))
    queries, heads, size, group = case.get("queries", 1), 2, case["size"], case["group"]
    sink, recent, dtype = case.get("sink", 5), case.get("recent", 17), case.get("dtype", torch.float32)
    buffers, lengths, floors = stored_state(
        case["lengths"], queries, heads, size, sink=sink, recent=recent, device=device, dtype=dtype,
        group_size=case.get("group_size"), floors=case.get("floors"),
        scale_dtype=case.get("scale_dtype", torch.float16),
    )  # fmt: skip
    query = torch.randn(len(lengths), heads, group * queries, size, device=device) * 0.3
    sinks = torch.randn(heads * group, device=device) if case.get("sinks") else None
    offset = torch.randn(query.shape[:3], device=device) if sinks is not None or "softcap" in case else None
    rotation = None
    if case.get("rotate"):
        rotation = torch.linalg.qr(torch.randn(heads, size, size, device=device)).Q.contiguous()
    settings = {"queries": queries, "softcap": case.get("softcap"), "sink_logits": sinks}
    expected = reference.attend_step(
        query, *ordered(buffers), lengths, floors, recent_tokens=recent, offset=offset, **settings
    )
    if rotation is not None:
        expected = expected @ rotation.mT
    expected = expected.unflatten(2, (group, queries)).flatten(1, 2).transpose(1, 2)
    output = kernel_step(
        query, buffers, lengths, floors, splits=splits, windows=windows, recent=recent, dtype=dtype,
        offset=None if offset is None else offset * LOG2E, v_rotation=rotation, **settings,
    )  # fmt: skip
    assert relative_error(output, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group_size", [None, 16])
def test_levels_that_are_not_evenly_spaced(group_size: int | None, device: str) -> None:
    buffers, lengths, floors = stored_state([130], 1, 2, 64, sink=5, recent=17, group_size=group_size, device=device)
    query = torch.randn(1, 2, 3, 64, device=device) * 0.3
    output = kernel_step(
        query, buffers, lengths, floors, splits=3, windows=1, queries=1, recent=17, levels=(1.05, 1.95)
    )
    table = torch.tensor([0.0, 1.05, 1.95, 3.0], device=device)
    for name in ("k", "v"):  # the same values as 16-bit rows, and no history
        codes, affine = unpack(buffers[f"{name}_codes"]).long(), buffers[f"{name}_affine"].float()
        scale, minimum = affine.split(1, -1)
        values = (table[codes].unflatten(-1, (affine.shape[3], -1)) * scale + minimum).flatten(-2)
        flushed = 131 - 22
        past = torch.cat([buffers[f"{name}_sink"], values[:, :, :flushed]], 2)
        slots = torch.arange(5 + flushed, 131, device=device) % buffers[f"{name}_recent"].shape[2]
        buffers[f"{name}_all"] = torch.cat([past, buffers[f"{name}_recent"][:, :, slots]], 2)
    weights = (query @ buffers["k_all"].mT / LOG2E).softmax(-1)
    expected = (weights @ buffers["v_all"]).flatten(1, 2)[:, None]
    assert relative_error(output, expected) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries, exact, history", [(1, 1, 0), (33, 63, 0), (40, 90, 129)])
def test_a_chunk_reads_history_and_its_own_tokens(queries: int, exact: int, history: int, device: str) -> None:
    softcap = 3.0 if history else None
    buffers, _, _ = stored_state([history + 30], 0, 2, 64, sink=0, recent=30, device=device)
    states = [torch.randn(1, 2, exact, 64, device=device) for _ in range(2)]
    query = torch.randn(1, 2, 3 * queries, 64, device=device) * 0.3
    packed = [buffers[name] for name in ("k_codes", "k_affine", "v_codes", "v_affine")]
    partial, stats = attend_split(
        query, *packed, *states, *states, None, None, queries=queries, splits=1, window_splits=0, history=history,
        softcap=softcap,
    )  # fmt: skip
    output = torch.full((1, queries, 6, 64), float("nan"), device=device)
    merge(partial, stats, output, queries=queries)
    visible = torch.ones(queries, exact, dtype=torch.bool, device=device).tril(exact - queries).repeat(3, 1)
    blocks = [(*states, visible)]
    if history:
        rows = [buffer[:, :, :history] for buffer in packed]
        blocks.append((Quantized(*rows[:2]), Quantized(*rows[2:]), None))
    expected = reference.attend_blocks(query / LOG2E, blocks, softcap)
    expected = expected.unflatten(2, (3, queries)).flatten(1, 2).transpose(1, 2)
    assert relative_error(output, expected) < 1e-5


def quick_and_portable(
    lengths: list[int], queries: int, group: int, heads: int = 2, **state: Any
) -> tuple[Tensor, Tensor]:
    """What `decode_split` gives on a GPU, and the twin in float32, both [B, queries, H_q, 128]."""
    from oscar_hf.kernels.decode import decode_split, supports

    state = {"sink": 64, "recent": 256, "dtype": torch.bfloat16, "device": "cuda"} | state
    capacity = -(-(max(lengths) + queries) // 32) * 32
    buffers, counts, floors = stored_state(lengths, queries, heads, 128, capacity=capacity, **state)
    query = torch.randn(len(lengths), heads, group * queries, 128, device="cuda") * 0.3
    assert supports(128, group * queries, 1, state["dtype"], query.device)
    settings = {"queries": queries, "recent_tokens": state["recent"]}
    partial, stats = decode_split(query, *ordered(buffers), counts, floors, **settings)
    output = torch.empty(len(lengths), queries, group * heads, 128, device="cuda")
    merge(partial, stats, output, queries=queries)
    expected = reference.attend_step(query, *ordered(buffers), counts, floors, **settings)
    return output, expected.unflatten(2, (group, queries)).flatten(1, 2).transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("queries, group", [(1, 1), (1, 4), (2, 4), (1, 8), (8, 1), (1, 7)])
@pytest.mark.parametrize("lengths", [[0], [63, 1], [320], [321, 5], [129, 4097, 700]])
def test_the_quick_kernel_equals_its_twin(lengths: list[int], queries: int, group: int) -> None:
    for changes in ({}, {"dtype": torch.float16}, {"scale_dtype": torch.bfloat16}, {"sink": 0, "recent": 32}):
        output, expected = quick_and_portable(lengths, queries, group, **changes)
        assert relative_error(output, expected) < 1e-2  # windows are read in 16 bits, as any 16-bit attention does


@pytest.mark.gpu
@pytest.mark.parametrize("length", [100_003, 131_072])
@pytest.mark.parametrize("group", [4, 8])
def test_long_histories_are_read_to_three_thousandths(length: int, group: int) -> None:
    output, expected = quick_and_portable([length], 1, group)
    assert relative_error(output, expected) < 3e-3


@pytest.mark.gpu
def test_the_quick_kernel_after_a_rollback() -> None:
    output, expected = quick_and_portable([700, 650], 2, 4, floors=[690 - 64, 0])
    assert relative_error(output, expected) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("quick", [False, True])
def test_offsets_beyond_two_to_the_31(quick: bool) -> None:
    from oscar_hf.kernels.decode import decode_split

    state = {"sink": 64, "recent": 256, "dtype": torch.bfloat16, "device": "cuda"}
    small, lengths, floors = stored_state([3, 2, 900], 1, 8, 128, **state)
    capacity = 4_300_000  # the last row's codes begin at byte 2.2e9
    buffers = dict(small)
    for name in ("k_codes", "v_codes", "k_affine", "v_affine"):
        held = small[name]
        buffers[name] = held.new_empty(3, 8, capacity, *held.shape[3:])
        buffers[name][:, :, : held.shape[2]] = held
    query = torch.randn(3, 8, 4, 128, device="cuda") * 0.3
    settings = {"queries": 1, "recent_tokens": 256}
    split = decode_split if quick else attend_split
    partial, stats = split(query, *ordered(buffers), lengths, floors, **settings)
    output = torch.empty(3, 1, 32, 128, device="cuda")
    merge(partial, stats, output, queries=1)
    expected = reference.attend_step(query, *ordered(small), lengths, floors, **settings)
    assert relative_error(output, expected.flatten(1, 2)[:, None]) < 1e-2


@pytest.mark.parametrize("pairs", [1, 8, 64, 100, 1360])
@pytest.mark.parametrize("capacity", [32, 320, 4096, 32_768, 131_072])
def test_splits_fill_the_gpu(pairs: int, capacity: int) -> None:
    from oscar_hf.kernels.decode import choose_splits

    places = 6 * 132
    splits, exact = choose_splits(pairs, capacity, 352, places)
    assert 1 <= exact < splits <= max(16, places // pairs)
    if pairs > 1 and capacity >= 32_768:  # most of the waves' places are taken
        waves = -(-splits * pairs // places)
        assert splits * pairs / (waves * places) > 0.8
