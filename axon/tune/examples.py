"""Examples to tune on, as files of chats have them: read, written by the chat template, packed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import grain
import numpy as np

from axon.checks import check_range
from axon.data.batches import PADDING, Batches, check_weights, held_out_order, training_order, without
from axon.data.corpus import TEXT_ARRAYS, Data
from axon.data.enough import check_vocab
from axon.data.feed import ALL, Batch, FeedContext, SequenceNumbers
from axon.data.prepare import SPLITS, Stored, train_tokenizer
from axon.data.prepared import NoRewards, Question
from axon.data.records import Record, RecordSource
from axon.data.store import Root
from axon.data.tokenizer import Bpe, Tokenizer, TokenizerFile
from axon.disk import check_paths
from axon.errors import UserError, suggest
from axon.fields import RESUMABLE, StoreLocation
from axon.nn.adapter_set import ADAPTERS
from axon.serve.chat import PLAIN, ROLES, Chat
from axon.serve.chat_turns import Turns
from axon.tune.formats import Conversation, Format, read_example
from axon.tune.packing import EMPTY, Document, Example, digest_of
from axon.tune.questions import Questions
from axon.tune.record_texts import RecordTexts
from axon.tune.remarks import Remarks
from axon.tune.split import Split, adapter_of
from axon.tune.turns import KEYS, Names


@dataclass(frozen=True)
class Examples(ABC):
    """The base of what `Train.data` names to tune on records: `Chats`, `Comparisons`, `Labelled` and `TextPairs`.

    Args:
        seq: positions in a sequence. batch: sequences in the global batch.
        sources: where records are read from, as `JsonLines(path)`, whole: its `field` says nothing here.
        tokenizer: the model's, a file; its folder may have a chat template. Or one trained on the records' texts.
        columns: column that is expected, or key of a message, `role` or `content` → what the records call it.
        roles: who speaks, by the records → the role, one of `axon.serve.chat.ROLES`.
        long: what is done with an example of more than `seq` + 1 tokens: "drop" it, or "cut" its end, which is then not
            learned. Either is counted, the first are named, and a run's folder has the places of all, `remarked.jsonl`.
        packed: examples in a sequence, at most; none attends to another.
        weights: how often each source is drawn from, relative to the others, in sequences, of which then none has
            examples of two; None: each as large as it is.
        adapters: for each source the one of `LoRA.adapters` that its examples train; a sequence has no examples of two.
        duplicates: what is done with an example that is in its split already, id for id: "keep" it, or "drop" it.
            Either is counted and named in the same way.
        held_out: fraction of the examples held out for evaluation, by the hash of what comes before the first answer,
            as `axon.tune.questions.normalised`.
        store: see `Data`. threads: how many prefetch batches; 0: no prefetching.
    """

    formats: ClassVar[tuple[Format, ...]]
    sides: ClassVar[int] = 1
    """Conversations of an example."""
    documents: ClassVar[str] = "documents"
    """Name of the array of a batch that says which document a token is of."""
    answers: ClassVar[bool] = True
    """Whether the assistant's turns are learned, which a model may be asked for."""

    weighs: ClassVar[bool] = False
    """Whether what is learned may count by weights other than 1."""

    seq: int
    batch: int
    sources: tuple[RecordSource, ...]
    tokenizer: Bpe | TokenizerFile
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    long: Literal["drop", "cut"] = "drop"
    packed: int = 2**16
    weights: tuple[float, ...] | None = None
    adapters: tuple[str, ...] = ()
    duplicates: Literal["keep", "drop"] = "keep"
    held_out: float = 0.05
    store: StoreLocation | None = field(default=None, metadata=RESUMABLE)
    threads: int = field(default=2, metadata=RESUMABLE)

    def __post_init__(self):
        name = type(self).__name__
        check_range(self, "[1, 2**31)", "seq", "batch", "packed")
        check_range(self, "[0, 1]", "held_out")
        check_range(self, "[0, 256]", "threads")
        check_paths(self)
        if not self.sources:
            raise UserError(f"{name}.sources is empty: expected at least one source of records, as (JsonLines(path),)")
        check_weights(self.weights, len(self.sources), f"{name}.weights")
        if self.adapters and len(self.adapters) != len(self.sources):
            raise UserError(
                f"{name}.adapters has {len(self.adapters)} names for {len(self.sources)} sources: give one for each"
            )
        for column in sorted(self.columns.keys() - (names := {*self.column_names, *KEYS})):
            raise UserError(f"{name}.columns has {column!r}; expected of {', '.join(sorted(names))}")
        for speaker, role in self.roles.items():
            if role not in ROLES:
                raise UserError(f"{name}.roles has {speaker!r}: {role!r}; there is no such role.{suggest(role, ROLES)}")

    @property
    def column_names(self) -> frozenset[str]:
        """The columns that a record may have."""
        return frozenset(column for one in self.formats for column in (*one.columns, *one.optional))

    @property
    def names(self) -> Names:
        return Names(self.columns, self.roles)

    def document(self, turns: Turns, read: "Read") -> Document:
        """What is packed of a conversation of a record."""
        return Document(np.array(turns.ids, np.int32), np.array(turns.weights, np.float32))

    def text_of(self, document: Document) -> Document:
        """A document as it was written by the template."""
        return document

    @property
    def more(self) -> Mapping[str, np.ndarray]:
        """See `axon.tune.packing.batch_of`."""
        return {}

    def check_objective(self, objective: Any) -> None:
        """Raise `UserError` for an objective that these examples are not for, though it has their arrays."""
        return

    def check_model(self, model: Any, splits: Mapping[str, "Split"]) -> None:
        """Raise `UserError` for the config of a model that cannot learn from these, prepared as `splits`."""
        return

    def title(self, example: Example) -> str:
        """What is printed above an example."""
        return example.where

    @abstractmethod
    def check_example(self, documents: Sequence[Document], where: str) -> None:
        """Raise `UserError` for documents from which nothing can be learned."""

    @property
    def text(self) -> Data:
        """The records' texts, as a corpus with the tokenizer and the shape of a batch."""
        texts = tuple(RecordTexts(source) for source in self.sources)
        shape = {"seq": self.seq, "batch": self.batch, "held_out": self.held_out}
        return Data(**shape, sources=texts, tokenizer=self.tokenizer, store=self.store, threads=self.threads)

    def with_tokenizer(self, tokenizer: TokenizerFile) -> "Examples":
        """See `Data`: these, whose own tokenizer has the chat template beside it."""
        return self

    def seq_of(self, model: Any) -> int:
        """Positions of a sequence: as the examples are packed, whatever the model."""
        return self.seq

    def prepare(self, report: Callable[[str], None] = print) -> "PreparedExamples":
        """Reads the records, and writes each by the chat template as ids.

        Raises `UserError`, with the place of the record, for one that is in none of the `formats`, that the template
        refuses, or from which nothing can be learned; and where a split has no example.
        """
        tokenizer = self._tokenizer(report)
        write = self.writer(tokenizer, report)
        splits: dict[str, list[Example]] = {split: [] for split in SPLITS}
        questions = Questions(tokenizer, self.held_out)
        limit, seen = f"{type(self).__name__}.seq = {self.seq}", set[bytes]()
        remarks = Remarks(
            limit, self.duplicates, {self.columns[name] for name in self.columns.keys() & self.column_names}
        )
        for read, conversations in self._conversations():
            remarks.unread.difference_update(read.record)
            documents = tuple(
                EMPTY if one is None else self.document(write(one, read.where), read) for one in conversations
            )
            self._check_weights(documents, read.where)
            self.check_example(documents, read.where)
            example = Example(documents, read.where, read.record, read.source)
            if example.positions > self.seq:
                shorter = self.shortened(example) if self.long == "cut" else None
                remarks.too_long["dropped" if shorter is None else "cut"].append(read.where)
                if (example := shorter) is None:
                    continue
            if (key := self.key_of(example) + adapter_of(self, read.source).encode()) in seen:
                remarks.repeated.append(read.where)
                if self.duplicates == "drop":
                    continue
            seen.add(key)
            split, rewritten = questions(self.question_of(example.own[0]))
            remarks.rewritten.extend([read.where] * rewritten)
            splits[split].append(example)
        made = {name: Split(self, tuple(own)) for name, own in splits.items()}
        prepared = PreparedExamples(self, tokenizer, made, remarks.examples)
        for line in (*prepared.summary(), *remarks.lines()):
            report(line)
        return prepared

    def of_adapter(self, name: str) -> "Examples":
        """The examples that train one adapter."""
        own = [source for source, adapter in enumerate(self.adapters) if adapter == name]
        weights = None if self.weights is None else tuple(self.weights[source] for source in own)
        return replace(self, sources=tuple(self.sources[source] for source in own), weights=weights, adapters=())

    def _check_weights(self, documents: Sequence[Document], where: str) -> None:
        if not (self.weighs or all(one.weighs_alike for one in documents)):
            raise UserError(
                f"{where}: a message has a weight other than 0 and 1, and of the examples of {type(self).__name__} all "
                "tokens count alike: leave it out. Chats, for supervised fine-tuning, have such weights"
            )

    def records(self) -> Iterator["Read"]:
        """The records of all sources, one source after the other."""
        for number, source in enumerate(self.sources):
            for where, record in source.records():
                yield Read(number, where, record)

    def writer(self, tokenizer: Tokenizer, report: Callable[[str], None]) -> Callable[[Conversation, str], Turns]:
        """The function that makes ids of a conversation: the chat template, which is reported."""
        chat = Chat.of(self.template_folder, tokenizer)
        is_plain = chat.template().source == PLAIN
        report(f"chat template: {'the built-in one, lines of role: content' if is_plain else self.template_folder}")
        return partial(written, chat)

    def key_of(self, example: Example) -> bytes:
        """A digest that is the same for examples with the same ids, of which the same are learned."""
        return digest_of(example.documents, 16)

    def question_of(self, document: Document) -> np.ndarray:
        """The ids by which an example is held out: those before the first that is learned."""
        return document.ids[: int(np.argmax(document.learned))]

    def shortened(self, example: Example) -> Example | None:
        """An example's documents with their ends left out, so that they fit in a sequence; None where nothing would be
        learned of one."""
        most = self.seq // len(example.own) + 1
        cut = tuple(one if one is EMPTY else one.first(most) for one in example.documents)
        shorter = replace(example, documents=cut)
        return shorter if all(one.learned[1:].any() for one in shorter.own) else None

    def identity(self) -> dict[str, Any]:
        """What the batches depend on, as JSON: every field but `store` and `threads`."""
        own = {"type": type(self).__name__, **asdict(self)}
        own["sources"] = [{"type": type(source).__name__, **asdict(source)} for source in self.sources]  # type: ignore[call-overload]
        return {name: value for name, value in own.items() if name not in ("store", "threads")}

    @property
    def template_folder(self) -> Path | None:
        """Where the tokenizer's file and what belongs to it is."""
        return Path(self.tokenizer.path).parent if isinstance(self.tokenizer, TokenizerFile) else None

    def _tokenizer(self, report: Callable[[str], None]) -> Tokenizer:
        if isinstance(self.tokenizer, TokenizerFile):
            return self.tokenizer.load()
        return train_tokenizer(self.tokenizer, self.text.sources, self.held_out, Root(self.store), report)

    def _conversations(self) -> Iterator[tuple["Read", tuple[Conversation | None, ...]]]:
        for read in self.records():
            found = read_example(read.record, read.where, self.formats, self.names)
            for start in range(0, len(found), self.sides):
                yield read, found[start : start + self.sides]


class Read(NamedTuple):
    """A record, where it is, and the number of the source that it is from."""

    source: int
    where: str
    record: Record


def written(chat: Chat, conversation: Conversation, where: str) -> Turns:
    """A conversation as ids. Raises `UserError`, with the place, for one that the template refuses."""
    try:
        return chat.turns(conversation.messages, conversation.tools or None)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


@dataclass(frozen=True)
class PreparedExamples(NoRewards):
    """Examples as ids, in batches of two splits. Returned by `Examples.prepare`."""

    data: Examples
    tokenizer: Tokenizer
    splits: Mapping[str, Split] = field(repr=False)
    remarked: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        name = type(self.data).__name__
        for split in SPLITS:
            if not len(self.splits[split]) and self.data.held_out != (split == "train"):
                raise UserError(
                    f"{name}.sources have no example for the split {split}: {name}.held_out is {self.data.held_out}, "
                    f"{name}.seq {self.data.seq}. Give more examples, or change these"
                )
        for number, weight in enumerate(self.data.weights or ()):
            first, end = self.splits["train"].span(number)
            if first == end:
                raise UserError(
                    f"{name}.weights has {weight} for {self.data.sources[number].name}, which has no example to train "
                    f"on: leave the source out, or change {name}.seq or {name}.held_out"
                )

    def summary(self) -> list[str]:
        """How much there is of each split."""
        data, lines = self.data, []
        for name, split in self.splits.items():
            positions = sum(example.positions for example in split.examples)
            filled = positions / (len(split) * data.seq) if len(split) else 0.0
            lines.append(
                f"{name.replace('_', ' ')}: {len(split.examples):,} examples in {len(split):,} sequences, {filled:.0%} "
                f"full; {split.learned:,} tokens are learned"
            )
        return lines

    @property
    def arrays(self) -> Mapping[str, str]:
        text = {self.data.documents if name == "documents" else name: axes for name, axes in TEXT_ARRAYS.items()}
        text |= {ADAPTERS: "batch"} if self.data.adapters else {}
        return text | {name: "batch seq top" if row.ndim else "batch seq" for name, row in self.data.more.items()}

    @property
    def companions(self) -> Path | None:
        return self.data.template_folder

    def check_fits(self, model: Any, objective: Any, seq: int) -> None:
        largest = {name: {"largest": split.largest} for name, split in self.splits.items()}
        self.data.check_objective(objective)
        self.data.check_model(model, self.splits)
        check_vocab(model, objective, seq, self.tokenizer, [Stored(type(self.data).__name__, "", largest)])

    def feed(self, context: FeedContext) -> Batches:
        order = without(self._order(context.seed), context.left_out)
        return self._batches("train", order[context.start :], context.sequences)

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> Batches:
        order = held_out_order(self.splits["held_out"].rows, self.data.batch)
        return self._batches("held_out", order[:batches], sequences)

    def questions(self, count: int, adapter: str | None = None) -> list[Question]:
        """See `Prepared`; of examples that train this `adapter` alone, if any is named."""
        if not self.data.answers:
            return []
        held_out = (one for one in self.splits["held_out"].examples if one.documents[0] is not EMPTY)
        examples = (one for one in held_out if adapter in (None, adapter_of(self.data, one.source)))
        return [last_answer(example) for example in islice(examples, count)]

    def text_bytes(self, batch: Batch) -> np.ndarray:
        return batch["weights"] * self.tokenizer.byte_lengths[batch["targets"]].astype(np.float32)

    def identity(self) -> dict[str, Any]:
        digests = {name: [split.digest()] for name, split in self.splits.items()}
        return self.data.identity() | {"digests": digests["train"], "held_out_digests": digests["held_out"]}

    def position(self, seed: int, step: int) -> str:
        places = [place for one in self.documents(seed, step) for place in one["examples"]]
        epoch = "" if self.data.weights else f" (epoch {step * self.data.batch / len(self.splits['train']):.2f})"
        return f"batch {step} of seed {seed}{epoch}: {', '.join(places[:16])}"

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        split = self.splits["train"]
        rows = [split.rows[row] for row in np.asarray(self._order(seed)[step]).tolist()]
        return [{"examples": [split.examples[number].where for number in row]} for row in rows]

    def _order(self, seed: int) -> grain.MapDataset:
        return training_order(self.splits["train"], self.data.weights, self.data.batch, seed)

    def _batches(self, split: str, order: grain.MapDataset, mine: SequenceNumbers) -> Batches:
        def load(numbers: np.ndarray) -> list[Batch]:
            numbers = np.asarray(numbers)
            padded = np.pad(numbers, (0, self.data.batch - len(numbers)), constant_values=PADDING)
            return [self.splits[split].batch(padded[mine])]

        return Batches(order.map(load), self.data.threads)


def last_answer(example: Example) -> Question:
    """The last of the assistant's turns of its first document, and all before it."""
    ids, learned = example.documents[0].ids, example.documents[0].learned
    end = len(learned) - int(np.argmax(learned[::-1]))
    begin = end - int(np.argmin(learned[:end][::-1]))
    return Question(tuple(ids[:begin].tolist()), tuple(ids[begin:end].tolist()), example.where, example.record)
