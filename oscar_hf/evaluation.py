"""Any number of caches through the same measurements, with the unquantised model as reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ._compat import text_config
from .attention import evaluating
from .contenders import UNQUANTISED, Contender
from .quality import (
    BLOCK,
    bootstrap,
    cut_sequences,
    divergence,
    negative_log_likelihood,
    perplexity,
    reference_logits,
)
from .retrieval import TASKS, Haystack, answers, batches


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        tasks: of `"kl"` (with perplexity) and the retrieval tasks of `retrieval.TASKS`.
        lengths: tokens of a sequence or prompt.
        sequences: of each length, for KL.
        first: first position whose prediction counts, for KL; past sink and window, unless they are to count too.
        offset: tokens of the text to leave out, for KL.
        trials: questions of each retrieval task and length, at as many depths.
        batch: questions at once.
        chunk: tokens of a forward.
        exact_prefill: retrieval reads its text in one forward whose tokens see each other exactly, as `generate`
            does; only the question and the answer then read the quantised history. False: all tokens do.
        seed: of keys, numbers, places and resamples.

    Raises:
        ValueError: an unknown task, or a number out of range.
    """

    tasks: tuple[str, ...] = ("kl", "single")
    lengths: tuple[int, ...] = (4096,)
    sequences: int = 2
    first: int = 1024
    offset: int = 0
    trials: int = 60
    batch: int = 10
    chunk: int = 1024
    exact_prefill: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in ("kl", *TASKS):
                raise ValueError(f"task={task!r} is not known; choose of {', '.join(('kl', *TASKS))}.")
        counts = {"sequences": self.sequences, "trials": self.trials, "batch": self.batch, "chunk": self.chunk}
        for name, value in {**counts, "length": min(self.lengths, default=0)}.items():
            if value < 1:
                raise ValueError(f"{name}={value!r} must be 1 or more.")
        if "kl" in self.tasks and not 0 <= self.first < min(self.lengths) - 1:
            raise ValueError(f"first={self.first} leaves nothing to measure of {min(self.lengths)} tokens; lower it.")


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    contenders: Sequence[Contender],
    plan: Plan,
    *,
    text: str = "",
    haystack: str = "",
    chat: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure caches on one model.

    Args:
        model: not patched.
        tokenizer: the model's.
        contenders: caches to measure; the unquantised one is measured in any case, first.
        plan: what to measure.
        text: for KL and perplexity.
        haystack: for retrieval; prose.
        chat: put retrieval prompts into the tokenizer's chat template, if it has one.
        progress: show a progress bar.

    Returns:
        dict: JSON-ready: `caches`, what each is, or why it was skipped; `rows`, one for each cache, task and length.

    Raises:
        ValueError: a patched model, two contenders of one name, or too little text.
    """
    if getattr(model, "_oscar_patch", None) is not None:
        raise ValueError("This model is patched already: call unpatch_model(model), or load it again.")
    field = [Contender(UNQUANTISED), *(c for c in contenders if c.name != UNQUANTISED)]
    if len({c.name for c in field}) < len(field):
        raise ValueError(f"Each cache needs a name of its own: {', '.join(c.name for c in field)}.")
    retrieval = [task for task in plan.tasks if task != "kl"]
    hay = Haystack(haystack, tokenizer, chat) if retrieval else None
    trials = {(t, n): hay.trials(t, n, plan.trials, plan.seed) for n in plan.lengths for t in retrieval if hay}
    sequences: dict[int, list[Tensor]] = {}
    if "kl" in plan.tasks:
        for length in plan.lengths:
            sequences[length] = cut_sequences(tokenizer, text, length, plan.sequences, plan.offset)

    caches = {contender.name: contender.facts(model) for contender in field}
    for contender in field:
        try:
            with contender.caches(model):
                pass
        except (ImportError, ValueError) as error:
            if contender.backend is None:
                raise
            caches[contender.name] = {"skipped": " ".join(str(error).split())}
    able = [contender for contender in field if "skipped" not in caches[contender.name]]

    rows: list[dict[str, Any]] = []
    steps = len(able) * (len(sequences) * plan.sequences + sum(-(-len(t) // plan.batch) for t in trials.values()))
    with evaluating(model), tqdm(total=steps, desc="Measuring", disable=not progress, smoothing=0) as bar:
        for length, ids in sequences.items():
            rows += _kl_rows(model, able, plan, length, ids, bar)
        for contender in able if trials else []:
            chunk = None if plan.exact_prefill else min(plan.chunk, contender.chunk_limit or plan.chunk)
            with contender.caches(model, exact_prefill=plan.exact_prefill) as make:
                for (task, length), asked in trials.items():
                    said: list[str] = []
                    for batch in batches(asked, plan.batch):
                        bar.set_postfix_str(f"{contender.name}, {task} {length}")
                        said += answers(model, tokenizer, batch, make(), chunk)
                        bar.update()
                    scores = [trial.score(answer) for trial, answer in zip(asked, said, strict=True)]
                    kept = [
                        {"depth": t.depth, "score": s, "answer": a.strip(), "expected": list(t.expected)}
                        for t, s, a in zip(asked, scores, said, strict=True)
                    ]
                    rows.append(
                        {
                            "cache": contender.name,
                            "task": task,
                            "length": length,
                            "score": bootstrap([scores], seed=plan.seed).to_dict(),
                            "right": sum(score == 1 for score in scores),
                            "trials": kept,
                        }
                    )
    return {"plan": {**vars(plan)}, "caches": caches, "rows": rows}


def _kl_rows(
    model: PreTrainedModel, contenders: Sequence[Contender], plan: Plan, length: int, sequences: list[Tensor], bar: Any
) -> list[dict[str, Any]]:
    """KL and perplexity at one length."""
    rows, expected = [], []
    for contender in contenders:
        bar.set_postfix_str(f"{contender.name}, kl {length}")
        divergences, losses = [], []
        if contender.name == UNQUANTISED:
            for ids in sequences:
                cache = DynamicCache(config=text_config(model))
                expected.append(reference_logits(model, ids, cache, plan.first, plan.chunk))
                losses.append(negative_log_likelihood(expected[-1], ids))
                divergences.append(losses[-1] * 0)
                bar.update()
        else:
            chunk = min(plan.chunk, contender.chunk_limit or plan.chunk)
            with contender.caches(model) as make:
                for ids, logits in zip(sequences, expected, strict=True):
                    kl, loss = divergence(model, ids, logits, make(), chunk)
                    divergences.append(kl)
                    losses.append(loss)
                    bar.update()
        rows.append(
            {
                "cache": contender.name,
                "task": "kl",
                "length": length,
                "positions": sum(map(len, divergences)),
                "kl": bootstrap(divergences, block=BLOCK, seed=plan.seed).to_dict(),
                "perplexity": perplexity(losses, plan.seed).to_dict(),
            }
        )
    return rows


def summary(results: dict[str, Any], title: str | None = None) -> Table:
    """Results for people: a row for each cache, a column for each measurement, with bounds of 95 %."""
    measured = list(dict.fromkeys((row["task"], row["length"]) for row in results["rows"]))
    table = Table(title=title)
    skipped: list[str] = []
    table.add_column("cache")
    table.add_column("bits", justify="right")
    for task, length in measured:
        for name in ("KL", "perplexity") if task == "kl" else (task,):
            table.add_column(f"{name}\n{length:,}", justify="right")
    found = {(row["cache"], row["task"], row["length"]): row for row in results["rows"]}
    for cache, facts in results["caches"].items():
        if "skipped" in facts:
            skipped.append(f"{cache} was skipped: {facts['skipped']}")
            continue
        cells = [cell for task, length in measured for cell in _cells(found[cache, task, length])]
        table.add_row(cache, f"{facts['bits_per_element']:g}", *cells)
    if skipped:
        table.caption = "\n".join(skipped)
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    if row["task"] == "kl":
        reference = row["cache"] == UNQUANTISED
        return ["0" if reference else _bounds(row["kl"], ".3f"), _bounds(row["perplexity"], ".2f")]
    score = {key: 100 * value for key, value in row["score"].items()}
    return [f"{row['right']} of {len(row['trials'])}\n{score['low']:.0f} to {score['high']:.0f} %"]


def _bounds(estimate: dict[str, float], form: str) -> str:
    mean, low, high = (format(estimate[key], form) for key in ("mean", "low", "high"))
    return f"{mean}\n{low} to {high}"
