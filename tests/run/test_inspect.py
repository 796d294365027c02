"""Loss and texts of a run that was trained."""

import json
import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from reports import silent

from axon.checkpoint import Reader
from axon.data import Bpe, TokenizerFile
from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.nn import Inputs
from axon.observe.metrics import read_metrics
from axon.run import program
from axon.run.convert import convert
from axon.run.inspect import evaluate_run, generate_text, logits_of, runtime_of
from axon.serve.request import Sampling

LAYOUTS = [
    Layout({"data": 4, "tensor": 2}, zero=3),
    Layout({"data": 4, "tensor": 2}, rows={"seq.residual": "tensor"}, overlap=("tensor",)),
    Layout({"pipe": 2, "data": 4}, pad_layers=True, microbatches=2),
]


@pytest.fixture(scope="module")
def full_logits(trained, few):
    """full_logits(batch): of the last parameters `batch seq vocab`, all at once, with none of the loss's own code."""
    with few(1):
        made = program(trained.train)
    parts = {"parameters": made.abstract_state().parameters}
    parameters = Reader(trained.folder / "checkpoints").restore_parts(parts)["parameters"]

    @jax.jit
    def logits(parameters, batch):
        model = made.runtime.bind(parameters)
        hidden, *_ = model.hidden(Inputs(batch["tokens"], batch["positions"], batch["documents"]))
        return model.output.logits(hidden)

    def computed(batch):
        with made.runtime.tracing():
            return np.asarray(logits(parameters, made.place(batch)))

    return computed


def test_loss_and_bits_per_byte_equal_a_direct_computation(trained, full_logits, few):
    corpus = trained.train.data.prepare(silent)
    nats = tokens = size = 0.0

    @cache
    def bytes_of(token):
        return 0 if token == corpus.tokenizer.bos else len(corpus.tokenizer.decode([token]).encode())

    for batch in corpus.held_out():
        logits = full_logits(batch).astype(np.float64)
        likely = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        real = batch["weights"] > 0
        targets = batch["targets"][real]
        nats -= np.take_along_axis(likely[real], targets[:, None], axis=1).sum()
        tokens += len(targets)
        size += sum(bytes_of(token) for token in targets)
    with few(1):
        found = evaluate_run(trained.folder, None, None, silent)
    assert found.loss == pytest.approx(nats / tokens, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_evaluating_a_run_repeats_the_figure_of_its_end(trained, few):
    last = read_metrics(trained.folder / "metrics.jsonl")[-1]
    lines = []
    with few(1):
        found = evaluate_run(trained.folder, None, trained.train.evaluation.batches, lines.append)
    assert (found.loss, found.bits_per_byte) == (last["eval_loss"], last["eval_bits_per_byte"])
    assert "parameters of step 12, on 1 device" in lines


def test_any_source_can_be_evaluated_and_all_of_it_counts(trained, text, few, tmp_path):
    documents = [path.read_text() for path in sorted(text.glob("*.txt"))[:9]]
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, document in enumerate(documents):
        (folder / f"{number}.txt").write_text(document)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    with few(1):
        of_folder = evaluate_run(trained.folder, str(folder), None, silent)
        of_lines = evaluate_run(trained.folder, str(tmp_path / "lines.jsonl"), None, silent)
        of_noise = evaluate_run(trained.folder, str(write(tmp_path / "noise.txt", "zyx wvu " * 300)), None, silent)
    assert of_folder == of_lines
    assert of_noise.bits_per_byte > of_folder.bits_per_byte


def write(path, text):
    path.write_text(text)
    return path


def test_a_run_with_a_tokenizer_of_its_own_can_be_evaluated_and_continued(tiny, trained, do, few, text, tmp_path):
    spelled = (trained.folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<begin>")
    tokenizer = TokenizerFile(str(write(tmp_path / "own.json", spelled)), bos="<begin>")
    do(replace(tiny, data=replace(tiny.data, tokenizer=tokenizer)), tmp_path / "run", steps=1)
    with few(1):
        found = evaluate_run(tmp_path / "run", str(text), 2, silent)
        assert generate_text(tmp_path / "run", "alpha", Sampling(tokens=4), silent).startswith("alpha")
    assert math.isfinite(found.loss)


@pytest.mark.full
def test_text_of_a_run_depends_on_the_seed_alone(trained, few):
    with few(1):
        texts = [
            generate_text(trained.folder, "alpha ", Sampling(tokens=30, temperature=2.0, seed=seed), silent)
            for seed in (1, 1, 2)
        ]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("alpha ") for text in texts)


def test_an_empty_prompt_is_continued(trained, few):
    with few(1):
        assert generate_text(trained.folder, "", Sampling(tokens=20, temperature=0), silent)


@pytest.mark.some(layout=LAYOUTS[2:])
@pytest.mark.few(layout=())
@pytest.mark.parametrize("layout", LAYOUTS, ids=["split", "overlapped", "staged"])
def test_a_run_on_many_devices_is_looked_at_on_them_or_on_one(layout, tiny, do, few, tmp_path, rng):
    do(replace(tiny, model=replace(tiny.model, layers=3), layout=layout), tmp_path, devices=8, steps=1)
    lines, losses, texts, logits = [], [], [], []
    ids = rng.integers(0, 320, (3, 7))
    for devices in (8, 1):
        with few(devices):
            losses.append(evaluate_run(tmp_path, None, 2, lines.append).loss)
            greedy = Sampling(tokens=10, temperature=0)
            texts.append([generate_text(tmp_path, "alpha ", greedy, lines.append, kind) for kind in (None, "int8")])
            logits.append(logits_of(tmp_path, ids, lines.append))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5)
    assert logits[0].shape == (3, 7, 320)
    assert texts[0] == texts[1]
    assert [line for line in lines if line.startswith("parameters")] == [
        *["parameters of step 1, on 8 devices"] * 4,
        *["parameters of step 1, on 1 device"] * 4,
    ]


def test_logits_are_those_that_the_loss_is_of(trained, full_logits, few, rng):
    ids, zeros = rng.integers(0, 320, (8, 32)), np.zeros((8, 32), np.int32)
    places = np.broadcast_to(np.arange(32, dtype=np.int32), ids.shape)
    batch = {"tokens": ids.astype(np.int32), "positions": places, "documents": zeros}
    with few(1):
        np.testing.assert_allclose(logits_of(trained.folder, ids[:3], silent), full_logits(batch)[:3], atol=1e-5)
        for wrong, said in ((ids + 300, "must be 0 to 319"), (ids[0], "expected integers `batch seq`")):
            with pytest.raises(UserError, match=said):
                logits_of(trained.folder, wrong, silent)


def test_what_is_no_run_or_lacks_a_part_is_said_so(copied, few, tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        generate_text(tmp_path / "nothing", "x", Sampling(), silent)
    with pytest.raises(UserError, match="There is no source 'nosuch'"):
        evaluate_run(copied, "nosuch", None, silent)
    with pytest.raises(UserError, match=r"The text has \d+ tokens, .* give more text"):
        evaluate_run(copied, str(write(tmp_path / "short.txt", "alpha")), None, silent)
    (copied / "checkpoints").rename(copied / "elsewhere")
    with few(1), pytest.raises(UserError, match="no checkpoint in"):
        generate_text(copied, "x", Sampling(), silent)
    (copied / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"there is no file .*tokenizer\.json"):
        evaluate_run(copied, None, None, silent)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(copied, rng):
    other = Bpe(vocab=400).train(iter([rng.integers(0, 10**18, 1000).astype(str).tobytes().decode("utf-32")]))
    other.save(copied / "tokenizer.json")
    said = rf"{copied / 'tokenizer.json'} has {other.vocab} ids, and the run's model 320: it belongs to another run"
    assert other.vocab > 320
    with pytest.raises(UserError, match=said):
        evaluate_run(copied, None, None, silent)
    with pytest.raises(UserError, match=said):
        generate_text(copied, "alpha", Sampling(), silent)


def test_a_tokenizer_of_the_hub_may_have_more_ids_than_the_model_and_a_text_with_one_is_refused(trained, few, tmp_path):
    hub, run, said = tmp_path / "hub", tmp_path / "run", r"has the id 320 \('<|image|>'\)".replace("|", r"\|")
    with few(1):
        convert(str(trained.folder), f"hf:{hub}", silent)
        inner = tokenizers.Tokenizer.from_file(str(hub / "tokenizer.json"))
        inner.add_tokens([f"<{number}>" for number in range(320 - inner.get_vocab_size())])
        inner.add_special_tokens(["<|image|>"])
        inner.save(str(hub / "tokenizer.json"))
        convert(f"hf:{hub}", str(run), silent)
        for path in (f"hf:{hub}", str(run)):
            assert generate_text(path, "alpha", Sampling(2), silent).startswith("alpha")
            with pytest.raises(UserError, match=said):
                generate_text(path, "alpha <|image|>", Sampling(2), silent)


def test_a_prompt_that_is_not_text_is_refused(copied):
    with pytest.raises(UserError, match=r"Sample.prompt is 'a\\udcff'; must be valid UTF-8"):
        generate_text(copied, "a\udcff", Sampling(), silent)


def test_full_logits_have_a_row_for_every_token(trained, full_logits):
    found = full_logits(next(trained.train.data.prepare(silent).held_out(1)))
    assert found.shape == (8, 32, trained.train.model.vocab)
    assert found.dtype == np.float32


@pytest.mark.full
def test_on_fewer_devices_the_reason_is_said_and_kernels_and_layout_rows_stay(tiny, do, few, tmp_path):
    layout, execution = Layout({"tensor": 4}, replicate_kv=2), Execution(kernels={"attention": "reference"})
    train = replace(tiny, model=replace(tiny.model, kv_heads=2), layout=layout, execution=execution)
    do(train, tmp_path, devices=4, steps=2)
    lines = []
    with few(4):
        whole = evaluate_run(tmp_path, None, 2, lines.append).loss
    assert not any("does not fit here" in line for line in lines)
    with few(1):
        alone = evaluate_run(tmp_path, None, 2, lines.append).loss
    assert alone == pytest.approx(whole, rel=1e-5)
    assert any("one device, as the run's layout does not fit here: Layout.mesh asks for" in line for line in lines)
    assert runtime_of(replace(train, layout=Layout({}))).execution.kernels == execution.kernels


def test_nothing_of_a_damaged_checkpoint_is_used_not_even_if_the_damage_is_elsewhere(trained, few, copied):
    (file,) = (copied / "checkpoints/12/state").glob("_sharding")
    file.write_bytes(file.read_bytes() + b" ")
    with few(1), pytest.raises(UserError, match=r"checkpoints/12 cannot be read: it is damaged: state/_sharding"):
        evaluate_run(copied, None, 1, silent)


def test_a_loss_that_is_no_number_is_an_error(trained, few, copied, monkeypatch):
    monkeypatch.setattr(Reader, "restore_parts", spoiled(Reader.restore_parts))
    with few(1), pytest.raises(UserError, match=r"not finite: .*/.*damaged"):
        evaluate_run(copied, None, 1, silent)


def spoiled(restore):
    """`restore`, with one number of the first parameter that is none."""

    def restored(self, *arguments, **options):
        parts = restore(self, *arguments, **options)
        leaves, tree = jax.tree.flatten(parts["parameters"])
        leaves[0] = leaves[0].at[(0,) * leaves[0].ndim].set(jnp.nan)
        return parts | {"parameters": jax.tree.unflatten(tree, leaves)}

    return restored
