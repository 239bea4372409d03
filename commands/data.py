"""`dflare data`: prompts to responses of the target."""

import random

import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from dflare.configuration.arguments import DataArguments
from dflare.configuration.targets import resolve_target
from dflare.training.prompts import Prompt, contaminated, read_benchmark_turns, read_prompts
from dflare.training.regenerate import ResponseStore, encode_prompts, generate_rows, read_rows


def run(args: DataArguments) -> int:
    """Reads, cleans and answers the prompts, and says what became of them."""
    folder = resolve_target(args.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = _clean_prompts(args, tokenizer)
    store = ResponseStore(args.output)
    have = {row["id"] for row in store.rows()}
    names = {prompt.id for prompt in prompts}
    reused = [row for path in args.reuse for row in read_rows(path) if row["id"] in names - have]
    if reused:
        store.add(reused)
        have |= {row["id"] for row in reused}
    print(f"{len(reused)} responses reused, {len(have) - len(reused)} already in {args.output}")
    _answer(args, folder, tokenizer, [prompt for prompt in prompts if prompt.id not in have], store)
    print(f"{store.finish(names)} rows in {args.output}")
    return 0


def _clean_prompts(args: DataArguments, tokenizer) -> list[Prompt]:
    prompts = read_prompts(args.prompts)
    reasons = contaminated(prompts, read_benchmark_turns(args.benchmarks), tokenizer)
    counts = {kind: list(reasons.values()).count(kind) for kind in ("32-gram", "identical")}
    print(
        f"{len(prompts)} prompts, of which removed as benchmark prompts: {counts['32-gram']} by a shared 32-gram, "
        f"{counts['identical']} identical"
    )
    return [prompt for prompt in prompts if prompt.id not in reasons]


def _answer(args: DataArguments, folder: str, tokenizer, prompts: list[Prompt], store: ResponseStore) -> None:
    if args.limit is not None:
        prompts = random.Random(args.seed).sample(prompts, min(args.limit, len(prompts)))
    if not prompts:
        return
    set_seed(args.seed)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    todo = encode_prompts(prompts, tokenizer, args.max_prompt_tokens)
    options = {key: getattr(args, key) for key in ("batch_size", "max_new_tokens", "temperature")}
    with Progress() as progress:
        task = progress.add_task("Answering prompts", total=len(todo))
        for rows in generate_rows(target, todo, **options):
            store.add(rows)
            progress.advance(task, len(rows))
