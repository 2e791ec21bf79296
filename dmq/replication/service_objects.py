"""Objects of a service: S3 and compatible servers, Google Cloud Storage, Azure, all through obstore.

obstore repeats nothing here: callers retry, and they know if a repeated write meets itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from dmq.replication.objects import ReplicaRefused, ReplicaUnavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig

T = TypeVar("T")

_CONNECT_S = 5.0
_CONFLICTS_MAX = 8  # writes that meet another one in progress, before the store counts as unavailable
_ENVIRONMENT = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
# A 404 may also be a missing bucket or an unknown key, and an empty log must never be read into that.
_NO_OBJECT = ("NoSuchKey", "BlobNotFound")
_CONFLICT = (AlreadyExistsError, PreconditionError)
_SETUP_STATUS = frozenset({400, 401, 403, 404, 405, 501})
_METADATA_HOST = "169.254.169.254"  # obstore asks the instance for credentials if there are no others


class ServiceObjects:
    """Objects under one prefix of a bucket or container."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url
        try:
            store = from_url(
                url,
                client_options=_client_options(url, timeout_s),
                retry_config={"max_retries": 0},
            )
        except (BaseError, ValueError) as error:
            raise ReplicaRefused(f"cannot use {url}: {_reason(error)}") from error
        assert isinstance(store, S3Store | GCSStore | AzureStore)
        self._store = store
        self._has_generations = isinstance(store, GCSStore)  # Google compares these, the others compare ETags

    def create(self, name: str, data: bytes) -> bool:
        """Put if absent. S3 may answer 409 although the name does not exist: look, and put again."""
        return self._put(name, data, None) is not None

    def replace(self, name: str, data: bytes, etag: str | None) -> str | None:
        """Put if the ETag is still the same."""
        return self._put(name, data, etag)

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return content and ETag."""
        found = self._get(name)
        if found is None:
            return None
        data = _call(lambda: bytes(found.bytes()))
        return data, self._etag(found.meta)

    def list(self, prefix: str, after: str = "") -> list[str]:
        """Return the names in a folder."""
        pages = obstore.list(self._store, prefix or None, offset=after or None)
        return sorted(meta["path"] for page in _call(lambda: list(pages)) for meta in page)

    def delete(self, names: Iterable[str]) -> None:
        """Delete in bulk, or one by one where a missing object is an error."""
        paths = list(names)
        try:
            _call(lambda: obstore.delete(self._store, paths))
        except FileNotFoundError:
            for path in paths:
                if self._get(path) is not None:
                    _call(partial(obstore.delete, self._store, path))

    def _put(self, name: str, data: bytes, etag: str | None) -> str | None:
        """Return the new ETag, or None if the current one is not ``etag``."""
        mode = self._mode(etag)
        for _ in range(_CONFLICTS_MAX):
            try:
                return self._etag(_call(lambda: obstore.put(self._store, name, data, mode=mode), passes=_CONFLICT))
            except FileNotFoundError as error:
                raise ReplicaUnavailable(_reason(error), is_setup=True) from error
            except _CONFLICT:
                found = self._get(name)
                if (None if found is None else self._etag(found.meta)) != etag:
                    return None
        raise ReplicaUnavailable(f"conflicting writes of {name}")

    def _get(self, name: str) -> obstore.GetResult | None:
        try:
            return _call(lambda: obstore.get(self._store, name))
        except FileNotFoundError:
            return None

    def _mode(self, etag: str | None) -> obstore.PutMode:
        if etag is None:
            return "create"
        return {"version": etag} if self._has_generations else {"e_tag": etag}

    def _etag(self, meta: obstore.ObjectMeta | obstore.PutResult) -> str:
        etag = meta["version"] if self._has_generations else meta["e_tag"]
        if etag is None:
            raise ReplicaUnavailable("the store answers without an ETag", is_setup=True)
        return etag


def _client_options(url: str, timeout_s: float) -> ClientConfig:
    """Return the options of the HTTP client. obstore ignores those of the environment if some are passed."""
    prefix = _ENVIRONMENT[urlsplit(url).scheme]
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
        "timeout": timedelta(seconds=timeout_s),
        "allow_http": os.environ.get(prefix + "ALLOW_HTTP", "").lower() in {"1", "true"},
    }
    if proxy := os.environ.get(prefix + "PROXY_URL"):
        options["proxy_url"] = proxy
    return options


def _call(function: Callable[[], T], passes: tuple[type[BaseError], ...] = ()) -> T:
    """Call the store. Missing objects and errors of ``passes`` pass; other errors become ``ReplicaUnavailable``.

    A service may answer any request with 409 while another operation is in progress, a read as well.
    """
    try:
        return function()
    except passes:
        raise
    except FileNotFoundError as error:
        if any(code in str(error) for code in _NO_OBJECT):
            raise
        raise ReplicaUnavailable(_reason(error), is_setup=True) from error
    except (BaseError, OSError) as error:
        status = re.search(r"status code: (\d+)", str(error))
        is_setup = isinstance(error, PermissionDeniedError | UnauthenticatedError) or _METADATA_HOST in str(error)
        raise ReplicaUnavailable(
            _reason(error), is_setup=is_setup or (status is not None and int(status[1]) in _SETUP_STATUS)
        ) from error


def _reason(error: BaseException) -> str:
    """Return the status, code and message of the answer, or the error of the connection, on one line."""
    text = str(error)
    if _METADATA_HOST in text:
        return "no credentials in the environment, in a profile or from the instance"
    if status := re.search(r"status code: (\d+[^:<]*)", text):
        parts = [status[1].strip()]
        parts += re.findall(r"<(?:Code|Message)>([^<]*)</", text)[:2]
        return ": ".join(dict.fromkeys(parts))
    if system := re.search(r'message: "([^"]*)"', text):
        return system[1]
    return " ".join(text.partition("Debug source")[0].split()).rpartition(" - ")[2]
