"""A layer's rotations, ready to use: on the device of the states they meet."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .rotation import LayerRotation
from .search import Metric


class Transform:
    """A layer's rotations on the devices that use them; one object serves all caches of a patched model."""

    def __init__(self, rotation: LayerRotation, absorbed: bool = False, heads: range | None = None):
        self.rotation = rotation
        self.heads = heads  # of those that have a transform each, the KV heads of this process
        self.absorbed = absorbed  # the projections carry v_rotation already
        self.bits = rotation.bits  # 16: this layer's keys are beyond 2 bits
        self.judged = rotation.bits == 16  # whether that is known (`outliers.judge`)
        self.retired = False  # the model's projections have changed since
        self._placed: dict[torch.device, dict[str, Tensor]] = {}
        self._metrics: dict[torch.device, Metric] = {}

    def unrotated(self) -> Transform:
        """The same that leaves keys as they are: for 16 bits, in which rotating large ones would cost precision."""
        keys = {"k_rotation": torch.eye(self.rotation.head_dim), "q_rotation": None, "k_mean": None, "k_metric": None}
        return Transform(replace(self.rotation, **keys, bits=16), self.absorbed)  # type: ignore[arg-type]

    @torch.inference_mode(False)
    def _on(self, device: torch.device) -> dict[str, Tensor]:
        if device not in self._placed:
            tensors = {
                name: self._own(name, tensor).to(device, torch.float32)
                for name, tensor in self.rotation.tensors().items()
                if name != "k_metric"
            }
            tensors.setdefault("q_rotation", tensors["k_rotation"])
            self._placed[device] = tensors
        return self._placed[device]

    def _own(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a transform that the heads of this process use."""
        if self.heads is None or not _per_head(name, tensor):
            return tensor
        return tensor[self.heads.start : self.heads.stop]

    @property
    def kv_heads(self) -> int | None:
        """How many KV heads these are for; None: any number."""
        if self.heads is not None:
            return len(self.heads)
        counts = [len(tensor) for name, tensor in self.rotation.tensors().items() if _per_head(name, tensor)]
        return counts[0] if counts else None

    def check(self, keys: Tensor) -> None:
        """Raise ValueError unless these are for keys [B, H_kv, n, D] of so many heads and channels."""
        if keys.shape[-1] != self.rotation.head_dim:
            raise ValueError(
                f"Rotations for head_dim {self.rotation.head_dim} met keys of {keys.shape[-1]} channels; they belong "
                "to another model."
            )
        if self.kv_heads not in (None, keys.shape[1]):
            raise ValueError(
                f"Rotations for {self.kv_heads} KV heads met keys of {keys.shape[1]}: under tensor parallelism make "
                "the cache from the model, not from its configuration."
            )

    def tensors(self, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """`k_mean` or None, `k_rotation`, `q_rotation`, and `v_rotation` unless the projections carry it; float32."""
        placed = self._on(device)
        v_rotation = None if self.absorbed else placed["v_rotation"]
        return placed.get("k_mean"), placed["k_rotation"], placed["q_rotation"], v_rotation

    @torch.inference_mode(False)
    def metric(self, device: torch.device) -> Metric:
        """What errors of stored keys cost, with its factor.

        Raises:
            ValueError: rotations without a metric.
        """
        if device not in self._metrics:
            if self.rotation.k_metric is None:
                raise ValueError(
                    "These rotations have no k_metric, which k_search needs: calibrate with recipe 'search', or set "
                    "k_search=0."
                )
            metric = Metric.of(self._own("k_metric", self.rotation.k_metric))
            self._metrics[device] = Metric(metric.matrix.to(device), metric.factor.to(device))
        return self._metrics[device]

    def rows(self, rows: slice) -> Transform:
        """For some rows of the batch: all have the same, unless a cache fits them (`fitting.RowTransform`)."""
        return self

    def exemplar(self) -> tuple[slice, Transform]:
        """The rows of a batch by which `outliers.judge` may judge the layer, and a transform without a batch's dim."""
        return slice(None), self

    def keys(self, keys: Tensor) -> Tensor:
        """`(k - k_mean) k_rotation`, [B, H_kv, n, D] in the dtype given."""
        placed, rotated = self._on(keys.device), keys.float()
        if "k_mean" in placed:
            rotated = rotated - placed["k_mean"].unsqueeze(-2)
        return (rotated @ placed["k_rotation"]).to(keys.dtype)

    def undo_keys(self, keys: Tensor) -> Tensor:
        """Stored keys back in the model's basis."""
        placed = self._on(keys.device)
        restored = keys.float() @ placed["q_rotation"].mT
        return (restored + placed["k_mean"].unsqueeze(-2) if "k_mean" in placed else restored).to(keys.dtype)

    def values(self, values: Tensor) -> Tensor:
        """`v v_rotation`, unless the projections have done it."""
        if self.absorbed:
            return values
        return (values.float() @ self._on(values.device)["v_rotation"]).to(values.dtype)

    def undo_values(self, values: Tensor) -> Tensor:
        """The inverse of `values`, for stored values and for attention outputs of a KV head."""
        if self.absorbed:
            return values
        return (values.float() @ self._on(values.device)["v_rotation"].mT).to(values.dtype)

    def queries(self, queries: Tensor) -> Tensor:
        """`q q_rotation` for queries [B, H_kv, n, D], float32."""
        return queries.float() @ self._on(queries.device)["q_rotation"]

    def mean_logits(self, queries: Tensor, scaling: float) -> Tensor | None:
        """`scaling q . k_mean`, [B, H_kv, n]: what every logit lacks because the mean was taken off the keys."""
        mean = self._on(queries.device).get("k_mean")
        return None if mean is None else (queries.float() @ mean.unsqueeze(-1)).squeeze(-1) * scaling


def _per_head(name: str, tensor: Tensor) -> bool:
    """Whether a rotation [D, D] or [H_kv, D, D], or a mean [H_kv, D], has an entry a head."""
    return tensor.dim() == 3 or name == "k_mean"
