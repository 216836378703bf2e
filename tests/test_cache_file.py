"""Caches on disk: opened again they go on as if nothing had happened; anything else is refused whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_fixed import SMALL, patched, run
from test_patch import relative_error, rotations_for, tokens
from tiny import tiny_model
from transformers import PreTrainedModel

from oscar_hf import OscarQuantizedCache, patch_model
from oscar_hf._compat import cache_argument, set_attention
from oscar_hf.cache_file import FACTS_NAME, WEIGHTS_NAME


@pytest.fixture
def model() -> PreTrainedModel:
    return patched("llama")


def go_on(model: PreTrainedModel, ids: torch.Tensor, cache: OscarQuantizedCache, mask=None) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, attention_mask=mask, **{cache_argument(model): cache}).logits


@pytest.mark.parametrize("length", [None, 90], ids=["growing", "fixed"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_a_cache_goes_on_where_it_was(family: str, length: int | None, tmp_path: Path) -> None:
    model, ids = patched(family), tokens(2, 70)
    cache = OscarQuantizedCache(model, max_cache_len=length)
    run(model, ids[:, :60], cache, prompt=50)
    cache.save(tmp_path / "context")
    again = OscarQuantizedCache.load(tmp_path / "context", model, max_cache_len=length)
    assert again.get_seq_length() == 60 and again.memory().history == cache.memory().history
    assert torch.equal(go_on(model, ids[:, 60:], again), go_on(model, ids[:, 60:], cache))


def test_another_process_dtype_padding_and_storage(model: PreTrainedModel, tmp_path: Path) -> None:
    model.to(torch.bfloat16)
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :9] = 0
    cache = OscarQuantizedCache(model)
    go_on(model, ids[:, :50], cache, mask[:, :50])
    cache.crop(-3)
    cache.save(tmp_path / "context")
    fixed = OscarQuantizedCache.load(tmp_path / "context", model, max_cache_len=80)
    set_attention(model, "sdpa")  # one token is read alike by any attention
    plain = OscarQuantizedCache.load(tmp_path / "context", model)
    dense = go_on(model, ids[:, 47:48], plain, mask[:, :48])
    set_attention(model, "oscar")
    assert relative_error(go_on(model, ids[:, 47:48], fixed), go_on(model, ids[:, 47:48], cache, mask[:, :48])) < 0.02
    assert (
        relative_error(
            dense, go_on(model, ids[:, 47:48], OscarQuantizedCache.load(tmp_path / "context", model), mask[:, :48])
        )
        < 0.02
    )


def test_saving_again_replaces(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, cache = tokens(1, 60), OscarQuantizedCache(model)
    go_on(model, ids[:, :40], cache)
    cache.save(tmp_path / "context")
    go_on(model, ids[:, 40:], cache)
    monkeypatch.setattr("oscar_hf.cache_file.save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        cache.save(tmp_path / "context")
    assert OscarQuantizedCache.load(tmp_path / "context", model).get_seq_length() == 40
    monkeypatch.undo()
    cache.save(tmp_path / "context")
    assert OscarQuantizedCache.load(tmp_path / "context", model).get_seq_length() == 60
    assert [path.name for path in tmp_path.iterdir()] == ["context"]


def test_what_is_not_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        OscarQuantizedCache(model).save(tmp_path / "context")
    cache = OscarQuantizedCache(model)
    go_on(model, tokens(1, 40), cache)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/from-home.txt").write_text("dear")
    with pytest.raises(ValueError, match="other files"):
        cache.save(tmp_path / "letters")
    assert (tmp_path / "letters/from-home.txt").read_text() == "dear"


class TestRefusals:
    @pytest.fixture
    def saved(self, model: PreTrainedModel, tmp_path: Path) -> Path:
        cache = OscarQuantizedCache(model)
        go_on(model, tokens(1, 60), cache)
        return cache.save(tmp_path / "context")

    def test_other_weights(self, model: PreTrainedModel, saved: Path) -> None:
        with torch.no_grad():
            model.model.embed_tokens.weight += 1
        other = tiny_model("llama")
        other.load_state_dict(model.state_dict())
        patch_model(other, model._oscar_patch.rotations, SMALL, absorb=False, check=False)
        with pytest.raises(ValueError, match="other weights"):
            OscarQuantizedCache.load(saved, other)

    def test_other_rotations_and_architecture(self, saved: Path) -> None:
        other = tiny_model("llama")
        patch_model(other, rotations_for(other, "oscar"), SMALL)
        with pytest.raises(ValueError, match="other rotations"):
            OscarQuantizedCache.load(saved, other)
        with pytest.raises(ValueError, match="another architecture"):
            OscarQuantizedCache.load(saved, patched("qwen2"))

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
    @pytest.mark.parametrize("name", [WEIGHTS_NAME, FACTS_NAME])
    def test_cut_files(self, model: PreTrainedModel, saved: Path, name: str, share: float) -> None:
        content = (saved / name).read_bytes()
        (saved / name).write_bytes(content[: int(share * len(content)) - (share > 0.9)])
        with pytest.raises(ValueError, match="damaged|JSON|malformed"):
            OscarQuantizedCache.load(saved, model)

    def test_a_flipped_bit(self, model: PreTrainedModel, saved: Path) -> None:
        content = bytearray((saved / WEIGHTS_NAME).read_bytes())
        content[-100] ^= 1
        (saved / WEIGHTS_NAME).write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            OscarQuantizedCache.load(saved, model)

    @pytest.mark.parametrize(
        "change, words",
        [
            (lambda facts: facts.update(version=99), "versions"),
            (lambda facts: facts.update(config={"bits": 3}), "bits=3"),
            (lambda facts: facts.update(config={**facts["config"], "recent_tokens": 9}), "windows"),
            (lambda facts: facts["layers"][0].update(lengths=[-1]), "malformed"),
            (lambda facts: facts["layers"][0].update(lengths=[10**9], seen=10**9), "JSON says|windows|malformed"),
            (lambda facts: facts["layers"].pop(), "other layers"),
            (lambda facts: facts.pop("sha256"), "sha256"),
        ],
    )
    def test_facts_that_do_not_fit(self, model: PreTrainedModel, saved: Path, change, words: str) -> None:
        facts = json.loads((saved / FACTS_NAME).read_text())
        change(facts)
        (saved / FACTS_NAME).write_text(json.dumps(facts))
        with pytest.raises(ValueError, match=words):
            OscarQuantizedCache.load(saved, model)

    def test_too_long_for_fixed_storage_and_missing_files(self, model: PreTrainedModel, saved: Path) -> None:
        with pytest.raises(ValueError, match="max_cache_len=50"):
            OscarQuantizedCache.load(saved, model, max_cache_len=50)
        (saved / WEIGHTS_NAME).unlink()
        with pytest.raises(FileNotFoundError, match=WEIGHTS_NAME):
            OscarQuantizedCache.load(saved, model)
