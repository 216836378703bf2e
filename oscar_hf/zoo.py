"""The RotationZoo: rotation sets by model name, from this package, a folder or a hub."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from .card import printable
from .config import OscarConfig
from .hub import HUBS, Pin, Source, fetch, inside, install, is_url, read_json, relative_path, take
from .rotation import CONFIG_NAME, RotationSet

INDEX_NAME = "index.json"
MAX_CARD_BYTES = 1 << 20
MAX_ANCESTORS = 6
FIELDS = {"about", "models", "folder", "files", "recipe", "sources"}
RECIPE_FIELDS = {"architecture", "layers", "config", "upstream", "results", "caveats"}

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_MODEL = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_VARIANT = re.compile(
    r"[-_.](?:gguf|awq|gptq|fp8|nvfp4|mxfp4|bnb|nf4|hqq|exl[23]|mlx|unsloth|autoround|torchao|dynamic|static|ud|imat|i1"
    r"|int[2348]|[234568]-?bit|w\d+a\d+|g\d+|b?f(?:p)?(?:16|32)|quantized|i?q\d(?:_[0-9a-z]+)*)$"
)


@dataclass(frozen=True)
class Entry:
    """What the index says of one rotation set.

    Args:
        name: what the zoo calls it.
        models: ids of the models it was made for.
        about: one line.
        folder: the set, where it comes with the zoo.
        files: size and checksum of the folder's files.
        sources: where else it is published.
        recipe: architecture, storage settings, results and caveats, as in `rotation_zoo/recipes`.
    """

    name: str
    models: tuple[str, ...]
    about: str = ""
    folder: Path | None = None
    files: dict[str, Pin] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def installed(self) -> Path:
        """Where `pull` puts it, whether or not it is there."""
        return store_folder() / self.name.lower()

    @property
    def state(self) -> str:
        """`bundled`, `installed`, `pinned` (pull needs no flags), `unpinned` or `recipe only`."""
        if self.folder:
            return "bundled"
        if (self.installed / CONFIG_NAME).is_file():
            return "installed"
        if not any(source.files for source in self.sources):
            return "recipe only"
        return "pinned" if any(source.pinned and source.hub in HUBS for source in self.sources) else "unpinned"


def zoo_folder() -> Path:
    """Where this installation keeps its zoo: inside the package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "rotation_zoo"
    return inside if inside.is_dir() else package.parent / "rotation_zoo"


def store_folder() -> Path:
    """Where pulled sets are kept: in Hugging Face's cache of assets."""
    return Path(constants.HF_ASSETS_CACHE) / "oscar-hf" / "zoo"


def zoo_index(folder: Path | None = None) -> dict[str, Entry]:
    """A zoo's entries by name.

    Args:
        folder: holds `index.json`; default: the zoo of this installation.

    Raises:
        ValueError: the index is malformed, or points out of its folder.
    """
    folder = folder or zoo_folder()
    path = folder / INDEX_NAME
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise ValueError(f"{path}: expected an object of entries.")
    return {name: _entry(name, entry, folder) for name, entry in facts.items()}


def _entry(name: str, facts: Any, root: Path) -> Entry:
    where = f"{root / INDEX_NAME}: {printable(name)}"
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{where}: a name has letters, digits, '.', '_' and '-' only.")
    if not isinstance(facts, dict) or set(facts) - FIELDS:
        raise ValueError(f"{where}: an entry has {', '.join(sorted(FIELDS))}, not {facts!r}.")
    models, files, sources = (facts.get(key) or [] for key in ("models", "files", "sources"))
    if not isinstance(models, list) or not all(isinstance(m, str) and _MODEL.fullmatch(m) for m in models):
        raise ValueError(f"{where}: models={models!r} must be a list of model ids.")
    if not isinstance(sources, list) or not isinstance(files or {}, dict):
        raise ValueError(f"{where}: sources must be a list, and files an object.")
    recipe = facts.get("recipe")
    return Entry(
        name,
        tuple(models),
        printable(facts.get("about") or ""),
        inside(root, facts["folder"], where) if facts.get("folder") else None,
        {relative_path(file, where): Pin.from_dict(pin, where) for file, pin in dict(files).items()},
        tuple(Source.from_dict(source, where) for source in sources),
        {} if recipe is None else _recipe(inside(root, recipe, where)),
    )


def _recipe(path: Path) -> dict[str, Any]:
    """A recipe, checked: `config` is an OscarConfig's, `layers` "all" or a list of indices."""
    facts = read_json(path)
    if not isinstance(facts, dict) or set(facts) - RECIPE_FIELDS:
        raise ValueError(f"{path}: a recipe has {', '.join(sorted(RECIPE_FIELDS))}.")
    try:
        OscarConfig.from_dict(facts.get("config"))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    layers, architecture = facts.get("layers", "all"), facts.get("architecture", {})
    if layers is not None and layers != "all" and not (isinstance(layers, list) and {int} >= set(map(type, layers))):
        raise ValueError(f'{path}: layers={layers!r} must be "all", a list of indices, or null.')
    if not isinstance(architecture, dict) or not isinstance(facts.get("caveats", []), list):
        raise ValueError(f"{path}: architecture must be an object, and caveats a list.")
    return facts


def resolve(name: str, index: dict[str, Entry]) -> Entry | None:
    """The entry for an entry's name, a model id, or a quantised variant of one (`-FP8`, `-AWQ`, `.Q4_K_M`, ...)."""
    wanted = name.rstrip("/").lower()
    for entry in index.values():
        if wanted in {entry.name.lower(), *(model.lower() for model in entry.models)}:
            return entry
    plain = _plain(wanted)
    for entry in index.values():
        models = {model.lower() for model in entry.models}
        if plain in {_plain(model) for model in models} or (
            plain != _last(wanted) and plain in {_plain(_last(model)) for model in models}
        ):
            return entry
    return None


def named(name: str) -> Entry:
    """`resolve` in this installation's index; raises FileNotFoundError with what is near."""
    index = zoo_index()
    entry = resolve(name, index)
    if entry is None:
        raise _unknown(name, index)
    return entry


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _plain(name: str) -> str:
    """A model id without the marks of quantised variants; without its owner, too, where there were marks."""
    stem = name
    while (shorter := _VARIANT.sub("", stem)) != stem:
        stem = shorter
    return stem if stem == name else _last(stem)


def base_models(name: str) -> Iterator[str]:
    """What a model was made from, nearest first, by the `base_model` of cards and adapters; a merge has none."""
    seen = {name}
    for _ in range(MAX_ANCESTORS):
        found = _base_model(name)
        if found is None or found in seen:
            return
        seen.add(found)
        yield found
        name = found


def _base_model(name: str) -> str | None:
    folder = Path(name)
    card = folder / "README.md" if folder.is_dir() else _hub_card(name)
    base: Any = None
    try:
        if (folder / "adapter_config.json").is_file():
            base = read_json(folder / "adapter_config.json", MAX_CARD_BYTES).get("base_model_name_or_path")
        elif card is not None and card.is_file() and card.stat().st_size <= MAX_CARD_BYTES:
            from huggingface_hub import metadata_load

            base = (metadata_load(card) or {}).get("base_model")
    except Exception:  # a card that cannot be read names no base; YAML has errors of its own
        return None
    if isinstance(base, list) and len(base) == 1:
        base = base[0]
    return base if isinstance(base, str) and _MODEL.fullmatch(base) else None


def _hub_card(name: str) -> Path | None:
    """A model's card, from the cache or the Hub; None where there is none."""
    from huggingface_hub import hf_hub_download

    if "/" not in name or not _MODEL.fullmatch(name):
        return None
    try:
        facts = hf_hub_download(name, "README.md", dry_run=True)
        return Path(hf_hub_download(name, "README.md")) if (facts.file_size or 0) <= MAX_CARD_BYTES else None
    except Exception:  # no network, no such model, no card: nothing to learn
        return None


def find_rotations(name: str | os.PathLike, zoo: str | os.PathLike | None = None) -> RotationSet:
    """The rotation set that a folder, a file, a hub path, a zoo entry, a model id or a model's folder stands for.

    Args:
        name: a folder of ours or upstream's, a `.gguf` file, `hf://OWNER/NAME@REVISION/FOLDER` or `modelscope://...`,
            an entry's name, or a model: its id, its quantised variants, its fine-tunes (by `base_model`).
        zoo: where names are looked up: None (this package, what was pulled, then the hubs with pinned revision and
            checksums), `"hub"`, `"modelscope"`, or a folder of sets.

    Raises:
        FileNotFoundError: nothing of that name; the message lists what is near.
        ValueError: it is not sound, not what was published, or published without a checksum and not pulled.
    """
    path = Path(name)
    if is_url(name):
        return _from_url(str(name))
    if (path / CONFIG_NAME).is_file():
        return RotationSet.from_pretrained(path)
    if (path.is_file() and path.suffix in (".gguf", ".pt")) or (path.is_dir() and any(path.glob("*_rotation*.pt"))):
        return _read(path)
    folder = None if zoo is None or str(zoo) in ("hub", *HUBS) else Path(zoo)
    index = zoo_index() if folder is None else _folder_index(folder)
    wanted = path.resolve().name if path.is_dir() else str(name)
    entry = resolve(wanted, index)
    for base in () if entry else base_models(str(name)):
        entry = entry or resolve(base, index)
    if entry is None:
        raise _unknown(wanted, index)
    if folder is None and zoo is not None:
        hub = "huggingface" if str(zoo) == "hub" else str(zoo)
        return RotationSet.from_pretrained(pull(entry, zoo=hub))
    return _load(entry)


def _load(entry: Entry) -> RotationSet:
    """An entry's set: bundled, pulled before, or pulled now if it is pinned."""
    if entry.folder:
        check_files(entry)
        return RotationSet.from_pretrained(entry.folder)
    return RotationSet.from_pretrained(entry.installed if entry.state == "installed" else pull(entry))


def _unknown(name: str, index: dict[str, Entry]) -> FileNotFoundError:
    names = {entry.lower(): entry for entry in index}
    near = [names[name] for name in get_close_matches(_last(name.rstrip("/").lower()), names, n=3, cutoff=0.4)]
    near = near or sorted(index)
    return FileNotFoundError(
        f"No rotations for {printable(name)!r}: neither a folder with {CONFIG_NAME} nor in the RotationZoo "
        f"(nearest: {', '.join(near) or 'it is empty'}). Make them with `oscar-hf calibrate MODEL --out DIR`."
    )


def _folder_index(folder: Path) -> dict[str, Entry]:
    """The index of a folder of sets, or one made from what its sets say of themselves."""
    if not folder.is_dir():
        raise FileNotFoundError(f'zoo={str(folder)!r} is no folder; a zoo is "hub", "modelscope" or a folder of sets.')
    if (folder / INDEX_NAME).is_file():
        return zoo_index(folder)
    entries = {}
    for path in sorted(folder.iterdir()):
        if _NAME.fullmatch(path.name) and not path.is_symlink() and (path / CONFIG_NAME).is_file():
            facts = read_json(path / CONFIG_NAME)
            model = (facts.get("provenance") or {}).get("model") if isinstance(facts, dict) else None
            models = (model,) if isinstance(model, str) and _MODEL.fullmatch(model) else ()
            entries[path.name] = Entry(path.name, models, folder=path)
    return entries


def check_files(entry: Entry) -> None:
    """Raise ValueError unless a bundled set's files are those that the index lists."""
    assert entry.folder is not None
    with tempfile.TemporaryDirectory(prefix="oscar-hf-") as scratch:
        for number, (name, pin) in enumerate(entry.files.items()):
            take(inside(entry.folder, name, entry.name), Path(scratch) / str(number), pin, follow=False)


def _read(path: Path, values: Path | None = None) -> RotationSet:
    from .formats import read_rotations

    return read_rotations(path, values=values)


def _read_fetched(folder: Path) -> RotationSet:
    """A set of ours, or upstream's pair."""
    if (folder / CONFIG_NAME).is_file():
        return RotationSet.from_pretrained(folder)
    pair = [next(iter(sorted(folder.glob(f"{letter}*.pt"))), None) for letter in "kv"]
    if None in pair:
        raise ValueError(f"Expected a set of two files, not {sorted(file.name for file in folder.iterdir())}.")
    return _read(*pair)  # type: ignore[arg-type]


def _from_url(url: str) -> RotationSet:
    source = Source.from_url(url)
    with tempfile.TemporaryDirectory(prefix="oscar-hf-") as scratch:
        files = fetch(source, Path(scratch))
        rotations = _read_fetched(Path(scratch))
    rotations.provenance.setdefault("source", {"url": url, "files": files})
    return rotations


def pull(
    name: str | Entry,
    *,
    zoo: str | None = None,
    revision: str | None = None,
    folder: str | os.PathLike | None = None,
    unverified: bool = False,
) -> Path:
    """Fetch an entry's set, check it, and keep it in our format for `patch_model`, online or not.

    Args:
        name: an entry, its name, or a model id.
        zoo: only this hub.
        revision: branch or commit to trust where the index pins none.
        folder: read published files from here instead of a hub.
        unverified: accept files from `folder` whose checksum the index does not have.

    Returns:
        Path: the folder of the set.

    Raises:
        FileNotFoundError: no such entry, or nothing published that is known here.
        ValueError: not pinned and no revision given, another checksum than pinned, or not this model's.
    """
    entry = name if isinstance(name, Entry) else named(name)
    if entry.folder:
        check_files(entry)
        return entry.folder
    sources = [source for source in entry.sources if source.files and zoo in (None, source.hub)]
    if folder is None:
        sources = [source for source in sources if source.hub in HUBS]
    if not sources:
        by_hand = ", ".join(source.about or source.url for source in entry.sources)
        raise FileNotFoundError(
            f"{entry.name}: no files are recorded{f' on {zoo}' if zoo else ''}, so there is nothing to pull"
            f"{f' (but see {by_hand})' if by_hand else ''}; give a folder of published files with --from, "
            "a hub path hf://OWNER/NAME@REVISION/FOLDER, or calibrate the model."
        )
    store = store_folder()
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=store, ignore_cleanup_errors=True) as scratch:
        if folder is None:
            source = next((source for source in sources if source.pinned), sources[0])
            if not source.pinned and revision is None:
                raise ValueError(
                    f"{entry.name}: unpinned, no revision and checksums are recorded for {source.url}. To trust what "
                    f"is there now: `oscar-hf zoo pull {entry.name} --revision main`, or a commit you checked."
                )
            files = fetch(source, Path(scratch), revision=revision)
        else:
            source, files = _take_folder(entry, sources, Path(folder), Path(scratch), unverified)
        rotations = finish(entry, _read_fetched(Path(scratch)))
    kept = replace(source, revision=revision or source.revision).url
    rotations.provenance["source"] = {"url": kept, "files": files, "pinned": source.pinned}
    return install(rotations, entry.installed)


def _take_folder(
    entry: Entry, sources: list[Source], folder: Path, scratch: Path, unverified: bool
) -> tuple[Source, dict[str, str]]:
    """Copy the files of the source that they are, by checksum, or by name if unverified ones are accepted."""
    problems = []
    for source in sorted(sources, key=lambda source: not source.pinned):
        if not source.pinned and not unverified:
            problems.append(f"{source.url}: no checksum is recorded")
            continue
        try:
            taken = {}
            for name, pin in source.files.items():
                taken[name] = take(folder / name, scratch / name, pin, follow=False)
            return source, taken
        except (OSError, ValueError) as error:
            problems.append(str(error))
            for file in scratch.iterdir():
                file.unlink()
    raise ValueError(
        f"{entry.name}: the files in {folder} are not those that the index lists ({'; '.join(problems)}). "
        "--unverified accepts files that no checksum is recorded for."
    )


def finish(entry: Entry, rotations: RotationSet) -> RotationSet:
    """Give a published set what its recipe knows: storage settings, architecture, model; and check that it fits.

    Raises:
        ValueError: layers or shapes are not those of the entry's model.
    """
    recipe = entry.recipe
    architecture = recipe.get("architecture") or {}
    layers = recipe.get("layers", "all")
    if layers == "all":
        layers = range(architecture["num_hidden_layers"]) if "num_hidden_layers" in architecture else None
    try:
        rotations.check_fits(set(rotations.layers if layers is None else layers), architecture)
    except ValueError as error:
        raise ValueError(f"{entry.name}: {error}") from error
    if recipe and not rotations.architecture:
        rotations.architecture = dict(architecture)
        rotations.config = OscarConfig.from_dict(recipe["config"])
    if entry.models:
        rotations.provenance.setdefault("model", entry.models[0])
    return rotations


def verify(entry: Entry) -> dict[str, Any]:
    """Check what is on this machine of an entry, and say what nothing vouches for."""
    facts: dict[str, Any] = {"name": entry.name, "state": entry.state, "digest": None, "verified": False}
    pinned = [source for source in entry.sources if source.pinned]
    if entry.state == "bundled":
        check_files(entry)
        facts["digest"] = RotationSet.from_pretrained(entry.folder or "").digest()
        facts["verified"] = bool(entry.files)
    elif entry.state == "installed":
        rotations = finish(entry, RotationSet.from_pretrained(entry.installed))
        facts["digest"] = rotations.digest()
        files = (rotations.provenance.get("source") or {}).get("files")
        known = [{name: pin.sha256 for name, pin in source.files.items()} for source in pinned]
        facts["verified"] = files in known
        if known and not facts["verified"]:
            facts["note"] = "made from other files than the index pins; pull it again"
    if not facts["verified"]:
        facts.setdefault("note", "not on this machine" if pinned else "unpinned: no checksum is recorded")
    return json.loads(json.dumps(facts))
