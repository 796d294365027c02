"""A config that takes its model and tokenizer from where they were trained, and what it may change of them."""

import json
from dataclasses import replace

import pytest

from axon.checkpoint.huggingface.hub import TEMPLATE
from axon.config import ConfigError, dump, load
from axon.errors import UserError
from axon.run import Hub, HubTokenizer, InitFrom
from axon.run.trained import open_trained
from axon.serve.chat import Chat

CONFIG = """
from models.llama import Llama
MODEL = {source!r}
Train.model = @Hub()
Hub.source = %MODEL
Train.init_from = %MODEL
Train.data = @Chats()
Chats.seq = 128
Chats.batch = 4
Chats.sources = (@Words(),)
Chats.tokenizer = @HubTokenizer()
HubTokenizer.source = %MODEL
Words.count = 200
Words.task = 'reverse'
Train.optimizer = @AdamW()
AdamW.schedule = @Constant()
Constant.peak = 1e-3
Train.steps = 2
Train.evaluation = None
"""
TALK = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture
def config(tmp_path):
    """config(source, *lines): a file that tunes that model, and more lines."""

    def written(source, *lines):
        (tmp_path / "tune.gin").write_text("\n".join([CONFIG.format(source=source), *lines]))
        return load(tmp_path / "tune.gin")

    return written


def test_widths_and_tokens_are_those_of_the_folder_or_the_run(config, hub, trained):
    of_hub, of_run = config(f"hf:{hub}"), config(str(trained.folder))
    assert of_hub.tree.model == replace(trained.train.model, head_dim=of_hub.tree.model.head_dim) == Hub(f"hf:{hub}")
    assert of_run.tree.model == trained.train.model
    assert of_hub.tree.data.tokenizer == HubTokenizer(f"hf:{hub}") == open_trained(f"hf:{hub}").tokenizer
    assert of_run.tree.data.tokenizer == open_trained(trained.folder).tokenizer
    assert of_hub.origins["Llama.embed"] == "Hub()"


def test_what_is_recorded_needs_the_source_no_more(config, hub, tmp_path):
    tree = config(f"hf:{hub}").tree
    (tmp_path / "recorded.gin").write_text(dump(tree))
    assert "Hub" not in (tmp_path / "recorded.gin").read_text()
    assert load(tmp_path / "recorded.gin").tree == tree


def test_fields_are_overridden_by_bindings_of_the_family(config, hub):
    plain, other = config(f"hf:{hub}"), config(f"hf:{hub}", "Llama.vocab_multiple = 64", "Rope.theta = 77.0")
    assert other.tree.model == replace(
        plain.tree.model, vocab_multiple=64, rope=replace(plain.tree.model.rope, theta=77.0)
    )
    assert other.origins["Llama.vocab_multiple"].endswith("tune.gin:21")
    with pytest.raises(ConfigError, match=r"Llama.embeds.*Did you mean 'embed'"):
        config(f"hf:{hub}", "Llama.embeds = 3")


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_tuned_run_is_tuned_on_by_its_own_template(config, hub, do, tmp_path):
    train = config(f"hf:{hub}").tree
    (hub / TEMPLATE).write_text(TALK)
    try:
        ran = do(train, tmp_path / "run")
    finally:
        (hub / TEMPLATE).unlink()
    again = config(str(ran.folder)).tree
    chat = Chat.of(again.data.template_folder, again.data.tokenizer.load())
    assert chat.template().source == TALK
    do(again, tmp_path / "again", steps=1)


@pytest.mark.full
@pytest.mark.draws(1)
def test_mathematics_other_than_the_weights_were_trained_with_is_refused_unless_it_is_meant(config, hub, do, tmp_path):
    train = config(f"hf:{hub}", "Rope.theta = 77.0").tree
    with pytest.raises(UserError) as found:
        do(train, tmp_path / "run")
    theirs = Hub(f"hf:{hub}").rope.theta
    said = f"Llama.rope.theta is 77.0, and {theirs} in hf:{hub}", "@Hub()", "InitFrom.changed = ('rope.theta',)"
    for part in said:
        assert part in str(found.value)
    meant = replace(train, init_from=InitFrom(f"hf:{hub}", changed=("rope.theta",)))
    do(meant, tmp_path / "meant", steps=1)
    with pytest.raises(UserError, match=r"InitFrom\.changed has 'rope\.thta', which is as in .*"):
        do(replace(train, init_from=InitFrom(f"hf:{hub}", changed=("rope.theta", "rope.thta"))), tmp_path / "typo")


def test_a_source_that_is_none_is_told_with_its_line(config, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text(json.dumps({"architectures": ["NoModelForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"tune\.gin:\d+: Hub.*NoModelForCausalLM"):
        config(f"hf:{tmp_path / 'empty'}")
