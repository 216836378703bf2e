"""Random sequences of everything a cache can be asked to do, against an exact model of what it must hold."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_layer import random_rotation, random_states
from torch import Tensor

from oscar_hf.cache_file import layer_state, restore_layer
from oscar_hf.config import OscarConfig
from oscar_hf.layer import OscarLayer
from oscar_hf.quantization import dequantize, quantize
from oscar_hf.transform import Transform

SINK, RECENT = 3, 6
CONFIG = OscarConfig(recipe="balanced", sink_tokens=SINK, recent_tokens=RECENT)
RING = 2 * RECENT
LIMIT = 120


class Row:
    """Tokens of one row, real ones and padding, and how many were ever written since each."""

    def __init__(self) -> None:
        self.columns: list[bool] = []
        self.tokens: list[tuple[Tensor, Tensor]] = []  # keys and values [H_kv, D]
        self.lost = 0  # the first tokens that the ring has overwritten

    def append(self, keys: Tensor, values: Tensor, real: list[bool]) -> None:
        self.columns += real
        self.tokens += [(keys[:, t], values[:, t]) for t, kept in enumerate(real) if kept]
        self.lost = max(self.lost, len(self.tokens) - RING)

    def crop(self, count: int) -> None:
        kept = len(self.columns) - count
        gone = sum(self.columns[kept:])
        self.columns = self.columns[:kept]
        self.tokens = self.tokens[: len(self.tokens) - gone]
        self.lost = min(self.lost, len(self.tokens))

    def exact(self) -> list[bool]:
        window = max(len(self.tokens) - RECENT, self.lost)
        return [t < SINK or t >= window for t in range(len(self.tokens))]


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        warnings.simplefilter("error")
        torch.manual_seed(0)

    @initialize(batch=st.integers(1, 3), fixed=st.booleans())
    def start(self, batch: int, fixed: bool) -> None:
        self.transform = Transform(random_rotation())
        text_config = SimpleNamespace(_attn_implementation="oscar")
        self.layer = OscarLayer(self.transform, CONFIG, text_config, LIMIT if fixed else None)
        self.rows = [Row() for _ in range(batch)]
        self.other: tuple[OscarLayer, list[Row]] | None = None

    @rule(count=st.integers(1, 30), holes=st.booleans(), data=st.data())
    def append(self, count: int, holes: bool, data: st.DataObject) -> None:
        seen = len(self.rows[0].columns)
        count = min(count, LIMIT - seen)
        if not count:
            return
        batch = len(self.rows)
        real = [[True] * count for _ in range(batch)]
        if holes:
            real = data.draw(
                st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=batch, max_size=batch)
            )
        states = random_states(count, batch)
        past = [row.columns for row in self.rows]
        for index, row in enumerate(self.rows):
            row.append(states[1][index], states[2][index], real[index])
        whole = torch.tensor([row.columns for row in self.rows])
        if self.layer.fixed:  # its masks show new columns only
            whole = whole[:, seen:]
        key, value = self.layer.update(states[1], states[2])
        output = self.layer.attend(states[0], key, value, None if whole.all() and not any(map(bool, past)) else whole)
        assert output.isfinite().all()

    @rule(count=st.integers(0, 40))
    def crop(self, count: int) -> None:
        count = min(count, len(self.rows[0].columns))
        if not count:
            return
        self.layer.crop(-count)
        for row in self.rows:
            row.crop(count)

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        batch = len(self.rows)
        order = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))
        if not self.rows[0].columns:
            return
        self.layer.reorder_cache(torch.tensor(order))
        self.rows = [copy.deepcopy(self.rows[index]) for index in order]

    @rule()
    def repeat(self) -> None:
        if self.rows[0].columns and len(self.rows) < 3:
            self.layer.batch_repeat_interleave(2)
            self.rows = [copy.deepcopy(row) for row in self.rows for _ in range(2)]

    @rule(copies=st.integers(1, 3))
    def fork(self, copies: int) -> None:
        """Both go on, in turns; `exchange` shows that neither writes into the other."""
        if self.layer.fixed or len(self.rows) * copies > 4:
            return
        rows = [copy.deepcopy(row) for row in self.rows for _ in range(copies)]
        self.other = (self.layer, self.rows)
        self.layer, self.rows = self.layer.fork(copies), rows

    @rule()
    def exchange(self) -> None:
        if self.other is not None:
            self.other, (self.layer, self.rows) = (self.layer, self.rows), self.other

    @rule()
    def copied(self) -> None:
        self.layer, old = copy.deepcopy(self.layer), self.layer
        if old.is_initialized and not old.tiers.borrowed:  # what the other copy does is its own
            for tensor in old.buffers():
                tensor.zero_()

    @rule()
    def pickled(self) -> None:
        self.layer = pickle.loads(pickle.dumps(self.layer))

    @rule()
    def saved(self) -> None:
        if not self.rows[0].columns:
            return
        tensors, facts = layer_state(self.layer)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        again = OscarLayer(self.layer.transform, CONFIG, self.layer.text_config, self.layer.max_cache_len)
        restore_layer(again, tensors, facts)
        self.layer = again

    @rule()
    def reset(self) -> None:
        self.layer.reset()
        self.rows = [Row() for _ in self.rows]

    @invariant()
    def holds_what_it_must(self) -> None:
        if not hasattr(self, "layer") or not self.rows[0].columns:
            return
        assert self.layer.seen == len(self.rows[0].columns)
        keys, values = self.layer._dense()
        for index, row in enumerate(self.rows):
            columns = torch.tensor(row.columns)
            assert not keys[index][:, ~columns].any()
            for held, part in ((keys, 0), (values, 1)):
                if not row.tokens:
                    continue
                given = torch.stack([token[part] for token in row.tokens], 1)[None]  # [1, H_kv, n, D]
                lossy = self.quantised(given, part)
                expected = torch.where(torch.tensor(row.exact())[:, None], given, lossy)[0]
                torch.testing.assert_close(held[index][:, columns], expected, rtol=1e-3, atol=1e-3)

    def quantised(self, states: Tensor, part: int) -> Tensor:
        transform = self.layer.transform
        rotate, undo, clip = (
            (transform.keys, transform.undo_keys, CONFIG.k_clip),
            (transform.values, transform.undo_values, CONFIG.v_clip),
        )[part]
        return undo(dequantize(quantize(rotate(states), clip=clip, scale_rule=CONFIG.scale_rule)))


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
