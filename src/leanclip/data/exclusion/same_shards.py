"""Which shards of the data a table names. Data sets of different folders often have shards of the same names."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from leanclip.data.files import is_remote


def same_shards(listed: Collection[str], known: Collection[str]) -> dict[str, str]:
    """For each shard that a table lists the one of the data, where there is one: by its path, or, since data move, by
    its file name. A name that several shards have decides nothing, nor does one in a folder that the table knows by
    path: there the shards have not moved."""
    by_path = {_absolute(path): path for path in known}
    shard_of = {shard: by_path[_absolute(shard)] for shard in listed if _absolute(shard) in by_path}
    in_place = {_folder_and_name(path)[0] for path in shard_of.values()}
    names_listed = Counter(_folder_and_name(shard)[1] for shard in set(listed))
    names_known = Counter(_folder_and_name(path)[1] for path in by_path)
    by_name = {_folder_and_name(path)[1]: path for path in known}
    for shard in set(listed) - shard_of.keys():
        name = _folder_and_name(shard)[1]
        unique = names_listed[name] == names_known[name] == 1
        if unique and _folder_and_name(by_name[name])[0] not in in_place:
            shard_of[shard] = by_name[name]
    return shard_of


def _absolute(path: str) -> str:
    return path if is_remote(path) else str(Path(path).absolute())


def _folder_and_name(path: str) -> tuple[str, str]:
    folder, _, name = path.rstrip("/").rpartition("/")
    return folder, name
