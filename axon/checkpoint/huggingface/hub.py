"""`hf:DIR_OR_NAME`: a folder with a model, or its name on the Hugging Face hub, from where it is downloaded."""

import shutil
from pathlib import Path

from axon.disk import named
from axon.errors import UserError

PREFIX = "hf:"
TEMPLATE, TEMPLATES_BY_NAME = "chat_template.jinja", "additional_chat_templates/*.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
PREPROCESSOR = "preprocessor_config.json"
"""What a model of images says of their size and scale."""
ADAPTER = "adapter_config.json"
"""The file that describes an adapter of PEFT's, which has no CONFIG of its own."""
CONFIG, GENERATION = "config.json", "generation_config.json"
MODULES, SENTENCE, SENTENCES = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
"""What sentence-transformers says of a model's embeddings; its modules have folders of their own, with a CONFIG."""

POOLINGS = f"*_Pooling/{CONFIG}"


def companions(folder: Path) -> list[Path]:
    """The files of a model's folder besides its weights and CONFIG that say how it is used, by their paths in it:
    tokenizer, chat template, defaults of generation, preprocessing, pooling of embeddings."""
    named = (GENERATION, PREPROCESSOR, MODULES, SENTENCE, SENTENCES, *TOKENIZER_FILES)
    found = [
        *(folder / name for name in named),
        *sorted(folder.glob(POOLINGS)),
        *sorted(folder.glob(TEMPLATES_BY_NAME)),
    ]
    return [path.relative_to(folder) for path in found if path.is_file()]


def copy_companions(source: Path, target: Path) -> None:
    """Copy the `companions` in one folder into another."""
    for path in companions(source):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, target / path)


def is_hub(name: str | Path) -> bool:
    """Whether it is `hf:…`."""
    return str(name).startswith(PREFIX)


def model_folder(name: str) -> Path:
    """The folder of `hf:DIR_OR_NAME`, or of `hf:NAME@REVISION`; a name is downloaded, as far as it is not yet.

    Raises `UserError` if there is no such folder or model, or it has neither config.json nor that of an adapter.
    """
    text = name.removeprefix(PREFIX)
    folder = named(text, PREFIX)
    if not folder.exists():
        if text.startswith((".", "/", "~")) or text.count("/") != 1:
            raise UserError(
                f"{name}: there is no folder {folder}; expected one, or a model's name, as in hf:OWNER/NAME"
            )
        folder = _downloaded(text)
    if not any((folder / file).is_file() for file in (CONFIG, ADAPTER)):
        raise UserError(
            f"{name}: {folder} has no {CONFIG}; expected the folder of a model that transformers saved, or of an "
            f"adapter of PEFT's, with {ADAPTER}"
        )
    return folder


def _downloaded(name: str) -> Path:
    """Into the hub's own cache, with its progress bars; what is there already is not downloaded again."""
    import huggingface_hub

    repository, _, revision = name.partition("@")
    settings = [CONFIG, ADAPTER, GENERATION, PREPROCESSOR, MODULES, SENTENCE, SENTENCES, POOLINGS, TEMPLATES_BY_NAME]
    wanted = ["*.safetensors", "*.safetensors.index.json", *settings, *TOKENIZER_FILES]
    try:
        found = huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=wanted)
    except Exception as error:  # its own errors, requests', and the system's
        raise UserError(
            f"hf:{name} is no folder, and cannot be downloaded: {str(error).splitlines()[0]}\nCheck the name and the "
            "network, set HF_TOKEN if the model needs it, or give a folder; the same command resumes a download"
        ) from error
    return Path(found)
