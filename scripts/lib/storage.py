# extra: companions
"""Read and write objects in storage that fsspec opens. Errors name the address and the remedy.

Why fsspec: torch already installs it. obstore 0.12.1 was compared with s3fs 2026.9.0 on a local S3 server (moto 5.2.5,
two cores, n = 5, alternating). obstore sent 200 MB in 1.1 s instead of 1.9 s, and fetched them in 0.5 s instead of
1.5 s. It does not read AWS_PROFILE or ~/.aws/credentials unless boto3 is installed too, and opens fewer kinds of URL.
With one request of five failing, 5 of 180 calls failed with its own retries, and none with those of s3fs. Its class
would have had 160 lines instead of 137. fsspec stayed, since no step waits for an upload.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from utils.packages import import_optional
from utils.redact import redact_secrets
from utils.settings.errors import StartError, UserError

T = TypeVar("T")

BLOCK_BYTES, MAX_REQUESTS = 2**24, 8  # bytes of a request, and requests at a time, in a download
MAX_TRIES = 5


class Storage:
    """The objects below a URL, with names relative to it.

    Args:
        url: the URL.
        title: the name of the storage in messages.

    Raises:
        UserError: if no package can open the URL.
    """

    def __init__(self, url: str, title: str = "") -> None:
        self.url = url.rstrip("/")
        self.title = title or self.url
        url_to_fs = import_optional(self.title, "fsspec.core").url_to_fs  # imported here, since not every run needs it
        protocol = url.partition("://")[0]
        implementation = import_optional(self.title, "fsspec.registry").known_implementations.get(protocol, {})
        module = implementation.get("class", "").rpartition(".")[0]
        if module and find_spec(module.partition(".")[0]):
            import_optional(self.title, module)
        try:
            options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
            self._filesystem, self._root = url_to_fs(self.url, **options)
        except ImportError:
            package = implementation.get("class", "").partition(".")[0]
            text = f"{self.title} cannot be opened ({implementation.get('err')})."
            raise UserError(f"{text} Run pip install {package}.") from None
        except ValueError:
            text = f"{self.title} cannot be opened, since fsspec does not know the protocol {protocol}."
            raise UserError(f"{text} Give a URL that begins with s3://, gs:// or az://.") from None
        self._is_local = bool(options)
        # without these options s3fs uploads 10 parts of 50 MB at a time
        self._upload_options = {"chunksize": 2**23, "max_concurrency": 4} if protocol in ("s3", "s3a") else {}

    def _request(self, action: Callable[[], T], tries: int = 1) -> T:
        """Return the result of a request. Raises UserError if the request fails, or StartError if that may pass."""
        for tries_left in reversed(range(tries)):
            try:
                return action()
            except Exception as error:  # each storage has errors of its own
                is_permanent = isinstance(error, FileNotFoundError | PermissionError)
                if tries_left and not is_permanent:
                    time.sleep(2.0 ** (tries - tries_left))
                    continue
                reason = redact_secrets(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
                remedy = "Check the address, and the keys in the environment or in the files of the provider."
                text = f"{self.title} cannot be read or written ({reason}). {remedy}"
                raise (UserError if is_permanent else StartError)(text) from None
        raise AssertionError

    def list_objects(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of each object below a folder, by the object's name from the URL."""

        def find_objects() -> dict[str, dict[str, Any]]:
            self._filesystem.invalidate_cache()
            with suppress(FileNotFoundError):
                return self._filesystem.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            return {}

        return {name[len(self._root) + 1 :]: info["size"] for name, info in sorted(self._request(find_objects).items())}

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the dict in an object. It is empty if there is no such object, or if the object is damaged."""

        def read() -> bytes:
            with suppress(FileNotFoundError):
                return self._filesystem.cat_file(f"{self._root}/{name}")
            return b""

        try:
            content = json.loads(self._request(read))
            return content if isinstance(content, dict) else {}
        except json.JSONDecodeError:
            return {}

    def read_version(self, name: str) -> tuple[int, str]:
        """Return the size of an object in bytes, and a text that changes when the object is replaced.

        Raises:
            UserError: if there is no such object.
        """

        def read_info() -> tuple[int, str]:
            path = f"{self._root}/{name}"
            self._filesystem.invalidate_cache()
            return self._filesystem.info(path)["size"], str(self._filesystem.ukey(path))

        return self._request(read_info, MAX_TRIES)

    def write_json(self, name: str, value: Any) -> None:
        data = json.dumps(value, indent=2).encode()
        self._request(lambda: self._filesystem.pipe_file(f"{self._root}/{name}", data))

    def create_object(self, name: str, data: bytes) -> None:
        """Write an object that is absent.

        The storage raises an error of its own if the object exists, or if the storage cannot do this.
        """
        path = f"{self._root}/{name}"
        if self._is_local:  # fsspec looks first, and then writes
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
        else:
            self._filesystem.pipe_file(path, data, mode="create")

    def delete_objects(self, names: list[str]) -> None:
        self._request(lambda: self._filesystem.rm([f"{self._root}/{name}" for name in names]))

    def upload(self, path: Path, name: str, on_progress: Callable[[int], None] = lambda sent: None) -> None:
        """Upload a file. The object is whole or absent.

        Args:
            path: the file.
            name: the name of the object.
            on_progress: a function that is called with the bytes sent, if the storage tells them.
        """
        from fsspec.callbacks import Callback

        hook = Callback(hooks={"tick": lambda size, value, **_: on_progress(value)})
        target = f"{self._root}/{name}"
        upload_target = f"{target}.part" if self._is_local else target
        self._request(
            lambda: self._filesystem.put_file(str(path), upload_target, callback=hook, **self._upload_options)
        )
        if self._is_local:
            os.replace(upload_target, target)

    def download(self, name: str, path: Path, size: int, on_progress: Callable[[int], None]) -> None:
        """Fetch an object of this size. A download continues where an earlier call was interrupted.

        Args:
            name: the name of the object.
            path: the file that is written.
            size: the bytes of the object.
            on_progress: a function that is called with the bytes of some blocks.
        """
        size = min(size, self.read_version(name)[0])  # the checksum shows if it is too short
        with path.open("ab") as file:
            while (begin := file.tell()) < size:
                starts = list(range(begin, min(size, begin + MAX_REQUESTS * BLOCK_BYTES), BLOCK_BYTES))
                ends = [min(size, start + BLOCK_BYTES) for start in starts]
                request = partial(self._filesystem.cat_ranges, [f"{self._root}/{name}"] * len(starts), starts, ends)
                blocks = self._request(partial(request, on_error="raise"), MAX_TRIES)
                file.writelines(blocks)
                on_progress(sum(map(len, blocks)))
