"""Decode attention of one layer: ours against BF16 and INT2 baselines, in microseconds.

    python -m eval.speed.kernel --shapes 1x8K,1x32K,1x100K,1x128K,8x32K

32 query heads, 8 KV heads, head_dim 128, one query. Each figure is the median over replays of a CUDA graph that goes
through several sets of keys and values in turn, 256 MB or more together, so that nothing is read from L2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from eval.speed import baselines, common
from eval.speed.common import DEVICE, Results, attempt, graph_us, numbers, release, short
from oscar_hf import OscarConfig
from oscar_hf.kernels import attend, dispatch, merge, reference
from oscar_hf.kernels.launch import dependent_launches
from oscar_hf.matrices import hadamard
from oscar_hf.quantization import Quantized, dequantize

SINK, RECENT, SPARE = 64, 256, 32
HISTORY_SLACK = 512
SETS_BYTES = 256 << 20
LIMIT_SETS = 48


@dataclass
class State:
    """Buffers of one layer that holds `lengths` tokens a row; C is the history's capacity."""

    query: Tensor  # [B, H_q, n, D] model dtype, after RoPE
    key: Tensor  # [B, H, n, D] model dtype, the new token
    value: Tensor  # [B, H, n, D]
    sink_keys: Tensor  # [B, H, 64, D]
    sink_values: Tensor
    recent_keys: Tensor  # ring [B, H, 256 + 32, D]
    recent_values: Tensor
    keys: Quantized  # codes [B, H, C, D/4], affine [B, H, C, 1, 2]
    values: Quantized
    lengths: Tensor  # int32 [B], tokens before the call
    floors: Tensor  # int32 [B]
    k_rotation: Tensor  # [H, D, D] float32
    q_rotation: Tensor  # [H, D, D]
    k_mean: Tensor  # [H, D]
    scaling: float
    query_buffer: Tensor  # float32 [B, H, G n, D], what the first launch leaves for the second


def _tiers(state: State) -> tuple[Tensor, ...]:
    return state.sink_keys, state.sink_values, state.recent_keys, state.recent_values, *state.keys, *state.values


def ours(state: State, portable: bool = False) -> Tensor:
    """Attention over all tiers and merge, on `state.query_buffer`: [B, n, H_q, D]."""
    tiers, (batch, heads, queries, size) = _tiers(state), state.query.shape
    split = attend.attend_split if portable else dispatch.attend_split
    pdl = dependent_launches(state.query.device)
    arguments = (state.query_buffer, *tiers[4:], *tiers[:4], state.lengths, state.floors)
    settings = {"queries": queries, "recent_tokens": RECENT, "softcap": None, "offset": None, "launch_pdl": pdl}
    partial, stats = split(*arguments, **settings)
    output = state.query.new_empty(batch, queries, heads, size)
    merge.merge(partial, stats, output, queries=queries, launch_pdl=pdl)
    return output


def ours_step(state: State) -> Tensor:
    """The whole step: rotate and append, attention, merge; advances `state.lengths`."""
    settings = OscarConfig("balanced")
    return dispatch.step(
        state.query,
        state.key,
        state.value,
        state.k_mean,
        state.k_rotation,
        state.q_rotation,
        None,
        *_tiers(state),
        state.lengths,
        state.floors,
        RECENT,
        state.scaling,
        None,
        None,
        settings.k_clip,
        settings.v_clip,
        settings.scale_rule,
    )


# Data


def random_quantized(batch: int, heads: int, tokens: int, size: int) -> Quantized:
    """Rows in the stored format with random codes, of values about -1 to 1."""
    codes = torch.randint(256, (batch, heads, tokens, size // 4), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(batch, heads, tokens, 1, 1, device=DEVICE) * 0.2 + 0.5
    return Quantized(codes, torch.cat([scale, -1.5 * scale], -1).half())


def make_state(batch: int, kv_heads: int, groups: int, size: int, tokens: int) -> State:
    """Random buffers of a layer that holds `tokens` tokens."""

    def states(heads: int, count: int) -> Tensor:
        return torch.randn(batch, heads, count, size, dtype=torch.bfloat16, device=DEVICE)

    capacity = tokens - SINK - RECENT + HISTORY_SLACK
    rotation = hadamard(size).float().to(DEVICE).expand(kv_heads, -1, -1).contiguous()
    scaling = size**-0.5
    return State(
        query=states(kv_heads * groups, 1),
        key=states(kv_heads, 1),
        value=states(kv_heads, 1),
        sink_keys=states(kv_heads, SINK),
        sink_values=states(kv_heads, SINK),
        recent_keys=states(kv_heads, RECENT + SPARE),
        recent_values=states(kv_heads, RECENT + SPARE),
        keys=random_quantized(batch, kv_heads, capacity, size),
        values=random_quantized(batch, kv_heads, capacity, size),
        lengths=torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE),
        floors=torch.zeros(batch, dtype=torch.int32, device=DEVICE),
        k_rotation=rotation,
        q_rotation=rotation.clone(),
        k_mean=torch.randn(kv_heads, size, device=DEVICE),
        scaling=scaling,
        query_buffer=torch.randn(batch, kv_heads, groups, size, device=DEVICE) * (scaling * baselines.LOG2_E),
    )


def bf16_bytes(batch: int, heads: int, tokens: int, size: int) -> int:
    """Keys and values of one layer in BF16."""
    return 2 * 2 * batch * heads * tokens * size


def int2_bytes(batch: int, heads: int, tokens: int, size: int) -> int:
    """Keys and values of one layer in the stored format."""
    return 2 * batch * heads * tokens * (size // 4 + 4)


def oscar_bytes(batch: int, heads: int, tokens: int, size: int) -> int:
    """What a step of ours reads: history in the stored format, sink and recent window in BF16."""
    exact = SINK + RECENT
    return int2_bytes(batch, heads, tokens - exact, size) + bf16_bytes(batch, heads, exact, size)


def sets_of(size: int) -> int:
    """How many sets of `size` bytes are too many for L2."""
    if DEVICE.type != "cuda":
        return 1
    return min(LIMIT_SETS, max(2, -(-SETS_BYTES // size)))


def error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected."""
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


# Measurements: each returns the rows of its kernels


def _timed(name: str, size: int, calls: list[Callable[[], Any]], detail: str = "", **more: Any) -> dict[str, Any]:
    def measure() -> dict[str, Any]:
        return {"us": graph_us(calls), **more}

    return {"kernel": name, "detail": detail, "bytes": size, **attempt(measure)}


def measure_bf16(
    batch: int, heads: int, groups: int, tokens: int, size: int, splits: list[int]
) -> list[dict[str, Any]]:
    """SDPA, FlashInfer and the simple Triton kernel."""
    used = bf16_bytes(batch, heads, tokens, size)
    query = torch.randn(batch, heads * groups, 1, size, dtype=torch.bfloat16, device=DEVICE)
    sets = [
        [torch.randn(batch, heads, tokens, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        for _ in range(sets_of(used))
    ]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), *(states.float() for states in sets[0]), enable_gqa=True
    )
    rows = []

    def add(name: str, detail: str, attend: Callable[..., Tensor]) -> None:
        def off() -> dict[str, Any]:
            return {"relative_error": error(attend(query, *sets[0]), expected)}

        checked = attempt(off)
        if "error" in checked:
            rows.append({"kernel": name, "detail": detail, "bytes": used, **checked})
        else:
            calls = [lambda s=s: attend(query, *s) for s in sets]
            rows.append(_timed(name, used, calls, detail, **checked))

    for backend in baselines.SDPA_BACKENDS:
        add("BF16 SDPA", backend, baselines.sdpa(backend))
    for block in (64, 128):
        for count in splits:
            add(
                "BF16 split Triton",
                f"{count} splits of {block}-token tiles",
                lambda q, k, v, count=count, block=block: baselines.split_bf16(q, k, v, count, block),
            )
    try:
        import flashinfer  # noqa: F401
    except Exception as problem:  # not installed, or not for this machine
        rows.append({"kernel": "BF16 FlashInfer", "detail": "", "bytes": used, "error": f"{problem}"[:300]})
        return rows
    if batch == 1:
        add("BF16 FlashInfer", "single", baselines.flashinfer_single)
    sets.clear()
    release()

    def paged() -> dict[str, Any]:
        run = baselines.flashinfer_paged(query, heads, tokens)
        pages = [
            torch.randn(batch * tokens // 16, 2, heads, 16, size, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(sets_of(used))
        ]
        return {"us": graph_us([lambda p=p: run(query, p) for p in pages])}

    rows.append({"kernel": "BF16 FlashInfer", "detail": "paged", "bytes": used, **attempt(paged)})
    return rows


def measure_int2(
    batch: int, heads: int, groups: int, tokens: int, size: int, splits: list[int]
) -> list[dict[str, Any]]:
    """The plain INT2 kernel, all tokens quantised."""
    used = int2_bytes(batch, heads, tokens, size)
    query = torch.randn(batch, heads * groups, 1, size, dtype=torch.bfloat16, device=DEVICE)
    sets = [[random_quantized(batch, heads, tokens, size) for _ in range(2)] for _ in range(sets_of(used))]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), *(dequantize(states) for states in sets[0]), enable_gqa=True
    )
    rows = []
    for block in (64, 128):
        for count in splits:

            def off(count: int = count, block: int = block) -> dict[str, Any]:
                return {"relative_error": error(baselines.split_int2(query, *sets[0], count, block), expected)}

            calls = [lambda s=s, c=count, b=block: baselines.split_int2(query, *s, c, b) for s in sets]
            checked, detail = attempt(off), f"{count} splits of {block}-token tiles"
            if "error" in checked:
                rows.append({"kernel": "INT2 plain Triton", "detail": detail, "bytes": used, **checked})
            else:
                rows.append(_timed("INT2 plain Triton", used, calls, detail, **checked))
    return rows


def measure_read(batch: int, heads: int, tokens: int, size: int) -> list[dict[str, Any]]:
    """A kernel that only reads what ours reads."""
    used = oscar_bytes(batch, heads, tokens, size)
    sets = [torch.randint(1 << 30, (used // 4,), dtype=torch.int32, device=DEVICE) for _ in range(sets_of(used))]
    return [
        _timed(
            "read the same bytes",
            used,
            [lambda d=d, p=programs: baselines.read(d, p) for d in sets],
            f"{programs} programs",
        )
        for programs in (264, 528, 1056, 2112)
    ]


def measure_ours(batch: int, heads: int, groups: int, tokens: int, size: int) -> list[dict[str, Any]]:
    """Attention and merge by the quickest and by the portable kernel, and the whole step."""
    used = oscar_bytes(batch, heads, tokens, size)
    states = [make_state(batch, heads, groups, size, tokens) for _ in range(sets_of(used))]

    def reset() -> None:
        for state in states:
            state.lengths.fill_(tokens)

    first = states[0]
    expected = reference.attend_step(  # float32, on the dequantised values
        first.query_buffer, *first.keys, *first.values, *_tiers(first)[:4], first.lengths, first.floors,
        queries=1, recent_tokens=RECENT,
    ).flatten(1, 2)[:, None]  # fmt: skip
    rows = []
    kernels: dict[str, Callable[[State], Tensor]] = {
        "ours": ours,
        "ours, portable": lambda state: ours(state, portable=True),
        "ours, whole step": ours_step,
    }
    for name, call in kernels.items():

        def measure(name: str = name, call: Callable[[State], Tensor] = call) -> dict[str, Any]:
            reset()
            wrong = {} if "step" in name else {"relative_error": error(call(first), expected)}
            return {"us": graph_us([lambda s=s: call(s) for s in states], before=reset), **wrong}

        rows.append({"kernel": name, "detail": "", "bytes": used, **attempt(measure)})
    return rows


def best(rows: list[dict[str, Any]], kernel: str) -> float | None:
    """The least time among a kernel's settings."""
    return min((row["us"] for row in rows if row["kernel"] == kernel and "us" in row), default=None)


def main(
    shapes: Annotated[str, typer.Option(help="Batch x tokens.")] = "1x8K,1x32K,1x100K,1x128K,8x32K",
    kernels: Annotated[str, typer.Option(help="Of ours, read, int2, bf16.")] = "ours,read,int2,bf16",
    splits: Annotated[str, typer.Option(help="Split counts that the Triton baselines try.")] = "8,16,32,64,128",
    kv_heads: int = 8,
    groups: Annotated[int, typer.Option(help="Query heads per KV head.")] = 4,
    head_dim: int = 128,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = common.RESULTS,
) -> None:
    """Measure every kernel on every shape; the summary takes each kernel's best setting."""
    columns = {"shape": "", "kernel": "", "detail": "", "us": ".2f", "gb_per_s": ",.0f"}
    results = Results(
        "kernel", out, columns, kv_heads=kv_heads, query_heads=kv_heads * groups, head_dim=head_dim, dtype="bfloat16"
    )
    counts = numbers(splits)
    for shape in shapes.split(","):
        batch, tokens = (numbers(part)[0] for part in shape.split("x"))
        arguments = (batch, kv_heads, groups, tokens, head_dim)
        parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
            "ours": lambda a=arguments: measure_ours(*a),
            "read": lambda a=arguments: measure_read(a[0], a[1], a[3], a[4]),
            "int2": lambda a=arguments: measure_int2(*a, counts),
            "bf16": lambda a=arguments: measure_bf16(*a, counts),
        }
        for name, part in parts.items():
            if name not in kernels.split(","):
                continue
            rows = attempt(lambda part=part: {"rows": part()})
            for row in rows.get("rows", [{"kernel": name, "detail": "", **rows}]):
                if "us" in row:
                    row["gb_per_s"] = row["bytes"] / row["us"] / 1e3
                results.add({"shape": f"{batch}x{short(tokens)}", "batch": batch, "tokens": tokens, **row})
            release()
    summary = {}
    for shape in dict.fromkeys(row["shape"] for row in results.rows):
        rows = [row for row in results.rows if row["shape"] == shape]
        summary[shape] = {kernel: best(rows, kernel) for kernel in dict.fromkeys(row["kernel"] for row in rows)}
    results.content["best_us"] = summary
    results.save()
    results.show("Decode attention of one layer, microseconds")


if __name__ == "__main__":
    typer.run(main)
