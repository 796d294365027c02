"""A trained model as lm-eval's harness calls it: requests cut in windows, cut at their beginning, sampled, and ended.

All of it is `extra`, as `axon.run.harness` needs the extra `eval`, which only `--full` and `--slow` install.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from reports import silent

from axon.errors import UserError
from axon.run.inspect import runtime_of
from axon.run.trained import open_trained
from axon.serve.offline import write
from axon.serve.request import Request, Sampling
from axon.serve.teacher_forcing import Continuation

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def harness():
    """The module: imported here, as this file is also collected where there is no lm-eval."""
    from axon.run import harness

    return harness


@pytest.fixture(scope="module")
def parts(trained, few):
    """(runtime, parameters, variables, tokenizer) of the run."""
    run = open_trained(trained.folder)
    with few(1):
        runtime = runtime_of(run.train, silent)
        return runtime, *run.restore(runtime, run.train.model, silent), run.tokenizer.load()


def request(*arguments):
    return SimpleNamespace(args=arguments)


def scored(model, parts, pairs):
    _, parameters, variables, _ = parts
    found = dict(model._scorer(parameters, variables, [Continuation(*pair) for pair in pairs]))
    return [(found[place].log_likelihood, found[place].is_greedy) for place in range(len(pairs))]


def test_a_continuation_has_the_ids_that_it_has_in_the_whole_text(harness, parts):
    model, tokenizer = harness.HarnessModel(*parts, max_length=64), parts[-1]
    found = model.loglikelihood([request("alpha beta", " gamma"), request("", "alpha"), request("alpha", "")])
    context = tokenizer.prompt("alpha beta")
    whole = tokenizer.prompt("alpha beta gamma")
    pairs = [(context, whole[len(context) :]), ([tokenizer.bos], tokenizer.encode("alpha"))]
    np.testing.assert_allclose(
        [one[0] for one in found[:2]], [one[0] for one in scored(model, parts, pairs)], rtol=1e-6
    )
    assert found[2] == (0.0, True)


def test_a_long_text_is_predicted_once_in_windows_and_a_long_context_keeps_its_end(harness, parts):
    model, tokenizer, said = harness.HarnessModel(*parts, max_length=8), parts[-1], []
    ids = [tokenizer.bos, *tokenizer.encode("alpha beta gamma delta " * 4)]
    assert len(ids) > 17
    text = tokenizer.decode(ids[1:])
    full = [(ids[first : first + 1], ids[first + 1 : first + 9]) for first in range(0, len(ids) - 9, 8)]
    rest = ids[1 + 8 * len(full) :]
    windows = [*full, (ids[-9 : -len(rest)], rest)]
    expected = sum(score for score, _ in scored(model, parts, windows))
    assert model.loglikelihood_rolling([request(text)]) == [pytest.approx(expected, rel=1e-5)]
    (found,) = model._loglikelihood_tokens([(("", ""), ids[:12], ids[12:14])])
    assert found == pytest.approx(scored(model, parts, [(ids[5:12], ids[12:14])])[0])
    model.report_cuts(said.append)
    assert said[0].startswith("1 contexts had more than the 8 positions")
    with pytest.raises(UserError, match=r"an answer of 9 tokens, .* 8 positions: raise --max-length"):
        model._loglikelihood_tokens([(("", ""), ids[:1], ids[1:10])])


def test_a_text_ends_at_the_first_string_or_after_so_many_tokens(harness, parts):
    runtime, parameters, variables, tokenizer = parts
    model, prompt = harness.HarnessModel(*parts, max_length=128), tokenizer.prompt("alpha beta")
    asked = Request(tuple(prompt), Sampling(tokens=40, temperature=0.0))
    whole = next(write(runtime, parameters, variables, tokenizer, [asked])).text
    stop = whole[len(whole) // 2 :][:3]
    options = {"max_gen_toks": 40}
    texts = model.generate_until([request("alpha beta", options), request("alpha beta", options | {"until": [stop]})])
    assert texts == [whole, whole[: whole.index(stop)]]
    with pytest.raises(UserError, match="generates 128 tokens"):
        model.generate_until([request("alpha", {"max_gen_toks": 128})])


def test_repeats_of_a_prompt_are_sampled_apart_and_again_as_they_were(harness, parts, rng):
    model, words = harness.HarnessModel(*parts, max_length=128), rng.permutation(["alpha", "beta", "gamma", "delta"])
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 40}
    requests = [request(" ".join(words), options)] * 3 + [request(words[0], options)]
    texts = model.generate_until(requests)
    assert len(set(texts[:3])) > 1  # not 3: a text that ends with its first token is like another
    assert model.generate_until(requests) == texts
    assert model.generate_until(requests[::-1]) == [texts[3], *texts[:3]]
    greedy = [request(words[0], {"max_gen_toks": 4})] * 2
    assert len(set(model.generate_until(greedy))) == 1


def test_options_of_generation_are_followed_or_refused(harness):
    assert harness.sampling_of({"until": "\n", "do_sample": False, "temperature": 0.0}) == Sampling(
        256, 0.0, stop=("\n",)
    )
    drawn = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 3}
    assert harness.sampling_of(drawn) == Sampling(3, 0.5, top_p=0.9)
    with pytest.raises(UserError, match="generation_kwargs has repetition_penalty: Axon follows"):
        harness.sampling_of({"repetition_penalty": 2})
