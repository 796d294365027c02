"""Adapters by their names: listed, asked, and loaded and unloaded where the operator allows it."""

import pytest
from fake import FakeEngine
from test_bodies import refused

from axon.errors import UserError
from axon.serve.adapters import Adapter

RANKS = {"/adapters/sql": 4, "/adapters/large": 64}


def read(path):
    if path not in RANKS:
        raise UserError(f"{path} is no adapter")
    return Adapter(RANKS[path], {})


@pytest.fixture
def running(serve):
    with serve(FakeEngine(loaded={"poems": Adapter(2, {})}), read_adapter=read) as found:
        yield found


def load(running, name="sql", path="/adapters/sql", **more):
    return running.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def unload(running, name):
    return running.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def listed(running):
    return {one["id"]: one.get("parent") for one in running.client.get("/v1/models").json()["data"]}


def test_a_model_is_the_base_or_an_adapter_by_its_name(running):
    assert listed(running) == {"tiny": None, "poems": "tiny"}
    assert running.client.get("/v1/models/poems").json()["parent"] == "tiny"
    for name in ("poems", "tiny"):
        answer = running.client.post("/v1/completions", json={"model": name, "prompt": "a"})
        assert answer.json()["model"] == name
        assert running.client.post("/tokenize", json={"model": name, "prompt": "a"}).status_code == 200
    chat = {"model": "poems", "messages": [{"role": "user", "content": "the"}]}
    assert running.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert running.service.model.engine.asked == ["poems", None, "poems"]


def test_an_unknown_name_is_refused_with_the_nearest(running):
    error = refused(running.client.post("/v1/completions", json={"model": "peoms", "prompt": "a"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'poems'" in error["message"]
    error = refused(running.client.post("/v1/embeddings", json={"model": "poems", "input": "a"}), 400)
    assert error["param"] == "model"


def test_adapters_are_loaded_and_unloaded_while_the_model_is_served(running):
    assert load(running).status_code == 200
    assert listed(running) == {"tiny": None, "poems": "tiny", "sql": "tiny"}
    assert refused(load(running), 400)["param"] == "lora_name"
    assert load(running, load_inplace=True).status_code == 200
    assert unload(running, "poems").status_code == 200
    assert listed(running) == {"tiny": None, "sql": "tiny"}
    refused(running.client.post("/v1/completions", json={"model": "poems", "prompt": "a"}), 404)


def test_what_cannot_be_loaded_or_unloaded_is_refused_and_changes_nothing(running):
    assert "/adapters/sqk is no adapter" in refused(load(running, path="/adapters/sqk"), 400)["message"]
    assert "--adapter-rank" in refused(load(running, path="/adapters/large"), 400)["message"]
    for name in ("tiny", ""):
        refused(load(running, name=name), 400)
    assert "'poems'" in refused(unload(running, "poem"), 404)["message"]
    refused(unload(running, "tiny"), 400)
    assert listed(running) == {"tiny": None, "poems": "tiny"}


def test_clients_load_none_unless_the_operator_allows_it(serve):
    with serve() as running:
        assert "--load-adapters" in refused(load(running), 403)["message"]
        assert "--load-adapters" in refused(unload(running, "x"), 403)["message"]
