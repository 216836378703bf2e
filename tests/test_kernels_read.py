"""Attention kernels against their torch twins: in Triton's interpreter, and on a GPU with `make test-gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_hf.kernels import reference
from oscar_hf.quantization import Quantized, dequantize, quantize

triton = pytest.importorskip("triton", reason="Triton is not installed")
from oscar_hf.kernels.attend import LOG2E, attend_split, merge  # noqa: E402

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
    before, seen = lengths.clone(), torch.tensor(7, device=query.device)
    merge(
        partial, stats, output, queries=queries, sink_logits=sink_logits, v_rotation=v_rotation, lengths=before,
        seen=seen,
    )  # fmt: skip
    assert torch.equal(before, lengths + queries) and int(seen) == 7 + queries
    return output


def relative_error(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


CASES: dict[str, dict[str, Any]] = {
    "one token": {"lengths": [0], "group": 2, "size": 64},
    "sink only": {"lengths": [2, 1], "group": 3, "size": 64},
    "ragged": {"lengths": [200, 3, 63], "group": 2, "size": 64, "queries": 3},
    "floors": {"lengths": [150, 130], "floors": [140, 0], "group": 2, "size": 64, "queries": 2},
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
@pytest.mark.parametrize("splits, windows", [(2, 1), (9, 3)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_equals_its_twin(case: dict[str, Any], splits: int, windows: int, device: str) -> None:
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
        rows = Quantized(buffers[f"{name}_codes"], buffers[f"{name}_affine"])
        codes = dequantize(
            Quantized(rows.codes, torch.ones_like(rows.affine) * torch.tensor([1.0, 0.0], device=device))
        )
        scale, minimum = rows.affine.float().split(1, -1)
        values = (table[codes.long().clamp(0, 3)].unflatten(-1, (scale.shape[2 + 1], -1)) * scale + minimum).flatten(
            -2
        )
        flushed = 131 - 22
        past = torch.cat([buffers[f"{name}_sink"], values[:, :, :flushed]], 2)
        slots = torch.arange(5 + flushed, 131, device=device) % buffers[f"{name}_recent"].shape[2]
        buffers[f"{name}_all"] = torch.cat([past, buffers[f"{name}_recent"][:, :, slots]], 2)
    weights = (query @ buffers["k_all"].mT / LOG2E).softmax(-1)
    expected = (weights @ buffers["v_all"]).flatten(1, 2)[:, None]
    assert relative_error(output, expected) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries, exact, history", [(1, 1, 0), (40, 63, 0), (33, 97, 129), (129, 150, 200)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_chunk_reads_history_and_its_own_tokens(
    queries: int, exact: int, history: int, softcap: float | None, device: str
) -> None:
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
