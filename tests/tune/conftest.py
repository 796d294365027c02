import pytest
from worlds import WORDS

from axon.data import JsonLines


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in WORDS))
    return JsonLines(str(path))
