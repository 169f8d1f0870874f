from __future__ import annotations

import logging
import time

import pytest

from hub_stand_in import served
from tntprune.errors import UsageError, UserError
from tntprune.serialization.hub import download, split, upload

FILES = {"reducer.safetensors": bytes(range(256)) * 9, "README.md": b"---\ntags: []\n---\n\n# A card\n"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with served(monkeypatch, tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    for name, data in FILES.items():
        (tmp_path / "out" / name).write_bytes(data)
    return tmp_path / "out"


def refused(call, *words, kind=UserError):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message, message


@pytest.mark.parametrize(
    ("source", "revision", "expected"),
    [
        ("a/b", None, ("a/b", None)),
        ("a/b@v1", None, ("a/b", "v1")),
        ("a/b", "v1", ("a/b", "v1")),
        ("a/b@v1", "v1", ("a/b", "v1")),
        ("a/b@refs/pr/1", None, ("a/b", "refs/pr/1")),
    ],
)
def test_a_revision_can_be_part_of_the_id(source, revision, expected):
    assert split(source, revision) == expected


@pytest.mark.parametrize("source", ["a", "a/b/c", "/b", "a/", "../b", "~/b", "a/b@", "@v1"])
def test_what_is_no_id_is_refused(source):
    refused(lambda: split(source), source, "expected user/repo")


def test_two_revisions_are_refused():
    refused(lambda: split("a/b@v1", "v2"), "two revisions", kind=UsageError)


def test_what_is_uploaded_comes_back_byte_for_byte(hub, folder):
    address = upload(folder, "someone/small", "hello")
    repo = hub.repos["someone/small"]
    assert address == f"{hub.address}/someone/small/commit/{repo.branches['main']}"
    assert repo.messages == ["initial commit", "hello"] and not repo.private
    for name, data in FILES.items():
        path = download("someone/small", name)
        assert path.read_bytes() == data and path.parent.name == repo.branches["main"]


def test_a_repository_is_made_private_only_when_it_is_new(hub, folder):
    upload(folder, "someone/secret", "a", private=True)
    upload(folder, "someone/open", "a")
    upload(folder, "someone/open", "b", private=True)
    assert hub.repos["someone/secret"].private and not hub.repos["someone/open"].private
    assert hub.repos["someone/open"].messages[1:] == ["a", "b"]


@pytest.mark.parametrize("as_part", [True, False])
def test_a_branch_is_made_and_the_main_one_stays(hub, folder, as_part):
    upload(folder, "someone/small", "first")
    (folder / "reducer.safetensors").write_bytes(b"other")
    if as_part:
        upload(folder, "someone/small@trial", "second")
    else:
        upload(folder, "someone/small", "second", revision="trial")
    for source, data in (("someone/small", FILES["reducer.safetensors"]), ("someone/small@trial", b"other")):
        assert download(source, "reducer.safetensors").read_bytes() == data


def test_an_older_commit_can_be_asked_for(hub, folder):
    upload(folder, "someone/small", "first")
    first = hub.repos["someone/small"].branches["main"]
    (folder / "reducer.safetensors").write_bytes(b"other")
    upload(folder, "someone/small", "second")
    assert download("someone/small", "reducer.safetensors").read_bytes() == b"other"
    assert download("someone/small", "reducer.safetensors", first).read_bytes() == FILES["reducer.safetensors"]


def test_without_a_connection_the_cache_answers(hub, folder, monkeypatch):
    from huggingface_hub import constants

    upload(folder, "someone/small", "first")
    there = download("someone/small", "reducer.safetensors")
    hub.__exit__()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client waits ever longer before it gives up
    assert download("someone/small", "reducer.safetensors") == there
    refused(lambda: download("someone/small", "README.md"), "the Hub cannot be reached, and the cache has no copy")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert download("someone/small", "reducer.safetensors") == there and len(hub.asked) == asked
    refused(lambda: download("someone/small", "README.md"), "HF_HUB_OFFLINE is set, and the cache has no copy")
    refused(lambda: upload(folder, "someone/small", "m"), "someone/small: could not be pushed", "HF_HUB_OFFLINE is set")


def test_attempts_are_not_told_one_by_one(hub, monkeypatch, caplog):
    hub.__exit__()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    logger = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(logger, "propagate", True)  # to where caplog listens
    with caplog.at_level(logging.WARNING, "huggingface_hub"):
        logger.warning("heard")
        refused(lambda: download("someone/small", "README.md"), "cannot be reached")
        assert [record.message for record in caplog.records] == ["heard"] and logger.level == logging.WARNING


def test_without_a_connection_nothing_is_pushed(hub, folder):
    hub.__exit__()
    refused(lambda: upload(folder, "someone/small", "first"), "could not be pushed (the Hub cannot be reached)")


def test_what_is_not_there_is_told(hub, folder):
    upload(folder, "someone/small", "first")
    upload(folder, "someone/secret", "first", private=True)
    refused(lambda: download("someone/other", "x"), "someone/other:", "no such repository, or a private one")
    refused(lambda: download("someone/small@v7", "x"), "no revision v7 in that repository")
    refused(lambda: download("someone/small", "x.bin"), "no x.bin in that repository")
    refused(lambda: download("some one/small", "x"), "not the id of a repository")


def test_a_private_repository_is_hidden_from_those_who_are_not_logged_in(hub, folder, monkeypatch):
    upload(folder, "someone/secret", "first", private=True)
    assert download("someone/secret", "README.md").read_bytes() == FILES["README.md"]
    monkeypatch.setenv("HF_TOKEN", "stranger")
    refused(lambda: download("someone/secret", "reducer.safetensors"), "a private one", "hf auth login")
    monkeypatch.delenv("HF_TOKEN")
    refused(lambda: download("someone/secret", "reducer.safetensors"), "a private one", "hf auth login")


def test_pushing_needs_a_login_and_the_right_to_write(hub, folder, monkeypatch):
    upload(folder, "someone/small", "first")
    refused(lambda: upload(folder, "another/small", "m"), "another/small:", "no right to write")
    refused(lambda: upload(folder, "someone/small", "m", token="stranger"), "no right to write")
    refused(lambda: upload(folder, "someone/small", "m", token="made up"), "could not be pushed")
    refused(lambda: upload(folder, "someone/new", "m", token="made up"), "the token is not valid")
    monkeypatch.delenv("HF_TOKEN")
    asked = len(hub.asked)
    refused(lambda: upload(folder, "someone/small", "m"), "nobody is logged in", "hf auth login")
    assert len(hub.asked) == asked and hub.repos["someone/small"].messages == ["initial commit", "first"]
    upload(folder, "someone/small", "second", token="writer")
    assert hub.repos["someone/small"].messages[-1] == "second"


def test_a_hub_in_trouble_is_told_in_one_line(hub, folder):
    hub.answers = 418
    refused(lambda: download("someone/small", "x"), "the Hub gave none")
    refused(lambda: upload(folder, "someone/small", "m"), "could not be pushed", "418")
