"""Objects below a URL or a folder: where the server is, and what one reads, writes, lists and deletes."""

import time

import numpy as np
import pytest

from axon import object_store
from axon.errors import UserError
from axon.object_store import Objects, store_spec
from tests.checkpoint.s3_server import serving

AWS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
)


@pytest.fixture(params=["s3", "file"])
def objects(request, tmp_path, monkeypatch):
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield Objects("s3://bucket/some folder" if request.param == "s3" else str(tmp_path / "some folder"), "DIR")


def test_what_is_written_is_read_listed_and_deleted(objects, rng):
    contents = {f"a/{n:03}/b ü": rng.bytes(int(rng.integers(0, 3000))) for n in range(20)}
    objects.write_all((key, len(content), lambda c=content: c) for key, content in contents.items())
    objects.write("ab", b"beside")
    assert dict(objects.read_all(dict.fromkeys(contents, 0))) == contents
    assert objects.keys("a/") == sorted(contents)
    assert objects.read("a") is None
    objects.delete(["a/003/b ü"])
    assert len(objects.keys("a/")) == 19
    objects.delete(objects.keys("a/"))
    assert objects.keys("a/") == []
    assert objects.read("ab") == b"beside"
    objects.delete(["none"])


def test_so_many_bytes_are_in_progress_and_no_more(objects, rng, monkeypatch):
    monkeypatch.setattr(object_store, "BYTES_IN_PROGRESS", 100)
    sizes = [int(n) for n in rng.integers(1, 60, 30)] + [200]
    begun: list[int] = []

    def content(size):
        begun.append(size)
        return b"x" * size

    ended, most = 0, 0
    original = objects._ended

    def counted(*arguments):
        nonlocal ended, most
        most = max(most, sum(begun) - ended)
        ended += arguments[2]
        return original(*arguments)

    monkeypatch.setattr(objects, "_ended", counted)
    objects.write_all((f"k/{n}", size, lambda size=size: content(size)) for n, size in enumerate(sizes))
    assert begun == sizes
    assert 60 < most <= 200
    assert ended == sum(sizes)


def test_amazons_variables_say_where_the_server_is(monkeypatch):
    for name in AWS:
        monkeypatch.delenv(name, raising=False)

    def spec(**variables: str):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            found = store_spec("s3://bucket/a%20b/c", "DIR")
            assert isinstance(found, dict)
            assert found["bucket"] == "bucket"
            assert found["path"] == "a b/c/"
            return found.get("endpoint"), found.get("aws_region"), found["aws_credentials"]["type"]

    assert spec() == (None, None, "default")
    assert spec(AWS_ENDPOINT_URL="https://s3.host/") == ("https://s3.host", None, "default")
    assert spec(AWS_ENDPOINT_URL="http://localhost:1") == ("http://localhost:1", None, "anonymous")
    assert spec(AWS_ENDPOINT_URL="http://localhost:1", AWS_PROFILE="p")[2] == "default"
    assert spec(AWS_ENDPOINT_URL="x", AWS_ENDPOINT_URL_S3="http://127.0.0.1")[0] == "http://127.0.0.1"
    assert spec(AWS_REGION="eu", AWS_DEFAULT_REGION="us", AWS_ACCESS_KEY_ID="k")[1:] == ("eu", "environment")


def test_a_server_that_does_not_answer_is_said(monkeypatch):
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setattr(object_store, "SECONDS", 0.2)
        server.seconds = 60
        began = time.monotonic()
        with pytest.raises(UserError, match=r"cannot read s3://bucket/a/b: no answer within 0\.2 seconds"):
            Objects("s3://bucket/a", "DIR").read("b")
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("url", ["http://host/a", "https://host/a", "memory://a", "s3://", "s3:///a", "ftp://a/b"])
def test_a_url_of_another_kind_is_refused_before_it_is_opened(url):
    with pytest.raises(UserError, match=rf"DIR is '{url}'; expected s3://"):
        Objects(url, "DIR")


def test_a_token_store_can_be_on_the_same_server(monkeypatch):
    from axon.data.store import Root

    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        root = Root("s3://bucket/tokens")
        assert root.once("a/manifest.json", lambda part: part, print).startswith("a/part-")
        array = root.array("a/x", dtype="int32", shape=(8,), create=True)
        array.write(np.arange(8, dtype=np.int32)).result()
        assert Root("s3://bucket/tokens").array("a/x", open=True).read().result().tolist() == list(range(8))
        root.delete("a")
        assert not server.objects
