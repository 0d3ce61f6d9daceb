"""A Batch becomes tensors, tensors become tokens.

`launch` queues the whole step on the device and returns without waiting for it; `collect` waits and brings the results
to the host. Between the two the sampled tokens exist on the device only, and the next step may be launched already: it
takes them from `last_tokens`. Steps run in the order of their launch.

What may come next of a sequence with a constraint depends on its last token, which the host may not know at launch.
Such a step is launched like any other, and `constrain` draws those tokens again, from the same logits, once the step
before it is accounted for. So the device computes while the host looks for masks, and other sequences pay nothing.

A draft model's layers are computed in the same steps, for the same tokens, see engine/speculation/drafter.py.

On a GPU a step in which every sequence decodes runs from static buffers (decode_step.py), as a CUDA graph where one
was captured, and so do the layers of a step with few prompt tokens (prompt_step.py); every other step is made of
tensors of its own size. On a CPU, launch computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, StepShape
from engine.attention.triton_backend import TritonAttention
from engine.block_pool import Lease
from engine.block_tables import BlockTables
from engine.kv_pool import KVPool
from engine.launched import Forked, Launched, Scores, Undrawn, collect
from engine.models.base import Model
from engine.sampler import Sampled, SampleRow, sample, token_logprobs
from engine.scheduler import Item
from engine.sequence import Sequence as EngineSequence
from engine.speculation.chain import Chain
from engine.speculation.draft_graphs import DraftGraphs
from engine.speculation.draft_loop import DraftLoop
from engine.speculation.drafter import Drafter, Target
from engine.speculation.links import links_of, note_states
from engine.speculation.rejection import sample_rejecting
from engine.stepper import ItemResult
from engine.upload import upload
from engine.warm_up import Rows

if TYPE_CHECKING:
    from engine.decode_step import DecodeStep
    from engine.device_sampler import DeviceSampler
    from engine.prompt_step import PromptStep

MAX_LOGPROBS = 20  # alternatives beside a token, as SamplingParams allows
SCORED_AT_ONCE = 64  # prompt tokens whose logits exist at a time
ToScore = tuple[int, Item, int, int]  # an item and its index; the prompt tokens from here to before there are scored


class Runner:
    """Owns the model; writes KV only to the blocks of the items' leases.

    max_seqs: slots of the scheduler; max_blocks: of the longest lease. sampler: None samples with torch, which waits
    for the device: for a CPU. static: decode steps, and those with few prompt tokens, run from static buffers; needs a
    sampler and the Triton backend. most_tokens: of a step.
    drafts: most of an item, max_drafts: of a step. rejection: drafts are accepted by rejection sampling, in torch; on a
    GPU only those that were drawn, since for others sampling with their positions' noise has the same distribution.
    draft: layers of a draft model over this pool.
    """

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        backend: AttentionBackend[Any],
        *,
        max_seqs: int,
        max_blocks: int,
        most_tokens: int,
        sampler: DeviceSampler | None = None,
        static: bool = False,
        drafts: int = 0,
        max_drafts: int = 0,
        rejection: bool = False,
        draft: Drafter | None = None,
    ) -> None:
        self._model, self._kv, self._backend, self._sampler = model, kv, backend, sampler
        self._cache = kv.layers()
        self._device = kv.data.device
        self._tables = BlockTables(max_seqs, max_blocks)
        self._last_tokens = torch.zeros(max_seqs + 1, dtype=torch.int64, device=self._device)
        self._staged: list[Lease | None] = [None] * max_seqs
        self._replayed: tuple[int, int] | None = None
        self._drafts, self._rejection, self._draft = drafts, rejection, draft
        self._target = Target(model, self._cache, backend)
        self.decode: DecodeStep | None = None
        self.prompt: PromptStep | None = None
        if static:
            from engine.decode_step import DecodeStep
            from engine.prompt_step import PromptStep

            assert sampler is not None
            assert isinstance(backend, TritonAttention)
            self.decode = DecodeStep(
                model, self._cache, backend, sampler, self._tables, self._last_tokens,
                max_rows=max_seqs, drafts=drafts, max_drafts=max_drafts, draft=draft,
            )  # fmt: skip
            if draft is None:  # whose layers would have to be in the graphs, too
                self.prompt = PromptStep(model, self._cache, backend, most_tokens=most_tokens, max_blocks=max_blocks)
        self.draft_loop: DraftLoop | None = None
        self.draft_graphs: DraftGraphs | None = None
        if draft is not None:
            if self.decode is not None and sampler is not None and not rejection:
                self.draft_graphs = DraftGraphs(
                    draft, sampler, self._stage, buckets=self.decode.drafting_buckets, drafts=drafts,
                    width=max_blocks, block_size=kv.layout.block_size, device=self._device,
                )  # fmt: skip
            self.draft_loop = DraftLoop(draft, kv, self._tables, rejection=rejection, graphs=self.draft_graphs)

    @property
    def drafts_lag(self) -> bool:
        """See Drafter.lags."""
        return self._draft is not None and self._draft.lags

    def capture(self) -> None:
        """Records the CUDA graphs of all static steps."""
        for step in (self.decode, self.prompt, self.draft_graphs):
            if step is not None:
                step.capture()

    @torch.inference_mode()
    def launch(self, items: Sequence[Item]) -> Launched:
        """Queues forward pass and sampling of all items; every item's lease covers its tokens."""
        if self._sampler is not None:
            self._stage([item.seq for item in items if item.sample])
        self._kv.copy([item.copy for item in items if item.copy is not None])
        wanted = _wanted(items)
        self._replayed = None
        plain = not (self._rejects(items) or _constrained_drafts(items) or any(item.seq.embeds for item in items))
        if plain and self.decode is not None and self.decode.fits(items):
            self._clear_begun_blocks(items)
            self._replayed = rows, query = self.decode.stage(items)
            output = self.decode.run(rows, query)
            count = sum(1 + len(item.drafts) for item in items)
            results, logits, logit_rows = output.results[:count], output.logits, np.arange(count)
            undrawn = [item.seq.constraint is not None for item in items]
            scores: list[Scores] = []
        else:
            results, logits, logit_rows, scores = self._launch_chunks(items)
            undrawn = [item.sample and _awaits_token(item.seq) for item in items]
        if not any(undrawn):
            return self._send(items, results, wanted, logits, logit_rows, scores)
        rows_of = _rows_of(items)
        again = Undrawn(
            [item for item, undone in zip(items, undrawn, strict=True) if undone],
            [int(row) for row, undone in zip(rows_of, undrawn, strict=False) if undone],
            logits, logit_rows,
        )  # fmt: skip
        launched = Launched(items, results, wanted, (), (), None, again, scores)
        return launched if any(_awaits_token(item.seq) for item in again.items) else self.constrain(launched)

    @torch.inference_mode()
    def constrain(self, launched: Launched) -> Launched:
        """Draws again what was launched before its constraint knew the last token. Called once the steps before are
        accounted for; for most steps there is nothing to do.
        """
        undrawn, results = launched.undrawn, launched.results
        if undrawn is None:
            return launched
        pairs = [(i, row) for i, row in zip(undrawn.items, undrawn.rows, strict=True) if i.seq.finish is None]
        if pairs:
            self._draw_again([item for item, _ in pairs], [row for _, row in pairs], undrawn, results)
        return self._send(launched.items, results, launched.wanted, undrawn.logits, undrawn.logit_rows, launched.scores)

    def _draw_again(self, items: Sequence[Item], rows: Sequence[int], undrawn: Undrawn, results: Tensor) -> None:
        """Overwrites these results, and the last tokens of their slots."""
        masks = np.stack([mask for item in items for mask in _masks(item)])
        at, logit_rows, slots, positions = upload(
            [
                np.array(rows), undrawn.logit_rows[rows], np.array([item.seq.slot for item in items]),
                np.array([item.start + item.num_new for item in items]),
            ],
            self._device,
        )  # fmt: skip
        logits = undrawn.logits.index_select(0, logit_rows)
        if self._sampler is None:
            sampled = sample(logits, [_row(i, i.seq.tokens, (), m) for i, m in zip(items, masks, strict=True)])
        else:
            self._sampler.uncount(slots, results.index_select(0, at))
            (allowed,) = upload([masks], self._device)
            sampled = Sampled(*self._sampler.run(logits, slots, positions, allowed))
        self._last_tokens.index_copy_(0, slots, sampled.tokens)
        results.index_copy_(0, at, torch.where(sampled.finite, sampled.tokens, -1))

    def ended(self, launched: Launched) -> bool:
        """Whether `collect` would not wait."""
        return launched.arrived is None or bool(launched.arrived.query())  # type: ignore[no-untyped-call]

    def collect(self, launched: Launched) -> list[ItemResult]:
        """One result per item, in order; waits for the device."""
        return collect(launched)

    def replay(self, count: int) -> float | None:
        """Seconds that the last launched step takes when it is run `count` times back to back; None when it was not one
        from static buffers. Its sequences' KV and sampling state are spoilt: for measurements.
        """
        if self._replayed is None or self.decode is None or self._device.type != "cuda":
            return None
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            began.record()
            for _ in range(count):
                self.decode.run(*self._replayed)
            ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) * 1e-3 / count

    @torch.inference_mode()
    def rehearse(self, rows: Rows, block: int) -> None:
        """Queues a step whose rows all sample, with log-probabilities, and use that block of the pool alone.

        A row with as many new tokens as one with drafts has is taken for one.
        """
        shape = self._rehearsed(rows, block)
        ends = np.cumsum(shape.num_new)
        counts = np.where(np.array(shape.num_new) == 1 + self._drafts, shape.num_new, 1)
        last = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
        ids, at, rows_of = upload([np.zeros(ends[-1], dtype=np.int64), _positions(shape), last], self._device)
        hidden = self._hidden(shape, ids, at, rows_of, every=len(last) == len(ids))
        self._follow(shape, ids, at, list(range(len(rows))))
        logits = self._model.logits(hidden)
        if self._sampler is not None:
            pad = [self._sampler.pad_slot] * len(rows)
            slots, positions = upload([np.repeat(pad, counts), last], self._device)
            if len(last) > len(rows):
                tokens = self._sample_drafts(self._sampler, pad, counts, logits, slots, positions, slots * 0).tokens
            else:
                tokens, _ = self._sampler.run(logits, slots, positions)
            token_logprobs(logits, tokens, MAX_LOGPROBS)

    @torch.inference_mode()
    def plan(self, rows: Rows, block: int) -> None:
        """`rehearse` for the plans that the step's attention builds, without the rest of the model where it can."""
        if self._model.capturable and isinstance(self._backend, TritonAttention):
            self._backend.rehearse(self._rehearsed(rows, block))
        else:
            self.rehearse(rows, block)

    def _rehearsed(self, rows: Rows, block: int) -> StepShape:
        size = self._kv.layout.block_size
        starts, num_new = zip(*rows, strict=True)
        return StepShape(
            starts, num_new, [np.full(-(-(start + new) // size), block, dtype=np.int32) for start, new in rows]
        )

    def _launch_chunks(self, items: Sequence[Item]) -> tuple[Tensor, Tensor, np.ndarray, list[Scores]]:
        """results of any step, the logits that they are drawn from, each result's row of these, and scores."""
        self._clear_begun_blocks(items)
        shape = StepShape(
            starts=[item.start for item in items],
            num_new=[item.num_new for item in items],
            blocks=[self._tables.row(item.seq) for item in items],
        )
        ends = np.cumsum(shape.num_new)
        tokens: list[int] = []
        unseen: list[int] = []  # items whose last token only the device knows
        for index, item in enumerate(items):
            tokens += item.seq.tokens[item.start : item.start + item.num_new - len(item.drafts)]
            tokens += item.drafts
            if len(tokens) < ends[index]:
                tokens.append(0)
                unseen.append(index)
        # A row is a token after which something is sampled, or the last one of an item that samples nothing.
        counts = np.array([1 + len(item.drafts) for item in items])
        item_of = np.repeat(np.arange(len(items)), counts)
        back = np.cumsum(counts)[item_of] - 1 - np.arange(len(item_of))
        samples = np.array([item.sample for item in items])[item_of]
        slots = np.array([item.seq.slot for item in items])
        positions_of = _positions(shape)
        last_of = ends[item_of] - 1 - back
        to_score = _to_score(items)
        shown_rows = [
            np.arange(first, end) + ends[i] - (item.start + item.num_new) - 1 for i, item, first, end in to_score
        ]
        ids, positions, last, rows, row_slots, sampled_at, late, late_slots, shown = upload(
            [
                np.array(tokens), positions_of, last_of, np.flatnonzero(samples), slots[item_of[samples]],
                positions_of[last_of[samples]] + 1, ends[unseen] - 1, slots[unseen],
                np.concatenate([last_of, *shown_rows]),
            ],
            self._device,
        )  # fmt: skip
        if unseen:
            ids.index_copy_(0, late, self._last_tokens.index_select(0, late_slots))
        if self.prompt is not None and self.prompt.fits(shape, len(shown)):
            hidden = self.prompt.run(shape, ids, positions, shown)
        else:
            hidden = self._hidden(shape, ids, positions, shown, every=len(last) == len(ids) and not to_score)
            self._follow(shape, ids, positions, [row for row, item in enumerate(items) if not item.decode])
        scores = self._score(to_score, hidden[len(last) :]) if to_score else []
        hidden = hidden[: len(last)]
        for item, end in zip(items, np.cumsum(counts), strict=True):
            if item.seq.embeds and item.sample:
                item.seq.state = self._model.final(hidden[end - 1 : end])[0]
        sampling = [item for item in items if item.sample]
        every = bool(samples.all())
        results = torch.zeros(len(item_of), dtype=torch.int64, device=self._device)
        if not every:
            results.masked_fill_(~torch.isfinite(hidden.float().sum(dim=-1)), -1)
        if not sampling:
            self._note(shape, results, ids, last_of, counts)
            return results, hidden, np.zeros(0), scores
        logits = self._model.logits(hidden if every else hidden.index_select(0, rows))
        before = None
        if len(item_of) > len(items):
            before = ids.index_select(0, last if every else last.index_select(0, rows))
        sampled = self._sample(sampling, logits, row_slots, sampled_at, before)
        drawn = torch.where(sampled.finite, sampled.tokens, -1)
        if every:
            results = drawn
        else:
            results.index_copy_(0, rows, torch.where(results.index_select(0, rows) < 0, -1, drawn))
        self._note(shape, results, ids, last_of, counts)
        return results, logits, np.cumsum(samples) - 1, scores

    def _hidden(self, shape: StepShape, ids: Tensor, positions: Tensor, rows: Tensor, *, every: bool) -> Tensor:
        """States of these tokens; every: they are all, in order."""
        metadata = self._backend.prepare(shape)
        wanted = None if every else rows
        if self._draft is None or self._draft.lags:
            return self._model.hidden(ids, positions, self._cache, self._backend, metadata, rows=wanted)
        links = links_of(shape, self._kv) if self._draft.pairs else None
        return self._draft.follow(self._target, ids, positions, metadata, shape, rows=wanted, links=links)

    def _follow(self, shape: StepShape, ids: Tensor, positions: Tensor, rows: Sequence[int]) -> None:
        """A draft model that lags computes the tokens of these rows, which are prompts."""
        if self._draft is None or not self._draft.lags or not rows:
            return
        if len(rows) < len(shape.num_new):
            ends = np.cumsum(shape.num_new)
            (at,) = upload(
                [np.concatenate([np.arange(ends[r] - shape.num_new[r], ends[r]) for r in rows])], self._device
            )
            ids, positions = ids.index_select(0, at), positions.index_select(0, at)
            shape = StepShape(
                [shape.starts[r] for r in rows], [shape.num_new[r] for r in rows], [shape.blocks[r] for r in rows]
            )
        self._draft.fill(ids, positions, self._draft.backend.prepare(shape))

    def _note(self, shape: StepShape, sampled: Tensor, ids: Tensor, last_of: np.ndarray, counts: np.ndarray) -> None:
        """The draft's head leaves the states that it goes on from in their blocks."""
        if self._draft is not None and self._draft.pairs:
            note_states(self._draft, shape, sampled, ids, last_of, counts, kv=self._kv, query=1 + self._drafts)

    def _score(self, to_score: Sequence[ToScore], hidden: Tensor) -> list[Scores]:
        """hidden: of the tokens before those that are scored, item after item. Few logits exist at a time."""
        scores: list[Scores] = []
        for index, item, first, end in to_score:
            count = item.seq.request.sampling.prompt_logprobs or 0
            (targets,) = upload([np.array(item.seq.tokens[first:end])], self._device)
            before, hidden = hidden[: end - first], hidden[end - first :]
            parts: list[tuple[Tensor, ...]] = []
            for states, ids in zip(*(torch.split(x, SCORED_AT_ONCE) for x in (before, targets)), strict=True):
                logits = self._model.logits(states)
                chosen, top, top_ids = token_logprobs(logits, ids, count)
                ranks = (logits > logits.gather(1, ids[:, None])).sum(dim=-1) + 1
                if top is None or top_ids is None:
                    top, top_ids = chosen.new_empty(len(ids), 0), ids.new_empty(len(ids), 0)
                parts.append((chosen, ranks, top, top_ids))
            scores.append(Scores(index, first, *(torch.cat(part) for part in zip(*parts, strict=True))))
        return scores

    def _sample(
        self, items: Sequence[Item], logits: Tensor, slots: Tensor, positions: Tensor, before: Tensor | None
    ) -> Sampled:
        """Of all rows of the items, under the constraints of those whose last token is known. before: int64, the token
        before each row's, where some row follows drafts.
        """
        rejects = self._rejects(items)
        if self._sampler is not None and before is not None and not rejects:
            counts = np.array([1 + len(item.drafts) for item in items])
            item_slots = [item.seq.slot for item in items]
            allowed = self._allowed(items)
            return self._sample_drafts(self._sampler, item_slots, counts, logits, slots, positions, before, allowed)
        if self._sampler is not None and not rejects:
            drawn, finite = self._sampler.run(logits, slots, positions, self._allowed(items))
            self._last_tokens.index_copy_(0, slots, drawn)
            return Sampled(drawn, finite)
        rows: list[SampleRow] = []
        for item in items:
            seq, known = item.seq, item.start + item.num_new - len(item.drafts)
            tokens = seq.tokens if len(seq.tokens) == known else [*seq.tokens, int(self._last_tokens[seq.slot])]
            masks = _masks(item) if seq.constraint is not None and not seq.pending else None
            for taken in range(1 + len(item.drafts)):
                rows.append(_row(item, tokens, item.drafts[:taken], None if masks is None else masks[taken]))
        if rejects:
            sampled = sample_rejecting(logits, rows, [Chain(item.drafts, item.probs) for item in items])
        else:
            sampled = sample(logits, rows)
        if self._sampler is None:
            self._last_tokens.index_copy_(0, slots, sampled.tokens)
        else:
            for item in items:  # the device's sampler has not seen what was sampled: it starts anew
                self._staged[item.seq.slot] = None
        return sampled

    def _rejects(self, items: Sequence[Item]) -> bool:
        """The step is sampled by rejection sampling."""
        if not self._rejection:
            return False
        return any(item.drafts if self._sampler is None else item.probs is not None for item in items)

    def _sample_drafts(
        self,
        sampler: DeviceSampler,
        item_slots: Sequence[int],
        counts: np.ndarray,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        before: Tensor,
        allowed: Tensor | None = None,
    ) -> Sampled:
        """Rows of items that have so many each: after one known token, and after each draft."""
        ends = np.cumsum(counts)
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        there, cu_q, row_slots = upload([offsets, np.concatenate([[0], ends]), np.array(item_slots)], self._device)
        tokens, finite = sampler.run(logits, slots, positions, allowed, drafts=(before, there))
        sampler.accept(tokens, finite, before, cu_q, row_slots, self._last_tokens, query=1 + self._drafts)
        return Sampled(tokens, finite)

    def _allowed(self, items: Sequence[Item]) -> Tensor | None:
        """int32 [R, words] for all rows of these items; None when nothing is forbidden."""
        masks: list[np.ndarray] = []
        at: list[int] = []
        row = 0
        for item in items:
            rows = 1 + len(item.drafts)
            if item.seq.constraint is not None and not item.seq.pending:
                masks.append(_masks(item))
                at += range(row, row + rows)
            row += rows
        if not masks:
            return None
        words = np.concatenate(masks)
        allowed = torch.full((row, words.shape[1]), -1, dtype=torch.int32, device=self._device)
        index, there = upload([np.array(at, dtype=np.int32), words], self._device)
        return allowed.index_copy_(0, index.long(), there)

    def _fork(self, items: Sequence[Item], logits: Tensor, logit_rows: np.ndarray) -> list[Forked]:
        """First tokens of the children beside the one that was sampled, from the same logits.

        On a device the children take the sequence's slot in turn, so that each is sampled as it would be alone.
        """
        forked: list[Forked] = []
        for index, item in enumerate(items):
            seq, params = item.seq, item.seq.request.sampling
            if not item.sample or seq.draws == 1 or seq.finish is not None:
                continue
            allowed = None if seq.constraint is None else _masks(item)[0]
            rows = [
                SampleRow(params, seq.tokens, seq.prompt_len, child, allowed=allowed) for child in range(1, seq.draws)
            ]
            row = int(logit_rows[_rows_of(items)[index]])
            same = logits[row : row + 1].expand(len(rows), -1)
            if self._sampler is None:
                tokens = sample(same, rows).tokens
            else:
                tokens = self._draw_in_turn(seq.slot, rows, logits[row : row + 1], self._sampler)
            logprobs = () if params.logprobs is None else token_logprobs(same, tokens, params.logprobs)
            forked.append(Forked(index, tokens, logprobs))
        return forked

    def _draw_in_turn(self, slot: int, rows: Sequence[SampleRow], logits: Tensor, sampler: DeviceSampler) -> Tensor:
        slots, positions = upload([np.array([slot]), np.array([rows[0].position])], self._device)
        allowed = None
        if rows[0].allowed is not None:
            (allowed,) = upload([rows[0].allowed[None]], self._device)
        drawn: list[Tensor] = []
        for row in rows:
            sampler.stage(slot, row)
            sampler.flush()
            drawn.append(sampler.run(logits, slots, positions, allowed)[0].clone())
        self._staged[slot] = None  # the next step of the sequence in this slot brings its own state
        return torch.cat(drawn)

    def _stage(self, seqs: Sequence[EngineSequence]) -> None:
        """The device learns what sequences are sampled with that sample for the first time with their lease."""
        sampler = self._sampler
        assert sampler is not None
        for seq in seqs:
            if self._staged[seq.slot] is not seq.lease:
                sampler.stage(seq.slot, SampleRow(seq.request.sampling, seq.tokens, seq.prompt_len, seq.child))
                self._staged[seq.slot] = seq.lease
        sampler.flush()

    def _logprobs(
        self, items: Sequence[Item], wanted: Sequence[int], logits: Tensor, logit_rows: np.ndarray, results: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Of the `wanted` results; as many alternatives as any item wants."""
        if not wanted:
            return ()
        most = max(item.seq.request.sampling.logprobs or 0 for item in items)
        at, rows = upload([np.array(wanted), logit_rows[list(wanted)]], self._device)
        return token_logprobs(logits.index_select(0, rows), results.index_select(0, at).clamp(min=0), most)

    def _send(
        self,
        items: Sequence[Item],
        results: Tensor,
        wanted: Sequence[int],
        logits: Tensor,
        logit_rows: np.ndarray,
        scores: Sequence[Scores],
    ) -> Launched:
        """All that was drawn, and what is still to be made of the logits, on its way to the host."""
        logprobs = self._logprobs(items, wanted, logits, logit_rows, results)
        on_host = [None if x is None else _to_host(x) for x in logprobs]
        there = [Scores(s.index, s.first, *map(_to_host, (s.chosen, s.ranks, s.top, s.top_ids))) for s in scores]
        forked = [
            Forked(f.index, _to_host(f.tokens), tuple(None if x is None else _to_host(x) for x in f.logprobs))
            for f in self._fork(items, logits, logit_rows)
        ]
        results = _to_host(results)
        arrived = None
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return Launched(items, results, wanted, tuple(on_host), forked, arrived, scores=there)

    def _clear_begun_blocks(self, items: Sequence[Item]) -> None:
        """Zeroes the blocks that this step starts to fill and leaves partly unwritten.

        A prompt's last block may travel to a pod that reads all of it; of one that decodes only a backend could that
        reads slots before they are written. Where a draft model lags, its loop has cleared them, and written there.
        """
        size = self._kv.layout.block_size
        begun: list[int] = []
        for item in items:
            if item.drafts and self.drafts_lag:
                continue
            end = item.start + item.num_new
            if end % size and end - end % size >= item.start and (self._backend.reads_unwritten or not item.decode):
                assert item.seq.lease is not None
                begun.append(item.seq.lease.blocks[end // size])
        self._kv.zero(begun)


def _wanted(items: Sequence[Item]) -> list[int]:
    """Results whose log-probabilities somebody wants."""
    wanted: list[int] = []
    row = 0
    for item in items:
        rows = 1 + len(item.drafts)
        if item.sample and item.seq.request.sampling.logprobs is not None:
            wanted += range(row, row + rows)
        row += rows
    return wanted


def _rows_of(items: Sequence[Item]) -> np.ndarray:
    """Each item's first result."""
    return np.cumsum([0, *(1 + len(item.drafts) for item in items)])[:-1]


def _awaits_token(seq: EngineSequence) -> bool:
    """What may come next is not known before a token is that only the device knows."""
    return seq.constraint is not None and seq.pending > 0


def _constrained_drafts(items: Sequence[Item]) -> bool:
    return any(item.drafts and item.seq.constraint is not None for item in items)


def _masks(item: Item) -> np.ndarray:
    """int32 [1 + drafts, words]"""
    assert item.seq.constraint is not None
    masks = item.seq.constraint.masks(item.drafts)[1]
    missing = 1 + len(item.drafts) - len(masks)  # a matcher that fails is told when the token is accounted for
    return np.concatenate([masks, np.zeros((missing, masks.shape[1]), dtype=np.int32)]) if missing else masks


def _row(item: Item, tokens: Sequence[int], drafts: Sequence[int], allowed: np.ndarray | None) -> SampleRow:
    seq = item.seq
    return SampleRow(seq.request.sampling, tokens, seq.prompt_len, seq.child, drafts=drafts, allowed=allowed)


def _to_score(items: Sequence[Item]) -> list[ToScore]:
    found: list[ToScore] = []
    for index, item in enumerate(items):
        first = max(item.seq.scored, item.start + 1)
        end = min(item.start + item.num_new + 1, item.seq.prompt_len)
        if first < end:
            found.append((index, item, first, end))
    return found


def _to_host(tensor: Tensor) -> Tensor:
    """On a GPU torch allocates what goes to the host without waiting in pinned memory."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def _positions(shape: StepShape) -> np.ndarray:
    """int64 [T]"""
    num_new = np.asarray(shape.num_new)
    ends = np.cumsum(num_new)
    offsets: np.ndarray = np.repeat(np.asarray(shape.starts) - (ends - num_new), num_new)
    positions: np.ndarray = np.arange(int(ends[-1])) + offsets
    return positions
