"""Log-probabilities in the forms of OpenAI's two endpoints."""

from collections.abc import Sequence
from typing import Any

from axon.data.tokenizer import Tokenizer
from axon.serve.request import TokenLogprob

REPLACEMENT = "\ufffd"


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What a token stands for; `token_id:` and its id where that is no whole character."""
    text = tokenizer.decode([token])
    return f"token_id:{token}" if REPLACEMENT in text else text


def of_completion(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], first: int | None = None, offset: int = 0
) -> dict[str, Any]:
    """Of `/v1/completions`: lists, an element a token. `first`: a prompt's first id, which has no probability;
    `offset`: characters of the text before."""
    known = [(one.token, one.logprob, _top(tokenizer, one)) for one in logprobs]
    entries = [*([] if first is None else [(first, None, None)]), *known]
    texts = [token_text(tokenizer, token) for token, *_ in entries]
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob, _ in entries],
        "top_logprobs": [top for *_, top in entries],
        "text_offset": [offset + sum(map(len, texts[:k])) for k in range(len(texts))],
    }


def _top(tokenizer: Tokenizer, one: TokenLogprob) -> dict[str, float]:
    """The likeliest, and the token itself; of two with the same text the likelier."""
    found: dict[str, float] = {}
    for token, logprob in (*one.likeliest, (one.token, one.logprob)):
        found.setdefault(token_text(tokenizer, token), logprob)
    return found


def of_chat(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Of `/v1/chat/completions`: an object a token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        whole = None if REPLACEMENT in text else list(text.encode())
        return {"token": token_text(tokenizer, token), "logprob": logprob, "bytes": whole}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(*likely) for likely in one.likeliest]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}
