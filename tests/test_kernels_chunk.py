"""Long chunks over a quantised history: against their torch twins in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_hf.kernels import dispatch, reference
from oscar_hf.quantization import Quantized, dequantize, quantize
from oscar_hf.sharing import Prefix

pytest.importorskip("triton", reason="Triton is not installed")
from oscar_hf.kernels import chunk  # noqa: E402

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def packed_rows(
    batch: int, heads: int, tokens: int, size: int, device: str, *, capacity: int | None = None, **settings: Any
) -> Quantized:
    """Random rows in the stored format; beyond `tokens`, codes of 3 and affine of NaN. One spare head: odd strides."""
    rows = quantize(torch.randn(batch, heads, tokens, size, device=device) + 0.5, **settings)
    capacity = tokens + 5 if capacity is None else capacity
    codes = rows.codes.new_full((batch, heads + 1, capacity, size // 4), 255)[:, 1:]
    affine = rows.affine.new_full((batch, heads + 1, capacity, *rows.affine.shape[3:]), float("nan"))[:, 1:]
    codes[:, :, :tokens], affine[:, :, :tokens] = rows
    return Quantized(codes, affine)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size, group_size", [(64, None), (80, None), (96, 32), (128, None), (128, 16), (256, 64)])
def test_unpacking_equals_its_twin(size: int, group_size: int | None, dtype: torch.dtype, device: str) -> None:
    for tokens in (1, 63, 64, 65, 129):
        rows = packed_rows(1, 3, tokens, size, device, group_size=group_size)
        codes, affine = (part[:, :, :tokens] for part in rows)
        held = torch.full((2, 1, 3, tokens + 2, size), 7.0, dtype=dtype, device=device)
        chunk.unpack(codes, affine, held[1, :, :, :tokens])
        expected = dequantize(Quantized(codes, affine), dtype)
        # a product and a sum in one rounding or in two
        torch.testing.assert_close(held[1, :, :, :tokens], expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert (held[0] == 7).all() and (held[1, :, :, tokens:] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_unpacked_values_saturate(scale_dtype: torch.dtype, device: str) -> None:
    rows = quantize(torch.tensor([-1e30, 1e30], device=device).repeat(1, 2, 3, 16), scale_dtype=scale_dtype)
    held = torch.empty(1, 2, 3, 32, dtype=torch.float16, device=device)
    chunk.unpack(*rows, held)
    assert torch.equal(held, dequantize(rows, torch.float16)) and held.isfinite().all()


CASES: dict[str, dict[str, Any]] = {
    "one token": {"queries": 1, "held": 0, "history": 0},
    "no history": {"queries": 7, "held": 5, "history": 0},
    "nothing else held": {"queries": 3, "held": 0, "history": 1},
    "63": {"queries": 33, "held": 5, "history": 63},
    "127": {"queries": 17, "held": 5, "history": 127, "group": 1},
    "blocks": {"queries": 40, "held": 69, "history": 129, "block": 64},
    "whole blocks": {"queries": 40, "held": 69, "history": 128, "block": 64, "group": 4},
    "batch": {"queries": 12, "held": 5, "history": 70, "batch": 3, "block": 32},
    "eight heads": {"queries": 12, "held": 5, "history": 70, "group": 8},
    "head_dim 96": {"queries": 12, "held": 5, "history": 70, "size": 96},
    "head_dim 128": {"queries": 12, "held": 5, "history": 70, "size": 128},
    "head_dim 256": {"queries": 12, "held": 5, "history": 70, "size": 256},
    "groups": {"queries": 12, "held": 5, "history": 70, "group_size": 16},
    "bfloat16 scales": {"queries": 12, "held": 5, "history": 70, "scale_dtype": torch.bfloat16},
    "sink logits": {"queries": 12, "held": 5, "history": 70, "sinks": True, "batch": 2},
    "sink logits, no mean": {"queries": 12, "held": 5, "history": 70, "sinks": True, "offset": False},
    "value rotation": {"queries": 12, "held": 5, "history": 70, "rotate": 2},
    "value rotation a head": {"queries": 12, "held": 5, "history": 70, "rotate": 3, "batch": 2},
    "prefixes": {"queries": 12, "held": 5, "history": 70, "batch": 3, "prefixes": [(40, (0, 1, 0)), (9, (2, 2, 2))]},
    "a prefix alone": {"queries": 12, "held": 0, "history": 0, "batch": 2, "prefixes": [(129, (0, 0))], "block": 50},
}


def chunk_case(case: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """Arguments of `attend_history` and settings, and what the twin gives: [b, n, H_q, D] float32."""
    batch, heads, group, size = case.get("batch", 1), 2, case.get("group", 3), case.get("size", 64)
    queries, held, tokens = case["queries"], case["held"], case["history"]
    stored = {name: case[name] for name in ("group_size", "scale_dtype") if name in case}
    query = torch.randn(batch, heads, group * queries, size, device=device)
    exact = [torch.randn(batch, heads, held + queries, size, device=device).to(dtype) for _ in range(2)]
    history = [packed_rows(batch, heads, tokens, size, device, **stored) for _ in range(2)]
    prefixes = []
    for length, sources in case.get("prefixes", ()):
        of = [packed_rows(max(sources) + 1, heads, length, size, device, capacity=length, **stored) for _ in range(2)]
        prefixes.append(Prefix(*of, sources))
    sinks = torch.randn(heads * group, device=device) + 3 if case.get("sinks") else None
    offset = (
        torch.randn(query.shape[:3], device=device) * 2 if sinks is not None and case.get("offset", True) else None
    )
    rotation = None
    if "rotate" in case:
        square = torch.randn(*(heads, size, size)[3 - case["rotate"] :], device=device)
        rotation = torch.linalg.qr(square).Q.contiguous()

    visible = torch.ones(queries, held + queries, dtype=torch.bool, device=device).tril(held).repeat(group, 1)
    keys, values = (Quantized(*(part[:, :, :tokens] for part in rows)) for rows in history)
    blocks: list[reference.Block] = [(*exact, visible)]
    if tokens:
        blocks.append((keys, values, None))
    blocks += [(*(Quantized(*part) for part in prefix.states()), None) for prefix in prefixes]
    logits = None if sinks is None else sinks.view(1, heads, -1).repeat_interleave(queries, 2).expand(query.shape[:3])
    expected = reference.attend_blocks(query * size**-0.5, blocks, None, logits, offset)
    if rotation is not None:
        expected = expected @ rotation.mT
    expected = expected.unflatten(2, (group, queries)).flatten(1, 2).transpose(1, 2)
    output = torch.full((batch, queries + 1, heads * group, size), float("nan"), dtype=dtype, device=device)
    arguments = {
        "query": query,
        "history": [*history[0], *history[1]],
        "exact": exact,
        "output": output[:, 1:],  # as a part of a longer chunk
    }
    settings = {
        "tokens": tokens,
        "scaling": size**-0.5,
        "sink_logits": sinks,
        "offset": offset,
        "v_rotation": rotation,
        "prefixes": prefixes,
    }
    return arguments, settings, expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_chunk_equals_its_twin(
    case: dict[str, Any], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("flash attention on a GPU takes 16 bits")
    monkeypatch.setattr(chunk, "UNPACK_BLOCK", case.get("block", 16_384))
    arguments, settings, expected = chunk_case(case, dtype, device)
    chunk.attend(**arguments, **settings)
    assert relative_error(arguments["output"], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_large_states_stay_finite(scale_dtype: torch.dtype, device: str) -> None:
    """bfloat16 queries beyond float16's range; with float16 scales, a history's values are within it."""
    arguments, settings, _ = chunk_case({**CASES["63"], "scale_dtype": scale_dtype}, torch.bfloat16, device)
    arguments["query"] *= 1e7
    chunk.attend(**arguments, **settings)
    assert arguments["output"].isfinite().all()
    assert chunk.unpacked_dtype(torch.bfloat16, scale_dtype) == scale_dtype
    assert chunk.unpacked_dtype(torch.float16, scale_dtype) == torch.float16


def test_who_reads_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert chunk.supports(chunk.MIN_QUERIES, 128, torch.bfloat16, None, cpu)
    assert not chunk.supports(chunk.MIN_QUERIES - 1, 128, torch.bfloat16, None, cpu)
    assert not chunk.supports(chunk.MIN_QUERIES, 128, torch.bfloat16, 50.0, cpu)
    assert not chunk.supports(chunk.MIN_QUERIES, 100, torch.bfloat16, None, cpu)
    assert not chunk.supports(chunk.MIN_QUERIES, 512, torch.bfloat16, None, cpu)
    cuda = torch.device("cuda")
    for capability, dtype, taken in (
        ((9, 0), torch.bfloat16, True),
        ((8, 0), torch.float16, True),
        ((9, 0), torch.float32, False),
        ((7, 5), torch.float16, False),
        ((0, 0), torch.bfloat16, False),  # not NVIDIA's
    ):
        monkeypatch.setattr(chunk, "capability", lambda device, capability=capability: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        assert chunk.supports(chunk.MIN_QUERIES, 128, dtype, None, cuda) == taken


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("least, softcap, calls", [(12, None, 1), (13, None, 0), (12, 5.0, 0)])
def test_dispatch_by_the_number_of_queries(
    least: int, softcap: float | None, calls: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way gives the same."""
    monkeypatch.setattr(chunk, "MIN_QUERIES", least)
    taken = []
    attend = chunk.attend
    monkeypatch.setattr(chunk, "attend", lambda *args, **kwargs: (taken.append(1), attend(*args, **kwargs)))
    arguments, settings, expected = chunk_case(CASES["prefixes"], torch.float16, device)
    dispatch.attend_history(*arguments.values(), softcap=softcap, **settings)
    assert len(taken) == calls
    if softcap is None:
        assert relative_error(arguments["output"], expected) < TOLERANCE[torch.float16]


# On a GPU


def long_chunk(tokens: int, queries: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Qwen3-8B's heads, 320 exact tokens before the chunk."""
    batch, heads, group, size = 1, 8, 4, 128
    states = [torch.randn(batch, heads, 320 + queries, size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    history = [
        quantize(torch.randn(batch, heads, tokens, size, dtype=torch.bfloat16, device="cuda")) for _ in range(2)
    ]
    arguments = {
        "query": torch.randn(batch, heads, group * queries, size, device="cuda"),
        "history": [*history[0], *history[1]],
        "exact": states,
        "output": torch.empty(batch, queries, heads * group, size, dtype=torch.bfloat16, device="cuda"),
    }
    settings = {"tokens": tokens, "scaling": size**-0.5, "sink_logits": None, "offset": None, "v_rotation": None}
    return arguments, settings


def median_ms(call: Callable[[], Any], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


@pytest.mark.gpu
def test_a_long_chunk_is_right_and_quick() -> None:
    tokens, queries = 100 * 1024, 4096
    arguments, settings = long_chunk(tokens, queries)
    dispatch.attend_history(**arguments, softcap=None, **settings)
    keys, values = (
        torch.cat([dequantize(Quantized(*arguments["history"][at : at + 2])), arguments["exact"][at // 2].float()], 2)
        for at in (0, 2)
    )
    for first in (0, 2048, queries - 64):  # some of the queries, in float32
        own = torch.arange(first, first + 64, device="cuda")
        part = arguments["query"].unflatten(2, (-1, queries))[:, :, :, own].flatten(2, 3)
        visible = torch.arange(keys.shape[2], device="cuda") <= (tokens + 320 + own)[:, None]
        expected = reference.attend_blocks(part * settings["scaling"], [(keys, values, visible.repeat(4, 1))])
        expected = expected.unflatten(2, (4, -1)).flatten(1, 2).transpose(1, 2)
        assert relative_error(arguments["output"][:, own], expected) <= 5e-3
    quick = median_ms(lambda: dispatch.attend_history(**arguments, softcap=None, **settings))
    portable = median_ms(lambda: dispatch.attend_history_portable(**arguments, softcap=None, **settings), 3)
    assert portable >= 3 * quick, f"{quick:.2f} ms, the portable kernel {portable:.2f} ms"


@pytest.mark.gpu
def test_a_long_chunk_takes_the_memory_that_is_said() -> None:
    tokens, queries = 40_000, 2048
    arguments, settings = long_chunk(tokens, queries)
    dispatch.attend_history(**arguments, softcap=None, **settings)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dispatch.attend_history(**arguments, softcap=None, **settings)
    said = 2 * 8 * chunk.UNPACK_BLOCK * 128 * 2 + 12 * 32 * queries * 128
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * said


@pytest.mark.gpu
def test_unpacking_beyond_two_to_the_31() -> None:
    """Heads of a history of 4.3 million tokens: the codes of the last ones begin at byte 2.3e9."""
    heads, tokens, size = 18, 4_300_000, 128
    codes = torch.empty(1, heads, tokens, size // 4, dtype=torch.uint8, device="cuda")
    affine = torch.zeros(1, heads, tokens, 1, 2, dtype=torch.float16, device="cuda")
    block = slice(tokens - 100, tokens)
    rows = quantize(torch.randn(1, heads, 100, size, device="cuda"))
    codes[:, :, block], affine[:, :, block] = rows
    held = torch.empty(1, heads, 100, size, dtype=torch.bfloat16, device="cuda")
    chunk.unpack(codes[:, :, block], affine[:, :, block], held)
    expected = dequantize(rows, torch.bfloat16)
    torch.testing.assert_close(held, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)
