"""Text to batches: sources → tokenizer → token store → shuffled, mixed, packed batches."""

from axon.data.batches import Batches, throughput
from axon.data.columns import HuggingFace, Parquet
from axon.data.corpus import Corpus, Data
from axon.data.sources import Folder, JsonLines, Source, Stdlib, Synthetic, parse_source
from axon.data.tokenizer import Bpe, Tokenizer, TokenizerFile

__all__ = [
    "Batches",
    "Bpe",
    "Corpus",
    "Data",
    "Folder",
    "HuggingFace",
    "JsonLines",
    "Parquet",
    "Source",
    "Stdlib",
    "Synthetic",
    "Tokenizer",
    "TokenizerFile",
    "parse_source",
    "throughput",
]
