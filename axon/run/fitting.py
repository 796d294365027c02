"""Whether data, objective and model of a run fit each other, checked before anything is trained."""

from axon.data import Corpus, Gallery
from axon.errors import UserError
from axon.run.tree import Train


def check_fits(train: Train, data: Corpus | Gallery) -> None:
    """Raise `UserError` for a vocabulary without room for the tokens, or images of another shape than the model's."""
    if isinstance(data, Gallery):
        _check_images(train, data)
    else:
        _check_vocab(train, data.tokenizer.vocab)


def _check_vocab(train: Train, ids: int) -> None:
    """The objective's own ids, as a mask's, are the last of the vocabulary: none of a text's tokens may be one."""
    model = type(train.model).__name__
    vocab = getattr(train.model, "vocab", None)
    if vocab is None:
        raise UserError(f"Train.data is text, and a {model} has no vocab: set Train.model to a model of text")
    if vocab < ids:
        raise UserError(
            f"the model's vocab is {vocab}, and the tokenizer has {ids} ids: set {model}.vocab to at least that"
        )
    reserved = getattr(train.objective, "reserved_ids", None)
    own = 0 if reserved is None else reserved(train.seq)
    if vocab < ids + own:
        raise UserError(
            f"the model's vocab is {vocab}, and the tokenizer has {ids} ids: {type(train.objective).__name__} needs "
            f"{own} more, the last of the vocabulary, which no text has. Set {model}.vocab to at least {ids + own}, or "
            f"the tokenizer's vocab to at most {vocab - own}"
        )
    if (mask := getattr(train.objective, "mask_id", None)) is not None and mask >= vocab:
        raise UserError(f"MaskedToken.mask_id is {mask}, and the model's vocab {vocab}: must be below that")
    if (first := getattr(train.objective, "sentinel_id", None)) is not None:
        count = train.objective.sentinels(train.seq)  # type: ignore[attr-defined]
        if not count - 1 <= first < vocab:
            raise UserError(
                f"SpanCorruption.sentinel_id is {first}; must be in [{count - 1}, {vocab}), for the {count} sentinels "
                f"of {train.seq} tokens go backwards from it, and the model's vocab is {vocab}"
            )


def _check_images(train: Train, gallery: Gallery) -> None:
    model, name, source = train.model, type(train.model).__name__, gallery.data.source.name
    side, channels, classes = (getattr(model, field, None) for field in ("image", "channels", "classes"))
    if None not in (side, channels) and gallery.shape != (side, side, channels):
        raise UserError(
            f"{source}: images are of height, width and channels {gallery.shape}, and the model's of "
            f"{(side, side, channels)}: set {name}.image and {name}.channels, and Classification's fields, to these"
        )
    if classes is not None and gallery.classes > classes:
        raise UserError(
            f"{source}: the largest label is {gallery.classes - 1}, and the model has {classes} classes: set "
            f"{name}.classes to at least {gallery.classes}"
        )
