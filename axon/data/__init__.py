"""Text to batches: sources → tokenizer → token store → shuffled, mixed, packed batches. And images to batches."""

from axon.data.batches import Batches
from axon.data.columns import HuggingFace, Parquet
from axon.data.corpus import Corpus, Data
from axon.data.feed import Feed, FeedContext
from axon.data.feed_config import FedCorpus, FeedConfig
from axon.data.gallery import Gallery, Images
from axon.data.pictures import ArrayFiles, Letters, Pictures, PictureSource
from axon.data.prepared import Prepared
from axon.data.sources import Folder, JsonLines, Source, Stdlib, Synthetic, parse_source
from axon.data.tokenizer import Bpe, Tokenizer, TokenizerFile
