"""Hubs: fetch files by revision and checksum, put a set in place, give one back. What comes in is untrusted."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    DryRunError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .card import model_card, printable
from .rotation import CONFIG_NAME, WEIGHTS_NAME, RotationSet

HUBS = ("huggingface", "modelscope")
SCHEMES = {"hf": "huggingface", "modelscope": "modelscope"}
MAX_FILE_BYTES = 1 << 30
MAX_FILES = 16
CHUNK = 1 << 20

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,127}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_][\w.+-]{0,127}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ROTATION_FILE = re.compile(r"[kv]_rotation\w*\.pt", re.ASCII)


def relative_path(text: object, where: str) -> str:
    """`text`, if it is a plain path that stays below the folder it is joined to.

    Raises:
        ValueError: it is absolute, goes up, or has control characters, backslashes, wildcards or drive letters.
    """
    if not isinstance(text, str) or not all(map(_PART.fullmatch, text.split("/"))):
        raise ValueError(f"{where}: {text!r} is no plain path below its folder (letters, digits, '.', '_', '+', '-').")
    return text


def inside(folder: Path, text: object, where: str) -> Path:
    """`folder / text`, refused where `text` leaves the folder, by itself or through a symlink."""
    path = folder
    for part in relative_path(text, where).split("/"):
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{where}: {path} is a symlink, which a zoo does not follow.")
    return path


def _checked(pattern: re.Pattern[str], value: object, where: str, what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or ".." in value:
        raise ValueError(f"{where}: {value!r} is no {what}.")
    return value


@dataclass(frozen=True)
class Pin:
    """What a file must be. None: not known.

    Args:
        size: bytes.
        sha256: of its content, lower-case hexadecimal.
    """

    size: int | None = None
    sha256: str | None = None

    @classmethod
    def from_dict(cls, facts: Any, where: str) -> Pin:
        if not isinstance(facts, dict) or set(facts) - {"size", "sha256"}:
            raise ValueError(f"{where}: expected size and sha256, not {facts!r}.")
        size, sha256 = facts.get("size"), facts.get("sha256")
        if size is not None and (type(size) is not int or not 0 < size <= MAX_FILE_BYTES):
            raise ValueError(f"{where}: size={size!r} must be a number of bytes up to {MAX_FILE_BYTES}.")
        return cls(size, None if sha256 is None else _checked(_SHA256, sha256, where, "SHA-256"))


@dataclass(frozen=True)
class Source:
    """Where a rotation set is published.

    Args:
        hub: `"huggingface"`, `"modelscope"`, or `"git"` for files that are to be fetched by hand.
        repo: `OWNER/NAME`; None where hub is git.
        folder: where in the repository; "" for anywhere.
        revision: commit; None: not pinned.
        files: what each file must be, by name. Empty: not known.
        about: for people.
    """

    hub: str
    repo: str | None = None
    folder: str = ""
    revision: str | None = None
    files: dict[str, Pin] = field(default_factory=dict)
    about: str = ""

    @property
    def pinned(self) -> bool:
        """Whether revision and content are known beforehand."""
        known = bool(self.files) and all(pin.sha256 for pin in self.files.values())
        return known and (self.hub == "git" or self.revision is not None)

    @property
    def url(self) -> str:
        if self.hub == "git":
            return self.about or "git"
        scheme = next(scheme for scheme, hub in SCHEMES.items() if hub == self.hub)
        revision = f"@{self.revision}" if self.revision else ""
        return f"{scheme}://{self.repo}{revision}" + (f"/{self.folder}" if self.folder else "")

    @classmethod
    def from_dict(cls, facts: Any, where: str) -> Source:
        """Read an entry's source; raises ValueError where anything is not as it should be."""
        known = {"hub", "repo", "folder", "revision", "files", "about"}
        if not isinstance(facts, dict) or set(facts) - known:
            raise ValueError(f"{where}: a source has {', '.join(sorted(known))}, not {facts!r}.")
        hub, repo, revision, files = (facts.get(key) for key in ("hub", "repo", "revision", "files"))
        if hub not in (*HUBS, "git"):
            raise ValueError(f"{where}: hub={hub!r} is not one of {', '.join(HUBS)}, git.")
        if hub != "git":
            _checked(_REPO, repo, where, "repository OWNER/NAME")
        if revision is not None:
            _checked(_REVISION, revision, where, "revision")
        folder = facts.get("folder") or ""
        files = {} if files is None else files
        if not isinstance(files, dict) or len(files) > MAX_FILES:
            raise ValueError(f"{where}: files must be an object of at most {MAX_FILES} names.")
        return cls(
            hub,
            repo,
            relative_path(folder, where) if folder else "",
            revision,
            {_checked(_PART, name, where, "file name"): Pin.from_dict(pin, where) for name, pin in files.items()},
            printable(facts.get("about") or ""),
        )

    @classmethod
    def from_url(cls, text: str) -> Source:
        """Read `hf://OWNER/NAME@REVISION[/FOLDER]` or `modelscope://...`."""
        scheme, _, rest = text.partition("://")
        head, _, tail = rest.partition("@")
        revision, _, folder = tail.partition("/")
        if scheme not in SCHEMES or not _REPO.fullmatch(head):
            raise ValueError(f"{text!r} is no hub path; write hf://OWNER/NAME@REVISION/FOLDER, or modelscope://...")
        if not revision:
            raise ValueError(f"{text!r} names no revision; add @ and a commit, or @main to trust what is there now.")
        facts = {"hub": SCHEMES[scheme], "repo": head, "revision": revision, "folder": folder}
        return cls.from_dict(facts, printable(text))


def is_url(text: object) -> bool:
    return str(text).partition("://")[0] in SCHEMES


def fetch(source: Source, folder: Path, *, revision: str | None = None) -> dict[str, str]:
    """Download into the hub's own cache, check, and copy into an empty folder.

    Args:
        source: what to fetch.
        folder: receives the files, by their bare names.
        revision: instead of the source's; needed where that is not pinned.

    Returns:
        dict: SHA-256 of each file, by name.

    Raises:
        FileNotFoundError: no such repository, revision or file; or offline, and it is not in the cache.
        PermissionError: the repository is gated.
        ConnectionError: the hub does not answer as it should.
        ValueError: no pinned revision, or a file of another size or checksum than pinned.
    """
    if source.hub == "git":
        raise ValueError(f"{source.url}: fetch it by hand, and give its folder with --from.")
    if revision is None and not (source.pinned or (source.revision and not source.files)):
        raise ValueError(
            f"{source.url}: no revision and checksums are recorded for it, so there is nothing to verify it by; "
            "give a revision (--revision main) to trust what is there now."
        )
    revision = revision or source.revision or ""
    _checked(_REVISION, revision, "--revision", "revision")
    names = list(source.files) or [CONFIG_NAME, WEIGHTS_NAME, "k_rotation*.pt", "v_rotation*.pt"]
    prefix = f"{source.folder}/" if source.folder else ""
    patterns = [pattern for name in names for pattern in (f"{prefix}{name}", f"{prefix}*/{name}")]
    download = _from_huggingface if source.hub == "huggingface" else _from_modelscope
    try:
        root = download(source, revision, patterns)
    except GatedRepoError as error:
        raise PermissionError(f"{source.url} is gated: accept its terms there, then `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{source.url}: no such repository, or it is private.") from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(f"{source.url}: it has no revision {revision!r}.") from error
    except EntryNotFoundError as error:
        how = "offline mode is on" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise FileNotFoundError(f"{source.url} is not in the cache, and {how}: {_first_line(error)}") from error
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, HfHubHTTPError):
            raise ConnectionError(f"{source.url}: {_first_line(error)}") from error
        raise
    except Exception as error:  # the libraries' HTTP clients have errors of their own
        raise ConnectionError(f"{source.url}: {type(error).__name__}: {_first_line(error)}") from error
    found = _select(root, source)
    return {name: take(path, folder / name, source.files.get(name, Pin())) for name, path in found.items()}


def _first_line(error: BaseException) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])


def _check_size(sizes: dict[str, int | None], source: Source) -> None:
    """Refuse by what the hub says, before anything is downloaded."""
    for name, size in sizes.items():
        if size is not None and size > MAX_FILE_BYTES:
            raise ValueError(f"{source.url}: {printable(name)} has {size} bytes, allowed {MAX_FILE_BYTES}.")
    if len(sizes) > 4 * MAX_FILES:
        raise ValueError(f"{source.url}: {len(sizes)} rotation files; name one of its folders.")


def _from_huggingface(source: Source, revision: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    wanted: dict[str, Any] = {"repo_id": source.repo, "revision": revision, "allow_patterns": patterns}
    try:
        _check_size({file.filename: file.file_size for file in snapshot_download(**wanted, dry_run=True)}, source)
    except DryRunError as error:  # offline: sizes are checked as the files are read
        wanted["local_files_only"] = not isinstance(error.__cause__, HfHubHTTPError)
    except (HfHubHTTPError, ValueError):
        raise
    except Exception:  # huggingface_hub 1 passes its HTTP client's errors on
        wanted["local_files_only"] = True
    return Path(snapshot_download(**wanted))


def _from_modelscope(source: Source, revision: str, patterns: list[str]) -> Path:
    try:
        from modelscope.hub.api import HubApi
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError as error:
        raise ImportError("ModelScope needs its package: pip install 'oscar-hf[modelscope]'.") from error
    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        if not offline:
            files = HubApi().get_model_files(source.repo, revision=revision, recursive=True)
            named = {str(file.get("Path")): file.get("Size") for file in files}
            _check_size({path: size for path, size in named.items() if _wanted(path, source)}, source)
        return Path(
            snapshot_download(source.repo, revision=revision, allow_patterns=patterns, local_files_only=offline)
        )
    except ValueError:
        raise
    except Exception as error:
        if offline:
            raise FileNotFoundError(f"{source.url} is not in ModelScope's cache, and offline mode is on.") from error
        raise ConnectionError(f"{source.url}: {type(error).__name__}: {_first_line(error)}") from error


def _wanted(path: str, source: Source) -> bool:
    """Whether a file of a repository may be one of the source's."""
    name = path.rsplit("/", 1)[-1]
    if source.folder and not path.startswith(f"{source.folder}/"):
        return False
    if source.files:
        return name in source.files
    return name in (CONFIG_NAME, WEIGHTS_NAME) or bool(_ROTATION_FILE.fullmatch(name))


def _select(root: Path, source: Source) -> dict[str, Path]:
    """The source's files in a snapshot, by name: where it says, or the only one of that name below."""
    top = root / source.folder
    everything = sorted(path.relative_to(root) for path in top.rglob("*") if path.is_file())
    candidates: dict[str, list[Path]] = {}
    for path in everything:
        if _wanted(path.as_posix(), source):
            candidates.setdefault(path.name, []).append(root / path)
    found: dict[str, Path] = {}
    for name in source.files or candidates:
        paths = candidates.get(name, [])
        paths = [path for path in paths if path.parent == top] or paths
        if not paths:
            raise FileNotFoundError(f"{source.url} has no {name}.")
        if len(paths) > 1:
            folders = ", ".join(path.parent.relative_to(root).as_posix() for path in paths[:8])
            raise ValueError(f"{source.url} has {name} in several folders ({folders}); name one of them.")
        found[name] = paths[0]
    if not found:
        raise FileNotFoundError(f"{source.url} holds no rotations: no {WEIGHTS_NAME}, no [kv]_rotation*.pt.")
    return found


def take(path: Path, target: Path, pin: Pin, *, follow: bool = True) -> str:
    """Copy a file while hashing it, so that what was checked is what is read.

    Args:
        path: source.
        target: must not be there yet.
        pin: what it must be.
        follow: whether `path` may be a symlink, as in a hub's cache.

    Returns:
        str: its SHA-256.
    """
    if not follow and path.is_symlink():
        raise ValueError(f"{path} is a symlink, which a zoo does not follow.")
    sha, count = hashlib.sha256(), 0
    with path.open("rb") as reader, target.open("xb") as writer:
        status = os.fstat(reader.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no plain file.")
        limit = MAX_FILE_BYTES if pin.size is None else pin.size
        if status.st_size > limit or (pin.size is not None and status.st_size != pin.size):
            raise ValueError(f"{path} has {status.st_size} bytes, but {'at most ' * (not pin.size)}{limit} are due.")
        while chunk := reader.read(min(CHUNK, limit + 1 - count)):
            count += len(chunk)
            if count > limit:
                raise ValueError(f"{path} grew while it was read.")
            sha.update(chunk)
            writer.write(chunk)
    digest = sha.hexdigest()
    if pin.sha256 not in (None, digest):
        target.unlink()
        raise ValueError(
            f"{path}: its SHA-256 is {digest}, but {pin.sha256} is due; it was not used. Delete it, and fetch anew."
        )
    return digest


def install(rotations: RotationSet, target: Path) -> Path:
    """Write a set where it is not there at all until it is there whole; the first of two at once wins.

    Raises:
        OSError: it cannot be written, for a full disk, say; nothing is left behind.
    """
    rotations.validate()
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        raise ValueError(f"{target} is a symlink, which a zoo does not follow.")
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "set"
        try:
            rotations.save_pretrained(new)
            written = RotationSet.from_pretrained(new).digest()
        except Exception as error:
            raise OSError(f"{target} could not be written ({_first_line(error)}); nothing was installed.") from error
        if written != rotations.digest():
            raise OSError(f"{target} was not written as it should be; nothing was installed.")
        for _ in range(8):
            try:
                os.rename(new, target)
                return target
            except OSError:
                if not target.is_dir():
                    raise
            with suppress(OSError, ValueError):
                if RotationSet.from_pretrained(target).digest() == written and _same_settings(new, target):
                    return target
            with suppress(OSError):
                os.rename(target, Path(tempfile.mkdtemp(dir=scratch)) / "old")
        raise OSError(f"{target} is being written by others; try again.")


def _same_settings(one: Path, other: Path) -> bool:
    return (one / CONFIG_NAME).read_bytes() == (other / CONFIG_NAME).read_bytes()


def push(
    rotations: RotationSet,
    repo: str,
    *,
    hub: str = "huggingface",
    licence: str | None = None,
    measured: dict[str, Any] | None = None,
    private: bool = False,
    dry_run: bool = True,
) -> dict[str, Any]:
    """Publish a set with a generated model card, or show what would be published.

    Args:
        rotations: what to publish.
        repo: `OWNER/NAME`.
        hub: `"huggingface"` or `"modelscope"`.
        licence: for the card, such as `mit`.
        measured: `{"kl": ..., "needle": ..., "command": ...}`, for the card.
        private: create the repository as private.
        dry_run: upload nothing.

    Returns:
        dict: repository, card, files with sizes and, unless this is a dry run, SHA-256 and the commit's address.
    """
    _checked(_REPO, repo, "push", "repository OWNER/NAME")
    if hub not in HUBS:
        raise ValueError(f"hub={hub!r} is not one of {', '.join(HUBS)}.")
    rotations.validate()
    with tempfile.TemporaryDirectory(prefix="oscar-hf-") as scratch:
        folder = Path(scratch)
        rotations.save_pretrained(folder)
        source = Source(hub, repo)
        card = model_card(rotations, source.url, licence=licence, measured=measured)
        (folder / "README.md").write_text(card, encoding="utf-8")
        address = None if dry_run else _upload(hub, repo, folder, f"Add {rotations!r}", private)
        files: dict[str, dict[str, Any]] = {
            path.name: {"size": path.stat().st_size} for path in sorted(folder.iterdir())
        }
        if address is not None:  # safetensors orders its metadata at random: only what was uploaded has a checksum
            for name, facts in files.items():
                facts["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return {"hub": hub, "repo": repo, "files": files, "card": card, "address": address}


def _upload(hub: str, repo: str, folder: Path, message: str, private: bool) -> str:
    if hub == "huggingface":
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo, exist_ok=True, private=private)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url)
    try:
        from modelscope.hub.api import HubApi
    except ImportError as error:
        raise ImportError("ModelScope needs its package: pip install 'oscar-hf[modelscope]'.") from error
    modelscope = HubApi()
    modelscope.create_repo(repo, repo_type="model", visibility="private" if private else "public", exist_ok=True)
    modelscope.upload_folder(repo_id=repo, folder_path=str(folder), commit_message=message)
    return f"modelscope://{repo}"


def read_json(path: Path, limit: int = 1 << 20) -> Any:
    """A small JSON file; raises ValueError, with its name, for anything else."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is no plain file.")
    if path.stat().st_size > limit:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, allowed {limit}.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: this is not JSON ({error}).") from error
