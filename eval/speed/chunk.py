"""Attention of one layer to a chunk of a long prompt: ours against the portable kernel and SDPA over BF16 keys.

    python -m eval.speed.chunk --shapes 1x32K,1x100K,1x128K --chunk 4096

32 query heads, 8 KV heads, head_dim 128; tokens of the history are counted without the 320 in 16 bits and the chunk.
Times are medians over calls, by CUDA events and with what the host takes to launch. SDPA has no mask, so it attends to
all of the chunk from each of its tokens; queries and exact keys are given rotated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.speed import baselines, common
from eval.speed.common import DEVICE, Results, attempt, numbers, release, short, synchronize
from eval.speed.kernel import RECENT, SINK, error, random_quantized
from oscar_hf.kernels import chunk as chunks
from oscar_hf.kernels import dispatch, reference
from oscar_hf.quantization import Quantized, dequantize
from oscar_hf.reading import CHUNK_QUERIES

CHECKED = 64  # queries that are compared with float32


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """The median of `repeats` calls, after one that does not count."""
    call()
    synchronize()
    times = []
    for _ in range(repeats):
        if DEVICE.type != "cuda":
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def peak_of(call: Callable[[], Any]) -> int | None:
    """Bytes that a call allocates at most, besides what is there."""
    if DEVICE.type != "cuda":
        return None
    synchronize()
    common.reset_peak()
    before = torch.cuda.memory_allocated()
    call()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def last_queries(query: Tensor, keys: Quantized, values: Quantized, exact: list[Tensor], scaling: float) -> Tensor:
    """What the last `CHECKED` of the queries [B, H, G, n, D] see, in float32: [B, CHECKED, H_q, D]."""
    count, own = exact[0].shape[2], min(CHECKED, query.shape[3])
    part = query[:, :, :, -own:].flatten(2, 3).float()
    visible = torch.ones(own, count, dtype=torch.bool, device=DEVICE).tril(count - own).repeat(query.shape[2], 1)
    blocks: list[reference.Block] = [(*exact, visible), (keys, values, None)]  # type: ignore[list-item]
    result = reference.attend_blocks(part * scaling, blocks)
    return result.unflatten(2, (query.shape[2], -1)).flatten(1, 2).transpose(1, 2)


def measure(batch: int, heads: int, groups: int, tokens: int, size: int, count: int, repeats: int) -> list[dict]:
    """Every way to attend to `tokens` of the history and a chunk of `count` tokens."""

    def states(tokens: int) -> Tensor:
        return torch.randn(batch, heads, tokens, size, dtype=torch.bfloat16, device=DEVICE)

    keys, values = (random_quantized(batch, heads, tokens, size) for _ in range(2))
    exact = [states(SINK + RECENT + count) for _ in range(2)]
    query = states(groups * count).unflatten(2, (groups, count))
    output = torch.empty(batch, count, heads * groups, size, dtype=torch.bfloat16, device=DEVICE)
    scaling = size**-0.5
    settings: dict[str, Any] = {"tokens": tokens, "scaling": scaling, "softcap": None}
    settings |= dict.fromkeys(("sink_logits", "offset", "v_rotation"))
    expected = last_queries(query, keys, values, exact, scaling)

    def ours(attend: Callable[..., None], most: int = CHUNK_QUERIES) -> Tensor:
        for first in range(0, count, most):  # as `reading.attend_chunk` does
            last = min(first + most, count)
            part = query[:, :, :, first:last].flatten(2, 3).float()
            seen = [state[:, :, : state.shape[2] - count + last] for state in exact]
            attend(part, [*keys, *values], seen, output[:, first:last], **settings)
        return output

    def unpack_all() -> None:
        held = torch.empty(1, heads, chunks.UNPACK_BLOCK, size, dtype=torch.bfloat16, device=DEVICE)
        for row in range(batch):
            for codes, affine in (keys, values):
                for first in range(0, tokens, chunks.UNPACK_BLOCK):
                    block = (slice(row, row + 1), slice(None), slice(first, first + chunks.UNPACK_BLOCK))
                    chunks.unpack(codes[block], affine[block], held[:, :, : min(tokens - first, held.shape[2])])

    def whole() -> Tensor:
        return ours(dispatch.attend_history, count)

    flops = 4 * batch * heads * groups * count * (tokens + SINK + RECENT + count / 2) * size
    rows = []

    def add(name: str, detail: str, call: Callable[[], Any], repeats: int = repeats, checked: bool = True) -> None:
        def measured() -> dict[str, Any]:
            off = {"relative_error": error(call()[:, -expected.shape[1] :], expected)} if checked else {}
            spent = milliseconds(call, repeats)
            used = {"tflops": flops / spent / 1e9} if name != "unpack" else {}
            return {"ms": spent, **used, "transient_bytes": peak_of(call), **off}

        rows.append({"kernel": name, "detail": detail, **attempt(measured)})

    add("ours", f"{min(CHUNK_QUERIES, count)} queries a call", lambda: ours(dispatch.attend_history))
    if count > CHUNK_QUERIES:
        add("ours", f"{count} queries a call", whole)
    add("unpack", "history, once", unpack_all, checked=False)
    add("portable", "", lambda: ours(dispatch.attend_history_portable), max(1, repeats // 3))
    dense = [
        torch.cat([dequantize(rows, torch.bfloat16), held], 2)
        for rows, held in zip((keys, values), exact, strict=True)
    ]
    by_head = query.flatten(1, 2)
    for backend in ("flash", "cuDNN"):
        attend = baselines.sdpa(backend)
        add(
            "BF16 SDPA, no mask",
            backend,
            lambda attend=attend: attend(by_head, *dense),
            checked=False,
        )
    return rows


def main(
    shapes: Annotated[str, typer.Option(help="Batch x tokens of the history.")] = "1x32K,1x100K,1x128K",
    chunk: Annotated[int, typer.Option(help="New tokens a row.")] = 4096,
    kv_heads: int = 8,
    groups: Annotated[int, typer.Option(help="Query heads per KV head.")] = 4,
    head_dim: int = 128,
    repeats: Annotated[int, typer.Option(help="Calls, of which the median counts.")] = 9,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = common.RESULTS,
) -> None:
    """Measure a chunk over each history."""
    columns = {"shape": "", "kernel": "", "detail": "", "ms": ".2f", "tflops": ".0f", "relative_error": ".1e"}
    results = Results(
        "chunk",
        out,
        columns,
        chunk=chunk,
        kv_heads=kv_heads,
        query_heads=kv_heads * groups,
        head_dim=head_dim,
        dtype="bfloat16",
    )
    for shape in shapes.split(","):
        batch, tokens = (numbers(part)[0] for part in shape.split("x"))
        for row in measure(batch, kv_heads, groups, tokens, head_dim, chunk, repeats):
            results.add({"shape": f"{batch}x{short(tokens)}", "batch": batch, "tokens": tokens, **row})
        release()
    results.show("Attention of one layer to a chunk, milliseconds")


if __name__ == "__main__":
    typer.run(main)
