"""`axon report` of files that something else wrote: each is refused by its line and field, or shown."""

import json

import pytest

from axon.errors import UserError
from axon.run.reporting import RunReport

START = {"time": 5.0, "step": None, "kind": "start"}


@pytest.fixture
def report(tmp_path):
    """report(events, metrics, record): the page and the summary of a run with these lines and this run.json."""

    def make(events=(START,), metrics=(), record="{}"):
        (tmp_path / "config.gin").write_text("Train.steps = 1\n")
        for name, lines in {"events": events, "metrics": metrics}.items():
            texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{text}\n" for text in texts))
        (tmp_path / "run.json").write_text(record)
        found = RunReport(tmp_path)
        found.write_page(tmp_path / "page.html")
        return "\n".join([*found.lines(), json.dumps(found.summary(), allow_nan=False)])

    return make


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "5", "null", "{no json", "\0", "[" * 100_000, '{"a":' * 90 + "1" + "}" * 90]
)
def test_a_run_json_that_is_no_object_is_refused_by_its_name(report, text):
    with pytest.raises(UserError, match=r"run\.json"):
        report(record=text)


@pytest.mark.parametrize("text", ['{"loss_unit": 7, "git": [], "hardware": {"devices": {"cpu": null}}}', '{"a": NaN}'])
def test_a_run_json_with_other_fields_is_shown(report, text):
    report(record=text)


EVENTS = {
    "time": [{"kind": "start"}, START | {"time": "x"}, START | {"time": None}, START | {"time": 1e300}],
    "kind": [{"time": 5.0}, START | {"kind": 7}, START | {"kind": None}],
    "step": [START | {"step": step} for step in ("x", -1, 1.5, True, 10**400)],
    "seconds": [START | {"kind": "evaluation", "seconds": value} for value in ("x", [1], 10**400, True)],
    "data_seconds": [START | {"kind": "steps", "data_seconds": {}}],
    "lost_steps": [START | {"kind": "resume", "lost_steps": "a"}],
    "lost_seconds": [START | {"kind": "rollback", "lost_seconds": "a"}],
    "memory": [START | {"kind": "steps", "memory": value} for value in ([1], {"host": "x"}, 5)],
    "error": [START | {"kind": "end", "error": 5}],
    "outcome": [START | {"kind": "end", "outcome": []}],
    "": [[1], 5, None, "{no json", "[" * 100_000],
}


@pytest.mark.parametrize(("field", "event"), [(field, event) for field, many in EVENTS.items() for event in many])
def test_an_event_of_another_shape_is_refused_by_its_line_and_field(report, field, event):
    with pytest.raises(UserError, match=rf"events\.jsonl:2.*{field}.*Delete that line"):
        report([START, event])


METRICS = {
    "step": [{"step": "x", "loss": 1.0}, {"step": 1.5}],
    "loss": [{"step": 1, "loss": value} for value in ("x", [1], 10**400, False)],
    "step_seconds": [{"step": 1, "step_seconds": "x"}],
    "eval_loss": [{"step": 1, "eval_loss": {}}],
    "": [[1], "{no json"],
}


@pytest.mark.parametrize(("field", "record"), [(field, record) for field, many in METRICS.items() for record in many])
def test_a_record_of_another_shape_is_refused_by_its_line_and_field(report, field, record):
    with pytest.raises(UserError, match=rf"metrics\.jsonl:1.*{field}.*Delete that line"):
        report(metrics=[record])


ANSWER = {"question": "1 < 2?", "expected": "<b>", "answer": "yes", "scores": {"exact": 1.0, "reward_short": None}}


@pytest.mark.parametrize(
    "answer",
    [5, {}, ANSWER | {"question": None}, ANSWER | {"scores": {"exact": "x"}}, ANSWER | {"scores": 1}],
)
def test_answers_of_another_shape_are_refused_by_their_line(report, answer):
    with pytest.raises(UserError, match=r"events\.jsonl:2.*answers.*Delete that line"):
        report([START, START | {"kind": "evaluation", "step": 3, "answers": [answer]}])


def test_the_page_has_each_metric_and_the_answers_of_each_evaluation(report, tmp_path):
    later = ANSWER | {"answer": "no", "scores": {"exact": 0.0, "reward_short": 0.25}}
    evaluations = [{"time": 6.0, "kind": "evaluation", "step": step} for step in (0, 4)]
    report(
        [START, *({**one, "answers": [answer]} for one, answer in zip(evaluations, (later, ANSWER), strict=True))],
        [{"step": 1, "loss": 2.0, "kl": 0.5, "note": "x"}, {"step": 4, "eval_loss": 2.0, "eval_kl": 0.25, "kl": "x"}],
    )
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<figcaption>") == 1
    assert "<figcaption>kl<" in page
    assert "step 4: 0.25" in page  # the evaluation's
    assert page.index("step 0") < page.index(">no<") < page.index(">yes<")
    assert "reward short 0.25" in page
    assert "1 &lt; 2?" in page
    assert "&lt;b&gt;" in page


def test_numbers_that_json_lacks_count_as_none(report):
    events = [
        START,
        '{"time": 6, "kind": "evaluation", "seconds": NaN}',
        '{"time": 7, "kind": "save_blocked", "seconds": 1e999}',
    ]
    said = report(events, ['{"step": 1, "loss": NaN, "step_seconds": Infinity}', '{"loss": 2.0}'])
    assert "2 s" in said
    assert "NaN" not in said


def test_what_an_event_leaves_out_is_taken_for_nothing(report):
    resumed = {"time": 9.0, "kind": "resume", "lost_steps": 3, "step": 2}
    assert "goodput 0.0 % of 4 s" in report([START, {"time": 6.0, "kind": "steps"}, START | {"time": 8.0}, resumed])
