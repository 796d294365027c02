"""Rewards that something outside of the run gives: a program in a sandbox, and a language model behind a server."""

import json
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest

from axon.errors import Unavailable, UserError
from axon.observe.metrics import read_metrics
from axon.tune import ModelJudge, Program
from axon.tune.judge import Judge
from axon.tune.rewards import Sampled


def sampled(answer, **more):
    return Sampled("a prompt", answer, (1,), reference="17", where="document 4 of file", **more)


# ---- a program -------------------------------------------------------------------------------------------------------

CHECK = """
import json, subprocess, sys
sample = json.load(sys.stdin)
code = sample["answer"] + "\\n" + sample["record"]["tests"]
done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True)
print("a line before")
print(int(done.returncode == 0))
"""


@pytest.fixture
def verdicts(tmp_path, monkeypatch):
    """verdicts(command, answers, **fields): the rewards that a program gives, and the lines that were said."""
    (tmp_path / "check.py").write_text(CHECK)
    monkeypatch.chdir(tmp_path)

    def of(command, answers, limit=20.0, tests="assert twice(4) == 8", **fields):
        program, lines = Program((sys.executable, *command), **fields), []
        program.check()
        judge = Judge({"program": program}, {}, limit, lines.append)
        return judge([sampled(answer, record={"tests": tests}) for answer in answers]).total.tolist(), lines

    return of


def test_a_program_says_how_good_an_answer_is(verdicts, rng):
    factor = int(rng.integers(3, 9))
    answers = ["def twice(x): return x + x", f"def twice(x): return {factor} * x", "def twice("]
    assert verdicts(["check.py"], answers) == ([1, 0, 0], [])


def test_an_answer_that_is_run_has_no_network_no_file_but_its_own_and_so_much_memory(verdicts, tmp_path):
    victim, right = tmp_path / "victim", "\ndef twice(x): return 2 * x"
    victim.write_text("here")
    bad = {
        "writes": f"open({str(victim)!r}, 'w')",
        "deletes": f"import os; os.remove({str(victim)!r})",
        "connects": "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
        "sees the environment": "import os; os.environ['SECRET']",
        "takes memory": "x = bytearray(300 << 20)",
        "takes the disk": "open('/tmp/x', 'wb').write(bytes(9 << 20))",
    }
    good = ["open('/tmp/x', 'w').write('x')", "x = bytearray(20 << 20)", f"open({str(victim)!r}).read()"]
    found, _ = verdicts(["check.py"], [text + right for text in (*bad.values(), *good)], memory=256, files=8)
    assert found == [0] * len(bad) + [1] * len(good)
    assert victim.read_text() == "here"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(60)", "not done after 2 seconds"),
        ("import sys; sys.exit('no such thing')", "exit code 1: no such thing"),
        ("print('good')", "prints 'good' as its last line"),
        ("print('nan')", "prints 'nan' as its last line"),
        ("while True: print('y' * 10000)", "ends with exit code"),
    ],
    ids=["hangs", "fails", "says no number", "says nan", "floods"],
)
def test_what_a_program_does_wrong_costs_the_answer_and_a_line(verdicts, code, said):
    found, (line,) = verdicts(["-c", code], ["an answer"], limit=2.0, files=1)
    assert np.isnan(found).all()
    assert said in line
    assert "'program'" in line


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Program(), ("Program.command", "python3")),
        (lambda: Program(("no-such-program",)).check(), ("Program.command", "'no-such-program'")),
        (lambda: Program(("true",), memory=0), ("Program.memory",)),
        (lambda: ModelJudge(), ("ModelJudge.url", "ModelJudge.model")),
        (lambda: ModelJudge("http://x/v1", "m", asked="good?"), ("ModelJudge.asked", "{answer}")),
        (lambda: ModelJudge("http://x/v1", "m", key="NO_SUCH_KEY").check(), ("ModelJudge.key", "'NO_SUCH_KEY'")),
    ],
)
def test_a_mistake_is_told_at_the_start(make, said):
    with pytest.raises(UserError) as error:
        make()
    assert all(part in str(error.value) for part in said), error.value


# ---- a language model ------------------------------------------------------------------------------------------------


@contextmanager
def server(replies):
    """A server of which `replies(question)` gives the HTTP code and the reply; yields its URL and the questions."""
    questions = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            questions.append({"path": self.path, "key": self.headers["authorization"], **question})
            code, text = replies(question["messages"][0]["content"])
            body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", questions
    finally:
        http.shutdown()
        http.server_close()


def test_a_language_model_judges_by_the_last_number_of_its_reply(rng, monkeypatch):
    grades = rng.integers(0, 11, 24).tolist()
    monkeypatch.setenv("JUDGE_KEY", "secret")
    asked = "{prompt} {{x}} {reference}: {answer}"
    with server(lambda text: (200, f"Of 10, I say {text.split()[-1]}.")) as (url, questions):
        judge = ModelJudge(url, "judge", asked=asked, key="JUDGE_KEY")
        judge.check()
        scores = Judge({"judge": judge}, {}, 20.0)([sampled(str(grade)) for grade in grades])
    np.testing.assert_allclose(scores.total, np.array(grades) / 10)
    assert {question["path"] for question in questions} == {"/v1/chat/completions"}
    assert {question["key"] for question in questions} == {"Bearer secret"}
    assert {(question["model"], question["temperature"]) for question in questions} == {("judge", 0)}
    assert f"a prompt {{{{x}}}} 17: {grades[0]}" in [question["messages"][0]["content"] for question in questions]


def test_a_reply_without_a_number_costs_its_answer():
    lines = []
    with server(lambda text: (200, "good" if "bad" in text else "7")) as (url, _):
        scores = Judge({"judge": ModelJudge(url, "m")}, {}, 20.0, lines.append)([sampled("bad"), sampled("fine")])
    np.testing.assert_allclose(scores.total, [np.nan, 0.7])
    assert "1 of 2 answers" in lines[0]
    assert "'good'" in lines[0]


def test_a_busy_server_is_asked_again():
    codes = iter([503, 429, 200])
    with server(lambda text: (next(codes), "4")) as (url, questions):
        scores = Judge({"judge": ModelJudge(url, "m", pause=0.01)}, {}, 20.0)([sampled("x")])
    assert scores.total.tolist() == [0.4]
    assert len(questions) == 3


@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [(401, 20.0, "refuses the question: 401"), (500, 20.0, "does not answer: 500"), (500, 0.5, "does not answer: 500")],
)
def test_a_server_that_gives_no_reply_is_unavailable(code, limit, said):
    """Also where the limit ends before the attempts do."""
    pause = 0.01 if limit > 1 else 5.0
    with server(lambda text: (code, "4")) as (url, _), pytest.raises(Unavailable) as error:
        Judge({"judge": ModelJudge(url, "m", pause=pause, attempts=3)}, {}, limit)([sampled("x"), sampled("y")])
    assert said in str(error.value)
    assert url in str(error.value)
    assert "'judge'" in str(error.value)


def test_a_server_that_is_not_there_is_unavailable():
    with server(lambda text: (200, "4")) as (url, _):
        pass
    with pytest.raises(Unavailable, match="does not answer"):
        Judge({"judge": ModelJudge(url, "m", pause=0.01)}, {}, 20.0)([sampled("x")])


JUDGED = """
include 'run.gin'
Rollouts.rewards = {'judge': @ModelJudge()}
Rollouts.staleness = 0
ModelJudge.url = '%s'
ModelJudge.model = 'judge'
ModelJudge.attempts = 2
ModelJudge.pause = 0.01
"""


@pytest.mark.slow
def test_two_processes_whose_judge_is_gone_save_their_step_and_continue_bit_for_bit(command, tmp_path):
    """It answers for a step and a part of the next one, and later again."""
    left = [8 + 3]

    def replies(text):
        left[0] -= 1
        return 200 if left[0] >= 0 else 503, str(len(text) % 11)

    with server(replies) as (url, _):
        (tmp_path / "judged.gin").write_text(JUDGED % url)
        stopped = command(1, "judged.gin", "--run-dir", "stopped", "--processes", "2")
        said = stopped.stdout + stopped.stderr
        assert stopped.returncode == 2, said
        for part in ("'judge'", f"{url} does not answer: 503", "saved step 1 in", "the same command continues"):
            assert part in said
        left[0] = 10**6
        for folder in ("stopped", "whole"):
            done = command(1, "judged.gin", "--run-dir", folder, "--processes", "2")
            assert done.returncode == 0, done.stdout + done.stderr
    names = ("step", "loss", "grad_norm", "reward", "reward_std")
    runs = [read_metrics(tmp_path / folder / "metrics.jsonl") for folder in ("stopped", "whole")]
    stopped, whole = ([[row[name] for name in names] for row in rows] for rows in runs)
    assert stopped == whole
    assert len(whole) == 3
