"""Responses of any adapter become batches: checked one by one and together; the bad ones are set aside whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from keptset.schemas.adapters.arrays import violation
from keptset.schemas.adapters.base import Adapter, Part, Place, Record, Tree
from keptset.schemas.adapters.rejected import Rejected
from keptset.schemas.adapters.settings import Stated, read_settings
from keptset.schemas.adapters.tree import Node
from keptset.schemas.builder import BatchBuilder, Response
from keptset.schemas.errors import InvalidInput, SchemaError, ViolationError
from keptset.schemas.findings import Example, Finding, FindingKind, Severity
from keptset.schemas.rollout_batch import RolloutBatch, concat_batches
from keptset.schemas.validation import inspect, validate

EXAMPLES = 3
"""Places shown per kind."""
MAX_REMEMBERED = 2_000_000
"""Rollout ids remembered to tell a repeated one, some 200 bytes each. Beyond that the oldest are forgotten, and a
repeated id is left to the spool's readers."""
_RECORD_SIZE = 1024
"""Bytes for what is kept of a record beside itself: its place, its findings."""
_ID_COLUMNS = ("token_ids", "prompt_token_ids", "kept_ids")


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What became of an engine's output."""

    batches: tuple[RolloutBatch, ...]
    """The good responses, in order."""
    rejected: tuple[Rejected, ...]
    """The bad ones, whole. None is in `batches`, and none is lost: keep them where someone looks."""
    findings: tuple[Finding, ...]
    """Everything found, in good responses (warnings) and bad ones, one of each kind."""

    @cached_property
    def batch(self) -> RolloutBatch:
        """The good responses as one batch."""
        return concat_batches(self.batches)

    def require(self) -> RolloutBatch:
        """The batch, if no response was bad. Errors: ViolationError with the findings otherwise."""
        if self.rejected:
            findings = tuple(finding for one in self.rejected for finding in one.findings)
            first = self.rejected[0]
            raise ViolationError(
                f"{len(self.rejected)} responses were rejected, the first ({first.place} {first.path}): {first.reason}",
                merged(findings),
            )
        return self.batch


def adapt_live(
    adapter: Adapter,
    outputs: Iterable[object],
    params: object = None,
    stated: Stated | None = None,
    prompt_ids: Sequence[str] | None = None,
    prompt_token_ids: Sequence[object] | None = None,
) -> Adapted:
    """Objects of a live engine, one record each, through its adapter.

    Errors: SchemaError where the first is not the engine's, or `params` are no sampling settings; InvalidInput where
    `prompt_ids` or `prompt_token_ids` are not one per record.
    """
    stated = stated or Stated()
    objects = outputs if isinstance(outputs, Iterable) and not hasattr(outputs, "keys") else [outputs]
    places = (Place(text=f"output {number}", file="", number=number) for number in count())
    trees = list(adapter.whole(Tree(value=value, place=place) for value, place in zip(objects, places, strict=False)))
    for name, given in (("prompt_ids", prompt_ids), ("prompt_token_ids", prompt_token_ids)):
        if given is not None and len(given) != len(trees):
            raise InvalidInput(f"{len(given)} {name} for {len(trees)} outputs; give one for each")
    settings = read_settings(None if params is None else Node(params, "params"), stated)
    collector = Collector(adapter, stated)
    seen: Counter[str] = Counter()
    for number, tree in enumerate(trees):
        prompt_id = None if prompt_ids is None else prompt_ids[number]
        record = Record(
            tree=Node(tree.value),
            place=tree.place,
            settings=settings,
            prompt_id=prompt_id,
            repeat=0 if prompt_id is None else seen[prompt_id],
            prompt_token_ids=None if prompt_token_ids is None else prompt_token_ids[number],
            raw=tree.value,
        )
        if prompt_id is not None:
            seen[prompt_id] += 1
        collector.take_tree(tree, first=number == 0, record=record)
    return collector.flush()


class Collector:
    """Takes records, gives what became of them. One per run: it knows the ids that went before."""

    def __init__(self, adapter: Adapter, stated: Stated) -> None:
        self.adapter = adapter
        self.stated = stated
        identity = stated.identity
        self._builder = BatchBuilder(identity if identity.engine else replace(identity, engine=adapter.engine))
        self._parts: list[Part] = []
        self._rejected: list[Rejected] = []
        self._repeated: list[Finding] = []
        self._contents: dict[int, int] = {}
        self.held = 0
        """Bytes read of records that wait to be flushed. They are kept whole until it is known which are bad."""

    def take_tree(self, tree: Tree, *, first: bool, record: Record | None = None) -> None:
        """A tree, as the record that it is opened to. `first`: it decides whether its file, or the call, is the
        engine's at all; a later one that is not is rejected.

        Errors: SchemaError.
        """
        self.held += tree.size + _RECORD_SIZE
        try:
            if tree.error is not None:
                raise SchemaError(tree.error)
            self._take(record or self.adapter.open(tree, self.stated))
        except SchemaError as error:
            if first and not tree.recognised:
                raise SchemaError(f"{tree.place.text}: {error}") from error
            self._reject(tree.place, "", tree.value, error=str(error))

    def _take(self, record: Record) -> None:
        for part in self.adapter.parts(record):
            try:
                self._add(part, self.adapter.response(part, self.stated))
            except ViolationError as error:
                name = error.findings[0].examples[0].rollout_id
                self._reject(record.place, part.node.path, self.adapter.raw(part), name, error.findings)
            except (SchemaError, InvalidInput) as error:
                self._reject(record.place, part.node.path, self.adapter.raw(part), error=str(error))

    def _add(self, part: Part, response: Response) -> None:
        _check_width(response)
        if self._is_repeated(response):
            return
        self._builder.add(response)
        self._parts.append(part)

    def _is_repeated(self, response: Response) -> bool:
        """Whether the same response came before; it is taken once. Errors: ViolationError where another had its id."""
        name = hash(response.rollout_id)
        content = hash(tuple(map(_content, vars(response).values())))
        before = self._contents.get(name)
        if before is None:
            self._contents[name] = content
            if len(self._contents) > MAX_REMEMBERED:
                del self._contents[next(iter(self._contents))]
            return False
        if before != content:
            raise violation(
                FindingKind.CONFLICT, response.rollout_id, "another response came under this id; give an id prefix"
            )
        example = Example(rollout_id=response.rollout_id, position=None, detail="the same response came before")
        self._repeated.append(
            Finding(kind=FindingKind.DUPLICATE, severity=Severity.WARNING, count=1, responses=1, examples=(example,))
        )
        return True

    def _reject(
        self,
        place: Place,
        path: str,
        record: object,
        rollout_id: str | None = None,
        findings: tuple[Finding, ...] = (),
        error: str | None = None,
    ) -> None:
        self._rejected.append(
            Rejected(place=place.text, path=path, rollout_id=rollout_id, findings=findings, error=error, record=record)
        )

    def flush(self) -> Adapted:
        """Everything taken since the last time, checked. Errors: none; what is bad is in `rejected`."""
        found = [*(finding for one in self._rejected for finding in one.findings), *self._repeated]
        good: list[RolloutBatch] = []
        start = 0
        for batch in self._builder.build_batches() or [self._builder.build()]:
            of_batch = validate(batch, examples=EXAMPLES)
            found += of_batch
            bad = violations_by_row(batch) if any(one.severity is Severity.ERROR for one in of_batch) else {}
            for row, findings in bad.items():
                part = self._parts[start + row]
                name = batch.rollout_ids[row]
                self._reject(part.record.place, part.node.path, self.adapter.raw(part), name, findings)
            start += len(batch)
            good.append(batch.filter(~np.isin(np.arange(len(batch)), list(bad))) if bad else batch)
        adapted = Adapted(batches=tuple(good), rejected=tuple(self._rejected), findings=merged(found))
        self._parts, self._rejected, self._repeated, self.held = [], [], [], 0
        return adapted


def _content(value: object) -> Hashable:
    """A field of a response as something that is equal where the field is."""
    if isinstance(value, np.ndarray):
        shown, hidden = np.ma.getdata(value), np.ma.getmask(value)
        if shown.dtype == np.int64:
            shown = shown.astype(np.int32)  # ids fit (_check_width); half as many bytes are hashed in half the time
        return (shown.tobytes(), hidden.tobytes() if hidden.any() else b"")
    return value if value is None or isinstance(value, str) else repr(value)


def _check_width(response: Response) -> None:
    """That ids fit the 32 bits of their columns: one that does not is out of any vocabulary."""
    for name in _ID_COLUMNS:
        values = getattr(response, name)
        if values is None or not len(values):
            continue
        if values.min() >= -(1 << 31) and values.max() < 1 << 31:
            continue
        at = int(np.flatnonzero((values < -(1 << 31)) | (values >= 1 << 31))[0])
        position: int | None = at
        if name == "kept_ids" and response.kept_offsets is not None:
            position = int(np.searchsorted(response.kept_offsets, at, side="right")) - 1
        raise violation(
            FindingKind.RANGE,
            response.rollout_id,
            f"{name} holds {int(values[at])}, which no vocabulary does",
            None if name == "prompt_token_ids" else position,
        )


def violations_by_row(batch: RolloutBatch) -> dict[int, tuple[Finding, ...]]:
    """For each row with an error what is wrong in it."""
    inspected = inspect(batch, examples=1, repeats=False)
    kinds = {finding.kind for finding in inspected.findings if finding.severity is Severity.ERROR}
    rows = sorted({row for kind in kinds for row in inspected.rows[kind].tolist()})
    return {row: _errors(batch.slice(row, 1)) for row in rows}


def _errors(row: RolloutBatch) -> tuple[Finding, ...]:
    found = inspect(row, examples=EXAMPLES, repeats=False).findings
    return tuple(finding for finding in found if finding.severity is Severity.ERROR)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding of each kind and severity: counts added, the first examples kept."""
    of_kind: dict[tuple[FindingKind, Severity], list[Finding]] = {}
    for finding in findings:
        of_kind.setdefault((finding.kind, finding.severity), []).append(finding)
    return tuple(
        Finding(
            kind=kind,
            severity=severity,
            count=sum(one.count for one in same),
            responses=sum(one.responses for one in same),
            examples=tuple(example for one in same for example in one.examples)[:EXAMPLES],
        )
        for (kind, severity), same in of_kind.items()
    )
