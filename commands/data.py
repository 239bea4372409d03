"""`dflare data`: prompts to responses of the target."""

import random

from rich.progress import Progress
from transformers import AutoTokenizer, set_seed

from dflare.configuration.arguments import DataArguments
from dflare.configuration.targets import load_pretrained, resolve_target
from dflare.training.prompts import Prompt, contaminated, read_benchmark_turns, read_prompts
from dflare.training.regenerate import ResponseStore, check_settings, encode_prompts, generate_rows, read_rows


def run(args: DataArguments) -> int:
    """Reads, cleans and answers the prompts, and says what became of them."""
    made_with = {key: getattr(args, key) for key in ("target", "temperature", "max_new_tokens")}
    store = ResponseStore(args.output, made_with)
    for path in args.reuse:
        check_settings(path, {"target": args.target})
    folder = resolve_target(args.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts, removed = _clean_prompts(args, tokenizer)
    names = {prompt.id for prompt in prompts}
    reusable = {row["id"]: row for path in args.reuse for row in read_rows(path) if row["id"] in names}
    have = {row["id"] for row in store.rows()}
    if reused := [row for id, row in reusable.items() if id not in have]:
        store.add(reused)
    print(f"{len(reused)} responses reused, {len(have)} already in {args.output}", flush=True)
    todo = [prompt for prompt in prompts if prompt.id not in reusable]
    if args.limit is not None:  # drawn before what is stored is left out, so that a killed run draws the same again
        todo = random.Random(args.seed).sample(todo, min(args.limit, len(todo)))
    _answer(args, folder, tokenizer, [prompt for prompt in todo if prompt.id not in have], store)
    count = store.finish(without=removed)
    print(f"{count} rows in {args.output}")
    if not count:
        raise ValueError("no prompt is left to answer, so there is nothing to train on; the lines above say why")
    return 0


def _clean_prompts(args: DataArguments, tokenizer) -> tuple[list[Prompt], set[str]]:
    """The prompts that no benchmark holds, and the ids of the others."""
    prompts = read_prompts(args.prompts)
    reasons = contaminated(prompts, read_benchmark_turns(args.benchmarks), tokenizer)
    counts = {kind: list(reasons.values()).count(kind) for kind in ("32-gram", "identical")}
    print(
        f"{len(prompts)} prompts, of which removed as benchmark prompts: {counts['32-gram']} by a shared 32-gram, "
        f"{counts['identical']} identical"
    )
    return [prompt for prompt in prompts if prompt.id not in reasons], set(reasons)


def _answer(args: DataArguments, folder: str, tokenizer, prompts: list[Prompt], store: ResponseStore) -> None:
    if not prompts:
        return
    set_seed(args.seed)
    target = load_pretrained("AutoModelForCausalLM", folder, args.dtype)
    todo = encode_prompts(prompts, tokenizer, args.max_prompt_tokens)
    if len(todo) < len(prompts):
        print(f"{len(prompts) - len(todo)} prompts are longer than {args.max_prompt_tokens} tokens and left out")
    options = {key: getattr(args, key) for key in ("batch_size", "max_new_tokens", "temperature")}
    with Progress() as progress:
        task = progress.add_task("Answering prompts", total=len(todo))
        for rows in generate_rows(target, todo, **options):
            store.add(rows)
            progress.advance(task, len(rows))
