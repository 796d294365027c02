"""A feed whose batches depend on what it drew before, for tests of what a checkpoint keeps of it."""

from axon.data import FedCorpus, Feed, FeedConfig


class Remembering(FeedConfig):
    def prepare(self, report=print):
        return RememberingCorpus(self, self.data.prepare(report))


class RememberingCorpus(FedCorpus):
    def feed(self, context):
        return RememberingFeed(self.corpus, context)


class RememberingFeed(Feed):
    """Batches of a corpus, further apart the more were drawn."""

    sees_state = True

    def __init__(self, corpus, context):
        self.corpus, self.context, self.read = corpus, context, context.saved.get("read", 0)

    def draw(self, state):
        with self.corpus.train(self.context.seed, self.read) as batches:
            batch = next(batches)
        self.read = 2 * self.read + 1
        return batch

    def saved(self):
        return {"read": self.read}
