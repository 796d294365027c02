"""A trained model as the server wants it: one that writes texts, embeds them, or both."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from axon.checkpoint.huggingface.hub import GENERATION
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.foreign_json import NULL, integer, number, read_field, read_json
from axon.run.beside import ServedAdapters, reader_for
from axon.run.engines import decoders_as_encoders, encoders_of, engine_of
from axon.run.trained import Trained, open_trained
from axon.serve.capacity import Capacity
from axon.serve.chat import Chat
from axon.serve.embedder import Embedder, is_encoder
from axon.serve.grammar import Grammars
from axon.serve.http.conversations import Conversations
from axon.serve.http.model import NoEngine, Served
from axon.serve.pooling import Pooling
from axon.serve.sentence_transformers import sentences_of

Report = Callable[[str], None]
COMPILING = "compiling every step that there can be"


def served_model(
    path: str | Path,
    layout: Path | None,
    draft: str | None,
    embeddings: bool,
    weights: str | None,
    defaults: bool,
    adapters: ServedAdapters,
    capacity: Capacity,
    report: Report,
) -> Served:
    """See `axon.run.serve_run.serve_run`; all of its programs are compiled."""
    name, trained = _name(path), open_trained(path)
    if is_encoder(trained.train.model.build()):
        if draft is not None:
            raise UserError(f"--draft {draft}: {path} is an encoder, which writes no text to guess; leave it out")
        if weights is not None:
            raise UserError(f"--weights {weights}: {path} is an encoder, whose weights stay in its dtype; leave it out")
        if adapters != ServedAdapters():
            raise UserError(f"--adapter: {path} is an encoder, which writes no text; leave adapters out")
        return _encoder(name, trained, layout, capacity, report)
    tokenizer, folder, embedder = trained.tokenizer.load(), trained.companions, None
    own = _defaults(folder, report) if defaults else {}
    chat = _chat(folder, tokenizer, report)
    engine = engine_of(trained, layout, draft, capacity, tokenizer, report, weights, adapters.room(name, trained))
    read = reader_for(trained, engine)
    adapters.load(engine, read, report)
    if embeddings:
        embedder = Embedder(decoders_as_encoders(engine, sentences_of(folder, Pooling("last"))))
    report(COMPILING)
    engine.warm_up()
    if embedder is not None:
        embedder.warm_up()
    grammars = Grammars(tokenizer, engine.vocab)
    read = read if adapters.load_more else None
    return Served(name, engine, Conversations(chat, grammars), grammars, embedder, own, read)


def _encoder(name: str, trained: Trained, layout: Path | None, capacity: Capacity, report: Report) -> Served:
    """One that embeds texts."""
    tokenizer = trained.tokenizer.load()
    sentences = sentences_of(trained.companions, Pooling("mean"))
    embedder = Embedder(encoders_of(trained, layout, sentences, capacity.length, report))
    report("an encoder: it embeds texts, and writes none")
    report(COMPILING)
    embedder.warm_up()
    return Served(name, NoEngine(tokenizer, embedder.max_length), embedder=embedder)


def _defaults(folder: Path | None, report: Report) -> Mapping[str, Any]:
    """What requests have that do not say it themselves."""
    if own := sampling_defaults(folder):
        said = ", ".join(f"{name} {value}" for name, value in own.items())
        report(f"requests that do not say otherwise have {said}, of {GENERATION}; --no-defaults turns it off")
    return own


def _chat(folder: Path | None, tokenizer: Tokenizer, report: Report) -> Chat:
    """What writes conversations by the model's templates."""
    chat = Chat.of(folder, tokenizer)
    if chat.unused:
        report(f"no chat uses the templates {', '.join(chat.unused)}: there are default, and tool_use for tools")
    return chat


def _name(path: str | Path) -> str:
    """What clients call the model: its folder's name, or that of the hub."""
    name = str(path).removeprefix("hf:").rstrip("/")
    return Path(name).name if Path(name).exists() or "://" in name else name


FIELDS = {
    "temperature": number("[0, 1e6]"),
    "top_k": integer("[-1, 2**31)"),
    "top_p": number("(0, 1]"),
    "min_p": number("[0, 1]"),
    "repetition_penalty": number("[1e-6, 1e6]"),
}
"""What requests take from the file where they do not say it themselves, as vLLM does. `do_sample` has no effect."""


def sampling_defaults(folder: Path | None) -> Mapping[str, Any]:
    """The `FIELDS` that the generation_config.json in a model's folder has; none without a folder or a file. Raises
    `UserError` for a value that tokens cannot be drawn by."""
    path = folder and folder / GENERATION
    content = read_json(path) if path and path.is_file() else {}
    found = {name: read_field(str(path), content, name, kind | NULL, None) for name, kind in FIELDS.items()}
    return {name: value for name, value in found.items() if value is not None}
