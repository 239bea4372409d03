"""
Responses of the target itself, which is what its drafter has to foresee: prompts are kept, every response is generated.
Stored are token ids, never text to be tokenised again, so the training mask covers exactly what the target generated.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from .prompts import Prompt

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("temperature", pa.float32()),
        ("finish_reason", pa.string()),
    ]
)
METADATA_KEY = b"dflare"  # under which a file keeps what made its rows


def encode_prompts(prompts: Sequence[Prompt], tokenizer, max_tokens: int) -> dict[str, list[int]]:
    """Ids in the target's chat template, generation prompt included; prompts above `max_tokens` are left out."""
    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    return {prompt.id: ids for prompt, ids in zip(prompts, encoded, strict=True) if len(ids) <= max_tokens}


@torch.inference_mode()
def generate_rows(
    target, prompt_ids: dict[str, list[int]], *, batch_size: int, max_new_tokens: int, temperature: float
) -> Iterator[list[dict]]:
    """
    Yields a batch of finished rows at a time (columns as in `SCHEMA`), longest prompts first so that a batch that is too
    large fails at once. `temperature` 0 is greedy. A response cut by `max_new_tokens` has the finish reason `length`.
    """
    order = sorted(prompt_ids, key=lambda id: -len(prompt_ids[id]))
    stops = set(_as_list(target.generation_config.eos_token_id))
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    for start in range(0, len(order), batch_size):
        names = order[start : start + batch_size]
        inputs, mask = _left_pad([prompt_ids[name] for name in names])
        output = target.generate(
            input_ids=inputs.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            **sampling,
        )
        rows = []
        for name, tokens in zip(names, output[:, inputs.shape[1] :].tolist(), strict=True):
            end = next((i for i, token in enumerate(tokens) if token in stops), None)
            response = tokens if end is None else tokens[: end + 1]
            reason = "length" if end is None else "stop"
            rows.append(dict(zip(SCHEMA.names, (name, prompt_ids[name], response, temperature, reason), strict=True)))
        yield rows


class ResponseStore:
    """
    A parquet file of rows that grows by batches: each batch is written whole to a part of its own, so that a killed run
    loses at most one, and `finish` joins the parts.

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

    def rows(self) -> list[dict]:
        """All rows stored so far, finished file first."""
        return [row for file in self._files() for row in read_rows(file)]

    def add(self, rows: list[dict]) -> None:
        """Stores one batch."""
        number = max((int(part.stem) for part in self.parts.glob("*.parquet")), default=-1) + 1
        self._write(rows, self.parts / f"{number:06d}.parquet")

    def finish(self, without: Collection[str] = ()) -> int:
        """Joins all rows but those with an id in `without`, and without repeats, into the file; returns their number."""
        rows = list({row["id"]: row for row in self.rows() if row["id"] not in without}.values())
        self._write(rows, self.path)
        for part in self.parts.glob("*"):
            part.unlink()
        self.parts.rmdir()
        return len(rows)

    def _files(self) -> list[Path]:
        return [file for file in [self.path, *sorted(self.parts.glob("*.parquet"))] if file.is_file()]

    def _write(self, rows: list[dict], path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        schema = SCHEMA.with_metadata({METADATA_KEY: json.dumps(self.settings)})
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")
        temporary.replace(path)


def read_rows(path: str | Path) -> list[dict]:
    """Rows of a responses file; `ValueError` naming it if it cannot be read or has other columns."""
    table = opened(pq.read_table, path)
    if set(SCHEMA.names) - set(table.column_names):
        raise ValueError(f"{path} has the columns {table.column_names}, expected {SCHEMA.names}")
    return table.select(SCHEMA.names).to_pylist()


def check_settings(path: str | Path, settings: dict) -> None:
    """Raises `ValueError` if the file says that its rows were made with another value of one of `settings`."""
    metadata = opened(pq.read_schema, path).metadata or {}
    made_with = json.loads(metadata.get(METADATA_KEY, b"{}"))
    for key, value in settings.items():
        if made_with.get(key, value) != value:
            raise ValueError(f"{key} is {value!r}, but {path} was made with {made_with[key]!r}; choose another output")


def opened(read: Callable, path: str | Path, field: str = ""):
    """What `read` makes of a parquet file, or one error that names it, and the `field` that it was given in."""
    if not Path(path).is_file():
        raise ValueError(f"{field}there is no file {path}; `dflare data --help` says how to make one")
    try:
        return read(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{field}{path} is not a readable parquet file ({error}); if it is a damaged part, delete it"
        ) from None


def _left_pad(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, sequences))
    ids = [[0] * (longest - len(s)) + s for s in sequences]
    mask = [[0] * (longest - len(s)) + [1] * len(s) for s in sequences]
    return torch.tensor(ids), torch.tensor(mask)


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]
