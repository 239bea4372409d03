"""`dflare generate`: a prompt's answer by target and drafter, shown as it was accepted, with what it cost."""

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.utils.logging import disable_progress_bar

from dflare.candidates_dflare import DraftRecord, record_drafts
from dflare.configuration.arguments import GenerateArguments
from dflare.configuration.targets import load_pair

WARM_UP_TOKENS = 8
STYLES = ("black on bright_green", "black on bright_cyan")


class GroupStreamer:
    """
    Prints what `generate()` hands over at once in one colour, the next in another: each group is one round's accepted
    drafts and the target's bonus token. Where colours are not shown, a bar stands between groups.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console):
        self.tokenizer, self.console = tokenizer, console
        self.tokens: list[int] = []
        self.shown = ""
        self.groups = -1  # the prompt comes first and is not printed

    def put(self, value: torch.Tensor) -> None:
        """One group of token ids."""
        self.groups += 1
        if self.groups == 0:
            return
        self.tokens += value.flatten().tolist()
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # half a character waits for its other half
            new, self.shown = text[len(self.shown) :], text
            bar = "" if self.console.is_terminal else "|"
            self.console.print(Text(new, style=STYLES[self.groups % 2]), end=bar, soft_wrap=True)

    def end(self) -> None:
        """Called after the last group; prints what a half character held back."""
        rest = self.tokenizer.decode(self.tokens, skip_special_tokens=True)[len(self.shown) :]
        self.console.print(Text(rest, style=STYLES[self.groups % 2]))


def run(args: GenerateArguments) -> int:
    """Answers the prompt; status 1 if a comparison was asked for and greedy output differs."""
    console = Console(highlight=False)
    disable_progress_bar()
    target, drafter, tokenizer = load_pair(args.target, args.drafter, args.dtype)
    inputs = encode(args.prompt, tokenizer).to(target.device)
    options: dict = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        options["temperature"] = args.temperature
        drafter.config.draft_policy = "fixed"  # so that the seed repeats the answer
    if args.num_assistant_tokens is not None:
        options["num_assistant_tokens"] = args.num_assistant_tokens

    def decode(assistant=None, streamer=None) -> torch.Tensor:
        set_seed(args.seed)
        return target.generate(**inputs, **options, assistant_model=assistant, streamer=streamer)

    console.print(f"\n[bold]Prompt:[/bold] {args.prompt}\n")
    if not args.compare:
        decode(drafter, GroupStreamer(tokenizer, console))
        return 0
    for assistant in (None, drafter):
        target.generate(**inputs, max_new_tokens=WARM_UP_TOKENS, do_sample=False, assistant_model=assistant)
    return compare(decode, drafter, GroupStreamer(tokenizer, console), inputs["input_ids"].shape[1], args, console)


def compare(decode: Callable, drafter, streamer: GroupStreamer, length: int, args, console: Console) -> int:
    """Shows a run with the drafter as it comes, then times both ways in turn `args.repeats` times, and sums up."""
    console.print("[bold]With the drafter; each colour (or |) was accepted in one pass of the target:[/bold]\n")
    with record_drafts() as records:
        decode(drafter, streamer)
    console.print(f"\n[bold]Timing both ways, {args.repeats} times ...[/bold]")
    seconds: dict[str, list[float]] = {"ordinary decoding": [], "with the drafter": []}
    for _ in range(args.repeats):
        ordinary, spent = timed(decode)
        seconds["ordinary decoding"].append(spent)
        assisted, spent = timed(lambda: decode(drafter))
        seconds["with the drafter"].append(spent)
    identical = torch.equal(ordinary, assisted)
    tokens = (ordinary.shape[1] - length, assisted.shape[1] - length)
    console.print(summary(seconds, tokens, records[0], identical if args.temperature == 0 else None, args.repeats))
    return 0 if identical or args.temperature > 0 else 1


def summary(
    seconds: dict[str, list[float]], tokens: tuple[int, int], record: DraftRecord, identical: bool | None, repeats: int
) -> Table:
    """The closing table; medians where runs were repeated."""
    speeds = {
        name: count / statistics.median(runs) for (name, runs), count in zip(seconds.items(), tokens, strict=True)
    }
    table = Table(title=f"median of {repeats} runs" if repeats > 1 else None)
    for column in ("", *seconds):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("tokens", *(str(count) for count in tokens))
    table.add_row("seconds", *(f"{statistics.median(runs):.2f}" for runs in seconds.values()))
    table.add_row("tokens per second", *(f"{speed:.1f}" for speed in speeds.values()))
    slow, fast = speeds.values()
    table.add_row("speed-up", "1.00", f"{fast / slow:.2f}")
    table.add_row("acceptance length", "1.00", f"{record.acceptance_length:.2f}")
    verdict = {True: "yes", False: "NO", None: "not defined for sampling"}[identical]
    table.add_row("identical output", "", verdict)
    return table


def encode(prompt: str, tokenizer: PreTrainedTokenizerBase):
    """The prompt in the chat template, or as it is for a target without one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def timed(work: Callable):
    """What `work` returns, and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start
