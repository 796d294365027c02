"""`Chats`, conversations of which the assistant's turns are learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from axon.errors import UserError
from axon.tune.examples import Examples
from axon.tune.formats import CHATS, Format
from axon.tune.packing import Document


@dataclass(frozen=True)
class Chats(Examples):
    """Conversations, for supervised fine-tuning: of the next token, weights are 1 where the assistant writes it, or
    the `weight` of the message.

    A record is in OpenAI's form (`messages`), ShareGPT's (`conversations`) or Alpaca's (`instruction`, `input`,
    `output`), or has a `prompt` and a `completion`, each a text or messages. The model's chat template makes one text
    of it, which is encoded once; what the assistant writes is known from the rendering (`axon.serve.chat.Chat.turns`).
    """

    formats: ClassVar[tuple[Format, ...]] = CHATS
    weighs: ClassVar[bool] = True

    def check_example(self, documents: Sequence[Document], where: str) -> None:
        if not documents[0].learned[1:].any():
            raise UserError(
                f"{where}: nothing is learned of this example, as no message of it is the assistant's, or all of them "
                "are empty or have weight 0: add its answer, or leave the example out"
            )
