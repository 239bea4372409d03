"""`dflare data`: prompts to responses of the target."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from transformers import AutoConfig, AutoTokenizer

from dflare.commands.progress import TokenProgress
from dflare.configuration.arguments import DataArguments, parse_sources
from dflare.configuration.targets import load_pretrained, resolve_target
from dflare.training.data import load_responses, to_sequences
from dflare.training.decontaminate import BenchmarkIndex, Hit
from dflare.training.engines import Decoding, Engine, ServerEngine, TransformersEngine
from dflare.training.features import features_made_with, stored_features, target_states, write_features
from dflare.training.prompts import Prompt, in_shard, read_benchmarks, stream_prompts
from dflare.training.regenerate import Conversations, batched
from dflare.training.start import drafter_config
from dflare.training.store import ResponseStore, check_settings, conversation_of, read_table

MADE_WITH = ("target", "temperature", "top_p", "top_k", "max_new_tokens", "enable_thinking")
CLEANED_AT_ONCE = 1000  # prompts


def run(args: DataArguments) -> int:
    """Reads, cleans and answers the prompts, and says what became of them."""
    output = shard_file(args.output, args.shard)
    if not args.prompts and not args.sources:
        if args.features and Path(output).is_file():
            return add_features(args, output)
        raise ValueError("prompts and sources are both empty; one of them must say what to answer")
    store = ResponseStore(output, {key: getattr(args, key) for key in MADE_WITH})
    for path in args.reuse:
        check_settings(path, {"target": args.target})
    folder = resolve_target(args.target)
    if args.features:
        check_features(args, folder)
    work = _Work(args, store, AutoTokenizer.from_pretrained(folder))
    work.answer(lambda: make_engine(args, folder))
    count = store.finish(without={hit.id for hit in work.hits})
    work.report()
    print(f"{count} rows in {output}")
    if not count:
        raise ValueError("no prompt is left to answer, so there is nothing to train on; the lines above say why")
    return add_features(args, output) if args.features else 0


def check_features(args: DataArguments, folder: str) -> None:
    """Raises `ValueError` for settings of features that would fail, before prompts are answered."""
    config = drafter_config(args.drafter, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    stored_features(Path(str(args.features)), {"target_layer_ids": config.target_layer_ids})


def add_features(args: DataArguments, output: str) -> int:
    """Stores the target's states on every row of `output`, as far as they are not stored yet."""
    folder, place = resolve_target(args.target), Path(str(args.features))
    check_settings(output, {"target": args.target})
    target = load_pretrained("AutoModelForCausalLM", folder, args.dtype)
    config = drafter_config(args.drafter, target.config, AutoTokenizer.from_pretrained(folder))
    made_with = features_made_with(target, config)
    sequences = to_sequences(load_responses(output), args.max_length)
    with TokenProgress() as progress:
        task = progress.add_task("Storing states", total=sum(sequences["length"]), tokens=0)
        count = write_features(
            place,
            sequences,
            made_with,
            lambda ids: target_states(target, config, ids.to(target.device)),
            width=(config.num_taps + 1) * config.hidden_size,
            progress=lambda done, new: progress.update(task, completed=done, tokens=new),
        )
    print(f"states of {count} rows added in {place}; taps {config.target_layer_ids}")
    return 0


class _Work:
    """The prompts of one run on their way: drawn, cleaned, reused, answered."""

    def __init__(self, args: DataArguments, store: ResponseStore, tokenizer):
        self.args, self.store, self.tokenizer = args, store, tokenizer
        self.shard = parse_shard(args.shard)
        self.index = BenchmarkIndex(read_benchmarks(args.benchmarks), tokenizer)
        self.hits: list[Hit] = []
        self.have = store.ids()
        self.reusable: dict[str, list[tuple[pa.Table, int]]] = {}
        for table in map(read_table, args.reuse):
            for place, id in enumerate(table["id"].to_pylist()):
                self.reusable.setdefault(conversation_of(id), []).append((table, place))
        self.drawn = self.reused = 0

    def clean(self) -> Iterator[list[Prompt]]:
        """The prompts of this shard that no benchmark holds, many at a time, in the order that the seed decides."""
        sources = parse_sources(self.args.sources)
        stream = stream_prompts(self.args.prompts, sources, self.args.seed, self.args.num_prompts)
        for batch in batched((prompt for prompt in stream if in_shard(prompt.id, self.shard)), CLEANED_AT_ONCE):
            self.drawn += len(batch)
            hits = self.index.find(batch)
            self.hits += [hit for hit in hits if hit]
            yield [prompt for prompt, hit in zip(batch, hits, strict=True) if not hit]

    def new(self) -> Iterator[Prompt]:
        """The clean prompts without a response to be reused; the responses of the others are stored on the way."""
        for batch in self.clean():
            known = [p.id for p in batch if p.id in self.reusable and p.id not in self.have]
            if rows := [table.slice(place, 1).to_pylist()[0] for id in known for table, place in self.reusable[id]]:
                self.store.add(rows)
                self.reused += len(rows)
            yield from (prompt for prompt in batch if prompt.id not in self.reusable)

    def answer(self, make_engine: Callable[[], Engine]) -> None:
        """Answers, batch by batch, what is not stored yet; the engine is made when the first prompt needs it."""
        args = self.args
        template = {} if args.enable_thinking is None else {"enable_thinking": args.enable_thinking}
        work = Conversations(self.tokenizer, make_engine, args.temperature, args.max_prompt_tokens, args.seed, template)
        prompts: Iterable[Prompt] = self.new() if args.sources else list(self.new())
        total = len(prompts) if isinstance(prompts, list) else args.num_prompts and args.num_prompts // self.shard[1]
        total = args.limit if total is None else min(total, args.limit or total)
        with TokenProgress() as progress:
            task, tokens = progress.add_task("Answering prompts", total=total, tokens=0), 0
            for batch in work.batches(itertools.islice(prompts, args.limit), args.batch_size):
                if todo := [prompt for prompt in batch if prompt.id not in self.have]:
                    rows = work.answer(todo)
                    self.store.add(rows)
                    tokens += sum(len(row["response_ids"]) for row in rows)
                progress.update(task, advance=len(batch), tokens=tokens)
        if work.left_out:
            print(f"{work.left_out} prompts are longer than {args.max_prompt_tokens} tokens and left out")

    def report(self) -> None:
        """Says what was removed, and lists it where that is wanted."""
        print(f"{self.reused} responses reused, {len(self.have)} were stored before")
        print(f"{self.drawn} prompts, of which {len(self.hits)} removed as benchmark prompts")
        for (benchmark, reason), count in sorted(self.index.counts.items()):
            print(f"  {benchmark}: {count} {'identical' if reason == 'identical' else 'by a shared ' + reason}")
        if self.args.removed:
            lines = [json.dumps({"id": h.id, "reason": h.reason, "benchmarks": h.benchmarks}) for h in self.hits]
            removed = Path(shard_file(self.args.removed, self.args.shard))
            removed.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def make_engine(args: DataArguments, folder: str) -> Engine:
    """Who answers: the target, here or on a server."""
    decoding = Decoding(args.max_new_tokens, args.temperature, args.top_p, args.top_k)
    if args.server is None:
        return TransformersEngine(load_pretrained("AutoModelForCausalLM", folder, args.dtype), decoding)
    return ServerEngine(
        args.server, decoding, model=args.server_model, concurrency=args.concurrency, retries=args.retries
    )


def parse_shard(shard: str | None) -> tuple[int, int]:
    """K and N of "K/N"; `ValueError` if it is not that."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard or "1/1")
    k, n = map(int, match.groups()) if match else (0, 0)
    if not 1 <= k <= n:
        raise ValueError(f"shard is {shard!r}; expected K/N with K from 1 to N")
    return k, n


def shard_file(output: str, shard: str | None) -> str:
    """The file of one shard: responses.parquet becomes responses-00002-of-00008.parquet."""
    k, n = parse_shard(shard)
    path = Path(output)
    return output if shard is None else str(path.with_name(f"{path.stem}-{k:05d}-of-{n:05d}{path.suffix}"))
