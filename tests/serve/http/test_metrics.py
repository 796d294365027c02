"""What the server says of itself: metrics, its state, its description."""

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.http.canned import STATE


def samples(running) -> dict[str, float]:
    """Name and labels' values → value."""
    text = running.client.get("/metrics").text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in found}


def test_prometheus_reads_the_metrics_and_they_count(serve):
    with serve() as running:
        for _ in range(3):
            assert running.complete("a", max_tokens=5).status_code == 200
        assert running.complete("a", max_tokens=-5).status_code == 400
        running.client.get("/wp-admin/setup.php")
        running.until(lambda: samples(running).get("axon_requests_total other 404") == 1)
        found = samples(running)
    assert found["axon_generated_tokens_total"] == 15
    assert (found["axon_pages"], found["axon_free_pages"], found["axon_used_pages"]) == (64, 60, 4)
    assert (found["axon_running"], found["axon_waiting"], found["axon_prefix_hits_total"]) == (0, 0, 3)
    assert found["axon_requests_total /v1/completions 200"] == 3
    assert found["axon_requests_refused_total 400"] == 1
    assert found["axon_request_seconds_count"] == found["axon_first_token_seconds_count"] == 3
    assert 0 < found["axon_first_token_seconds_sum"] <= found["axon_request_seconds_sum"]
    assert not any("wp-admin" in name for name in found)


def test_the_state_is_what_the_page_shows(serve):
    with serve() as running:
        before = running.client.get("/state").json()
        assert (before["status"], before["first_token_seconds"], before["token_seconds"]) == ("ok", None, None)
        running.complete("a", max_tokens=50)
        running.until(lambda: running.client.get("/state").json()["first_token_seconds"])
        state = running.client.get("/state").json()
    assert {name: type(state[name]) for name in STATE if name != "tokens_per_second"} == {
        name: type(value) for name, value in STATE.items() if name != "tokens_per_second"
    }
    assert state["tokens_per_second"] > 0
    assert state["first_token_seconds"] > 0 < state["token_seconds"]
    assert (state["model"], state["pages"], state["free_pages"], state["generated_tokens"]) == ("tiny", 64, 60, 50)


def test_the_description_names_every_route_and_every_field(shared):
    described = shared.client.get("/openapi.json").json()
    routes = {route.path.replace(":path}", "}") for route in shared.server.config.app.routes}
    assert described["paths"].keys() == routes - {"/", "/openapi.json"}
    fields = described["components"]["schemas"]["CompletionBody"]
    assert fields["additionalProperties"] is False
    assert {"prompt", "max_tokens", "min_p", "response_format"} <= fields["properties"].keys()
    assert {"type": "null"} in fields["properties"]["presence_penalty"]["anyOf"]
    assert fields["properties"]["presence_penalty"]["anyOf"][0]["maximum"] == 2


def test_the_page_is_served_with_its_headers(shared):
    answer = shared.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src" in answer.headers["content-security-policy"]
