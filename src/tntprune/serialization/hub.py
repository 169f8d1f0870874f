"""The Hugging Face Hub: fetching a file of a repository, putting files there, and what went wrong in one line."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tntprune.errors import UsageError, UserError
from tntprune.system.messages import first_line

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def is_id(repo: str) -> bool:
    """Return whether a text without a revision has the form user/repo."""
    parts = repo.split("/")
    return len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~")


def split(source: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return a repository's id and its revision: "user/repo@v1" is "user/repo" at "v1".

    Raises:
        UserError: it is not of the form user/repo.
        UsageError: two different revisions were given.
    """
    repo, at, own = source.partition("@")
    if not is_id(repo) or (at and not own):
        raise UserError(f"{source}: not a Hub id; expected user/repo, or user/repo@revision")
    if own and revision is not None and own != revision:
        raise UsageError(f"{source} and revision={revision!r}: two revisions; expected one")
    return repo, own or revision


def download(source: str, file: str, revision: str | None = None) -> Path:
    """Fetch a file of a repository, from the cache where there is no connection.

    Args:
        source: user/repo, or user/repo@revision.
        file: Its name in the repository.
        revision: A branch, a tag or a commit; the main branch if there is none.

    Returns:
        Where it lies, in a folder named after its commit.

    Raises:
        UserError: it cannot be had, and why.
    """
    from huggingface_hub import hf_hub_download

    repo, revision = split(source, revision)
    try:
        with _quiet():
            return Path(hf_hub_download(repo, file, revision=revision))
    except Exception as error:  # the Hub's client raises a dozen kinds
        raise UserError(
            f"{source}: no such folder here{_near(Path(source))}, and the Hub gave none "
            f"({_reason(error, file, revision)}); expected a folder or a Hub id"
        ) from None


def _near(place: Path) -> str:
    """Name the folder beside a missing one whose name is most like it; "" if there is none."""
    if len(place.parts) < 2 or not place.parent.is_dir():
        return ""
    near = difflib.get_close_matches(place.name, [other.name for other in place.parent.iterdir()], n=1)
    return f" (did you mean {place.parent / near[0]}?)" if near else ""


def upload(
    folder: Path,
    target: str,
    message: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Put the files of a folder in a repository as one commit. Repository and branch are made if they are not there.

    Args:
        folder: With nothing but files.
        target: user/repo, or user/repo@branch.
        message: Of the commit.
        revision: A branch; the main one if there is none.
        private: Whether a new repository is hidden from others; None is what the Hub does for this user.
        token: To write with, instead of the one this machine is logged in with.

    Returns:
        The address of the commit.

    Raises:
        UserError: nobody is logged in, there is no right to write, or no connection. Nothing was committed then.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    repo, branch = split(target, revision)
    if not (token or get_token()):
        raise UserError(f"{target}: nobody is logged in to the Hub; expected a token: {LOGIN}")
    api = HfApi(token=token)
    files = [CommitOperationAdd(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
    try:
        with _quiet():
            api.create_repo(repo, private=private, exist_ok=True)
            if branch not in (None, "main"):
                api.create_branch(repo, branch=branch, exist_ok=True)
            commit = api.create_commit(repo, files, commit_message=message, revision=branch)
    except Exception as error:  # the Hub's client raises a dozen kinds
        raise UserError(f"{target}: could not be pushed ({_reason(error, revision=branch)})") from None
    return str(commit.commit_url)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the client from telling each of its attempts; what came of them is told in one line at the end."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException, file: str = "", revision: str | None = None) -> str:
    """Say what an error of the Hub's client means, in one line."""
    from huggingface_hub import errors

    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # a file that could not be sent
        error = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and the cache has no copy"
    kinds: list[tuple[type[BaseException], str]] = [  # each before those it is a kind of
        (errors.GatedRepoError, "access has to be asked for on the repository's page"),
        (errors.RepositoryNotFoundError, f"no such repository, or a private one: {LOGIN} to see those of yours"),
        (errors.RevisionNotFoundError, f"no revision {revision} in that repository"),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set"),
        (errors.LocalEntryNotFoundError, "the Hub cannot be reached, and the cache has no copy"),
        (errors.EntryNotFoundError, f"no {file} in that repository"),
        (errors.HFValidationError, "not the id of a repository"),
        (errors.LocalTokenNotFoundError, f"nobody is logged in: {LOGIN}"),
    ]
    if told := next((words for kind, words in kinds if isinstance(error, kind)), None):
        return told
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"the token is not valid: {LOGIN}" if status == 401 else "the token has no right to write there"
    if any(base.__name__ in ("TransportError", "ConnectionError") for base in type(error).__mro__):
        return "the Hub cannot be reached"  # httpx, httpx2 or requests: which one depends on the client's version
    return first_line(error)
