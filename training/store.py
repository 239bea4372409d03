"""
Responses on disk: parquet files of token ids, one row per response. A file grows by parts, each written whole, so that a
killed run loses at most one batch and never half a row.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("temperature", pa.float32()),
        ("finish_reason", pa.string()),
    ]
)
ROWS_AT_ONCE = 10_000
METADATA_KEY = b"dflare"  # under which a file keeps what made its rows


class ResponseStore:
    """
    A parquet file of rows that grows by batches: each is written whole to a part of its own, and `finish` joins the parts.

    Args:
        path: the file in the end; the parts lie in `path` + `.parts` until then.
        settings: what made the rows (target and so on), kept in the files.
    Raises:
        ValueError: if rows are there already that other settings made.
    """

    def __init__(self, path: str | Path, settings: dict | None = None):
        self.path = Path(path)
        self.settings = settings or {}
        self.parts = self.path.with_name(self.path.name + ".parts")
        for file in self._files():
            check_settings(file, self.settings)
        self.parts.mkdir(parents=True, exist_ok=True)
        self.next_part = max((int(part.stem) for part in self.parts.glob("*.parquet")), default=-1) + 1

    def ids(self) -> set[str]:
        """The ids of all rows stored so far."""
        return {id for file in self._files() for id in opened(pq.read_table, file, columns=["id"])["id"].to_pylist()}

    def add(self, rows: list[dict]) -> None:
        """Stores one batch."""
        path = self.parts / f"{self.next_part:06d}.parquet"
        temporary = path.with_suffix(".tmp")
        pq.write_table(pa.Table.from_pylist(rows, schema=self._schema()), temporary, compression="zstd")
        temporary.replace(path)
        self.next_part += 1

    def finish(self, without: Collection[str] = ()) -> int:
        """
        Joins all rows into the file, but those of conversations in `without` and repeats, some at a time; returns their
        number.
        """
        temporary, seen = self.path.with_suffix(".tmp"), set(without)
        count = 0
        with pq.ParquetWriter(temporary, self._schema(), compression="zstd") as writer:
            for batch in itertools.chain.from_iterable(map(_pieces, self._files())):
                kept = []
                for id in batch["id"].to_pylist():
                    kept.append(not {id, conversation_of(id)} & seen)
                    seen.add(id)
                count += sum(kept)
                writer.write_table(batch.filter(pa.array(kept, pa.bool_())).cast(self._schema()))
        temporary.replace(self.path)
        for part in self.parts.glob("*"):
            part.unlink()
        self.parts.rmdir()
        return count

    def _files(self) -> list[Path]:
        return [file for file in [self.path, *sorted(self.parts.glob("*.parquet"))] if file.is_file()]

    def _schema(self) -> pa.Schema:
        return SCHEMA.with_metadata({METADATA_KEY: json.dumps(self.settings)})


def turn_id(conversation: str, turn: int) -> str:
    """The id of a conversation's row for one turn (from 0): the first has the conversation's own."""
    return f"{conversation} (turn {turn + 1})" if turn else conversation


def conversation_of(id: str) -> str:
    """The conversation that a row belongs to."""
    return re.sub(r" \(turn \d+\)$", "", id)


def read_rows(path: str | Path) -> list[dict]:
    """Rows of a responses file; `ValueError` naming it if it cannot be read or has other columns."""
    return read_table(path).to_pylist()


def read_table(path: str | Path) -> pa.Table:
    """As `read_rows`, as a table, which takes a tenth of the memory."""
    table = opened(pq.read_table, path)
    if set(SCHEMA.names) - set(table.column_names):
        raise ValueError(f"{path} has the columns {table.column_names}, expected {SCHEMA.names}")
    return table.select(SCHEMA.names)


def _pieces(path: Path) -> Iterator[pa.Table]:
    """A responses file, some rows at a time."""
    for batch in opened(pq.ParquetFile, path).iter_batches(ROWS_AT_ONCE, columns=SCHEMA.names):
        yield pa.Table.from_batches([batch])


def check_settings(path: str | Path, settings: dict) -> None:
    """Raises `ValueError` if the file says that its rows were made with another value of one of `settings`."""
    before = made_with(path)
    for key, value in settings.items():
        if before.get(key, value) != value:
            raise ValueError(f"{key} is {value!r}, but {path} was made with {before[key]!r}; choose another output")


def made_with(path: str | Path) -> dict:
    """What the file says of how its rows were made; nothing if it does not."""
    metadata = opened(pq.read_schema, path).metadata or {}
    return json.loads(metadata.get(METADATA_KEY, b"{}"))


def opened(read: Callable, path: str | Path, field: str = "", **options):
    """What `read` makes of a parquet file, or one error that names it, and the `field` that it was given in."""
    if not Path(path).is_file():
        raise ValueError(f"{field}there is no file {path}; `dflare data --help` says how to make one")
    try:
        return read(path, **options)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{field}{path} is not a readable parquet file ({error}); if it is a damaged part, delete it"
        ) from None
